"""Puts the probes together: what is read from files here, what has to be tried by `trial.py` in a child process.

Blocks for about 0.2 s. The one rule: a check says what was found and, when it failed, what the reader can do.
"""

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from dsec.edge.host.cgroups import find_cgroups, try_cgroup_kill
from dsec.edge.host.check import Check, Feature
from dsec.edge.host.limits import (
    INOTIFY_INSTANCES_TARGET,
    INOTIFY_WATCHES_TARGET,
    NOFILE_NEEDED,
    PID_MAX_TARGET,
    read_sysctl,
)

MIN_KERNEL: Final = (6, 14)
_MIN_MEMORY_BYTES: Final = 2 << 30
_MIN_DISK_BYTES: Final = 4 << 30
_SECCOMP_PROFILE: Final = Path("/usr/share/containers/seccomp.json")
_TRIAL_TIMEOUT_S: Final = 30.0
_KERNEL_FIX: Final = "boot a kernel >= 6.14 built with this feature (Debian's has all of them)"

# name of the trial: (feature, needed by every sandbox, what to do)
_TRIALS: Final[dict[str, tuple[Feature, bool, str]]] = {
    "mount_api": (Feature.CONTAINER, True, _KERNEL_FIX),
    "overlay": (Feature.CONTAINER, True, f"modprobe overlay; else {_KERNEL_FIX}"),
    "erofs": (Feature.CONTAINER, True, f"modprobe erofs; else {_KERNEL_FIX}, with CONFIG_EROFS_FS_BACKED_BY_FILE"),
    "idmap": (Feature.CONTAINER, True, f"where user namespaces work: {_KERNEL_FIX}"),
    "user_namespaces": (
        Feature.CONTAINER,
        True,
        "sysctl -w user.max_user_namespaces=100000 kernel.unprivileged_userns_clone=1; a chroot refuses them always",
    ),
    "namespaces": (Feature.CONTAINER, True, "run on the host, or in a container that is privileged"),
    "pidfd": (Feature.CONTAINER, True, _KERNEL_FIX),
    "seccomp": (Feature.CONTAINER, True, _KERNEL_FIX),
    "loop": (Feature.DISK, False, "modprobe loop; until then disks are in memory (tmpfs)"),
    "kvm": (
        Feature.MICROVM,
        False,
        "use a host with hardware virtualisation, or switch nested virtualisation on; modprobe kvm_intel or kvm_amd",
    ),
    "fanotify": (Feature.LAZY_LOADING, False, _KERNEL_FIX),
    "fuse": (Feature.LAZY_LOADING, False, "modprobe fuse"),
    "bpf_lsm": (
        Feature.AUDIT,
        False,
        "boot with lsm=...,bpf and without lockdown; audit events then come from the kernel",
    ),
}


def probe(home: Path) -> tuple[Check, ...]:
    """Look at this host; `home` is where the state will be. Leaves nothing behind; without root some checks answer None."""
    return (*_basics(home), *_cgroups(), *_trials(), *_seccomp_parts(), *_limits(), *_security_modules())


def unmet(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the required checks that failed: with any of them no sandbox can start here."""
    return tuple(check for check in checks if check.required and check.ok is False)


def _basics(home: Path) -> Iterator[Check]:
    root = os.geteuid() == 0
    yield Check(
        name="root",
        feature=Feature.HOST,
        ok=root,
        required=True,
        detail="running as root" if root else f"running as user {os.geteuid()}",
        fix="" if root else "run as root or with sudo: namespaces with their own ids, mounts and cgroups need it",
    )
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    recent = found is not None and (int(found[1]), int(found[2])) >= MIN_KERNEL
    yield Check(
        name="kernel",
        feature=Feature.HOST,
        ok=recent,
        required=True,
        detail=f"Linux {release}",
        fix="" if recent else "boot Linux >= 6.14 (file-backed EROFS and pidfd namespaces; older ones are refused)",
    )
    memory = _meminfo().get("MemAvailable", 0)
    yield Check(
        name="memory",
        feature=Feature.SCALE,
        ok=memory >= _MIN_MEMORY_BYTES,
        detail=f"{memory / 2**30:.1f} GiB available",
        fix=""
        if memory >= _MIN_MEMORY_BYTES
        else "free memory: a sandbox needs its limit, 512 MiB by default, when it is used",
    )
    yield _disk(home)


def _disk(home: Path) -> Check:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    status = os.statvfs(place)
    room = status.f_bavail * status.f_frsize
    enough = room >= _MIN_DISK_BYTES
    return Check(
        name="disk",
        feature=Feature.DISK,
        ok=enough,
        detail=f"{room / 2**30:.1f} GiB free at {place}",
        fix="" if enough else "free at least 4 GiB, or put the state elsewhere with DSEC_HOME",
    )


def _cgroups() -> Iterator[Check]:
    layout = find_cgroups()
    yield Check(
        name="cgroup controllers",
        feature=Feature.CONTAINER,
        ok=not layout.missing,
        required=True,
        detail=layout.describe(),
        fix=""
        if not layout.missing
        else f"boot with the controllers {', '.join(layout.missing)} (cgroup_enable=memory)",
    )
    if layout.unified is None:
        problem = "no cgroup2 is mounted"
        fix = "mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified (make the folder first)"
    else:
        problem = "" if os.geteuid() else try_cgroup_kill(layout.unified)
        fix = "make the cgroup2 mount writable: mount -o remount,rw it, or run outside a container"
    untold = layout.unified is not None and os.geteuid() != 0
    yield Check(
        name="cgroup2",
        feature=Feature.CONTAINER,
        ok=None if untold else not problem,
        required=True,
        detail=problem or f"at {layout.unified}",
        fix=fix if problem else "",
    )


def _trials() -> Iterator[Check]:
    script = Path(__file__).with_name("trial.py")
    outcome: dict[str, list[object]] = {}
    problem = ""
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S, check=True
        )
        outcome = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        problem = f"the trial process failed: {error}"
    for name, (feature, required, fix) in _TRIALS.items():
        ok, detail = outcome.get(name, [None, problem or "not tried"])
        # Without root a refusal says nothing about the kernel.
        untold = ok is None or (not ok and os.geteuid() != 0)
        yield Check(
            name=name.replace("_", " "),
            feature=feature,
            ok=None if untold else bool(ok),
            required=required,
            detail=str(detail),
            fix="" if ok or untold else fix,
        )


def _seccomp_parts() -> Iterator[Check]:
    try:
        ctypes.CDLL("libseccomp.so.2")
        library = True
    except OSError:
        library = False
    profile = _SECCOMP_PROFILE.is_file()
    missing = [
        name for name, there in (("libseccomp2", library), ("golang-github-containers-common", profile)) if not there
    ]
    yield Check(
        name="seccomp profile",
        feature=Feature.CONTAINER,
        ok=not missing,
        detail="libseccomp and the OCI default profile" if not missing else f"missing: {', '.join(missing)}",
        fix=f"apt-get install {' '.join(missing)}" if missing else "",
    )


def _limits() -> Iterator[Check]:
    raising = "`dsec doctor --fix` raises it for the running system"
    for name, sysctl, target, reason in (
        ("pid_max", "kernel/pid_max", PID_MAX_TARGET, "64 fork bombs of 512 processes use up 32,768"),
        ("inotify instances", "fs/inotify/max_user_instances", INOTIFY_INSTANCES_TARGET, "one a watching sandbox"),
        ("inotify watches", "fs/inotify/max_user_watches", INOTIFY_WATCHES_TARGET, "one a watched directory"),
    ):
        value = read_sysctl(sysctl)
        enough = value >= target
        yield Check(
            name=name,
            feature=Feature.SCALE,
            ok=enough,
            detail=f"{value:,}" if enough else f"{value:,} of {target:,}; {reason}",
            fix="" if enough else f"{raising}; sysctl -w {sysctl.replace('/', '.')}={target}",
        )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY or hard >= NOFILE_NEEDED
    yield Check(
        name="open files",
        feature=Feature.SCALE,
        ok=unlimited,
        detail=f"{hard:,} a process: room for about {hard // 4:,} sandboxes",
        fix="" if unlimited else "raise the hard limit: ulimit -Hn, or LimitNOFILE= of the unit",
    )


def _security_modules() -> Iterator[Check]:
    try:
        enabled = Path("/sys/module/apparmor/parameters/enabled").read_text().strip() == "Y"
    except OSError:
        enabled = False
    yield Check(
        name="apparmor",
        feature=Feature.AUDIT,
        ok=enabled,
        detail="enabled" if enabled else "not in this kernel; sandboxes do without it",
        fix="" if enabled else "boot with apparmor=1 security=apparmor where the kernel has it",
    )


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines if len(fields) > 1}
