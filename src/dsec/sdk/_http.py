"""A lean HTTP/1.1 client for short requests over kept connections: a call costs a quarter of aiohttp's time.

For plain HTTP over TCP or a unix socket, with a body and an answer that are held in memory. Streams, WebSockets and TLS are aiohttp's. The
server is dsec's own: what is not understood ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from urllib.parse import urlsplit

MAX_CONNECTIONS = 2048
"""Connections at once; further calls wait. Each running `run` holds one."""
IDLE_S = 30.0
"""A connection unused for so long is not used again: the server closes idle ones after 75 s, and a request must not meet that."""
_CONNECT_S = 10.0
_MAX_HEAD_BYTES = 65_536


class NotConnectedError(ConnectionError):
    """No connection could be made: nothing was sent."""


class LostError(ConnectionError):
    """The connection ended before the whole answer was there: the request may have been acted on."""


class Answer:
    """Status, content type and body of an answer."""

    __slots__ = ("body", "content_type", "status")

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        self.status = status
        self.content_type = content_type
        self.body = body


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._buffer = bytearray()
        self._status = 0
        self._content_type = ""
        self._left = -1
        """Bytes of the body still to come; -1: the head is not there yet, -2: chunked."""
        self._parts: list[bytes] = []
        self.usable = True
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(LostError(str(error) if error else "the server closed the connection"))

    async def exchange(self, request: bytes, body: bytes | None) -> Answer:
        """Send a request and return its answer. Cancelled, or after an error, the connection is of no more use."""
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._left = -1
        self._transport.write(request if not body else request + body)
        try:
            return await self._waiter
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._left > 0 and not self._buffer:
            self._take(data)
            return
        self._buffer += data
        try:
            if self._left == -1:
                self._read_head()
            if self._left == -2:
                self._read_chunks()
            elif self._left >= 0 and (self._buffer or self._left == 0):
                rest = bytes(self._buffer)
                self._buffer.clear()
                self._take(rest)
        except ValueError as error:
            self._fail(f"the answer is not understood: {error}")

    def _take(self, data: bytes) -> None:
        if len(data) > self._left or self._waiter is None:
            self._fail("the server sent more than it announced")
            return
        if data:
            self._parts.append(data)
            self._left -= len(data)
        if self._left == 0:
            self._finish()

    def _read_head(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ValueError("its head is too long")
            return
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        status = int(lines[0][9:12])
        if status < 200:
            self._read_head()  # 100 Continue and the like announce nothing
            return
        self._status, self._content_type, length, chunked = status, "", 0, False
        for line in lines[1:]:
            name, _, value = line.partition(":")
            name = name.lower()
            if name == "content-length":
                length = int(value)
            elif name == "content-type":
                self._content_type = value.strip()
            elif name == "transfer-encoding":
                chunked = "chunked" in value.lower()
            elif name == "connection" and value.strip().lower() == "close":
                self.usable = False
        self._parts = []
        self._left = -2 if chunked else 0 if status in (204, 304) else length

    def _read_chunks(self) -> None:
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return
            size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
            if len(self._buffer) < end + 4 + size:
                return
            chunk = bytes(self._buffer[end + 2 : end + 2 + size])
            del self._buffer[: end + 4 + size]
            if size == 0:
                self._finish()
                return
            self._parts.append(chunk)

    def _finish(self) -> None:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._left = -1
        if self._buffer:
            self.usable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(self._status, self._content_type, body))
        self._waiter = None

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(LostError(reason))
        self.close()


def _keep_alive(wire: asyncio.BaseTransport) -> None:
    """Let the kernel notice, within a minute or so, a host that has gone without a word: a `run` may wait for hours."""
    sock = wire.get_extra_info("socket")
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ):
        sock.setsockopt(level, option, value)


class Pool:
    """Connections to one server, of one event loop."""

    def __init__(self, base: str, path: str | None, headers: dict[str, str]) -> None:
        parts = urlsplit(base)
        self._path = path
        self._host = parts.hostname or "dsec"
        self._port = parts.port or 80
        self._prefix = parts.path.rstrip("/")
        common = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._common = f" HTTP/1.1\r\nHost: {parts.netloc}\r\n{common}"
        self._idle: list[_Connection] = []
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)

    async def request(self, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        """Make a request. Raises NotConnectedError, LostError. Cancelled: the server sees the connection end."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        head = f"{method} {self._prefix}{target}{self._common}{extra}{length}\r\n".encode("latin-1")
        async with self._room:
            connection = self._reused() or await self._connect()
            answer = await connection.exchange(head, body)
            if connection.usable:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    def _reused(self) -> _Connection | None:
        # The last one used comes first, so that the others can grow old.
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._path is not None:
                    _, connection = await loop.create_unix_connection(_Connection, self._path)
                else:
                    wire, connection = await loop.create_connection(_Connection, self._host, self._port)
                    _keep_alive(wire)
        except OSError as error:  # a TimeoutError is one, too
            raise NotConnectedError(error.strerror or str(error) or "no answer within 10 s") from error
        return connection

    def close(self) -> None:
        """Close idle connections; those in use end with their calls."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
