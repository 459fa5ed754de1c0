"""A sandbox: commands, processes, files, usage, its end.

Nothing here holds the sandbox alive: dropping the object leaves it running until it is stopped or one of its TTLs ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from dsec.api import types as t
from dsec.api.errors import CommandFailed, Conflict, DsecError, ExecTimeout, InvalidRequest, OutcomeUnknown
from dsec.sdk import _calls
from dsec.sdk._collector import OutputCollector
from dsec.sdk._later import Later, later
from dsec.sdk._transport import RECONNECT_S
from dsec.sdk.files import AsyncFiles
from dsec.sdk.processes import AsyncProcess
from dsec.sdk.results import ExecResult, exec_result

if TYPE_CHECKING:
    from dsec.sdk._transport import Transport

Input = bytes | bytearray | memoryview | str
Stdin = Input | AsyncIterable[bytes] | Iterable[bytes]

_INLINE_STDIN_BYTES = 8 << 20
"""More than this is streamed: a request's body is held in memory on both sides."""
_DEFAULT_OUTPUT_BYTES = 10 << 20
_MESSAGE_CHARS = 500
_KILL = t.SignalRequest(signal="KILL", tree=True)


class AsyncSandbox:
    """One sandbox. Made by `client.create`, `create_many`, `get` and `list`.

    `async with` stops it when the block is left, on exceptions and cancellation too.
    """

    __slots__ = ("_files", "_record", "_transport", "id")

    id: str
    """The sandbox's id: `client.get(id)` finds it again, from any client of its project."""

    def __init__(self, transport: Transport, record: t.SandboxRecord) -> None:
        self._transport = transport
        self._record = record
        self._files: AsyncFiles | None = None
        self.id = record.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._record.kind} {self._record.state}>"

    @property
    def record(self) -> t.SandboxRecord:
        """All that is known of the sandbox, as last heard: limits in bytes, times in seconds since the epoch."""
        return self._record

    @property
    def kind(self) -> str:
        """`container`, `microvm` or `fullvm`."""
        return str(self._record.kind)

    @property
    def state(self) -> str:
        """The state, as last heard; `refresh` asks anew."""
        return str(self._record.state)

    @property
    def reason(self) -> str | None:
        """Why it ended (`requested`, `idle`, `lifetime`, `oom`, ...), or None."""
        return None if self._record.reason is None else str(self._record.reason)

    @property
    def labels(self) -> dict[str, str]:
        """The labels given at creation."""
        return self._record.labels

    @property
    def files(self) -> AsyncFiles:
        """The sandbox's files."""
        if self._files is None:
            self._files = AsyncFiles(self._transport, self.id)
        return self._files

    async def refresh(self) -> t.SandboxRecord:
        """Fetch the record anew and return it. Neither resumes the sandbox nor counts as activity. Raises NotFound."""
        self._record = await self._transport.call(_calls.get(self.id))
        return self._record

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: Stdin | None = None,
        timeout: float | None = None,
        output_limit: int | str = "10MiB",
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run a command to its end and return its result.

        A `str` runs through `/bin/bash -c` (`/bin/sh -c` where there is no bash), no login shell; a list is argv, without a shell. `env` is
        laid over the sandbox's. `user` is a name, uid, `name:group` or `uid:gid`. `stdin` is bytes, text (as UTF-8), a binary file or any (async)
        iterable of bytes; None is /dev/null. The command's end ends the call: children in the background live on and do not delay it.

        `timeout` (seconds; None: no limit) kills the command and everything it started. `output_limit` (bytes for each stream, at most 64 MiB) drops the
        middle of what is longer. Exit codes and signals are results, not errors, unless `check` is set. The call is repeated over a lost
        connection without running the command twice.

        Raises ExecTimeout (its `result` has the partial output; the sandbox is usable), CommandFailed (`check`; has `result`), CommandNotStarted (no such
        program or directory), SandboxGone, InvalidRequest, ConnectionFailed, OutcomeUnknown.

        Cancelled: the command and everything it started are killed; the sandbox lives on.
        """
        inline, streamed = _split_stdin(stdin)
        limit = _DEFAULT_OUTPUT_BYTES if output_limit == "10MiB" else t.parse_size(output_limit, name="output_limit")
        request = _exec_request(
            command, cwd=cwd, env=env, user=user, stdin=inline, timeout=timeout, limit=limit, request_id=request_id
        )
        if streamed is not None:
            result = await self._run_streamed(msgspec.structs.replace(request, stdin_open=True), streamed, limit)
        else:
            result = await self._run(request, limit)
        if result.reason == "timeout":
            raise _timed_out(self.id, timeout, result)
        if check and result.exit_code != 0:
            raise _command_failed(self.id, result)
        return result

    async def _run(self, request: t.ExecRequest, limit: int) -> ExecResult:
        bound = None if request.timeout is None else request.timeout + RECONNECT_S
        try:
            return exec_result(await self._transport.call(_calls.run(self.id, request), timeout=bound), limit)
        except (asyncio.CancelledError, OutcomeUnknown, TimeoutError):
            await self._transport.shielded(self._kill_request(request))
            raise

    async def _kill_request(self, request: t.ExecRequest) -> None:
        call = _calls.signal(self.id, f"req:{request.request_id}", _KILL, repeatable=True)
        await self._transport.call_raw(call)

    async def _run_streamed(self, request: t.ExecRequest, stdin: AsyncIterator[bytes], limit: int) -> ExecResult:
        """Run with stdin and output as streams: neither is ever whole in memory."""
        process = await self._start(request)
        collectors = {"stdout": OutputCollector(limit), "stderr": OutputCollector(limit)}
        try:
            feeding = asyncio.ensure_future(_feed(process, stdin))
            try:
                async for chunk in process.output():
                    if chunk.dropped:
                        collectors[chunk.stream].skip(chunk.dropped)
                    else:
                        collectors[chunk.stream].add(chunk.data)
            finally:
                feeding.cancel()
                await asyncio.wait([feeding])
            # An input that cannot be read is the caller's error, whatever the command made of the part it got.
            if not feeding.cancelled() and (failure := feeding.exception()) is not None:
                raise failure
            await process.wait()
        except BaseException:
            await self._transport.shielded(process.kill())
            raise
        finally:
            await process.aclose()
        assert process.result is not None
        (out, out_gap), (err, err_gap) = collectors["stdout"].finish(), collectors["stderr"].finish()
        return dataclasses.replace(
            process.result,
            stdout=out,
            stderr=err,
            stdout_gap=out_gap,
            stderr_gap=err_gap,
            stdout_total=collectors["stdout"].total,
            stderr_total=collectors["stderr"].total,
            output_limit=limit,
        )

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout: float | None = None,
        output_limit: int | str = "10MiB",
        pty: tuple[int, int] | None = None,
        request_id: str | None = None,
    ) -> AsyncProcess:
        """Start a process in the background and return it as soon as it runs. Arguments are those of `run`.

        `stdin=True` keeps its stdin open for `process.write`; else it is /dev/null. It runs until its own end, its `timeout` (then killed with everything
        it started), or the sandbox's end; while it runs, the sandbox is not idle. Of each output stream `output_limit` bytes are kept for
        readers to come. `pty` is not part of this release.

        Raises CommandNotStarted, SandboxGone, InvalidRequest, Unsupported (`pty`), ConnectionFailed, OutcomeUnknown. Cancelled: what may have been started
        is killed.
        """
        if pty is not None:
            raise later("pty")
        limit = t.parse_size(output_limit, name="output_limit")
        request = _exec_request(
            command, cwd=cwd, env=env, user=user, stdin=None, timeout=timeout, limit=limit, request_id=request_id
        )
        return await self._start(msgspec.structs.replace(request, stdin_open=True) if stdin else request)

    async def _start(self, request: t.ExecRequest) -> AsyncProcess:
        try:
            info = await self._transport.call(_calls.start(self.id, request), timeout=2 * RECONNECT_S)
        except (asyncio.CancelledError, OutcomeUnknown, TimeoutError):
            await self._transport.shielded(self._kill_request(request))
            raise
        return AsyncProcess(self._transport, self.id, info)

    async def attach(self, process_id: str) -> AsyncProcess:
        """Find a process by dsec's id of it, or by its pid as text, whoever started it. Raises NotFound, SandboxGone."""
        info = await self._transport.call(_calls.process(self.id, process_id))
        return AsyncProcess(self._transport, self.id, info)

    async def processes(self) -> list[AsyncProcess]:
        """List the processes that `start` and `run` made: running ones, and ended ones as long as their output is kept."""
        answer = await self._transport.call(_calls.processes(self.id))
        return [AsyncProcess(self._transport, self.id, info) for info in answer.processes]

    async def usage(self) -> t.Usage:
        """What the sandbox uses now: CPU seconds; memory, disk and network in bytes; processes. Does not count as activity."""
        return await self._transport.call(_calls.usage(self.id))

    async def set_timeout(
        self,
        *,
        idle: float | None | msgspec.UnsetType = msgspec.UNSET,
        max_lifetime: float | None | msgspec.UnsetType = msgspec.UNSET,
    ) -> t.SandboxRecord:
        """Change the TTLs, in seconds; None: no limit; not given: unchanged. `idle` counts anew from now, `max_lifetime` from the creation."""
        update = t.TimeoutUpdate(idle_timeout=idle, max_lifetime=max_lifetime)
        self._record = await self._transport.call(_calls.set_timeout(self.id, update))
        return self._record

    async def stop(self) -> None:
        """End the sandbox and everything in it, and wait until all of it is gone. Stopping an ended one succeeds.

        Cancelled: it may or may not be stopped; stop it again. Raises NotFound, ConnectionFailed, OutcomeUnknown.
        """
        self._record = await self._transport.call(_calls.stop(self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self._stop_if_known()
        else:
            await self._transport.shielded(self._stop_if_known())

    async def _stop_if_known(self) -> None:
        try:
            await self.stop()
        except (LookupError, Conflict):
            return  # gone already

    async def shell(self) -> NoReturn:
        """Open a shell that keeps its directory and variables between commands. Not part of this release: raises Unsupported."""
        raise later("shell")

    def forward(self, port: int) -> NoReturn:
        """Forward a local port into the sandbox. Not part of this release: raises Unsupported."""
        raise later("forward")

    def url(self, port: int) -> NoReturn:
        """The address of a port of the sandbox. Not part of this release: raises Unsupported."""
        raise later("url")

    async def pause(self) -> NoReturn:
        """Pause the sandbox. Not part of this release: raises Unsupported."""
        raise later("pause")

    async def resume(self) -> NoReturn:
        """Resume a paused sandbox. Not part of this release: raises Unsupported."""
        raise later("resume")

    async def snapshot(self, name: str | None = None) -> NoReturn:
        """Keep the sandbox's state as a snapshot. Not part of this release: raises Unsupported."""
        raise later("snapshot")

    async def fork(self, count: int = 1) -> NoReturn:
        """Make copies of the sandbox. Not part of this release: raises Unsupported."""
        raise later("fork")

    async def pack_diff(self, name: str, *, exclude: Sequence[str] = (), scrub: bool = True) -> NoReturn:
        """Make an image of what was changed. Not part of this release: raises Unsupported."""
        raise later("pack_diff")

    async def audit(self) -> NoReturn:
        """Report what the sandbox did. Not part of this release: raises Unsupported."""
        raise later("audit")

    @property
    def screen(self) -> Later:
        """A full VM's screen. Not part of this release: using it raises Unsupported."""
        return Later("screen")

    @property
    def network(self) -> Later:
        """The sandbox's network rules. Not part of this release: using it raises Unsupported."""
        return Later("network")


def _exec_request(
    command: str | Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    stdin: bytes | None,
    timeout: float | None,
    limit: int,
    request_id: str | None,
) -> t.ExecRequest:
    is_shell = isinstance(command, str)
    is_argv = isinstance(command, list | tuple) and command and all(isinstance(word, str) for word in command)
    if not is_shell and not is_argv:
        raise InvalidRequest('a command is text for the shell, or a list of words such as ["ls", "-l"]')
    return t.ExecRequest(
        argv=() if is_shell else tuple(command),
        command=command if isinstance(command, str) else None,
        cwd=cwd,
        env=dict(env) if env else {},
        user=user,
        stdin=stdin,
        timeout=timeout,
        output_limit=limit,
        request_id=request_id or _calls.new_request_id(),
    )


def _split_stdin(stdin: Stdin | None) -> tuple[bytes | None, AsyncIterator[bytes] | None]:
    """What goes into the request, or else what is streamed."""
    if stdin is None:
        return None, None
    if isinstance(stdin, str):
        stdin = stdin.encode()
    if isinstance(stdin, bytes | bytearray | memoryview):
        return (bytes(stdin), None) if len(stdin) <= _INLINE_STDIN_BYTES else (None, _pieces(iter([bytes(stdin)])))
    if isinstance(stdin, AsyncIterable):
        return None, aiter(stdin)
    return None, _pieces(iter(stdin))


async def _pieces(source: Any) -> AsyncIterator[bytes]:
    """A blocking iterator's items, each fetched in a thread: it may be a file, a pipe or a generator that waits."""
    end = object()
    while True:
        item: Any = await asyncio.to_thread(next, source, end)
        if item is end:
            return
        yield item


async def _feed(process: AsyncProcess, stdin: AsyncIterator[bytes]) -> None:
    """Write all of `stdin`, then close it. A command that ends or closes its stdin first is none of its concern."""
    try:
        async for piece in stdin:
            await process.write(piece)
        await process.close_stdin()
    except DsecError:
        return
    except Exception:
        # The input cannot be read: the command would wait for the rest for ever.
        await process.kill()
        raise


def _timed_out(sandbox_id: str, timeout: float | None, result: ExecResult) -> ExecTimeout:
    message = f"the command was killed after {timeout} s"
    error = ExecTimeout(message, sandbox_id=sandbox_id, sandbox_survived=True)
    error.result = result
    return error


def _command_failed(sandbox_id: str, result: ExecResult) -> CommandFailed:
    how = "ran out of memory" if result.reason == "oom" else f"ended with exit code {result.exit_code}"
    last = (result.stderr_text or result.text).strip()[-_MESSAGE_CHARS:]
    error = CommandFailed(
        f"the command {how}" + (f": {last}" if last else ""), sandbox_id=sandbox_id, sandbox_survived=True
    )
    error.result = result
    return error
