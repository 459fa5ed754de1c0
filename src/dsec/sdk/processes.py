"""Processes in a sandbox: output by offset, stdin as messages, signals, the end.

A process belongs to the sandbox, not to the client: losing the connection, or dropping the object, leaves it running.
"""

from __future__ import annotations

import asyncio
import json
import signal as signals
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dsec.api import types as t
from dsec.api.errors import (
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    DsecError,
    ErrorBody,
    InternalError,
    OutcomeUnknown,
    from_body,
)
from dsec.sdk import _calls
from dsec.sdk._later import later
from dsec.sdk._transport import lost_errors
from dsec.sdk.results import ExecResult, Output, exec_result

if TYPE_CHECKING:
    import aiohttp

    from dsec.sdk._transport import Transport

_STREAMS = {1: "stdout", 2: "stderr"}
_HEADER_BYTES = 9
_WAIT_ROUND_S = 30.0
"""A wait is asked for in rounds, so that a lost server is noticed and no connection stands idle for hours."""
_STREAM_TRIES = 60
"""Times a followed stream without progress is taken up again."""
_BEYOND = 1 << 62
"""An offset no stream reaches: a connection that only writes stdin asks for no old output."""
_STDIN_PIECE = 256 * 1024


class AsyncProcess:
    """A process that dsec started in a sandbox. `id` is dsec's, `pid` the one inside; `argv` what was started.

    Made by `sandbox.start`, `sandbox.attach` and `sandbox.processes`. Use it with `async with` to end it (KILL, with everything it
    started) when the block is left.
    """

    __slots__ = ("_info", "_position", "_result", "_sandbox_id", "_stdin", "_stdin_lock", "_transport")

    def __init__(self, transport: Transport, sandbox_id: str, info: t.ProcessInfo) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._info = info
        self._position = (0, 0)
        self._result: ExecResult | None = None
        self._stdin: _Stdin | None = None
        self._stdin_lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} pid={self.pid} {self._info.state} in {self._sandbox_id}>"

    @property
    def id(self) -> str:
        """The id that dsec gave the process: `sandbox.attach(id)` finds it again, from any client."""
        return self._info.id

    @property
    def pid(self) -> int:
        """The pid inside the sandbox."""
        return self._info.pid

    @property
    def argv(self) -> list[str]:
        """What was started."""
        return self._info.argv

    @property
    def state(self) -> str:
        """`running` or `ended`, as last heard."""
        return self._info.state

    @property
    def position(self) -> tuple[int, int]:
        """Offsets (stdout, stderr) after what `output` handed out last: give them to `output(since=...)` to go on from there."""
        return self._position

    @property
    def result(self) -> ExecResult | None:
        """How it ended, without output; None while that is not known here."""
        return self._result

    async def output(self, *, since: int | tuple[int, int] = 0, follow: bool = True) -> AsyncIterator[Output]:
        """Yield what the process wrote, from offset `since` (bytes; one for both streams, or a pair for stdout and stderr) on.

        With `follow` until the process has ended and all was read, else what there is now. While somebody follows, the process is
        held back rather than anything being dropped; what was dropped before (the middle, above the process's `output_limit`) is
        an `Output` with `dropped`. A lost connection is taken up again at the same offset. Leaving the loop, or being cancelled,
        detaches and leaves the process running.

        Raises NotFound (its record is gone), SandboxGone, ConnectionFailed.
        """
        position = since if isinstance(since, tuple) else (since, since)
        self._position = position
        tries = 0
        while True:
            before = self._position
            try:
                async for chunk in self._attached(follow=follow):
                    yield chunk
            except _Lost as lost:
                # Progress resets the count: a stream of days may lose its connection many times.
                tries = tries + 1 if self._position == before else 0
                if tries > _STREAM_TRIES:
                    raise ConnectionFailed(f"the output of process {self.id} was lost: {lost}") from lost
                await asyncio.sleep(min(0.05 * 2 ** min(tries, 5), 1.0))
            else:
                return

    async def _attached(self, *, follow: bool) -> AsyncIterator[Output]:
        socket = await self._transport.websocket(self._stream_target(self._position, follow=follow))
        try:
            while True:
                item = await _receive(socket)
                if item is None:
                    return
                if isinstance(item, Output):
                    self._advance(item)
                    yield item
                else:
                    self._ended(item)
                    return
        finally:
            await self._transport.shielded(socket.close())

    def _stream_target(self, since: tuple[int, int], *, follow: bool) -> str:
        return _calls.stream(self._sandbox_id, self.id, since=since, follow=follow)

    def _advance(self, item: Output) -> None:
        after = item.offset + len(item.data) + item.dropped
        out, err = self._position
        self._position = (after, err) if item.stream == "stdout" else (out, after)

    def _ended(self, response: t.ExecResponse) -> ExecResult:
        self._result = exec_result(response, 0)
        self._info = msgspec.structs.replace(self._info, state="ended")
        return self._result

    async def write(self, data: bytes | str) -> None:
        """Send `data` (text as UTF-8) to the process's stdin, waiting while it does not read.

        Raises Conflict (stdin is closed, or the process was started without `stdin=True`), OutcomeUnknown (the connection was lost
        with data under way), SandboxGone. Cancelled: a part may have been written.
        """
        raw = data.encode() if isinstance(data, str) else data
        async with self._stdin_lock:
            stdin = await self._open_stdin()
            await stdin.write(raw)

    async def close_stdin(self) -> None:
        """Close the process's stdin: it reads end of file. Closing twice is harmless."""
        async with self._stdin_lock:
            stdin = await self._open_stdin()
            await stdin.close()

    async def _open_stdin(self) -> _Stdin:
        if self._stdin is None:
            socket = await self._transport.websocket(self._stream_target((_BEYOND, _BEYOND), follow=True))
            self._stdin = _Stdin(socket, self.id)
        return self._stdin

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of the process's terminal. Terminals are not part of this release: raises Unsupported."""
        raise later("pty")

    async def signal(self, signal: str | int, *, tree: bool = False) -> None:
        """Send a signal by name ("TERM") or number; `tree` with KILL ends everything the process started too.

        Raises Conflict or NotFound (it has ended), InvalidRequest (no such signal), OutcomeUnknown.
        """
        number = signal if isinstance(signal, int) else signal.upper().removeprefix("SIG")
        is_kill = number in ("KILL", int(signals.SIGKILL))
        request = t.SignalRequest(signal=number, tree=tree)
        await self._transport.call_raw(_calls.signal(self._sandbox_id, self.id, request, repeatable=is_kill))

    async def kill(self) -> None:
        """End the process and everything it started, whatever they did to their sessions. Harmless if it has ended."""
        try:
            await self.signal("KILL", tree=True)
        except (Conflict, LookupError):
            return

    async def wait(self, *, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code (128 + n after signal n); `result` then has the rest.

        Raises DeadlineExceeded after `timeout` seconds: the process runs on. Cancelled: it runs on too. SandboxGone, NotFound.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while self._result is None:
            left = _WAIT_ROUND_S if deadline is None else min(deadline - loop.time(), _WAIT_ROUND_S)
            if left < 0:
                raise DeadlineExceeded(f"process {self.id} still runs after {timeout} s", sandbox_id=self._sandbox_id)
            info = await self._transport.call(_calls.wait(self._sandbox_id, self.id, seconds=max(left, 0.0)))
            self._info = info
            if info.result is not None:
                return self._ended(info.result).exit_code
            if left == 0:
                raise DeadlineExceeded(f"process {self.id} still runs after {timeout} s", sandbox_id=self._sandbox_id)
        return self._result.exit_code

    async def aclose(self) -> None:
        """Let go of the connection for stdin; the process runs on, with its stdin open."""
        stdin, self._stdin = self._stdin, None
        if stdin is not None:
            await stdin.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self._result is None:
                await self._transport.shielded(self.kill())
        finally:
            await self.aclose()


class _Lost(Exception):
    """The connection under a stream broke."""


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> Output | t.ExecResponse | None:
    """The next piece of output, or the result, or None: the process still runs and nothing more is to come."""
    from aiohttp import WSMsgType

    try:
        message = await socket.receive()
    except lost_errors(OSError) as error:
        raise _Lost(str(error)) from error
    if message.type is WSMsgType.BINARY:
        data: bytes = message.data
        return Output(
            _STREAMS.get(data[0], "stdout"), data[_HEADER_BYTES:], int.from_bytes(data[1:_HEADER_BYTES], "little")
        )
    if message.type is WSMsgType.TEXT:
        return _control(json.loads(message.data))
    raise _Lost(f"closed with code {socket.close_code}")


def _control(fields: dict[str, Any]) -> Output | t.ExecResponse | None:
    if "gap" in fields:
        channel, start, end = fields["gap"]
        return Output(_STREAMS.get(channel, "stdout"), b"", start, end - start)
    if "result" in fields:
        return msgspec.convert(fields["result"], t.ExecResponse, builtin_types=())
    if "error" in fields:
        raise from_body(msgspec.convert(fields["error"], ErrorBody))
    if "running" in fields:
        return None
    raise InternalError(f"the server sent an unknown message on a stream: {sorted(fields)}")


class _Stdin:
    """The connection that carries a process's stdin. Output that comes along is dropped here: others read it by offset."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, process_id: str) -> None:
        self._socket = socket
        self._process_id = process_id
        self._closed = False
        self._failure: DsecError | None = None
        self._drain = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while await _receive(self._socket) is not None:
                pass
            self._failure = Conflict(f"the stdin of process {self._process_id} is closed")
        except _Lost:
            self._failure = OutcomeUnknown(f"the connection for stdin of process {self._process_id} was lost")
        except DsecError as error:
            self._failure = error

    def _check(self) -> None:
        if self._closed:
            raise Conflict(f"the stdin of process {self._process_id} is closed")
        if self._failure is not None:
            raise self._failure
        if self._drain.done():
            raise Conflict(f"process {self._process_id} has ended")

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _STDIN_PIECE):
            self._check()
            await self._send(self._socket.send_bytes(bytes(view[start : start + _STDIN_PIECE])))

    async def close(self) -> None:
        if not self._closed and self._failure is None and not self._drain.done():
            await self._send(self._socket.send_str('{"stdin":"close"}'))
        self._closed = True

    async def _send(self, sending: Any) -> None:
        try:
            await sending
        except lost_errors(OSError) as error:
            raise OutcomeUnknown(f"the connection for stdin of process {self._process_id} was lost") from error

    async def detach(self) -> None:
        await self._socket.close()
        self._drain.cancel()
        await asyncio.wait([self._drain])
