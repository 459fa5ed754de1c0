"""Reading /proc as a test needs it: a process that ends meanwhile is no error."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def all_pids() -> list[int]:
    """Every process on the host."""
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]  # noqa: PTH208 - as above


def read(pid: int, name: str) -> bytes:
    """`/proc/PID/NAME`, empty if the process is gone."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def cmdline(pid: int) -> list[str]:
    """The words of the command line, empty for kernel threads and the dead."""
    raw = read(pid, "cmdline")
    return [os.fsdecode(word) for word in raw.rstrip(b"\0").split(b"\0")] if raw else []


def comm(pid: int) -> str:
    """The short name of the process."""
    return os.fsdecode(read(pid, "comm").strip())


def state(pid: int) -> str:
    """R, S, D, Z ...; empty if the process is gone."""
    raw = read(pid, "stat")
    return raw.rpartition(b") ")[2][:1].decode() if raw else ""


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    return state(pid) not in ("", "Z", "X")


def parent(pid: int) -> int:
    """The parent's pid, 0 if the process is gone."""
    fields = read(pid, "stat").rpartition(b") ")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def rss_bytes(pid: int) -> int:
    """Resident memory in bytes, 0 if the process is gone."""
    fields = read(pid, "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def descriptors(pid: int) -> list[str]:
    """What each open descriptor of the process points at."""
    targets = []
    folder = PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - as above
    except OSError:
        return []
    for name in names:
        try:
            targets.append(os.readlink(folder / name))  # noqa: PTH115 - thousands of times: no Path each
        except OSError:
            continue
    return targets


def namespaces(pid: int) -> set[str]:
    """The namespaces the process is in, such as `net:[4026531840]`."""
    found: set[str] = set()
    folder = PROC / str(pid) / "ns"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - as above
    except OSError:
        return found
    for name in names:
        try:
            found.add(os.readlink(folder / name))  # noqa: PTH115 - thousands of times: no Path each
        except OSError:
            continue
    return found


def with_word(word: str) -> list[int]:
    """Living processes that have `word` as one of the words of their command line."""
    return [pid for pid in all_pids() if word in cmdline(pid) and alive(pid)]
