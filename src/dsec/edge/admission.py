"""Whether the host has room for another sandbox. Light: what is asked is checked against the host, what is used against a reserve."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Final

from dsec.api.errors import NoCapacity
from dsec.api.types import SandboxSpec

_MAX_SLOTS: Final = 4095
"""User ids of an instance's block; the last one is the agents'."""
_MEMORY_KNOWN_S: Final = 0.05
_OWN_DESCRIPTORS: Final = 1024
"""For everything but sandboxes: connections, files, the loop."""
_DESCRIPTORS_EACH: Final = 4
"""Two in the edge, four in the launcher, which has the same limit."""


class Admission:
    """Facts of the host, read once, and what may be started."""

    def __init__(self, *, max_sandboxes: int | None, memory_reserve_bytes: int) -> None:
        self.memory_bytes = meminfo("MemTotal")
        self._reserve_bytes = memory_reserve_bytes
        self._memory_known_until = 0.0
        self._memory_enough = True
        self._pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        files = _MAX_SLOTS * _DESCRIPTORS_EACH if hard == resource.RLIM_INFINITY else hard - _OWN_DESCRIPTORS
        allowed = min(_MAX_SLOTS, max(1, files // _DESCRIPTORS_EACH))
        self.max_sandboxes = allowed if max_sandboxes is None else min(allowed, max_sandboxes)

    def check(self, spec: SandboxSpec) -> None:
        """Raise NoCapacity, naming the resource, if this host can never start `spec`."""
        if spec.memory_bytes > self.memory_bytes:
            raise NoCapacity(
                f"memory: the sandbox asks for {spec.memory_bytes} bytes, the host has {self.memory_bytes}; ask for less",
                resource="memory",
                retry_after=60.0,
            )
        if spec.pids > self._pid_max:
            raise NoCapacity(
                f"pids: the sandbox asks for {spec.pids}, the host has {self._pid_max}; ask for less or raise kernel.pid_max",
                resource="pids",
                retry_after=60.0,
            )

    def has_memory(self) -> bool:
        """Whether the host has more than the reserve left; looks at most every 50 ms."""
        now = time.monotonic()
        if now >= self._memory_known_until:
            self._memory_known_until = now + _MEMORY_KNOWN_S
            self._memory_enough = meminfo("MemAvailable") > self._reserve_bytes
        return self._memory_enough


def meminfo(name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    with Path("/proc/meminfo").open("rb") as file:
        text = file.read(256)
    start = text.index(name.encode() + b":") + len(name) + 1
    return int(text[start : text.index(b"kB", start)]) << 10
