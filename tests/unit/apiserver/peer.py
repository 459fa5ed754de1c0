"""An edge for the control plane's tests: it keeps sandboxes in memory and answers guest methods as docs/protocols.md says, with
processes of the test's own host and a folder for each sandbox's files. Nothing here is isolated; nothing here ships.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import shutil
import signal
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dsec.api.control import (
    NodeQuery,
    SetTimeouts,
    StartBatch,
    StartResult,
    StopResult,
    StopSandboxes,
    UsageQuery,
    UsageReply,
)
from dsec.api.dataplane import Data, GuestReset, GuestStream, Message
from dsec.api.errors import DsecError, InternalError, NoCapacity, NotFound, PermissionDenied, SandboxGone
from dsec.api.token import TokenKey, operation
from dsec.api.types import EndReason, NodeInfo, SandboxRecord, State, Usage
from dsec.edge.ports import RecordSink

INLINE = 49_152
HEADER = struct.Struct("<BQ")


class Stream:
    """Both ends of a stream: the test's side is a GuestStream, the guest's side is what the methods below use."""

    def __init__(self) -> None:
        self.out: deque[Data | Message] = deque()
        self.inbox: deque[bytes] = deque()
        self.ended = False
        self.finished = False
        self.error: DsecError | None = None
        self.moved = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def _wake(self) -> None:
        self.moved.set()

    async def until(self, ready: Any) -> None:
        while not ready():
            self.moved.clear()
            await self.moved.wait()

    # The client's side

    async def send(self, payload: bytes | memoryview, *, fin: bool = False) -> None:
        await self.until(lambda: sum(map(len, self.inbox)) < 262_144 or self.error or self.ended)
        if self.error is not None:
            raise self.error
        self.inbox.append(bytes(payload))
        self.finished = self.finished or fin
        self._wake()

    async def finish(self) -> None:
        self.finished = True
        self._wake()

    async def receive(self) -> Data | Message | None:
        await self.until(lambda: self.out or self.error or self.ended)
        if self.out:
            item = self.out.popleft()
            self._wake()
            return item
        if self.error is not None:
            raise self.error
        return None

    async def aclose(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        self.ended = True
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # The guest's side

    async def put(self, item: Data | Message) -> None:
        await self.until(lambda: len(self.out) < 8)
        self.out.append(item)
        self._wake()

    async def last(self, **fields: Any) -> None:
        await self.put(Message(fields, True))

    def fail(self, error: DsecError) -> None:
        self.error = error
        self._wake()

    async def input(self) -> AsyncIterator[bytes]:
        while True:
            await self.until(lambda: self.inbox or self.finished)
            while self.inbox:
                piece = self.inbox.popleft()
                self._wake()
                yield piece
            if self.finished and not self.inbox:
                return


class Process:
    """One command and its output, kept whole."""

    def __init__(self, name: str, rid: str | None, argv: list[bytes]) -> None:
        self.name, self.rid, self.argv = name, rid, argv
        self.output = [bytearray(), bytearray()]
        self.result: dict[str, Any] | None = None
        self.started = time.time()
        self.process: asyncio.subprocess.Process | None = None
        self.changed = asyncio.Event()

    def entry(self) -> dict[str, Any]:
        assert self.process is not None
        return {
            "id": self.name, "pid": self.process.pid, "argv": self.argv, "user": "root", "rid": self.rid,
            "state": "running" if self.result is None else "ended", "started_ms": int(self.started * 1000),
            "result": self.result,
        }  # fmt: skip


class Box:
    """One sandbox: its record, its folder, its processes."""

    def __init__(self, record: SandboxRecord, root: Path) -> None:
        self.record, self.root = record, root
        self.processes: dict[str, Process] = {}
        root.mkdir(parents=True)


class PeerEdge:
    """See the module. `hold` makes starts wait; `room` sandboxes fit; `calls` counts opened guest methods."""

    def __init__(self, code: str, folder: Path, sink: RecordSink, key: bytes) -> None:
        self.code, self.folder, self.sink = code, folder, sink
        self.tokens = TokenKey(key)
        self.boxes: dict[str, Box] = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.room = 1_000_000
        self.group = 16
        self.calls: list[str] = []
        self.started: list[str] = []
        self.break_usage = False
        self.lag = False
        """Whether the sink hears of changes only when `catch_up` is called."""
        self._late: list[tuple[SandboxRecord, str, dict[str, Any]]] = []

    # Control

    async def start_batch(self, batch: StartBatch) -> AsyncIterator[list[StartResult]]:
        items = list(batch.items)
        while items:
            group, items = items[: self.group], items[self.group :]
            results = []
            for item in group:
                self.started.append(item.record.id)
                self.boxes[item.record.id] = Box(copy.copy(item.record), self.folder / item.record.id)
            await self.hold.wait()
            for item in group:
                box = self.boxes[item.record.id]
                if box.record.state.ended:
                    error = NoCapacity("cancelled").body()
                    results.append(StartResult(id=item.record.id, error=error))
                elif len(self.alive()) > self.room:
                    await self._end(box, State.FAILED, EndReason.ADMISSION)
                    results.append(StartResult(id=item.record.id, error=NoCapacity("the node is full").body()))
                else:
                    box.record.state, box.record.started_at = State.RUNNING, time.time()
                    box.record.seq += 1
                    await self._tell(box)
                    results.append(StartResult(id=item.record.id, record=copy.copy(box.record)))
            yield results

    def alive(self) -> list[Box]:
        return [box for box in self.boxes.values() if not box.record.state.ended]

    async def _tell(self, box: Box) -> None:
        reason = box.record.reason
        data = {"reason": reason.value} if reason else {}
        self._late.append((copy.copy(box.record), f"sandbox.{box.record.state.value}", data))
        if not self.lag:
            await self.catch_up()

    async def catch_up(self) -> None:
        late, self._late = self._late, []
        await self.sink.changed(late)

    async def _end(self, box: Box, state: State, reason: EndReason) -> None:
        box.record.state, box.record.reason, box.record.ended_at = state, reason, time.time()
        box.record.seq += 1
        for process in box.processes.values():
            if process.result is None and process.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.process.pid, signal.SIGKILL)
        shutil.rmtree(box.root, ignore_errors=True)
        await self._tell(box)

    async def aclose(self) -> None:
        """Wait for what was killed and close its pipes: an event loop that closes before leaves them to the collector."""
        for box in self.boxes.values():
            for process in box.processes.values():
                if process.process is not None:
                    await process.process.wait()
                    process.process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)

    async def stop(self, request: StopSandboxes) -> list[StopResult]:
        results = []
        for name in request.ids:
            box = self.boxes.get(name)
            if box is None:
                results.append(StopResult(id=name, error=NotFound(f"no sandbox {name} here").body()))
                continue
            if not box.record.state.ended:
                await self._end(box, State.STOPPED, EndReason(request.reason))
            results.append(StopResult(id=name, record=copy.copy(box.record)))
        return results

    async def set_timeouts(self, request: SetTimeouts) -> SandboxRecord:
        box = self._box(request.id)
        box.record.idle_timeout, box.record.max_lifetime = request.idle_timeout_s, request.max_lifetime_s
        box.record.seq += 1
        await self._tell(box)
        return copy.copy(box.record)

    async def usage(self, query: UsageQuery) -> UsageReply:
        if self.break_usage:
            raise ZeroDivisionError("a fault nobody foresaw")
        return UsageReply(usage=Usage(memory=1, memory_limit=self._box(query.id).record.memory))

    async def node(self, _: NodeQuery) -> NodeInfo:
        return NodeInfo(
            edge=self.code, epoch=1, kinds=["container"], sandboxes=len(self.alive()), cpus=8, memory=64 << 30,
            memory_available=60 << 30, version="test",
        )  # fmt: skip

    def _box(self, name: str) -> Box:
        box = self.boxes.get(name)
        if box is None:
            raise NotFound(f"no sandbox {name} here", sandbox_id=name)
        if box.record.state.ended:
            reason = box.record.reason.value if box.record.reason else "unknown"
            raise SandboxGone("it has ended", sandbox_id=name, sandbox_survived=False, reason=reason)
        return box

    # Data plane

    async def open(self, token: str, params: Mapping[str, Any], *, fin: bool) -> GuestStream:
        said = self.tokens.verify(token, now_s=time.time())
        if not operation(params) & said.operations:
            raise PermissionDenied("the token does not cover this")
        box = self._box(said.sandbox)
        stream = Stream()
        stream.finished = fin
        self.calls.append(str(params["m"]) + (":" + str(params["op"]) if "op" in params else ""))
        stream.task = asyncio.get_running_loop().create_task(self._run(box, stream, params))
        return stream

    async def call(self, token: str, params: Mapping[str, Any]) -> Message:
        stream = await self.open(token, params, fin=True)
        async with stream:
            item = await stream.receive()
            if not isinstance(item, Message) or not item.last:
                raise InternalError("more than one answer")
            return item

    async def _run(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        try:
            await getattr(self, f"_do_{params['m']}")(box, stream, params)
        except GuestReset as error:
            stream.fail(error)
        except FileNotFoundError as error:
            stream.fail(GuestReset("not_found", "no such file", errno=error.errno, path=str(error.filename)))
        except IsADirectoryError as error:
            stream.fail(GuestReset("is_directory", "is a directory", errno=error.errno, path=str(error.filename)))
        except OSError as error:
            codes = {
                errno.ENOTEMPTY: "not_empty",
                errno.EEXIST: "exists",
                errno.ENOSPC: "no_space",
                errno.EACCES: "permission",
            }
            stream.fail(GuestReset(codes.get(error.errno or 0, "io"), str(error), errno=error.errno))

    async def _do_exec(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        for known in box.processes.values():
            if params["rid"] is not None and known.rid == params["rid"]:
                await self._follow(known)
                await self._deliver(stream, known)
                return
        argv = params.get("argv") or [b"/bin/sh", b"-c", params["shell"]]
        process = Process(params["id"], params["rid"], argv)
        pipe = asyncio.subprocess.PIPE
        try:
            process.process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe if params["stdin"] else asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
                cwd=params["cwd"] or box.root, env=dict(os.environ) | dict(params["env"]), start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise GuestReset("not_found", "no such program", path=os.fsdecode(argv[0]), errno=2) from error
        box.processes[process.name] = process
        running = asyncio.get_running_loop().create_task(self._finish(process, params))
        if params["start"]:
            await stream.put(Message({"pid": process.process.pid}, not params["stdin"]))
        try:
            if params["stdin"] and not params["start"]:
                feeding = asyncio.get_running_loop().create_task(self._feed(stream, process))
                await running
                feeding.cancel()
            elif params["stdin"]:
                await self._feed(stream, process)
            else:
                await asyncio.shield(running)
        except asyncio.CancelledError:
            if not params["start"]:
                with suppress(ProcessLookupError):
                    os.killpg(process.process.pid, signal.SIGKILL)
            raise
        if not params["start"]:
            await self._deliver(stream, process)

    async def _feed(self, stream: Stream, process: Process) -> None:
        assert process.process is not None
        assert process.process.stdin is not None
        with suppress(ConnectionError):
            async for piece in stream.input():
                process.process.stdin.write(piece)
                await process.process.stdin.drain()
            process.process.stdin.close()

    async def _finish(self, process: Process, params: Mapping[str, Any]) -> None:
        running = process.process
        assert running is not None
        began, reason = time.monotonic(), "exit"
        readers = [
            asyncio.get_running_loop().create_task(self._read(process, index, pipe))
            for index, pipe in enumerate((running.stdout, running.stderr))
        ]
        try:
            async with asyncio.timeout(params["timeout_ms"] / 1000 if params["timeout_ms"] else None):
                code = await running.wait()
        except TimeoutError:
            os.killpg(running.pid, signal.SIGKILL)
            code, reason = await running.wait(), "timeout"
        await asyncio.wait(readers, timeout=0.2)
        if code < 0 and reason == "exit":
            reason = "signal"
        out, err = process.output
        process.result = {
            "exit": code if code >= 0 else None, "signal": -code if code < 0 else None, "reason": reason,
            "pid": running.pid, "out_total": len(out), "err_total": len(err), "out_gap": None, "err_gap": None,
            "dur_us": int((time.monotonic() - began) * 1e6), "cpu_us": 1, "peak": 1, "oom_kills": 0,
        }  # fmt: skip
        process.changed.set()

    async def _read(self, process: Process, index: int, pipe: asyncio.StreamReader | None) -> None:
        assert pipe is not None
        while piece := await pipe.read(65_536):
            process.output[index] += piece
            process.changed.set()

    async def _follow(self, process: Process) -> None:
        while process.result is None:
            process.changed.clear()
            await process.changed.wait()

    async def _deliver(self, stream: Stream, process: Process) -> None:
        assert process.result is not None
        out, err = process.output
        if len(out) + len(err) <= INLINE:
            await stream.last(**process.result, out=bytes(out), err=bytes(err))
            return
        for channel, data in ((1, out), (2, err)):
            for offset in range(0, len(data), 32_768):
                await stream.put(Data(HEADER.pack(channel, offset) + data[offset : offset + 32_768]))
        await stream.last(**process.result)

    def _process(self, box: Box, params: Mapping[str, Any]) -> Process:
        for process in box.processes.values():
            if process.name == params.get("id") or (process.process and process.process.pid == params.get("pid")):
                return process
        raise GuestReset("no_process", "no such process")

    async def _do_output(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        process = self._process(box, params)
        sent = [params["since_out"], params["since_err"]]
        while True:
            done = process.result is not None
            process.changed.clear()
            for index in (0, 1):
                while piece := bytes(process.output[index][sent[index] : sent[index] + 32_768]):
                    await stream.put(Data(HEADER.pack(index + 1, sent[index]) + piece))
                    sent[index] += len(piece)
            if done or not params["follow"]:
                break
            await process.changed.wait()
        await stream.last(**(process.result or {"running": True}))

    async def _do_stdin(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        process = self._process(box, params)
        running = process.process
        if running is None or running.stdin is None or running.stdin.is_closing():
            raise GuestReset("bad_state", "stdin is closed")
        written = 0
        async for piece in stream.input():
            running.stdin.write(piece)
            await running.stdin.drain()
            written += len(piece)
        running.stdin.close()
        await stream.last(written=written)

    async def _do_signal(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        process = self._process(box, params)
        assert process.process is not None
        if process.result is not None:
            raise GuestReset("bad_state", "it has ended")
        with suppress(ProcessLookupError):
            (os.killpg if params["tree"] else os.kill)(process.process.pid, params["sig"])
        await stream.last()

    async def _do_wait(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        process = self._process(box, params)
        with suppress(TimeoutError):
            async with asyncio.timeout(params["timeout_ms"] / 1000):
                await self._follow(process)
        await stream.last(**(process.result or {"running": True}))

    async def _do_ps(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        await stream.last(processes=[process.entry() for process in box.processes.values()])

    async def _do_file(self, box: Box, stream: Stream, params: Mapping[str, Any]) -> None:
        path = box.root / os.fsdecode(params["path"]).lstrip("/")
        match params["op"]:
            case "read":
                data = path.read_bytes()[params["offset"] :]
                data = data if params["limit"] is None else data[: params["limit"]]
                for start in range(0, len(data), 65_536):
                    await stream.put(Data(data[start : start + 65_536]))
                await stream.last(size=len(data))
            case "write":
                if path.is_dir():
                    raise GuestReset(
                        "is_directory", "is a directory", errno=errno.EISDIR, path=os.fsdecode(params["path"])
                    )
                if params["parents"]:
                    path.parent.mkdir(parents=True, exist_ok=True)
                got = b"".join([piece async for piece in stream.input()])
                if len(got) > 64 << 20:
                    raise GuestReset("no_space", "no space left", errno=errno.ENOSPC)
                path.write_bytes((path.read_bytes() if params["append"] and path.exists() else b"") + got)
                if params["mode"] is not None:
                    path.chmod(params["mode"])
                await stream.last(size=len(got))
            case "stat":
                await stream.last(**self._entry(path, params["path"]))
            case "list":
                found = [self._entry(child, os.fsencode(child.relative_to(box.root))) for child in path.iterdir()]
                await stream.put(Message({"entries": found}, False))
                await stream.last(count=len(found))
            case "mkdir":
                path.mkdir(mode=params["mode"], parents=params["parents"], exist_ok=params["parents"])
                await stream.last()
            case "remove":
                if params["recursive"]:
                    shutil.rmtree(path)
                elif path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()
                await stream.last()
            case "move":
                path.replace(box.root / os.fsdecode(params["to"]).lstrip("/"))
                await stream.last()
            case "chmod":
                path.chmod(params["mode"])
                await stream.last()
            case "tar_put":
                size = sum([len(piece) async for piece in stream.input()])
                await stream.last(entries=size, refused=[b"../x"])
            case other:
                raise GuestReset("unsupported", f"no {other} here")

    @staticmethod
    def _entry(path: Path, shown: bytes) -> dict[str, Any]:
        status = path.lstat()
        return {
            "name": os.fsencode(path.name), "path": shown, "type": "directory" if path.is_dir() else "file",
            "size": status.st_size, "mode": status.st_mode & 0o7777, "uid": 0, "gid": 0, "mtime_ns": status.st_mtime_ns,
            "target": None,
        }  # fmt: skip
