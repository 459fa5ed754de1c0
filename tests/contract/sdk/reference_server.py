"""A server of docs/http.md in one file, without isolation: commands run on this host as the tests' own user.

It exists so that the SDK's contract is tested without root, and so that faults (lost connections, restarts) can be planned. What it answers
is what the real server answers; the same suite runs over both.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from dsec.api import errors as e
from dsec.api import types as t
from dsec.api.ids import EdgeCode, new_process_id, new_sandbox_id

KEY = "test-key"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Process:
    """A local process group with its output kept whole."""

    def __init__(self, child: asyncio.subprocess.Process, request: t.ExecRequest) -> None:
        self.id = new_process_id()
        self.child = child
        self.request = request
        self.started = time.time()
        self.output = {1: bytearray(), 2: bytearray()}
        self.changed = asyncio.Condition()
        self.timed_out = False
        self.done = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        readers = [
            asyncio.ensure_future(self._read(1, self.child.stdout)),
            asyncio.ensure_future(self._read(2, self.child.stderr)),
        ]
        try:
            async with asyncio.timeout(self.request.timeout):
                await self.child.wait()
        except TimeoutError:
            self.timed_out = True
            self.kill(signal.SIGKILL)
            await self.child.wait()
        await asyncio.wait(readers, timeout=0.3)
        for reader in readers:
            reader.cancel()
        async with self.changed:
            self.changed.notify_all()

    async def _read(self, channel: int, pipe: asyncio.StreamReader | None) -> None:
        assert pipe is not None
        while data := await pipe.read(65536):
            async with self.changed:
                self.output[channel] += data
                self.changed.notify_all()

    def kill(self, number: int) -> None:
        try:
            os.killpg(self.child.pid, number)
        except ProcessLookupError:
            return

    def response(self) -> t.ExecResponse:
        code = self.child.returncode or 0
        reason = "timeout" if self.timed_out else "signal" if code < 0 else "exit"
        parts: dict[str, Any] = {}
        for channel, name in ((1, "stdout"), (2, "stderr")):
            data, limit = bytes(self.output[channel]), int(self.request.output_limit)
            parts[f"{name}_total"] = len(data)
            if len(data) > limit:
                head, tail = limit - limit // 2, limit // 2
                parts[f"{name}_gap"] = (head, len(data) - tail)
                data = data[:head] + data[len(data) - tail :]
            parts[name] = data
        return t.ExecResponse(
            process_id=self.id,
            pid=self.child.pid,
            reason=reason,
            exit_code=128 - code if code < 0 else code,
            signal=-code if code < 0 else None,
            duration_s=time.time() - self.started,
            **parts,
        )

    def info(self) -> t.ProcessInfo:
        result = self.response() if self.done.done() else None
        if result is not None:
            result = msgspec.structs.replace(result, stdout=b"", stderr=b"")
        return t.ProcessInfo(
            id=self.id,
            pid=self.child.pid,
            argv=list(self.request.argv) or [self.request.command or ""],
            state="ended" if self.done.done() else "running",
            started_at=self.started,
            result=result,
        )


class Box:
    """A sandbox: a record, a folder, processes."""

    def __init__(self, record: t.SandboxRecord, folder: Path, env: dict[str, str]) -> None:
        self.record = record
        self.folder = folder
        self.env = env
        self.processes: dict[str, Process] = {}
        self.by_request: dict[str, Process] = {}


class ReferenceServer:
    """The server's state and handlers. `faults` maps "METHOD /path-prefix" to how often the answer shall be cut off after the work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boxes: dict[str, Box] = {}
        self.by_request: dict[str, list[str]] = {}
        self.faults: dict[str, int] = {}
        self.slow_create_s = 0.0
        self.events: list[t.Event] = []
        self.seen: list[str] = []

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 31)
        box = "/v1/sandboxes/{id}"
        process = box + "/processes/{p}"
        app.add_routes(
            [
                web.post("/v1/sandboxes", self.create),
                web.post("/v1/sandboxes:batch", self.batch),
                web.post("/v1/sandboxes:stop", self.stop_many),
                web.get("/v1/sandboxes", self.list),
                web.get(box, self.get),
                web.patch(box, self.patch),
                web.delete(box, self.stop),
                web.get(box + "/usage", self.usage),
                web.post(box + "/exec", self.exec),
                web.post(box + "/processes", self.start),
                web.get(box + "/processes", self.processes),
                web.get(process, self.process),
                web.get(process + "/wait", self.wait),
                web.post(process + "/signal", self.signal),
                web.get(process + "/stream", self.stream),
                web.get(box + "/files", self.read),
                web.put(box + "/files", self.write),
                web.get(box + "/files:stat", self.stat),
                web.get(box + "/files:list", self.list_files),
                web.post(box + "/files:{verb}", self.change),
                web.get(box + "/files:archive", self.get_archive),
                web.put(box + "/files:archive", self.put_archive),
                web.get("/v1/events", self.list_events),
                web.get("/v1/images", self.images),
                web.get("/v1/nodes", self.nodes),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path}")
        try:
            if request.headers.get("Authorization") != f"Bearer {KEY}":
                raise e.Unauthenticated("the key is wrong")
            answer = await handler(request)
        except e.DsecError as error:
            return web.Response(
                body=msgspec.msgpack.encode(error.body()), status=error.http_status, content_type="application/msgpack"
            )
        except OSError as error:
            raised = _file_error(error)
            return web.Response(
                body=msgspec.msgpack.encode(raised.body()),
                status=raised.http_status,
                content_type="application/msgpack",
            )
        for prefix, left in self.faults.items():
            if left > 0 and f"{request.method} {request.path}".startswith(prefix):
                self.faults[prefix] -= 1
                assert request.transport is not None
                request.transport.abort()
        return answer

    def _box(self, request: web.Request, *, living: bool = True) -> Box:
        box = self.boxes.get(request.match_info["id"])
        if box is None:
            raise e.NotFound("no such sandbox")
        if living and box.record.state.ended:
            raise e.SandboxGone("the sandbox has ended", reason=str(box.record.reason), sandbox_id=box.record.id)
        return box

    def _make(self, spec: t.CreateSandbox) -> t.SandboxRecord:
        if spec.kind != "container":
            raise e.Unsupported(f"{spec.kind} is not offered")
        if spec.image != "debian:12":
            raise e.ImageError(f"no image {spec.image}")
        box_id = new_sandbox_id(EdgeCode("aaaa"))
        record = t.SandboxRecord(
            id=box_id,
            project="default",
            principal="p",
            edge="aaaa",
            epoch=1,
            kind=t.Kind(spec.kind),
            state=t.State.RUNNING,
            image=spec.image,
            cpus=spec.cpus,
            memory=t.parse_size(spec.memory),
            disk=t.parse_size(spec.disk),
            pids=spec.pids,
            labels=spec.labels,
            created_at=time.time(),
            request_id=spec.request_id,
        )
        folder = self.folder / box_id
        folder.mkdir()
        self.boxes[box_id] = Box(record, folder, spec.env)
        self.by_request.setdefault(spec.request_id or "", []).append(box_id)
        self.events.append(
            t.Event(
                seq=len(self.events) + 1, time=time.time(), type="sandbox.running", project="default", sandbox_id=box_id
            )
        )
        return record

    async def create(self, request: web.Request) -> web.Response:
        spec = msgspec.msgpack.decode(await request.read(), type=t.CreateSandbox)
        known = self.by_request.get(spec.request_id or "")
        record = self.boxes[known[0]].record if known else self._make(spec)
        await asyncio.sleep(self.slow_create_s)
        return _pack(record, status=201)

    async def batch(self, request: web.Request) -> web.StreamResponse:
        batch = msgspec.msgpack.decode(await request.read(), type=t.CreateBatch)
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        known = self.by_request.get(batch.sandbox.request_id or "", [])
        for index in range(batch.count):
            if index < len(known):
                item = t.BatchItem(index=index, sandbox=self.boxes[known[index]].record)
            elif index == 7:
                item = t.BatchItem(index=index, error=e.NoCapacity("no room for number 7").body())
            else:
                item = t.BatchItem(index=index, sandbox=self._make(batch.sandbox))
            await answer.write(msgspec.json.encode(item) + b"\n")
            if self.slow_create_s:
                await asyncio.sleep(self.slow_create_s)
        await answer.write_eof()
        return answer

    def _stop(self, box_id: str) -> t.StopItem:
        box = self.boxes.get(box_id)
        if box is None:
            return t.StopItem(id=box_id, error=e.NotFound("no such sandbox").body())
        for process in box.processes.values():
            process.kill(signal.SIGKILL)
        if not box.record.state.ended:
            box.record = msgspec.structs.replace(box.record, state=t.State.STOPPED, reason=t.EndReason.REQUESTED)
            shutil.rmtree(box.folder, ignore_errors=True)
        return t.StopItem(id=box_id, state=box.record.state)

    async def stop_many(self, request: web.Request) -> web.Response:
        asked = msgspec.msgpack.decode(await request.read(), type=t.StopRequest)
        ids = list(asked.ids) + self.by_request.get(asked.request_id or "-", [])
        if asked.labels:
            ids += [
                item.record.id for item in self.boxes.values() if asked.labels.items() <= item.record.labels.items()
            ]
        return _pack(t.StopResponse(results=[self._stop(box_id) for box_id in ids]))

    async def list(self, request: web.Request) -> web.Response:
        labels = dict(text.split("=", 1) for text in request.query.getall("label", []))
        state, limit, start = (
            request.query.get("state"),
            int(request.query["limit"]),
            int(request.query.get("cursor", 0)),
        )
        found = [
            item.record
            for item in reversed(self.boxes.values())
            if labels.items() <= item.record.labels.items()
            and (state in ("all", str(item.record.state)) or (state is None and not item.record.state.ended))
        ]
        more = str(start + limit) if len(found) > start + limit else None
        return _pack(t.SandboxPage(items=found[start : start + limit], next_cursor=more))

    async def get(self, request: web.Request) -> web.Response:
        return _pack(self._box(request, living=False).record)

    async def patch(self, request: web.Request) -> web.Response:
        box = self._box(request)
        update = msgspec.msgpack.decode(await request.read(), type=t.TimeoutUpdate)
        changes = {
            name: value
            for name in ("idle_timeout", "max_lifetime")
            if (value := getattr(update, name)) is not msgspec.UNSET
        }
        box.record = msgspec.structs.replace(box.record, **changes)
        return _pack(box.record)

    async def stop(self, request: web.Request) -> web.Response:
        box = self._box(request, living=False)
        self._stop(box.record.id)
        return _pack(box.record)

    async def usage(self, request: web.Request) -> web.Response:
        box = self._box(request)
        return _pack(t.Usage(pids=len(box.processes), memory_limit=box.record.memory))

    async def _spawn(self, box: Box, request: t.ExecRequest) -> Process:
        if request.request_id in box.by_request:
            return box.by_request[request.request_id or ""]
        argv = list(request.argv) or ["/bin/bash", "-c", request.command or ""]
        child_env = {"PATH": os.environ["PATH"], **box.env, **request.env}
        piped = request.stdin is not None or request.stdin_open
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                cwd=self._inside(box, request.cwd or "/"),
                env=child_env,
                stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise e.CommandNotStarted(f"{argv[0]} could not be started: {error.strerror}") from error
        process = Process(child, request)
        box.processes[process.id] = process
        if request.request_id:
            box.by_request[request.request_id] = process
        if request.stdin is not None:
            assert child.stdin is not None
            try:
                child.stdin.write(request.stdin)
                await child.stdin.drain()
            except ConnectionError:
                pass
            child.stdin.close()
        return process

    async def exec(self, request: web.Request) -> web.Response:
        box = self._box(request)
        asked = msgspec.msgpack.decode(await request.read(), type=t.ExecRequest)
        process = await self._spawn(box, asked)
        await asyncio.shield(process.done)
        return _pack(process.response())

    async def start(self, request: web.Request) -> web.Response:
        box = self._box(request)
        asked = msgspec.msgpack.decode(await request.read(), type=t.ExecRequest)
        return _pack((await self._spawn(box, asked)).info(), status=201)

    async def processes(self, request: web.Request) -> web.Response:
        return _pack(t.ProcessList(processes=[process.info() for process in self._box(request).processes.values()]))

    def _process(self, request: web.Request) -> Process:
        box, name = self._box(request), request.match_info["p"]
        found = box.by_request.get(name[4:]) if name.startswith("req:") else box.processes.get(name)
        if found is None:
            raise e.NotFound(f"no process {name}")
        return found

    async def process(self, request: web.Request) -> web.Response:
        return _pack(self._process(request).info())

    async def wait(self, request: web.Request) -> web.Response:
        process = self._process(request)
        await asyncio.wait([process.done], timeout=float(request.query["timeout"]))
        return _pack(process.info())

    async def signal(self, request: web.Request) -> web.Response:
        asked = msgspec.msgpack.decode(await request.read(), type=t.SignalRequest)
        number = asked.signal if isinstance(asked.signal, int) else signal.Signals[f"SIG{asked.signal}"]
        self._process(request).kill(number)
        return _pack({})

    async def stream(self, request: web.Request) -> web.WebSocketResponse:
        process = self._process(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        position = {1: int(request.query["since_stdout"]), 2: int(request.query["since_stderr"])}
        pump = asyncio.ensure_future(self._pump(socket, process, position, follow=request.query["follow"] == "true"))
        stdin = process.child.stdin
        async for message in socket:
            if message.type is WSMsgType.BINARY and stdin is not None:
                stdin.write(message.data)
                await stdin.drain()
            elif message.type is WSMsgType.TEXT and stdin is not None:
                stdin.close()
        pump.cancel()
        await asyncio.wait([pump])
        return socket

    async def _pump(
        self, socket: web.WebSocketResponse, process: Process, position: dict[int, int], *, follow: bool
    ) -> None:
        sent = 0
        while True:
            ended = process.done.done()
            for channel in (1, 2):
                data = bytes(process.output[channel][position[channel] :][:65536])
                if data:
                    await socket.send_bytes(bytes([channel]) + position[channel].to_bytes(8, "little") + data)
                    position[channel] += len(data)
                    sent += 1
                    if sent == 2 and self.faults.get("STREAM", 0) > 0:
                        self.faults["STREAM"] -= 1
                        assert socket._req is not None
                        assert socket._req.transport is not None
                        socket._req.transport.abort()
            if all(len(process.output[channel]) <= position[channel] for channel in (1, 2)):
                if ended:
                    body = msgspec.to_builtins(msgspec.structs.replace(process.response(), stdout=b"", stderr=b""))
                    await socket.send_str(json.dumps({"result": body}))
                    break
                if not follow:
                    await socket.send_str('{"running": true}')
                    break
                async with process.changed:
                    try:
                        await asyncio.wait_for(process.changed.wait(), 0.2)
                    except TimeoutError:
                        continue
        await socket.close()

    def _inside(self, box: Box, path: str) -> Path:
        return box.folder / os.fsencode(path).lstrip(b"/").decode("utf-8", "surrogateescape")

    def _path(self, request: web.Request, name: str = "path") -> Path:
        from urllib.parse import unquote

        for pair in request.rel_url.raw_query_string.split("&"):
            key, _, value = pair.partition("=")
            if key == name:
                return self._inside(self._box(request), unquote(value, errors="surrogateescape"))
        raise e.InvalidRequest("no path")

    async def read(self, request: web.Request) -> web.Response:
        path = self._path(request)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise e.NotRegularFile("not a regular file")
        with path.open("rb") as file:
            file.seek(int(request.query.get("offset", 0)))
            limit = request.query.get("limit")
            return web.Response(body=file.read(-1 if limit is None else int(limit)))

    async def write(self, request: web.Request) -> web.Response:
        path, body = self._path(request), await request.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if "append" in request.query else "wb") as file:
            file.write(body)
        if "mode" in request.query:
            path.chmod(int(request.query["mode"], 8))
        return _pack(t.FileWritten(size=len(body)))

    def _entry(self, path: Path, box: Box) -> t.FileEntry:
        info = path.lstat()
        kinds = (
            (stat.S_ISDIR, "directory"),
            (stat.S_ISLNK, "symlink"),
            (stat.S_ISREG, "file"),
            (stat.S_ISFIFO, "fifo"),
        )
        raw, full = os.fsencode(path.name), b"/" + os.fsencode(path.relative_to(box.folder))
        return t.FileEntry(
            name=raw.decode("utf-8", "replace"),
            path=full.decode("utf-8", "replace"),
            type=next(name for check, name in kinds if check(info.st_mode)),
            size=info.st_size,
            mode=stat.S_IMODE(info.st_mode),
            uid=info.st_uid,
            gid=info.st_gid,
            mtime=info.st_mtime,
            target=str(path.readlink()) if path.is_symlink() else None,
            name_bytes=None if _is_text(raw) else raw,
            path_bytes=None if _is_text(full) else full,
        )

    async def stat(self, request: web.Request) -> web.Response:
        return _pack(self._entry(self._path(request), self._box(request)))

    async def list_files(self, request: web.Request) -> web.Response:
        box = self._box(request)
        return _pack(t.FileList(entries=[self._entry(entry, box) for entry in sorted(self._path(request).iterdir())]))

    async def change(self, request: web.Request) -> web.Response:
        path, verb, query = self._path(request), request.match_info["verb"], request.query
        if verb == "mkdir":
            path.mkdir(parents=query["parents"] == "true", exist_ok=query["parents"] == "true")
        elif verb == "remove":
            if query["recursive"] == "true":
                shutil.rmtree(path)
            elif path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        elif verb == "move":
            path.rename(self._path(request, "to"))
        elif verb == "chmod":
            path.chmod(int(query["mode"], 8))
        else:
            raise e.Unsupported(verb)
        return _pack({})

    async def get_archive(self, request: web.Request) -> web.StreamResponse:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
            for entry in sorted(self._path(request).iterdir()):
                tar.add(entry, arcname=entry.name)
        answer = web.StreamResponse()
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        data = buffer.getvalue()
        cut = self.faults.get("ARCHIVE", 0) > 0
        await answer.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.faults["ARCHIVE"] -= 1
            assert request.transport is not None
            request.transport.abort()
        await answer.write_eof()
        return answer

    async def put_archive(self, request: web.Request) -> web.Response:
        path, body = self._path(request), await request.read()
        path.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(body), errors="surrogateescape") as tar:
            tar.extractall(path, filter="tar")
            return _pack(t.ArchiveReport(entries=len(tar.getmembers())))

    async def list_events(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query.get("since", 0))
        if request.query.get("follow") != "true":
            items = [event for event in self.events if event.seq > since]
            return _pack(t.EventPage(items=items, next_since=items[-1].seq if items else since))
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        for event in [event for event in self.events if event.seq > since][:2]:
            await answer.write(msgspec.json.encode(event) + b"\n")
        await answer.write_eof()
        return answer

    async def images(self, request: web.Request) -> web.Response:
        return _pack(t.ImageList(images=[t.ImageInfo(name="debian:12", layers=("sha256-x",), size=1)]))

    async def nodes(self, request: web.Request) -> web.Response:
        node = t.NodeInfo(edge="aaaa", epoch=1, kinds=["container"], sandboxes=0, cpus=2, memory=1, memory_available=1)
        return _pack(t.NodeList(nodes=[node]))


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _pack(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(value), status=status, content_type="application/msgpack")


def _file_error(error: OSError) -> e.DsecError:
    table: list[tuple[type[OSError], type[e.FileError]]] = [
        (FileNotFoundError, e.FileNotFound),
        (IsADirectoryError, e.FileIsDirectory),
        (NotADirectoryError, e.FileNotDirectory),
        (FileExistsError, e.FileExists),
        (PermissionError, e.FileDenied),
    ]
    found = next((made for kind, made in table if isinstance(error, kind)), None)
    if found is None:
        found = e.DirectoryNotEmpty if error.errno == 39 else e.FileError
    return found(str(error), errno=error.errno)


@asynccontextmanager
async def serve(server: ReferenceServer, socket: Path) -> AsyncIterator[None]:
    """Serve on a unix socket until the block is left."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        yield
    finally:
        for box in server.boxes.values():
            for process in box.processes.values():
                process.kill(signal.SIGKILL)
                await asyncio.wait([process.done], timeout=5)
        await runner.cleanup()
