"""Blocks of host user ids, one for each instance on this host, so that no two sandboxes of any instances share an id.

A block is claimed by flock on `/run/dsec/uid-blocks/N`; edge and launcher hold the same open file, so that it stays claimed while
either lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from dsec.api.errors import NoCapacity

BLOCK_IDS: Final = 1 << 28
"""4,096 slots of 65,536 ids each."""
_BLOCKS: Final = range(1, 15)
"""Block 0 holds the host's own users; the last one ends with the id that means "no id"."""
_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on all architectures; Python has no name for it."""

_libc = ctypes.CDLL(None, use_errno=True)


class UidBlock:
    """A claimed block; `aclose` gives up this process's share of the claim."""

    __slots__ = ("descriptor", "number")

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self.descriptor = descriptor

    @property
    def base(self) -> int:
        """The block's first id."""
        return self.number * BLOCK_IDS

    @classmethod
    def claim(cls, folder: Path) -> Self:
        """Claim a free block. Raises NoCapacity when as many instances hold them all."""
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for number in _BLOCKS:
            descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            return cls(number, descriptor)
        raise NoCapacity(
            f"all {len(_BLOCKS)} blocks of user ids under {folder} are claimed: stop another instance", resource="uids"
        )

    @classmethod
    def of_process(cls, folder: Path, pid: int) -> Self | None:
        """The block that process `pid` (a launcher that outlived its edge) holds, sharing its claim; None if it holds none."""
        pidfd = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = entry.readlink()
                    if target.parent == folder and target.name.isdecimal():
                        return cls(int(target.name), _pidfd_getfd(pidfd, int(entry.name)))
        finally:
            os.close(pidfd)
        return None

    def close(self) -> None:
        """Close this process's descriptor; the claim ends with the last. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _pidfd_getfd(pidfd: int, target: int) -> int:
    descriptor: int = _libc.syscall(_PIDFD_GETFD, pidfd, target, 0)
    if descriptor < 0:
        number = ctypes.get_errno() or errno.EIO
        raise OSError(number, os.strerror(number))
    return descriptor
