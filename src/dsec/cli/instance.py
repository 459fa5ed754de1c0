"""The one daemon of a home: finding it by the lock that its edge holds, and its TCP port."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from pathlib import Path

from dsec.api.errors import Conflict, PermissionDenied
from dsec.paths import Paths

_LOOKS = 50
_LOOK_S = 0.01


def port_file(paths: Paths) -> Path:
    """Holds the living daemon's TCP port."""
    return paths.run_dir / "api.port"


def refuse_second(paths: Paths) -> None:
    """Raise Conflict if a daemon serves the home. The edge's lock decides; this says it sooner and better.

    The lock alone does not prove a daemon: another instance's sweep holds it for moments, and the edge waits for that.
    """
    other = find(paths)
    if other is None:
        return
    other.close()
    if _listens(paths.api_socket):
        raise Conflict(f"a daemon (pid {other.pid}) already serves {paths.home}: use it, or stop it with `dsec down`")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


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
    """The daemon that holds the home's lock, or None. Raises PermissionDenied where that cannot be told."""
    # The kernel's table is read in pieces and may miss a line while others come and go: only the lock itself says "none".
    for _ in range(_LOOKS):
        try:
            held = _is_held(paths.lock_file)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise PermissionDenied(f"the daemon of {paths.home} belongs to another user: run this as root") from None
        if not held:
            return None
        pid = _holder(paths.lock_file)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                return Daemon(pid, os.pidfd_open(pid))
        time.sleep(_LOOK_S)
    return None


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Shared, so that two who look at the same moment do not take each other for a daemon.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _holder(path: Path) -> int | None:
    """The pid of the process that took the lock."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    mark = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        # 1: FLOCK  ADVISORY  WRITE 4711 00:1c:815 0 EOF
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[3] == "WRITE" and words[5] == mark and words[4].isdecimal():
            return int(words[4])
    return None
