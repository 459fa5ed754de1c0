"""`dsec up`: the daemon. SIGTERM and SIGINT end it with all sandboxes; SIGHUP ends it and leaves them running.

The one rule: whoever starts it in the background hears whether it answers, and if not, why.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from dsec.api.errors import DsecError, ErrorBody, InternalError, PermissionDenied, from_body
from dsec.cli import output
from dsec.cli.instance import port_file, refuse_second
from dsec.cli.logs import logging_to
from dsec.paths import Paths

DEFAULT_PORT = 7373
READY_S = 60.0
"""A start that takes over thousands of sandboxes takes seconds; past this something hangs."""
_READY_FD = "DSEC_READY_FD"


def foreground(port: int | None, *, as_json: bool) -> int:
    """Run the daemon until a signal ends it."""
    _need_root()
    report = _take_ready_fd()
    paths = Paths.discover()
    try:
        refuse_second(paths)
        with _listening(port) as tcp:
            paths.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with logging_to(paths.log_file, to_stderr=report is None):
                _run(paths, tcp, report, as_json=as_json)
    except DsecError as error:
        if report is None:
            raise
        _tell(report, {"error": {"code": error.code, "message": error.message}})
        return 1
    return 0


def detached(port: int | None, *, as_json: bool) -> int:
    """Start the daemon in the background and return when it answers."""
    _need_root()
    paths = Paths.discover()
    refuse_second(paths)
    ours, theirs = os.pipe()
    paths.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "dsec.cli.app", "up", "--foreground"]
    argv += [] if port is None else ["--port", str(port)]
    with (paths.state_dir / "daemon.out").open("wb") as out:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",
            env={**os.environ, "DSEC_HOME": str(paths.home), _READY_FD: str(theirs)},
            pass_fds=(theirs,),
            start_new_session=True,
        )
    os.close(theirs)
    with open(ours, "rb") as pipe, output.working("starting the daemon"):  # noqa: PTH123 - a descriptor
        answer = _await(pipe, child)
    if "error" in answer:
        raise from_body(ErrorBody(code=answer["error"]["code"], message=answer["error"]["message"]))
    _tell_people(answer, as_json=as_json)
    return 0


def _await(pipe: Any, child: subprocess.Popen[bytes]) -> dict[str, Any]:
    import select

    ready, _, _ = select.select([pipe], [], [], READY_S)
    line = pipe.readline() if ready else b""
    if line:
        found: dict[str, Any] = json.loads(line)
        return found
    paths = Paths.discover()
    tail = (paths.state_dir / "daemon.out").read_text(errors="replace").strip().splitlines()[-3:]
    child.kill()
    child.wait()
    raise InternalError("the daemon did not start: " + (" ".join(tail) or f"see {paths.log_file}"))


def _need_root() -> None:
    if os.geteuid() != 0:
        raise PermissionDenied("the daemon needs root: run `sudo dsec up`, or set DSEC_URL to use another host's")


def _take_ready_fd() -> int | None:
    text = os.environ.pop(_READY_FD, None)
    return int(text) if text else None


def _tell(descriptor: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, json.dumps(message).encode() + b"\n")
    os.close(descriptor)


def _tell_people(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.print_json(answer)
    else:
        output.say(
            f"dsec is up: {answer['socket']} and http://127.0.0.1:{answer['port']} (key in {answer['key_file']})"
        )


@contextlib.contextmanager
def _listening(port: int | None) -> Iterator[socket.socket]:
    """A listening loopback socket: on `port`, or without one on the default port if it is free, else on any."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", DEFAULT_PORT if port is None else port))
        except OSError:
            if port is not None:
                raise
            listener.bind(("127.0.0.1", 0))
        yield listener


def _run(paths: Paths, tcp: socket.socket, report: int | None, *, as_json: bool) -> None:
    from dsec.edge.host.limits import raise_own_nofile

    raise_own_nofile()
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(paths, tcp, report, as_json=as_json))


async def _serve(paths: Paths, tcp: socket.socket, report: int | None, *, as_json: bool) -> None:
    from dsec.apiserver.v1.app import ApiServer
    from dsec.cli.compose import composed

    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(name, _end, ending, name)
    async with composed(paths) as parts:
        async with ApiServer(parts.service, socket_path=paths.api_socket, tcp=tcp):
            # What was made while starting lives on: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            answer = {
                "pid": os.getpid(),
                "socket": str(paths.api_socket),
                "port": tcp.getsockname()[1],
                "key_file": str(paths.api_key_file),
                "home": str(paths.home),
            }
            port_file(paths).write_text(f"{answer['port']}\n", encoding="ascii")
            if report is None:
                _tell_people(answer, as_json=as_json)
            else:
                _tell(report, answer)
            number = await ending
            port_file(paths).unlink(missing_ok=True)
        if number != signal.SIGHUP:
            await parts.edge.drain()
    if number != signal.SIGHUP:
        # Sockets, lock, templates: nothing in there outlives the last sandbox.
        await asyncio.to_thread(shutil.rmtree, paths.run_dir, ignore_errors=True)


def _end(ending: asyncio.Future[int], number: int) -> None:
    if not ending.done():
        ending.set_result(number)
