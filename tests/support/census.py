"""What one dsec instance has in the kernel and on disk: processes, descriptors, mounts, namespaces, cgroups, loop devices, files.

A census is taken before and after a test; what grew is a leak. Only things that belong to a sandbox count: empty slots that the
launcher keeps ready (their cgroups, namespaces and descriptors) are not sandboxes, so they are counted apart and bounded.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support import procfs

CGROUP_ROOT = Path("/sys/fs/cgroup")
POOL_MAX = 64
"""Slots a launcher may keep ready."""
SANDBOX_DESCRIPTORS = re.compile(r"^(anon_inode:\[pidfd\]|socket:|/dev/loop|/memfd:|.*\(deleted\))")
"""Descriptors that belong to sandboxes or calls. A slot's own (namespaces, cgroup files, mounts) are pooled."""


@dataclass(frozen=True, slots=True)
class Census:
    """One count. All members are multisets or sets of readable names."""

    processes: frozenset[str]
    edge_descriptors: Counter[str]
    launcher_descriptors: Counter[str]
    mounts: Counter[str]
    namespaces: frozenset[str]
    run_cgroups: frozenset[str]
    slot_cgroups: frozenset[str]
    loops: frozenset[str]
    files: frozenset[str]

    def leaks_since(self, before: Census) -> list[str]:
        """What this census has and `before` had not."""
        found = []
        for name in ("processes", "namespaces", "run_cgroups", "loops", "files"):
            new = sorted(getattr(self, name) - getattr(before, name))
            if new:
                found.append(f"{name}: {new[:20]}{' ...' if len(new) > 20 else ''} ({len(new)} new)")
        for name in ("edge_descriptors", "launcher_descriptors", "mounts"):
            grown = getattr(self, name) - getattr(before, name)
            if grown:
                found.append(f"{name}: {dict(grown)}")
        if len(self.slot_cgroups) > max(POOL_MAX, len(before.slot_cgroups)):
            found.append(f"slot_cgroups: {len(self.slot_cgroups)}, more than the {POOL_MAX} that may be kept ready")
        return found


def instance_pids(instance: str, home: Path) -> list[int]:
    """Processes of the instance: its name is in their cgroup or command line, or its home in their environment."""
    mark, home_mark = os.fsencode(instance), b"DSEC_HOME=" + os.fsencode(home) + b"\0"
    found = []
    for pid in procfs.all_pids():
        if pid == os.getpid():
            continue
        if (
            mark in procfs.read(pid, "cgroup")
            or any(instance in word for word in procfs.cmdline(pid)[:1] + procfs.cmdline(pid))
            or home_mark in procfs.read(pid, "environ")
        ):
            found.append(pid)
    return found


def cgroups_of(instance: str) -> list[Path]:
    """All cgroup directories of the instance in every hierarchy, deepest last."""
    tops: list[Path] = []
    for hierarchy in [CGROUP_ROOT, *CGROUP_ROOT.iterdir()]:
        try:
            tops += [entry for entry in hierarchy.iterdir() if instance in entry.name and entry.is_dir()]
        except OSError:
            continue
    found = []
    for top in tops:
        found += [Path(folder) for folder, _, _ in os.walk(top)]
    return found


def loops_of(home: Path) -> list[str]:
    """Loop devices backed by a file of the instance (deleted ones too)."""
    found = []
    for entry in Path("/sys/block").glob("loop*"):
        try:
            backing = (entry / "loop" / "backing_file").read_text().strip()
        except OSError:
            continue
        if backing.startswith(str(home)):
            found.append(f"{entry.name}: {backing}")
    return found


def mounts_of(pids: list[int], instance: str, home: Path) -> list[str]:
    """Mounts that name the instance or its home, on the host and in the given processes' namespaces (each namespace once)."""
    found = []
    seen = set()
    for pid in [os.getpid(), *pids]:
        try:
            namespace = str(Path(f"/proc/{pid}/ns/mnt").readlink())
        except OSError:
            continue
        if namespace in seen:
            continue
        seen.add(namespace)
        for line in procfs.read(pid, "mountinfo").decode(errors="replace").splitlines():
            if instance in line or str(home) in line:
                fields = line.split()
                found.append(" ".join(fields[3:5] + fields[fields.index("-") + 1 :][:2]))
    return found


def _descriptor_kind(target: str) -> str:
    """`socket:[123]` -> `socket`, and so on: numbers differ from run to run."""
    return re.sub(r"\d+", "N", target)


def _files(home: Path, images: Path) -> set[str]:
    """Files below home but the database, logs and images."""
    found = set()
    for folder, _, names in os.walk(home):
        if Path(folder) == images:
            continue
        for name in names:
            if not re.search(r"\.(db|db-wal|db-shm|db-journal|log)(\.\d+)?$|api\.key$", name):
                found.add(str(Path(folder) / name))
    return found


def take(*, instance: str, home: Path, edge: int, launcher: int | None) -> Census:
    """Count what the instance has now."""
    pids = [pid for pid in instance_pids(instance, home) if procfs.alive(pid) or procfs.state(pid) == "Z"]
    groups = cgroups_of(instance)
    launcher_fds = procfs.descriptors(launcher) if launcher else []
    return Census(
        processes=frozenset(
            f"{pid} {procfs.comm(pid)} {(procfs.state(pid) == 'Z' and 'zombie') or ''}" for pid in pids
        ),
        edge_descriptors=Counter(_descriptor_kind(fd) for fd in procfs.descriptors(edge)),
        launcher_descriptors=Counter(_descriptor_kind(fd) for fd in launcher_fds if SANDBOX_DESCRIPTORS.match(fd)),
        mounts=Counter(mounts_of(pids, instance, home)),
        namespaces=frozenset(name for pid in pids for name in procfs.namespaces(pid)),
        run_cgroups=frozenset(str(path) for path in groups if path.name.startswith("run-")),
        slot_cgroups=frozenset(path.name for path in groups if re.fullmatch(r"s\d+", path.name)),
        loops=frozenset(loops_of(home)),
        files=frozenset(_files(home, home / "images")),
    )


def remains(*, instance: str, home: Path) -> list[str]:
    """What is left of an instance that should be gone altogether."""
    found = [f"process {pid} {procfs.cmdline(pid)}" for pid in instance_pids(instance, home)]
    found += [f"cgroup {path}" for path in cgroups_of(instance)]
    found += [f"loop {text}" for text in loops_of(home)]
    found += [f"mount {text}" for text in mounts_of([], instance, home)]
    storage = home / "storage"
    if storage.is_dir():
        found += [f"file {path}" for path in storage.rglob("*") if path.is_file()]
    return found
