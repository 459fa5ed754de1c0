"""Carries calls over HTTP: retries over a server's restart, deadlines, errors as exceptions.

Short calls go through `_http`; streams, WebSockets, large bodies and TLS through aiohttp, which is imported when it is first needed.

The rule: a call that may have reached the server and is not repeatable is never sent again; its outcome is unknown.
"""

from __future__ import annotations

import asyncio
import io
import random
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dsec.api.errors import ConnectionFailed, DeadlineExceeded, DsecError, OutcomeUnknown
from dsec.sdk import _calls
from dsec.sdk._calls import Call
from dsec.sdk._endpoint import Endpoint
from dsec.sdk._http import MAX_CONNECTIONS, LostError, NotConnectedError, Pool

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

RECONNECT_S = 30.0
"""How long a call looks for a server that was there before: a daemon's restart takes a few seconds."""
CONNECT_TRIES = 3
"""Tries at a server that never answered: its socket may appear a moment after its process."""
CLEANUP_S = 10.0
"""Time for what a cancelled call has to undo."""
CHUNK_BYTES = 256 * 1024
_LARGE_BYTES = 1 << 20


def lost_errors(*more: type[BaseException]) -> tuple[type[BaseException], ...]:
    """What is raised when a connection is not there or breaks, and `more`, for an `except` clause; aiohttp's own only if it was ever imported."""
    aiohttp = sys.modules.get("aiohttp")
    ours: tuple[type[BaseException], ...] = (LostError, NotConnectedError, ConnectionResetError, *more)
    return ours if aiohttp is None else (*ours, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


def _was_sent(error: BaseException) -> bool:
    """Whether the request may have reached the server."""
    aiohttp = sys.modules.get("aiohttp")
    if isinstance(error, NotConnectedError):
        return False
    return aiohttp is None or not isinstance(error, aiohttp.ClientConnectorError)


class Transport:
    """A client's connections. `open` binds it to the running event loop; `aclose` ends it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._pool: Pool | None = None
        self._headers = {"Authorization": f"Bearer {endpoint.key}", "Accept": _calls.MSGPACK}
        self._prefix = endpoint.base
        self._answered = False
        self._closed = False
        self._cleanups: set[asyncio.Task[None]] = set()

    def session(self) -> aiohttp.ClientSession:
        """The session, made at its first use, because it belongs to the running loop."""
        if self._session is None:
            import aiohttp

            self._check_open()
            socket = self.endpoint.socket
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(path=socket, limit=MAX_CONNECTIONS)
                if socket is not None
                else aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                read_bufsize=CHUNK_BYTES,
                raise_for_status=False,
            )
        return self._session

    @property
    def _is_plain(self) -> bool:
        return not self._prefix.startswith("https")

    def _check_open(self) -> None:
        # What cancelled calls have to undo goes on while the client closes.
        if self._closed and not self._cleanups:
            raise ConnectionFailed("this client is closed")

    async def aclose(self) -> None:
        """Finish what cancelled calls left to undo (bounded), then close the connections. Idempotent."""
        self._closed = True
        for _ in range(2):
            # An iterator that was left early is closed by a task that has yet to begin: let it register what it undoes.
            await asyncio.sleep(0)
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=CLEANUP_S)
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            await asyncio.sleep(0)  # for the connections to end
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, call: Call[T], *, timeout: float | None = None) -> T:
        """Make the call and return its decoded answer. `timeout` in seconds bounds all of it, retries included.

        Raises the error the server answered with, ConnectionFailed, OutcomeUnknown, DeadlineExceeded.
        """
        raw = await self.call_raw(call, timeout=timeout)
        return _calls.decode(call, raw)

    async def call_raw(self, call: Call[Any], *, timeout: float | None = None) -> bytes:
        """As `call`, returning the answer's bytes."""
        return await self._retrying(call, lambda: self._once(call), timeout)

    async def _once(self, call: Call[Any]) -> bytes:
        headers = call.headers
        if call.body is not None and "Content-Type" not in headers:
            headers = {**headers, "Content-Type": _calls.MSGPACK}
        if self._is_plain and (call.body is None or len(call.body) <= _LARGE_BYTES):
            if self._pool is None:
                self._check_open()
                self._pool = Pool(self._prefix, self.endpoint.socket, self._headers)
            short = await self._pool.request(call.method, call.target, call.body, headers)
            if short.status >= 400:
                raise _calls.error_of(short.status, short.content_type, short.body)
            return short.body
        # Sent piece by piece: one write of a large body would hold the loop up.
        data = None if call.body is None else io.BytesIO(call.body)
        async with self.session().request(call.method, self._url(call.target), data=data, headers=headers) as answer:
            raw = await answer.read()
            if answer.status >= 400:
                raise _calls.error_of(answer.status, answer.content_type, raw)
        return raw

    def _url(self, target: str) -> URL:
        from yarl import URL

        return URL(self._prefix + target, encoded=True)

    async def _retrying(self, call: Call[Any], attempt: Callable[[], Awaitable[T]], timeout: float | None) -> T:
        retry = Retry(self, call)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        result = await attempt()
                    except DsecError:
                        raise  # an answer; some are OSErrors, too
                    except lost_errors() as error:
                        await retry.after(error)
                    else:
                        self._answered = True
                        return result
        except TimeoutError as error:
            if isinstance(error, DsecError):
                self._answered = True
                raise
            raise DeadlineExceeded(
                f"no answer from {self.endpoint.name} to {call.method} {call.target} within {timeout} s"
            ) from error
        except DsecError as error:
            self._answered = self._answered or not isinstance(error, ConnectionFailed)
            raise

    def stream(self, call: Call[Any], *, data: Any = None, timeout: float | None = None) -> Stream:
        """A call whose answer (or body, `data`) is streamed, for `async with`. The connection is retried, the stream itself is not.

        `timeout` bounds the time until the answer's head.
        """
        return Stream(self, call, data, timeout)

    async def open_stream(self, call: Call[Any], data: Any, timeout: float | None) -> aiohttp.ClientResponse:
        """Make the call and return its answer with the body unread."""

        async def attempt() -> aiohttp.ClientResponse:
            headers = call.headers
            if call.body is not None and "Content-Type" not in headers:
                headers = {**headers, "Content-Type": _calls.MSGPACK}
            answer = await self.session().request(
                call.method, self._url(call.target), data=call.body if data is None else data, headers=headers
            )
            if answer.status >= 400:
                async with answer:
                    raise _calls.error_of(answer.status, answer.content_type, await answer.read())
            return answer

        return await self._retrying(call, attempt, timeout)

    async def websocket(self, target: str, *, timeout: float | None = None) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket, retrying the connection as `call` does."""
        import aiohttp

        async def attempt() -> aiohttp.ClientWebSocketResponse:
            try:
                return await self.session().ws_connect(self._url(target), max_msg_size=0, autoclose=True, compress=0)
            except aiohttp.WSServerHandshakeError as error:
                raise await self._refusal(target, error) from error

        return await self._retrying(Call("GET", target, repeatable=True), attempt, timeout)

    async def _refusal(self, target: str, error: aiohttp.WSServerHandshakeError) -> DsecError:
        """The reason a WebSocket was refused: a handshake's error drops the body, a plain request gets it."""
        async with self.session().get(self._url(target)) as answer:
            raw = await answer.read()
            if answer.status >= 400:
                return _calls.error_of(answer.status, answer.content_type, raw)
        return ConnectionFailed(f"the server refused a stream with status {error.status}")

    async def shielded(self, undo: Awaitable[object]) -> None:
        """Run `undo` to its end, at most CLEANUP_S, even if the caller is cancelled meanwhile; its errors are dropped.

        For what a cancelled or failed call must undo: the caller is about to raise something more important.
        """

        async def bounded() -> None:
            try:
                async with asyncio.timeout(CLEANUP_S):
                    await undo
            except (DsecError, TimeoutError):
                pass

        task = asyncio.ensure_future(bounded())
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    @property
    def answered(self) -> bool:
        """Whether this server ever answered this client."""
        return self._answered


class Stream:
    """An open streamed answer. Leaving it ends the connection: keeping it would keep a stream that was left half-read."""

    def __init__(self, transport: Transport, call: Call[Any], data: Any, timeout: float | None) -> None:
        self._transport = transport
        self._opening = (call, data, timeout)
        self._answer: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self._answer = await self._transport.open_stream(*self._opening)
        return self._answer

    async def __aexit__(self, *exc_info: object) -> None:
        if self._answer is not None:
            self._answer.close()


class Retry:
    """Decides, for one call, whether and when it is sent again after a connection was lost."""

    def __init__(self, transport: Transport, call: Call[Any]) -> None:
        self._transport = transport
        self._call = call
        self._tries = 0
        self._sent = False
        self._give_up_at: float | None = None

    async def after(self, error: BaseException) -> None:
        """Wait until the call should be sent again, or raise what became of it."""
        self._tries += 1
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None or _was_sent(error):
            self._give_up_at = now + RECONNECT_S
        self._sent = self._sent or _was_sent(error)
        if self._sent and not self._call.repeatable:
            raise OutcomeUnknown(
                f"the connection to {self._transport.endpoint.name} was lost during {self._call.method} "
                f"{self._call.target}: it may or may not have happened"
            ) from error
        never_there = not self._transport.answered and not self._sent and self._tries >= CONNECT_TRIES
        if never_there or now >= self._give_up_at:
            raise self._failure(error) from error
        # Jitter: many calls lose the same server at the same moment.
        await asyncio.sleep(min(0.05 * 2 ** min(self._tries - 1, 5), 1.0) * random.uniform(0.5, 1.0))  # noqa: S311

    def _failure(self, error: BaseException) -> DsecError:
        name = self._transport.endpoint.name
        if self._sent and self._call.method != "GET":
            return OutcomeUnknown(f"the connection to {name} was lost and the server did not come back: {error}")
        hint = (
            "is the daemon running? Start it with `dsec up`"
            if self._transport.endpoint.socket
            else "is the address right?"
        )
        return ConnectionFailed(f"cannot reach dsec at {name} ({hint}): {error}")
