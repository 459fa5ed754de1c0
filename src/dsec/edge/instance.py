"""The lock that says that an instance lives: `/run/dsec/<instance>/lock`, held by flock as long as its daemon runs."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final, Self

from dsec.api.errors import Conflict

_PATIENCE_S: Final = 5.0
"""A daemon that was just told to end may take this long."""


class InstanceLock:
    """The held lock; `close` gives it up. Its file's mtime is renewed by `touch`, so that a sweep can tell how long a daemon is dead."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, *, patience_s: float = _PATIENCE_S) -> Self:
        """Take the lock, waiting up to `patience_s` (blocking: for starts only). Raises Conflict if another daemon holds it."""
        deadline = time.monotonic() + patience_s
        while True:
            lock = cls.try_take(path)
            if lock is not None:
                return lock
            if time.monotonic() >= deadline:
                raise Conflict(f"another daemon of this instance is running (it holds {path})")
            time.sleep(0.02)

    @classmethod
    def try_take(cls, path: Path) -> Self | None:
        """Take the lock, or return None if it is held."""
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sweep may have removed the file between the two calls; a lock on a file without a name protects nothing.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return cls(descriptor)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def touch(self) -> None:
        """Note that the daemon lives."""
        os.utime(self._descriptor)

    def close(self) -> None:
        """Give the lock up. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
