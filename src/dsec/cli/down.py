"""`dsec down`: ends the daemon of the home, or what a dead one left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket

from dsec.api.errors import DeadlineExceeded, PermissionDenied
from dsec.cli import output
from dsec.cli.instance import find
from dsec.paths import Paths

_END_S = 120.0
"""Stopping thousands of sandboxes takes seconds; a device that hangs may hold one for a minute."""


def down(*, keep: bool, as_json: bool) -> int:
    """End it and wait until it has ended; 0 also if nothing was running."""
    paths = Paths.discover()
    daemon = find(paths)
    if daemon is not None:
        daemon.signal(signal.SIGHUP if keep else signal.SIGTERM)
        with output.working("stopping the daemon" if keep else "stopping all sandboxes and the daemon"):
            ended = daemon.ended(within_s=_END_S)
        daemon.close()
        if not ended:
            raise DeadlineExceeded(
                f"the daemon (pid {daemon.pid}) did not end within {_END_S:.0f} s; see {paths.log_file}"
            )
        _tell("stopped", as_json=as_json, more="; the sandboxes run on" if keep else "")
    elif not keep and _launcher_lives(paths):
        if os.geteuid() != 0:
            raise PermissionDenied("a dead daemon left sandboxes behind: run this as root to end them")
        with output.working("ending what a dead daemon left"):
            asyncio.run(_end_leftovers(paths))
        _tell("ended what a dead daemon left", as_json=as_json)
    else:
        _tell("not running", as_json=as_json)
    return 0


def _tell(what: str, *, as_json: bool, more: str = "") -> None:
    if as_json:
        output.print_json({"daemon": what})
    else:
        output.say(what + more)


def _launcher_lives(paths: Paths) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(paths.launch_socket))
        except OSError:
            return False
    return True


async def _end_leftovers(paths: Paths) -> None:
    """Take the sandboxes over as the next daemon would, and end them: so their records are right, too."""
    from dsec.cli.compose import composed

    async with composed(paths) as parts:
        await parts.edge.drain()
    await asyncio.to_thread(shutil.rmtree, paths.run_dir, ignore_errors=True)
