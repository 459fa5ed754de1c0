"""A small read-only stand-in for /sys, which tells a container of its own CPUs and nothing of the host."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDERS: Final = (
    "block",
    "bus",
    "class/net",
    "dev",
    "devices/virtual",
    "firmware",
    "fs/cgroup",
    "kernel/mm",
    "module",
    "power",
)


def synthetic_sysfs(run_dir: Path, cpus: int) -> Path:
    """The folder to bind at /sys for a container with `cpus` CPUs; made once, atomically, and shared."""
    folder = run_dir / "sys"
    path = folder / str(cpus)
    if path.is_dir():
        return path
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder, prefix=f".{cpus}."))
    try:
        fresh.chmod(0o755)
        for name in _FOLDERS:
            (fresh / name).mkdir(parents=True)
        every = "0\n" if cpus == 1 else f"0-{cpus - 1}\n"
        system = fresh / "devices" / "system"
        node = system / "node" / "node0"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(every)
        for name in ("online", "possible", "has_cpu", "has_memory"):
            (system / "node" / name).write_text("0\n")
        cpu = system / "cpu"
        for number in range(cpus):
            (cpu / f"cpu{number}" / "topology").mkdir(parents=True)
            (cpu / f"cpu{number}" / "online").write_text("1\n")
            (cpu / f"cpu{number}" / "topology" / "core_id").write_text(f"{number}\n")
            (cpu / f"cpu{number}" / "topology" / "physical_package_id").write_text("0\n")
        for name in ("online", "possible", "present"):
            (cpu / name).write_text(every)
        with suppress(FileExistsError, OSError):
            fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return path
