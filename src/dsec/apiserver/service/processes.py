"""Commands and processes in sandboxes, over the guest protocol's methods. Knows no HTTP.

A process made with a request id has an id made from it, so that whoever knows the request id can name the process before it has an answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal as signals
import time
from typing import Any

from dsec.api import token
from dsec.api.dataplane import Data, GuestReset, GuestStream, Message
from dsec.api.errors import (
    CommandNotStarted,
    Conflict,
    DeadlineExceeded,
    DsecError,
    InternalError,
    InvalidRequest,
    NotFound,
    Unsupported,
)
from dsec.api.ids import new_process_id
from dsec.api.types import ExecRequest, ExecResponse, ProcessInfo, ProcessList, SignalRequest, parse_size
from dsec.api.wire import OUTPUT_HEADER
from dsec.apiserver.metrics import Metrics
from dsec.apiserver.service import checks
from dsec.apiserver.service.attach import Attached
from dsec.apiserver.service.guest import Guests, translated
from dsec.apiserver.service.results import exec_response, process_info
from dsec.apiserver.service.tasks import Detached
from dsec.iam import Action, Principal

_Entries = list[dict[str, Any]]

_GUEST_GRACE_S = 20.0
"""How long after a command's timeout its agent may take to say that it has ended: a busy one takes some seconds, a stopped one for ever."""

MAX_OUTPUT_LIMIT = 64 << 20
"""Bytes of one stream that a `run` may keep; more is for `start` and a stream."""
MAX_STDIN_BYTES = 64 << 20
MAX_WAIT_S = 3600.0
REQUEST_PREFIX = "req:"
_INLINE_STDIN = 128 << 10
"""Input that fits the stream's window: it is sent without a task of its own."""
_TOMBSTONE_S = 120.0
_HEX_TO_BASE32 = str.maketrans("0123456789abcdef", "abcdefghijklmnop")


def process_id_of(request_id: str) -> str:
    """The id of the process that a request with this id makes."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=10, person=b"dsec-process")
    return "p" + digest.hexdigest().translate(_HEX_TO_BASE32)


class Processes:
    """Commands and processes; every method takes the principal who asks."""

    def __init__(self, guests: Guests, tasks: Detached, metrics: Metrics) -> None:
        self._guests = guests
        self._tasks = tasks
        self._metrics = metrics
        self._exec_by_reason = {
            reason: metrics.exec.labels(reason) for reason in ("exit", "signal", "oom", "timeout", "killed")
        }
        self._tombstones: dict[tuple[str, str], float] = {}

    # Running

    async def run(self, principal: Principal, sandbox_id: str, request: ExecRequest) -> ExecResponse:
        """Run a command to its end. Cancelled: its whole tree is killed, unless it has a request id: then it goes on.

        Raises CommandNotStarted, InvalidRequest, SandboxGone, NotFound. A timeout is a response with reason `timeout`.
        """
        if request.stdin_open:
            raise InvalidRequest("stdin_open is for processes that are started; run takes all of its input as stdin")
        if request.request_id is None:
            return await self._run(principal, sandbox_id, request)
        return await asyncio.shield(self._tasks.start(self._run(principal, sandbox_id, request)))

    async def _run(self, principal: Principal, sandbox_id: str, request: ExecRequest) -> ExecResponse:
        began = time.perf_counter()
        params = self._params(sandbox_id, request, start=False)
        stdin = request.stdin
        patience = asyncio.timeout(None if request.timeout is None else request.timeout + _GUEST_GRACE_S)
        try:
            async with patience:
                stream = await self._guests.open(
                    principal, Action.EXEC, sandbox_id, token.EXEC, params, fin=stdin is None
                )
                async with stream:
                    if stdin is None:
                        response = await _collected(stream, params["id"])
                    elif len(stdin) <= _INLINE_STDIN:
                        await _feed(stream, stdin)
                        response = await _collected(stream, params["id"])
                    else:
                        # Both ways at once: a command that answers while it reads would else fill both pipes and stop.
                        async with asyncio.TaskGroup() as group:
                            feeding = group.create_task(_feed(stream, stdin))
                            response = await _collected(stream, params["id"])
                            feeding.cancel()
        except GuestReset as error:
            raise translated(error, sandbox_id=sandbox_id, method="exec") from error
        except BaseExceptionGroup as group_error:
            raise _only(group_error, sandbox_id) from group_error
        except TimeoutError as error:
            if not patience.expired():
                raise
            text = f"the sandbox's agent did not report the command's end within {_GUEST_GRACE_S:.0f} s of its timeout; stop the sandbox"
            raise DeadlineExceeded(text, sandbox_id=sandbox_id, sandbox_survived=True) from error
        counter = self._exec_by_reason.get(response.reason)
        if counter is not None:
            counter.inc()
        self._metrics.exec_overhead_seconds.observe(max(0.0, time.perf_counter() - began - response.duration_s))
        return response

    async def start(self, principal: Principal, sandbox_id: str, request: ExecRequest) -> ProcessInfo:
        """Start a process; returns when it runs. Raises as `run` does."""
        params = self._params(sandbox_id, request, start=True)
        feeds = request.stdin is not None or request.stdin_open
        try:
            stream = await self._guests.open(principal, Action.EXEC, sandbox_id, token.EXEC, params, fin=not feeds)
            first = await stream.receive()
        except GuestReset as error:
            raise translated(error, sandbox_id=sandbox_id, method="exec") from error
        if not isinstance(first, Message):
            await stream.aclose()
            raise InternalError("the guest did not say which process it started", sandbox_id=sandbox_id)
        if request.stdin is not None:
            self._tasks.start(_feed_started(stream, request.stdin, keep_open=request.stdin_open))
        else:
            # A reset leaves the process and its stdin as they are.
            await stream.aclose()
        argv = list(request.argv) if request.argv else ["/bin/sh", "-c", request.command or ""]
        return ProcessInfo(
            id=params["id"],
            pid=int(first.fields.get("pid", 0)),
            argv=argv,
            user=request.user or "",
            state="running",
            started_at=time.time(),
        )

    def _params(self, sandbox_id: str, request: ExecRequest, *, start: bool) -> dict[str, Any]:
        _check_exec(request)
        rid = request.request_id
        if rid is not None:
            self._check_tombstone(sandbox_id, rid)
        params: dict[str, Any] = {
            "m": "exec",
            "id": process_id_of(rid) if rid is not None else new_process_id(),
            "rid": rid,
            "env": request.env,
            "cwd": request.cwd.encode() if request.cwd is not None else None,
            "user": request.user,
            "stdin": request.stdin is not None or request.stdin_open,
            "timeout_ms": None if request.timeout is None else max(1, round(request.timeout * 1000)),
            "cap": min(parse_size(request.output_limit, name="output_limit"), MAX_OUTPUT_LIMIT),
            "start": start,
        }
        if request.command is not None:
            params["shell"] = request.command.encode()
        else:
            params["argv"] = [word.encode() for word in request.argv]
        return params

    def _check_tombstone(self, sandbox_id: str, request_id: str) -> None:
        until = self._tombstones.get((sandbox_id, request_id))
        if until is not None and until > time.monotonic():
            raise Conflict(f"the request {request_id!r} was cancelled", sandbox_id=sandbox_id)

    # Living and ended processes

    async def list(self, principal: Principal, sandbox_id: str) -> ProcessList:
        """All processes started through the API: living ones, and ended ones that the guest still knows."""
        return ProcessList(processes=[process_info(entry) for entry in await self._ps(principal, sandbox_id)])

    async def get(self, principal: Principal, sandbox_id: str, process: str) -> ProcessInfo:
        """One process by its id, its pid, or `req:` and the request id that made it. Raises NotFound."""
        return process_info(await self._find(principal, sandbox_id, process))

    async def signal(self, principal: Principal, sandbox_id: str, process: str, request: SignalRequest) -> None:
        """Send a signal. Raises NotFound (no such process), Conflict (it has ended), InvalidRequest (no such signal)."""
        number = signal_number(request.signal)
        params: dict[str, Any] = {"m": "signal", "id": None, "pid": None, "sig": number, "tree": request.tree}
        if process.isdecimal():
            params["pid"] = int(process)
        else:
            params["id"] = self._id_of(process)
        try:
            await self._guests.call(principal, Action.EXEC, sandbox_id, token.EXEC, params)
        except NotFound as error:
            if error.sandbox_survived and process.startswith(REQUEST_PREFIX) and number == signals.SIGKILL:
                # A client that cancels kills a command whose request may still be under way: refuse it when it comes.
                self._bury(sandbox_id, process.removeprefix(REQUEST_PREFIX))
                return
            raise

    def _bury(self, sandbox_id: str, request_id: str) -> None:
        now = time.monotonic()
        self._tombstones = {key: until for key, until in self._tombstones.items() if until > now}
        self._tombstones[sandbox_id, request_id] = now + _TOMBSTONE_S

    async def wait(self, principal: Principal, sandbox_id: str, process: str, *, timeout: float | None) -> ProcessInfo:
        """Wait at most `timeout` seconds (an hour where None) for the end; the info says whether it came. Raises NotFound."""
        checks.check_seconds("timeout", timeout, most=MAX_WAIT_S)
        name = self._id_of(process)
        if process.isdecimal():
            name = str((await self._find(principal, sandbox_id, process)).get("id", ""))
        limit_ms = round((timeout if timeout is not None else MAX_WAIT_S) * 1000)
        params = {"m": "wait", "id": name, "timeout_ms": limit_ms}
        answer = await self._guests.call(principal, Action.EXEC, sandbox_id, token.OBSERVE, params)
        try:
            entry = await self._find(principal, sandbox_id, name)
        except NotFound:
            # It ended and its place in the guest's table was taken meanwhile.
            if answer.fields.get("running"):
                raise
            entry = {"id": name, "pid": answer.fields.get("pid", 0), "state": "ended", "result": answer.fields}
        return process_info(entry)

    async def attach(
        self, principal: Principal, sandbox_id: str, process: str, *, since: tuple[int, int], follow: bool
    ) -> Attached:
        """Attach to a process's output and stdin. Raises NotFound, SandboxGone."""
        name = self._id_of(process)
        if process.isdecimal():
            name = str((await self._find(principal, sandbox_id, process)).get("id", ""))
        return await Attached.open(self._guests, principal, sandbox_id, name, since=since, follow=follow)

    async def _ps(self, principal: Principal, sandbox_id: str) -> _Entries:
        answer = await self._guests.call(principal, Action.EXEC, sandbox_id, token.OBSERVE, {"m": "ps"})
        entries = answer.fields.get("processes")
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []

    async def _find(self, principal: Principal, sandbox_id: str, process: str) -> dict[str, Any]:
        entries = await self._ps(principal, sandbox_id)
        if process.isdecimal():
            pid = int(process)
            # The latest first: pids come round again.
            found = [entry for entry in reversed(entries) if entry.get("pid") == pid]
            found.sort(key=lambda entry: entry.get("state") != "running")
        else:
            name = self._id_of(process)
            found = [entry for entry in entries if entry.get("id") == name]
        if not found:
            raise NotFound(
                f"there is no process {process[:80]!r} in sandbox {sandbox_id}",
                sandbox_id=sandbox_id,
                sandbox_survived=True,
            )
        return found[0]

    @staticmethod
    def _id_of(process: str) -> str:
        if process.startswith(REQUEST_PREFIX):
            return process_id_of(process.removeprefix(REQUEST_PREFIX))
        return process[: checks.MAX_NAME_CHARS]


def signal_number(signal: str | int) -> int:
    """The number of a signal given by name ("TERM", "SIGTERM") or number. Raises InvalidRequest."""
    if isinstance(signal, str) and not signal.isdecimal():
        name = signal.upper()
        found = getattr(signals.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if not isinstance(found, signals.Signals):
            raise InvalidRequest(f"there is no signal {signal[:32]!r}; give a name such as TERM, or a number")
        return int(found)
    number = int(signal)
    if not 1 <= number <= signals.SIGRTMAX:
        raise InvalidRequest(f"there is no signal {number}; numbers are 1 to {int(signals.SIGRTMAX)}")
    return number


def _check_exec(request: ExecRequest) -> None:
    if bool(request.argv) == (request.command is not None):
        raise InvalidRequest("give either argv (a list that is not empty) or command (text for the shell)")
    if request.pty is not None:
        raise Unsupported("terminals (pty) are part of a later release; leave pty out", feature="pty")
    if any("\0" in word for word in request.argv) or (request.command is not None and "\0" in request.command):
        raise InvalidRequest("a command cannot have NUL in it")
    if request.argv and not request.argv[0]:
        raise CommandNotStarted("the program's name is empty")
    if request.cwd is not None:
        checks.check_absolute("cwd", request.cwd)
    if request.env:
        checks.check_env(request.env)
    checks.check_user(request.user)
    checks.check_request_id(request.request_id)
    checks.check_seconds("timeout", request.timeout)
    if request.stdin is not None and len(request.stdin) > MAX_STDIN_BYTES:
        raise InvalidRequest(
            f"stdin is larger than {MAX_STDIN_BYTES} bytes; write a file, or start the process and stream it"
        )
    limit = parse_size(request.output_limit, name="output_limit")
    if limit > MAX_OUTPUT_LIMIT:
        raise InvalidRequest(
            f"output_limit is at most {MAX_OUTPUT_LIMIT} bytes; start the process and stream its output"
        )


async def _feed(stream: GuestStream, stdin: bytes) -> None:
    """Send all of stdin. A command that ends without reading it is no error: its result says what there is to say."""
    try:
        if stdin:
            await stream.send(stdin, fin=True)
        else:
            await stream.finish()
    except DsecError:
        return


async def _feed_started(stream: GuestStream, stdin: bytes, *, keep_open: bool) -> None:
    async with stream:
        try:
            if stdin:
                await stream.send(stdin, fin=not keep_open)
            elif not keep_open:
                await stream.finish()
        except DsecError:
            return


async def _collected(stream: GuestStream, process_id: str) -> ExecResponse:
    """The result, with the output that came in frames before it."""
    output: tuple[bytearray, bytearray] | None = None
    while True:
        item = await stream.receive()
        if type(item) is Message:
            if item.last:
                return exec_response(process_id, item.fields, output)
        elif type(item) is Data:
            payload = item.payload
            if output is None:
                output = (bytearray(), bytearray())
            output[payload[0] != 1].extend(memoryview(payload)[OUTPUT_HEADER.size :])
        else:
            raise InternalError("the guest ended a command without its result")


def _only(group: BaseExceptionGroup[BaseException], sandbox_id: str) -> BaseException:
    """The one error of a group whose other members are none."""
    first = group.exceptions[0]
    return translated(first, sandbox_id=sandbox_id, method="exec") if isinstance(first, GuestReset) else first
