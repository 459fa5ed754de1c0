"""Finds the host's cgroup hierarchies: pure cgroup2, the v1 controllers one by one, or both beside each other."""

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NEEDED_CONTROLLERS: Final = ("memory", "cpu", "pids")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLayout:
    """Where the hierarchies are: `unified` is the cgroup2 mount, `v1` maps controllers to their mounts, `v2` are cgroup2's controllers.

    `unified_options` are the mount's options as the mount table shows them.
    """

    unified: Path | None
    v1: dict[str, Path]
    v2: frozenset[str]
    unified_options: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Needed controllers that are in neither hierarchy."""
        return tuple(name for name in NEEDED_CONTROLLERS if name not in self.v1 and name not in self.v2)

    def describe(self) -> str:
        """Say in a few words where each needed controller is."""
        return ", ".join(
            f"{name} v2" if name in self.v2 else f"{name} v1" if name in self.v1 else f"{name} missing"
            for name in NEEDED_CONTROLLERS
        )


def find_cgroups(mounts: Path = Path("/proc/self/mounts")) -> CgroupLayout:
    """Return the layout as the mount table tells it."""
    unified: Path | None = None
    v1: dict[str, Path] = {}
    options: tuple[str, ...] = ()
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        target = Path(fields[1])
        if fields[2] == "cgroup2" and unified is None:
            unified, options = target, tuple(fields[3].split(","))
        elif fields[2] == "cgroup":
            v1.update({name: target for name in fields[3].split(",") if name in NEEDED_CONTROLLERS})
    v2: frozenset[str] = frozenset()
    if unified is not None:
        with contextlib.suppress(OSError):
            v2 = frozenset((unified / "cgroup.controllers").read_text().split())
    return CgroupLayout(unified=unified, v1=v1, v2=v2, unified_options=options)


def try_cgroup_kill(unified: Path) -> str:
    """Make and remove a cgroup2 leaf that has `cgroup.kill`; returns what is wrong, empty if nothing is."""
    leaf = unified / f"dsec-probe-{os.getpid()}"
    try:
        leaf.mkdir()
    except OSError as error:
        return f"cannot make a cgroup in {unified}: {error.strerror}"
    try:
        return "" if (leaf / "cgroup.kill").exists() else f"{unified} has no cgroup.kill"
    finally:
        leaf.rmdir()


def favour_moves(layout: CgroupLayout) -> str:
    """Set cgroup2's mount option `favordynmods`; returns what is wrong, empty if nothing is. Needs root; the other options are kept.

    Without it the first move of a process between cgroups after 20 ms of quiet waits for an RCU grace period: 7.7 ms measured on 6.18,
    against 0.06 ms with it. Every command of an agent that pauses to think would pay that.
    """
    if layout.unified is None or "favordynmods" in layout.unified_options:
        return ""
    options = ",".join(["remount", *layout.unified_options, "favordynmods"])
    done = subprocess.run(["mount", "-o", options, str(layout.unified)], capture_output=True, timeout=10, check=False)
    return "" if done.returncode == 0 else f"cannot set favordynmods: {done.stderr.decode(errors='replace').strip()}"
