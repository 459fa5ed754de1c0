"""The edge's side of one connection to `dsec-launch` (docs/protocols.md, section 2).

Owns the socket and every descriptor until it is handed over inside a `Spawned` or `Listed`. Answers about many sandboxes come as lists
through `LaunchEvents`, without a future or a task for each. The rule a reader could break: a packet's descriptors belong to somebody
as soon as it is read; whoever drops a result closes them.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from dsec.api.errors import Conflict, DsecError, InternalError, NoCapacity, Unsupported

log = logging.getLogger(__name__)

PROTO: Final = 1
MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_ITEMS: Final = 120
"""Sandboxes in one message: two descriptors each, and the kernel passes at most 253."""
_ITEM_BUDGET_BYTES: Final = 96 << 10
"""Items of one spawn message; the common part and the envelope fit beside them."""
_CUT_SHORT: Final = int(socket.MSG_CTRUNC) | int(socket.MSG_TRUNC)
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(253 * 4)
_PACKETS_A_TURN: Final = 32

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Spawned:
    """A sandbox that runs: `hello` is its guest's first packet. The receiver owns both descriptors."""

    id: str
    pid: int
    slot: int
    hello: bytes
    pidfd: int
    channel: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A sandbox that could not be started; nothing of it is left."""

    id: str
    error: DsecError


@dataclass(frozen=True, slots=True)
class Killed:
    """A sandbox that was killed and is gone (`error` None), or could not be."""

    id: str
    oom_kills: int
    error: DsecError | None


@dataclass(frozen=True, slots=True)
class Exited:
    """A sandbox whose first process ended by itself. `status`: exit code, -n for a signal, None where nobody knows."""

    id: str
    status: int | None
    oom_kills: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A sandbox that the launcher keeps. The receiver owns both descriptors."""

    id: str
    pid: int
    slot: int
    tag: bytes
    pidfd: int
    channel: int


class LaunchEvents(Protocol):
    """What a connection reports; called in the loop's thread, and must not raise."""

    def spawned(self, results: Sequence[Spawned | Refused]) -> None:
        """Outcomes of `spawn`, in order of readiness."""

    def killed(self, results: Sequence[Killed]) -> None:
        """Outcomes of `kill`, as they end."""

    def exited(self, event: Exited) -> None:
        """A sandbox ended by itself."""

    def launcher_lost(self, connection: Connection) -> None:
        """The connection is closed; nothing more comes. Spawns without an outcome never get one."""


def launch_error(fields: Mapping[str, Any]) -> DsecError:
    """The launcher's error map as one of ours."""
    code, text = str(fields.get("code", "")), str(fields.get("msg", "the launcher gave no reason"))
    details: dict[str, Any] = {"launch_code": code, "errno": fields.get("errno")}
    if code in ("no_memory", "too_many", "no_space"):
        return NoCapacity(
            f"the host has no room for another sandbox: {text}", retry_after=1.0, resource=code, **details
        )
    if code == "unsupported":
        return Unsupported(f"this host cannot start the sandbox: {text}", **details)
    if code in ("exists", "busy"):
        return Conflict(text, **details)
    return InternalError(f"the launcher failed: {text}", **details)


@dataclass(slots=True)
class _Asked:
    """A request without its (last) answer: spawn and kill name their sandboxes, others have a future."""

    ids: tuple[str, ...] = ()
    kill: bool = False
    future: asyncio.Future[dict[str, Any]] | None = None
    listed: list[Listed] | None = None


class Connection:
    """A connection to a launcher; close it with `close`."""

    def __init__(self, sock: socket.socket, events: LaunchEvents) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._seq = 0
        self._asked: dict[int, _Asked] = {}
        self._out: deque[tuple[bytes, Sequence[int]]] = deque()
        self._buffer = bytearray(MAX_MESSAGE_BYTES + 1)
        self._view = memoryview(self._buffer)
        self._closed = False
        self.expected_to_end = False
        """Whether it was asked to end, so that its end is no news."""
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @property
    def closed(self) -> bool:
        """Whether the launcher is gone or `close` was called."""
        return self._closed

    def peer_pid(self) -> int:
        """The launcher's pid, as the kernel tells it."""
        credentials = array.array("i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return credentials[0]

    def spawn(self, common: msgspec.Raw, items: Sequence[Mapping[str, Any]]) -> None:
        """Start sandboxes: `common` is the encoded common spec, each item has its `id`. Outcomes come through the events."""
        for chunk, ids in _chunks(items):
            seq = self._ask(_Asked(ids=ids))
            self._send(_encoder.encode({"t": "spawn", "seq": seq, "common": common, "items": chunk}))

    def kill(self, ids: Sequence[str]) -> None:
        """End sandboxes and free all they have. Outcomes come through the events."""
        for start in range(0, len(ids), 1000):
            part = tuple(ids[start : start + 1000])
            seq = self._ask(_Asked(ids=part, kill=True))
            self._send(_encoder.encode({"t": "kill", "seq": seq, "ids": part, "destroy": True}))

    async def request(
        self, kind: str, fields: Mapping[str, Any], *, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Ask and return the answer; `descriptors` are passed as duplicates. Raises its error, or TimeoutError."""
        return await self._answer(kind, fields, _Asked(future=self._loop.create_future()), timeout_s, descriptors)

    async def list_sandboxes(self, *, timeout_s: float) -> list[Listed]:
        """All that the launcher keeps, with duplicates of their descriptors."""
        asked = _Asked(future=self._loop.create_future(), listed=[])
        assert asked.listed is not None
        try:
            await self._answer("list", {}, asked, timeout_s, ())
        except BaseException:
            for listed in asked.listed:
                close_all((listed.pidfd, listed.channel))
            raise
        return asked.listed

    async def adopt(self, sandboxes: Sequence[Listed], *, timeout_s: float) -> None:
        """Hand sandboxes of a dead launcher to this one; the descriptors stay the caller's."""
        for start in range(0, len(sandboxes), MAX_ITEMS):
            part = sandboxes[start : start + MAX_ITEMS]
            fields = [{"id": box.id, "pid": box.pid, "slot": box.slot, "spec_tag": box.tag} for box in part]
            descriptors = [descriptor for box in part for descriptor in (box.pidfd, box.channel)]
            await self.request("adopt", {"sandboxes": fields}, timeout_s=timeout_s, descriptors=descriptors)

    def close(self) -> None:
        """Close the socket; requests without an answer fail. Idempotent; does not report `launcher_lost`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for asked in self._asked.values():
            if asked.future is not None and not asked.future.done():
                asked.future.set_exception(InternalError("the launcher has gone"))
        self._asked.clear()
        self._out.clear()

    async def _answer(
        self, kind: str, fields: Mapping[str, Any], asked: _Asked, timeout_s: float, descriptors: Sequence[int]
    ) -> dict[str, Any]:
        assert asked.future is not None
        if self._closed:
            raise InternalError("the launcher has gone")
        seq = self._ask(asked)
        self._send(_encoder.encode({"t": kind, "seq": seq, **fields}), descriptors)
        try:
            async with asyncio.timeout(timeout_s):
                return await asked.future
        finally:
            self._asked.pop(seq, None)

    def _ask(self, asked: _Asked) -> int:
        self._seq += 1
        self._asked[self._seq] = asked
        return self._seq

    def _send(self, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        if self._closed:
            return
        if self._out or not self._send_now(packet, descriptors):
            if not self._out:
                self._loop.add_writer(self._sock.fileno(), self._on_writable)
            self._out.append((packet, descriptors))

    def _send_now(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        try:
            if descriptors:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                self._sock.sendmsg((packet,), (rights,))
            else:
                self._sock.send(packet)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost(f"sending failed: {error.strerror}")
        return True

    def _on_writable(self) -> None:
        while self._out:
            if not self._send_now(*self._out[0]):
                return
            if self._closed:
                return
            self._out.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        for _ in range(_PACKETS_A_TURN):
            if self._closed:
                return
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into(
                    (self._buffer,), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(f"reading failed: {error.strerror}")
                return
            if size == 0:
                self._lost("it closed the connection")
                return
            descriptors = _descriptors(ancillary)
            try:
                if flags & _CUT_SHORT:
                    raise InternalError("a packet was cut short: too few descriptors are free")
                self._take(_decoder.decode(self._view[:size]), descriptors)
            except Exception as error:
                log.exception("a message of the launcher could not be used")
                self._lost(f"it broke the protocol: {error}")
            finally:
                # Those that were handed over have been taken out.
                close_all(descriptors)

    def _take(self, fields: dict[str, Any], descriptors: deque[int]) -> None:
        kind = fields["t"]
        if kind == "exited":
            self._events.exited(Exited(fields["id"], fields.get("status"), fields.get("oom_kills") or 0))
            return
        asked = self._asked.get(fields["seq"])
        if asked is None:
            return  # its asker stopped waiting
        if kind == "spawned":
            numbers = iter(tuple(descriptors))
            results = [_spawn_result(result, numbers) for result in fields["results"]]
            _hand_over(descriptors, sum(type(result) is Spawned for result in results))
            self._settle(fields["seq"], asked, len(results))
            self._events.spawned(results)
        elif kind == "killed":
            ended = [_kill_result(result) for result in fields["results"]]
            self._settle(fields["seq"], asked, len(ended))
            self._events.killed(ended)
        elif kind == "listed":
            assert asked.listed is not None
            numbers = iter(tuple(descriptors))
            listed = [_listed(box, numbers) for box in fields["sandboxes"]]
            _hand_over(descriptors, len(listed))
            asked.listed.extend(listed)
            if not fields.get("more"):
                self._finish(asked, fields)
        elif asked.future is not None:
            self._finish(asked, fields)
        elif kind == "error":
            del self._asked[fields["seq"]]
            error = launch_error(fields)
            if asked.kill:
                self._events.killed([Killed(sandbox, 0, error) for sandbox in asked.ids])
            else:
                self._events.spawned([Refused(sandbox, error) for sandbox in asked.ids])

    def _settle(self, seq: int, asked: _Asked, count: int) -> None:
        # Answers come in any order of ids; only how many are missing matters here.
        asked.ids = asked.ids[count:]
        if not asked.ids:
            del self._asked[seq]

    @staticmethod
    def _finish(asked: _Asked, fields: dict[str, Any]) -> None:
        assert asked.future is not None
        if not asked.future.done():
            if fields["t"] == "error":
                asked.future.set_exception(launch_error(fields))
            else:
                asked.future.set_result(fields)

    def _lost(self, reason: str) -> None:
        if not self._closed:
            log.log(
                logging.DEBUG if self.expected_to_end else logging.WARNING,
                "the launcher is gone: %s",
                reason,
            )
            self.close()
            self._events.launcher_lost(self)


def close_all(descriptors: Iterable[int]) -> None:
    """Close each of `descriptors`; one that is closed already is a fault that is logged, not raised."""
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            log.exception("closing a descriptor failed")


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> deque[int]:
    found: deque[int] = deque()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found.extend(numbers)
    return found


def _hand_over(descriptors: deque[int], sandboxes: int) -> None:
    # Only after the whole packet was understood: until then all of its descriptors are still the connection's to close.
    for _ in range(2 * sandboxes):
        descriptors.popleft()


def _next(numbers: Iterator[int]) -> int:
    try:
        return next(numbers)
    except StopIteration:
        raise InternalError("a sandbox came without its descriptors") from None


def _spawn_result(result: dict[str, Any], numbers: Iterator[int]) -> Spawned | Refused:
    error = result.get("error")
    if error is not None:
        return Refused(result["id"], launch_error(error))
    return Spawned(
        result["id"], result["pid"], result["slot"], result.get("hello") or b"", _next(numbers), _next(numbers)
    )


def _kill_result(result: dict[str, Any]) -> Killed:
    error = result.get("error")
    return Killed(result["id"], result.get("oom_kills") or 0, None if error is None else launch_error(error))


def _listed(box: dict[str, Any], numbers: Iterator[int]) -> Listed:
    return Listed(box["id"], box["pid"], box["slot"], box.get("spec_tag") or b"", _next(numbers), _next(numbers))


def _chunks(items: Sequence[Mapping[str, Any]]) -> Iterable[tuple[list[msgspec.Raw], tuple[str, ...]]]:
    """`items`, encoded, in parts that fit one message each."""
    encoded: list[msgspec.Raw] = []
    ids: list[str] = []
    total = 0
    for item in items:
        raw = _encoder.encode(item)
        if encoded and (len(encoded) >= MAX_ITEMS or total + len(raw) > _ITEM_BUDGET_BYTES):
            yield encoded, tuple(ids)
            encoded, ids, total = [], [], 0
        encoded.append(msgspec.Raw(raw))
        ids.append(item["id"])
        total += len(raw)
    if encoded:
        yield encoded, tuple(ids)
