"""The one way in which an edge starts helper programs: an argv list, no shell, bounded time, output with a cap."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dsec.api.errors import InternalError

_OUTPUT_BYTES: Final = 64 << 10
"""What is kept of a helper's output, for its error message."""
_ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True, slots=True)
class Completed:
    """How a helper ended, and the first 64 KiB of what it printed."""

    status: int
    output: str


async def run(argv: Sequence[str], *, timeout_s: float) -> Completed:
    """Run `argv` to its end. Raises InternalError if it is not there or takes longer; it is killed then, and when cancelled."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise InternalError(f"{argv[0]} is not installed", program=argv[0]) from error
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError as error:
        raise InternalError(f"{argv[0]} took longer than {timeout_s:.0f} s", program=argv[0]) from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return Completed(process.returncode or 0, output[:_OUTPUT_BYTES].decode(errors="replace"))


async def start_detached(argv: Sequence[str], *, log_path: str, descriptors: Sequence[int], timeout_s: float) -> None:
    """Start `argv` so that it outlives this process: own session, parent init, output appended to `log_path`.

    `descriptors` keep their numbers in it. util-linux's setsid does the double fork, so that this (threaded) process never forks
    without exec.
    """
    log_descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = await asyncio.create_subprocess_exec(
            "setsid",
            "--fork",
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_descriptor,
            stderr=log_descriptor,
            env=_ENVIRONMENT,
            cwd="/",
            pass_fds=tuple(descriptors),
        )
    finally:
        os.close(log_descriptor)
    async with asyncio.timeout(timeout_s):
        status = await process.wait()
    if status != 0:
        raise InternalError(f"{argv[0]} could not be started (setsid ended with {status})", program=argv[0])
