"""Reads and reclaims the cgroups that the launcher makes: `dsec-<instance>/s<slot>`, on cgroup2 and on v1 controllers where there are any.

Limits are the launcher's to set; nothing here changes a living sandbox's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

PREFIX: Final = "dsec-"
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_REMOVE_S: Final = 5.0
"""Killed processes leave their group within milliseconds, or after the device they wait for."""


@dataclass(frozen=True, slots=True)
class Counters:
    """A slot's counters: bytes, seconds of CPU, processes."""

    memory: int
    memory_peak: int
    cpu_s: float
    pids: int
    oom_kills: int


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where cgroups are mounted: `unified` is cgroup2; the others are v1 mount points, None where cgroup2 has the controller."""

    unified: Path
    memory: Path | None
    cpu: Path | None
    pids: Path | None

    @classmethod
    def discover(cls) -> Self:
        """Read this host's mount table. Raises OSError if no cgroup2 is mounted."""
        unified: Path | None = None
        v1: dict[str, Path] = {}
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, path, kind, options, *_ = line.split(" ")
            if kind == "cgroup2" and unified is None:
                unified = Path(path)
            elif kind == "cgroup":
                for option in options.split(","):
                    v1.setdefault(option, Path(path))
        if unified is None:
            raise OSError("no cgroup2 is mounted on this host")
        return cls(unified, v1.get("memory"), v1.get("cpu"), v1.get("pids"))

    def roots(self) -> Iterator[Path]:
        """Every mount point in which the launcher makes groups."""
        yield self.unified
        for root in (self.memory, self.cpu, self.pids):
            if root is not None:
                yield root


class Cgroups:
    """The groups of one instance, `name` being `dsec-<instance>`."""

    def __init__(self, hierarchies: Hierarchies, name: str) -> None:
        self._where = hierarchies
        self._name = name
        self._unified = f"{hierarchies.unified}/{name}"

    def cpu_s(self, slot: int, first_pid: int) -> float:
        """CPU seconds of a sandbox: of its first process, which inherits the times of all that were waited for, and of those that live.

        Not from cpu.stat: slots are reused, and reading a base at every start waits for the launcher's work on other groups. What is
        missed are processes whose parent ignores their end.
        """
        ticks = _ticks(first_pid)
        for folder in Path(f"{self._unified}/s{slot}/runs").glob("*/"):
            with suppress(OSError):
                ticks += sum(_ticks(int(pid)) for pid in (folder / "cgroup.procs").read_text().split())
        return ticks / _TICKS_A_SECOND

    def counters(self, slot: int, first_pid: int) -> Counters:
        """The slot's counters; blocks for up to milliseconds (v1 memory statistics). What is missing counts as 0."""
        base = f"{self._name}/s{slot}"
        where = self._where
        if where.memory is not None:
            group = where.memory / base
            cache = _stat(group / "memory.stat").get("total_inactive_file", 0)
            memory, peak = (
                _number(group / "memory.usage_in_bytes") - cache,
                _number(group / "memory.max_usage_in_bytes"),
            )
            kills = _stat(group / "memory.oom_control").get("oom_kill", 0)
        else:
            group = where.unified / base
            cache = _stat(group / "memory.stat").get("inactive_file", 0)
            memory, peak = _number(group / "memory.current") - cache, _number(group / "memory.peak")
            kills = _stat(group / "memory.events").get("oom_kill", 0)
        pids = where.pids / base if where.pids is not None else where.unified / base / "runs"
        return Counters(max(0, memory), peak, self.cpu_s(slot, first_pid), _number(pids / "pids.current"), kills)

    def strays(self, keep: Collection[int]) -> list[int]:
        """Slots with groups that are not in `keep`."""
        found = []
        with suppress(OSError):
            for name in _names(Path(self._unified)):
                number = name[1:]
                if name.startswith("s") and number.isdecimal() and int(number) not in keep:
                    found.append(int(number))
        return found

    def populated(self, slot: int) -> bool:
        """Whether the slot has processes."""
        try:
            return "populated 1" in Path(f"{self._unified}/s{slot}/cgroup.events").read_text()
        except OSError:
            return False

    def kill(self, slot: int) -> None:
        """Kill every process in the slot, whatever it did to its session."""
        with suppress(FileNotFoundError, OSError):
            Path(f"{self._unified}/s{slot}/cgroup.kill").write_text("1")


def reclaim(hierarchies: Hierarchies, name: str) -> list[str]:
    """Kill every process in the groups of `name` and remove them, within 5 s; returns what could not be removed. Blocks."""
    with suppress(OSError):
        (hierarchies.unified / name / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + _REMOVE_S
    return [str(root / name) for root in hierarchies.roots() if not _remove(root / name, deadline)]


def instances(hierarchies: Hierarchies) -> set[str]:
    """Instances that have groups on this host."""
    found: set[str] = set()
    for root in hierarchies.roots():
        with suppress(OSError):
            found |= {name.removeprefix(PREFIX) for name in _names(root) if name.startswith(PREFIX)}
    return found


def _remove(folder: Path, deadline: float) -> bool:
    while True:
        _remove_once(folder)
        if not folder.exists():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def _remove_once(folder: Path) -> None:
    # Depth first; v1 has no cgroup.kill, but every process of ours is in a cgroup2 group too and was killed there.
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if entry.is_dir():
                _remove_once(entry)
    with suppress(OSError):
        folder.rmdir()


def _ticks(pid: int) -> int:
    """User and system time of a process and of the children it has waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name may hold anything, also spaces and brackets.
    return sum(int(word) for word in text[text.rindex(")") + 2 :].split()[11:15])


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _stat(path: Path) -> dict[str, int]:
    table: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if value.isdecimal():
                table[name] = int(value)
    return table
