"""The reference loops over crun: create and destroy, and exec. Run as a program in a mount namespace of its own.

Same conditions as ours: the same layer as lower directory, a tmpfs upper, user, network, pid, mount, ipc and uts namespaces, memory,
CPU and pids limits, the same seccomp rules. Where cgroup v1 controllers stand beside an empty cgroup2, crun fails unless the latter is out of sight,
so it is unmounted in this namespace.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dsec.api.errors import InternalError, Unsupported
from dsec.security import find_profile
from dsec.security.profile import DEFAULT_CAPABILITIES, StrictProfile, load_strict

MEMORY_BYTES = 256 << 20
DISK_BYTES = 64 << 20
PIDS = 512
CPU_PERIOD_US = 100_000
_JOIN_S = 5.0
_HOST_IDS = 100_000
_IDS = 65_536
_PARENT = "dsecbench-crun"
_NAMESPACES = ("pid", "mount", "ipc", "uts", "network", "user")
_OPERATORS = {
    1: "SCMP_CMP_NE",
    2: "SCMP_CMP_LT",
    3: "SCMP_CMP_LE",
    4: "SCMP_CMP_EQ",
    5: "SCMP_CMP_GE",
    6: "SCMP_CMP_GT",
    7: "SCMP_CMP_MASKED_EQ",
}
_START_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)


def measure(layer: Path, mode: str, **options: float) -> dict[str, Any]:
    """Run this module in a private mount namespace and return what it measured. Raises InternalError, Unsupported (crun is missing)."""
    if shutil.which("crun") is None:
        raise Unsupported("crun is not installed: run `make setup`")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "dsec.bench.crun", mode]
    command += ["--layer", str(layer)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_START_S + 2 * options.get("seconds", 30.0), check=False
    )
    if done.returncode != 0:
        raise InternalError(f"the crun loop failed: {done.stderr.strip()[-800:]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _mount(source: str, target: Path, kind: str, options: str, flags: int = 0) -> None:
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind} on {target}: {os.strerror(number)}")


def _umount(target: Path) -> None:
    if _libc.umount2(os.fsencode(target), 2) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"umount {target}: {os.strerror(number)}")


def hide_empty_cgroup2() -> None:
    """Unmount a cgroup2 that stands beside v1 controllers."""
    unified = Path("/sys/fs/cgroup/unified")
    if (unified / "cgroup.procs").exists() and Path("/sys/fs/cgroup/memory").is_dir():
        _umount(unified)


def seccomp_section(profile: StrictProfile) -> dict[str, Any]:
    """The rules that our sandboxes have, as an OCI configuration says them."""
    calls = []
    for rule in profile.rules:
        entry: dict[str, Any] = {"names": [rule.syscall], "action": "SCMP_ACT_ALLOW"}
        if rule.error is not None:
            entry |= {"action": "SCMP_ACT_ERRNO", "errnoRet": rule.error}
        entry["args"] = [
            {"index": item.argument, "value": item.value, "valueTwo": item.other, "op": _OPERATORS[item.operator]}
            for item in rule.conditions
        ]
        calls.append(entry)
    return {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": profile.default_error, "syscalls": calls}


def configuration(rootfs: Path, name: str, seccomp: dict[str, Any]) -> dict[str, Any]:
    """An OCI configuration under our conditions, running `sleep`."""
    capabilities = sorted(DEFAULT_CAPABILITIES)
    ids = [{"containerID": 0, "hostID": _HOST_IDS, "size": _IDS}]
    return {
        "ociVersion": "1.0.0",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sleep", "3600"],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs), "readonly": False},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755", "size=65536k"],
            },
            {
                "destination": "/dev/pts",
                "type": "devpts",
                "source": "devpts",
                "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
            },
            {
                "destination": "/dev/shm",  # noqa: S108 - inside the container
                "type": "tmpfs",
                "source": "shm",
                "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
            },
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "uidMappings": ids,
            "gidMappings": ids,
            "cgroupsPath": f"/{_PARENT}/{name}",
            "resources": {
                "memory": {"limit": MEMORY_BYTES},
                "cpu": {"quota": CPU_PERIOD_US, "period": CPU_PERIOD_US, "shares": 512},
                "pids": {"limit": PIDS},
            },
            "seccomp": seccomp,
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"],
        },
    }


class Containers:
    """Containers over one lower directory; safe for threads, each with names of its own."""

    def __init__(self, folder: Path, layer: Path) -> None:
        self._folder = folder
        self._state = folder / "state"
        self._lower = folder / "lower"
        self._lower.mkdir()
        subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", layer, self._lower], check=True)
        self._seccomp = seccomp_section(load_strict(find_profile()))

    def start(self, name: str) -> None:
        """Mount its root and start it; returns when its process runs."""
        bundle = self._folder / name
        bundle.mkdir(mode=0o755)
        upper, rootfs = bundle / "upper", bundle / "rootfs"
        upper.mkdir()
        rootfs.mkdir()
        _mount("tmpfs", upper, "tmpfs", f"size={DISK_BYTES},nr_inodes=16384")
        (upper / "up").mkdir(mode=0o755)
        (upper / "work").mkdir()
        _mount("overlay", rootfs, "overlay", f"lowerdir={self._lower},upperdir={upper}/up,workdir={upper}/work")
        (bundle / "config.json").write_bytes(msgspec.json.encode(configuration(rootfs, name, self._seccomp)))
        self._crun("run", "--detach", "--bundle", str(bundle), name)

    def end(self, name: str) -> None:
        """Kill it and remove all of it."""
        self._crun("delete", "--force", name)
        bundle = self._folder / name
        for mounted in ("rootfs", "upper"):
            _umount(bundle / mounted)
        shutil.rmtree(bundle)

    def execute(self, name: str) -> float:
        """Seconds of one `crun exec` of `true`."""
        began = time.perf_counter()
        self._crun("exec", name, "/bin/true")
        return time.perf_counter() - began

    def _crun(self, *words: str) -> None:
        # A file for stderr: a detached container keeps a pipe open.
        with tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                ["crun", "--root", str(self._state), "--cgroup-manager", "cgroupfs", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                check=False,
            )
            if done.returncode != 0:
                errors.seek(0)
                raise InternalError(f"crun {words[0]}: {errors.read().decode(errors='replace').strip()}")

    def close(self) -> None:
        """End what still runs, unmount the layer and remove the cgroups."""
        for entry in list(self._folder.iterdir()):
            if (entry / "config.json").exists():
                with contextlib.suppress(InternalError, OSError):
                    self.end(entry.name)
        _umount(self._lower)
        root = Path("/sys/fs/cgroup")
        for group in (*root.glob(_PARENT), *root.glob(f"*/{_PARENT}")):
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def containers(layer: Path) -> Iterator[Containers]:
    """Containers that end with the block."""
    folder = Path(tempfile.mkdtemp(prefix="dsec-crun-", dir="/run"))
    folder.chmod(0o755)
    try:
        made = Containers(folder, layer)
        try:
            yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launch_loop(made: Containers, *, seconds: float, workers: int, alive: int) -> dict[str, float]:
    """Create and destroy for `seconds`, in `workers` threads that keep `alive` between them; rate of creations."""
    counts = [0] * workers
    failures: list[BaseException] = []
    began = time.monotonic()

    def work(number: int) -> None:
        living: list[str] = []
        try:
            serial = 0
            while time.monotonic() - began < seconds and not failures:
                name = f"w{number}-{serial}"
                serial += 1
                made.start(name)
                living.append(name)
                counts[number] += 1
                if len(living) >= alive // workers:
                    made.end(living.pop(0))
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - began
    if failures:
        raise failures[0]
    return {"rate": sum(counts) / elapsed, "n": sum(counts)}


def exec_loop(made: Containers, *, count: int) -> dict[str, Any]:
    """`count` times `crun exec` of `true`, one at a time; milliseconds of each."""
    made.start("exec")
    # crun's `run --detach` returns before its container can be joined: until then exec ends with EPERM.
    deadline = time.monotonic() + _JOIN_S
    while True:
        try:
            made.execute("exec")
            break
        except InternalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    for _ in range(3):
        made.execute("exec")
    return {"ms": [made.execute("exec") * 1e3 for _ in range(count)]}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("launch", "exec"))
    parser.add_argument("--layer", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--alive", type=int, default=64)
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    hide_empty_cgroup2()
    with containers(options.layer) as made:
        if options.mode == "launch":
            measured: dict[str, Any] = launch_loop(
                made, seconds=options.seconds, workers=options.workers, alive=options.alive
            )
        else:
            measured = exec_loop(made, count=options.count)
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
