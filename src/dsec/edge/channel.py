"""A sandbox's channel: many streams of the guest protocol over one SEQPACKET socket, seen from the edge.

Owns the descriptor, the streams and their credit; knows no methods. What arrives is untrusted input: bounded, and a guest that breaks
the protocol loses its stream or its channel, never the edge. The rule a reader could break: everything here runs in the loop's
thread and nothing blocks, so state is consistent between two awaits and there are no locks.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from dsec.api import wire
from dsec.api.dataplane import Data, GuestReset, Message
from dsec.api.errors import Conflict, DeadlineExceeded, DsecError, InternalError, InvalidRequest, NoCapacity
from dsec.edge.poller import READ, WRITE, Poller

MAX_STREAMS: Final = 1024
"""Streams open at once on one channel; the guest has 512 processes."""
_WATCH: Final = b"watch"
_PACKETS_A_TURN: Final = 16
"""Packets read from one channel before another gets its turn (1 MiB at most)."""
_GRANT_BYTES: Final = wire.WINDOW_BYTES // 4
"""Consumed bytes are granted again in steps of this size: a quarter of the window keeps the sender going."""
_QUEUED_MESSAGE_BYTES: Final = 8 << 20
"""MSG frames are not counted by credit; a stream whose reader lets more than this pile up is reset."""
_OUT_PAUSE_BYTES: Final = 256 << 10
"""Senders of DATA wait while more than this is queued for a guest that does not read."""
_OUT_MAX_BYTES: Final = 4 << 20
"""No stream is opened while more than this is queued."""

_unpack = wire.HEADER.unpack_from
_END = wire.MSG | wire.FIN


def _reset_error(fields: Mapping[str, Any]) -> GuestReset:
    details: dict[str, Any] = {}
    if isinstance(number := fields.get("errno"), int):
        details["errno"] = number
    if isinstance(path := fields.get("path"), bytes):
        details["path"] = path.decode(errors="replace")
    elif isinstance(path, str):
        details["path"] = path
    return GuestReset(str(fields.get("code", "internal")), str(fields.get("msg", "")), **details)


class _Call:
    """A stream that consists of one question and one answer."""

    __slots__ = ("_channel", "_stream", "future")

    def __init__(self, channel: Channel, stream: int, future: asyncio.Future[Message]) -> None:
        self._channel = channel
        self._stream = stream
        self.future = future

    def on_frame(self, kind: int, payload: memoryview) -> None:
        if kind == _END:
            self._channel.forget(self._stream)
            if not self.future.done():
                try:
                    self.future.set_result(Message(wire.fields_of(payload), True))
                except wire.WireError as error:
                    self.future.set_exception(InternalError(f"the guest's answer is damaged: {error}"))
            return
        self._channel.forget(self._stream)
        if kind & ~wire.FIN == wire.RESET:
            failure: DsecError = _reset_error(wire.fields_of(payload))
        else:
            self._channel.reset(self._stream)
            failure = InternalError("the guest sent data where one answer was expected")
        self.fail(failure)

    def fail(self, error: DsecError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Stream:
    """A GuestStream of this edge (see `dsec.api.dataplane`). One reader and one writer at a time."""

    __slots__ = (
        "_channel", "_credit", "_error", "_finished", "_got", "_message_bytes", "_on_end", "_peer_finished",
        "_reader", "_stream", "_ungranted", "_unread", "_writer",
    )  # fmt: skip

    def __init__(self, channel: Channel, stream: int, *, finished: bool, on_end: Callable[[], None] | None) -> None:
        self._channel = channel
        self._stream = stream
        self._credit = wire.WINDOW_BYTES
        self._finished = finished
        self._peer_finished = False
        self._got: deque[Data | Message] = deque()
        self._message_bytes = 0
        self._unread = 0
        self._ungranted = 0
        self._error: DsecError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._on_end = on_end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def send(self, payload: bytes | memoryview, *, fin: bool = False) -> None:
        """Send `payload` in frames, waiting for the guest's credit and for room in the socket.

        Raises Conflict after `finish`, or when the guest has finished; else as `receive`. Cancelled: a part may have been sent.
        """
        rest, position = memoryview(payload), 0
        while position < len(rest):
            while (self._credit == 0 or self._channel.congested) and self._may_send():
                await self._wait_for_room()
            self._may_send()
            size = min(len(rest) - position, self._credit, wire.MAX_PAYLOAD_BYTES)
            last = fin and position + size == len(rest)
            self._credit -= size
            self._finished = last
            self._channel.write(
                wire.frame(self._stream, wire.DATA | wire.FIN if last else wire.DATA, rest[position : position + size])
            )
            position += size
        if fin and not self._finished:
            await self.finish()
        elif self._finished:
            self._settle()

    async def finish(self) -> None:
        """Say that nothing more will be sent. Idempotent."""
        if self._finished or self._error is not None:
            return
        self._finished = True
        self._channel.write(wire.frame(self._stream, wire.DATA | wire.FIN))
        self._settle()

    async def receive(self) -> Data | Message | None:
        """The next frame, or None after the guest's FIN. What came before an error is handed out first.

        Raises GuestReset, SandboxGone, or InternalError if the guest broke the protocol. Cancelling loses nothing.
        """
        while not self._got:
            if self._error is not None:
                raise self._error
            if self._peer_finished:
                return None
            if self._reader is not None:
                raise Conflict("the stream is being read already")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._got.popleft()
        if type(item) is Data:
            self._consumed(len(item.payload))
        else:
            self._message_bytes = 0 if not self._got else self._message_bytes
        return item

    async def aclose(self) -> None:
        """Reset the stream unless it has ended. Idempotent."""
        if self._error is None and not (self._finished and self._peer_finished):
            self._channel.reset(self._stream)
            self.fail(Conflict("the stream is closed"))
        self._got.clear()

    def on_frame(self, kind: int, payload: memoryview) -> None:
        """Take in a frame of this stream."""
        base = kind & ~wire.FIN
        if base == wire.CREDIT:
            self._credit += wire.credit_of(payload)
            self._wake(self._writer)
            return
        if base == wire.RESET:
            self.fail(_reset_error(wire.fields_of(payload)))
            return
        if base == wire.DATA:
            self._unread += len(payload)
            if len(payload) or not kind & wire.FIN:
                self._got.append(Data(bytes(payload)))
        elif base == wire.MSG:
            self._message_bytes += len(payload)
            self._got.append(Message(wire.fields_of(payload), bool(kind & wire.FIN)))
        if self._unread > wire.WINDOW_BYTES or self._message_bytes > _QUEUED_MESSAGE_BYTES:
            self._channel.reset(self._stream)
            self.fail(InternalError("the guest sent more than the stream's window"))
            return
        if kind & wire.FIN:
            self._peer_finished = True
            self._wake(self._writer)
            self._settle()
        self._wake(self._reader)

    def fail(self, error: DsecError) -> None:
        """End the stream with `error`."""
        if self._error is None and not (self._finished and self._peer_finished):
            self._error = error
            self._end()
        self._wake(self._reader)
        self._wake(self._writer)

    def woken(self) -> None:
        """There is room in the socket again."""
        self._wake(self._writer)

    def _may_send(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._finished:
            raise Conflict("nothing can be sent after finish()")
        if self._peer_finished:
            raise Conflict("the other side has finished and reads no more")
        return True

    async def _wait_for_room(self) -> None:
        if self._writer is not None:
            raise Conflict("the stream is being written already")
        self._writer = asyncio.get_running_loop().create_future()
        try:
            await self._writer
        finally:
            self._writer = None

    def _consumed(self, size: int) -> None:
        self._unread -= size
        self._ungranted += size
        if self._ungranted >= _GRANT_BYTES and not self._peer_finished and self._error is None:
            self._channel.write(wire.credit_frame(self._stream, self._ungranted))
            self._ungranted = 0

    def _settle(self) -> None:
        if self._finished and self._peer_finished:
            self._end()

    def _end(self) -> None:
        self._channel.forget(self._stream)
        if (on_end := self._on_end) is not None:
            self._on_end = None
            on_end()

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Channel:
    """The edge's end of one channel; owns `descriptor` (SEQPACKET) until `close`.

    `on_lost` is called once, when the channel breaks or the guest breaks the protocol: the streams stay open until `close` says with
    which error they end, because only the launcher's report tells why.
    """

    __slots__ = (
        "_descriptor",
        "_hello",
        "_lost",
        "_next",
        "_on_lost",
        "_out",
        "_out_bytes",
        "_poller",
        "_silent_since",
        "_streams",
        "congested",
    )  # fmt: skip

    def __init__(self, poller: Poller, descriptor: int, *, on_lost: Callable[[str], None]) -> None:
        self._poller = poller
        self._descriptor = descriptor
        self._on_lost = on_lost
        self._streams: dict[int, _Call | Stream] = {}
        self._next = 1
        self._out: deque[bytes] = deque()
        self._out_bytes = 0
        self._lost = False
        self._hello: tuple[int, asyncio.Future[dict[str, Any]]] | None = None
        self._silent_since: float | None = None
        self.congested = False
        """Whether senders of DATA should wait."""
        os.set_blocking(descriptor, False)
        poller.register(descriptor, self._on_ready)

    @property
    def descriptor(self) -> int:
        """The socket, for handing a duplicate to a new launcher."""
        return self._descriptor

    @property
    def streams(self) -> int:
        """Streams that are open now."""
        return len(self._streams)

    async def call(self, params: Mapping[str, Any]) -> Message:
        """Open with FIN and return the final message (see `DataPlane.call`). Cancelled: the stream is reset."""
        stream = self._next
        future = self.ask(params)
        try:
            return await future
        except asyncio.CancelledError:
            if stream in self._streams:
                self.forget(stream)
                self.reset(stream)
            raise

    def ask(self, params: Mapping[str, Any]) -> asyncio.Future[Message]:
        """As `call`, for callers that attach a callback instead of waiting."""
        stream = self._take_id()
        packet = self._opening(stream, wire.OPEN | wire.FIN, params)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._streams[stream] = _Call(self, stream, future)
        self.write(packet)
        return future

    def open(self, params: Mapping[str, Any], *, fin: bool, on_end: Callable[[], None] | None = None) -> Stream:
        """Open a stream; `on_end` is called once when it has ended, whoever ended it."""
        stream_id = self._take_id()
        packet = self._opening(stream_id, wire.OPEN | wire.FIN if fin else wire.OPEN, params)
        stream = Stream(self, stream_id, finished=fin, on_end=on_end)
        self._streams[stream_id] = stream
        self.write(packet)
        return stream

    async def hello(self, epoch: int, config: Mapping[str, Any] | None, *, timeout_s: float) -> dict[str, Any]:
        """Take the channel over from an edge of a lower epoch; everything that comes before the guest's answer is dropped.

        Raises TimeoutError if the guest does not answer in time.
        """
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._hello = (epoch, future)
        fields: dict[str, Any] = {"proto": wire.PROTO, "epoch": epoch}
        if config is not None:
            fields["config"] = config
        self.write(wire.map_frame(0, wire.HELLO, fields))
        async with asyncio.timeout(timeout_s):
            return await future

    def watch(self, now: float, *, patience_s: float) -> bool:
        """Ask a guest with open streams for a sign of life; True if it gave none for `patience_s` (its streams have failed then).

        To be called every few seconds. A command may run for hours without a word, so that silence alone says nothing.
        """
        if not self._streams or self._lost or self._hello is not None:
            self._silent_since = None
            return False
        if self._silent_since is None:
            self._silent_since = now
            self.write(wire.frame(0, wire.PING, _WATCH))
            return False
        if now - self._silent_since < patience_s:
            return False
        self._silent_since = None
        for number, stream in list(self._streams.items()):
            self.reset(number)
            stream.fail(
                DeadlineExceeded(
                    f"the sandbox has not answered for {patience_s:.0f} s: stop it, or try again", sandbox_survived=True
                )
            )
        self._streams.clear()
        return True

    def close(self, error: Callable[[], DsecError]) -> None:
        """Close the socket and end all streams, each with a fresh `error()`. Idempotent."""
        if self._descriptor < 0:
            return
        self._lost = True
        self._poller.unregister(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._out.clear()
        self._out_bytes = 0
        self.congested = False
        if self._streams:
            for stream in list(self._streams.values()):
                stream.fail(error())
            self._streams.clear()
        if self._hello is not None and not self._hello[1].done():
            self._hello[1].set_exception(error())

    def write(self, packet: bytes) -> None:
        """Send `packet` now, or queue it while the guest does not read."""
        if self._lost:
            return
        if not self._out:
            try:
                os.write(self._descriptor, packet)
            except BlockingIOError:
                self._poller.interest(self._descriptor, READ | WRITE)
            except OSError as error:
                self._lose(f"writing failed: {error.strerror}")
                return
            else:
                return
        self._out.append(packet)
        self._out_bytes += len(packet)
        self.congested = self._out_bytes > _OUT_PAUSE_BYTES

    def reset(self, stream: int) -> None:
        """Tell the guest that `stream` is over."""
        self.write(wire.map_frame(stream, wire.RESET, {"code": "cancelled", "msg": ""}))

    def forget(self, stream: int) -> None:
        """Drop what still comes for `stream`."""
        self._streams.pop(stream, None)

    def _take_id(self) -> int:
        if len(self._streams) >= MAX_STREAMS or self._out_bytes > _OUT_MAX_BYTES:
            raise NoCapacity(
                f"the sandbox has {len(self._streams)} operations running; wait for some to end", retry_after=1.0
            )
        stream = self._next
        self._next += 2
        return stream

    @staticmethod
    def _opening(stream: int, kind: int, params: Mapping[str, Any]) -> bytes:
        try:
            return wire.map_frame(stream, kind, params)
        except wire.WireError as error:
            raise InvalidRequest(
                f"the request is too large or not valid (argv and env must fit 64 KiB): {error}"
            ) from error

    def _on_ready(self, events: int) -> None:
        if events & WRITE and self._out:
            self._flush()
        buffers = self._poller.buffers
        view = self._poller.view
        for _ in range(_PACKETS_A_TURN):
            if self._lost:
                return
            try:
                size = os.readv(self._descriptor, buffers)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"reading failed: {error.strerror}")
                return
            if size == 0:
                self._lose("the guest closed it")
                return
            self._silent_since = None
            try:
                self._take_packet(view, size)
            except wire.WireError as error:
                self._lose(f"the guest broke the protocol: {error}")

    def _take_packet(self, view: memoryview, size: int) -> None:
        # As `wire.frames`, without a generator: this loop is half the edge's work for a short command.
        position = 0
        while position < size:
            if size - position < wire.HEADER_BYTES:
                raise wire.WireError("the packet ends inside a header")
            length, stream_id, kind = _unpack(view, position)
            end = position + wire.LENGTH_BYTES + length
            if length < 5 or end > size:
                raise wire.WireError(f"a frame of length {length} does not fit its packet")
            payload = view[position + wire.HEADER_BYTES : end]
            position = end
            stream = self._streams.get(stream_id)
            if stream is not None:
                if self._hello is None:
                    stream.on_frame(kind, payload)
            elif stream_id == 0:
                self._control(kind, payload)
            elif kind & ~wire.FIN == wire.OPEN and stream_id % 2 == 0 and self._hello is None:
                self.write(
                    wire.map_frame(stream_id, wire.RESET, {"code": "unsupported", "msg": "the edge takes no streams"})
                )

    def _control(self, kind: int, payload: memoryview) -> None:
        if kind == wire.HELLO:
            if self._hello is not None:
                fields = wire.fields_of(payload)
                epoch, future = self._hello
                if fields.get("epoch") == epoch:
                    self._hello = None
                    if not future.done():
                        future.set_result(fields)
        elif kind == wire.PING and self._hello is None and not self.congested:
            self.write(wire.frame(0, wire.PONG, payload))

    def _flush(self) -> None:
        while self._out:
            packet = self._out[0]
            count = 1
            if len(packet) < 4096 and len(self._out) > 1:
                packet, count = self._coalesced()
            try:
                os.write(self._descriptor, packet)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(f"writing failed: {error.strerror}")
                return
            for _ in range(count):
                self._out_bytes -= len(self._out.popleft())
        if not self._out:
            self._poller.interest(self._descriptor, READ)
        if self.congested and self._out_bytes <= _OUT_PAUSE_BYTES // 2:
            self.congested = False
            for stream in self._streams.values():
                if type(stream) is Stream:
                    stream.woken()

    def _coalesced(self) -> tuple[bytes, int]:
        """Several small frames as one packet: one system call and one wake-up of the guest."""
        parts: list[bytes] = []
        total = 0
        for part in self._out:
            total += len(part)
            if total > wire.MAX_PACKET_BYTES:
                break
            parts.append(part)
        return b"".join(parts), len(parts)

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            self._poller.unregister(self._descriptor)
            self._on_lost(reason)
