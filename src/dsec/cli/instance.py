"""The one daemon of a home: its pid and TCP port, and finding it. The lock itself is the edge's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.api.errors import Conflict, PermissionDenied
from dsec.paths import Paths


def pid_file(paths: Paths) -> Path:
    """Holds the living daemon's pid; means nothing unless the lock is held."""
    return paths.run_dir / "daemon.pid"


def port_file(paths: Paths) -> Path:
    """Holds the living daemon's TCP port."""
    return paths.run_dir / "api.port"


@contextmanager
def announced(paths: Paths) -> Iterator[None]:
    """Keep this process's pid on file. Raises Conflict if another daemon serves the home."""
    other = find(paths)
    if other is not None:
        other.close()
        raise Conflict(f"a daemon (pid {other.pid}) already serves {paths.home}: use it, or stop it with `dsec down`")
    paths.run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    pid_file(paths).write_text(f"{os.getpid()}\n", encoding="ascii")
    try:
        yield
    finally:
        for path in (pid_file(paths), port_file(paths)):
            path.unlink(missing_ok=True)


class Daemon:
    """A living daemon, held by pidfd so that its pid cannot come to mean another process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def signal(self, number: int) -> None:
        """Send a signal; harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def ended(self, *, within_s: float) -> bool:
        """Wait for its end, at most `within_s` seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def close(self) -> None:
        """Let go of it."""
        os.close(self._pidfd)


def find(paths: Paths) -> Daemon | None:
    """The daemon that serves the home, or None. Raises PermissionDenied where that cannot be told."""
    if not _lock_is_held(paths):
        return None
    try:
        pid = int(pid_file(paths).read_text(encoding="ascii"))
        return Daemon(pid, os.pidfd_open(pid))
    except (OSError, ValueError):
        return None  # it is about to begin or to end


def _lock_is_held(paths: Paths) -> bool:
    try:
        descriptor = os.open(paths.lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        raise PermissionDenied(f"the daemon of {paths.home} belongs to another user: run this as root") from None
    try:
        # Shared, so that two who look at the same moment do not take each other for a daemon.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
