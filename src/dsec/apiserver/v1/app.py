"""The HTTP server: sockets, dispatch, errors. Built on aiohttp's low-level server, because its application layer costs more than our handlers.

The rule: every answer that is not a success is an ErrorBody, and what nobody foresaw is an InternalError with an incident id whose
traceback is in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from dsec.api.errors import DsecError, InternalError, InvalidRequest, NotFound, Unauthenticated
from dsec.apiserver.service import Service
from dsec.apiserver.v1 import openapi
from dsec.apiserver.v1.exchange import Exchange, error_response
from dsec.apiserver.v1.route import Route, Router
from dsec.apiserver.v1.table import LATER, ROUTES

log = logging.getLogger(__name__)

KEEPALIVE_S = 90.0
"""Longer than clients keep idle connections, so that it is they who close them and no request is sent into a closing one."""
FIRST_REQUEST_S = 30.0
"""A connection that has not sent a whole request head by then is closed."""
_MAX_LINE = 32 << 10
"""Two paths of 4,096 bytes, percent-encoded, and the rest."""
_MAX_HEADER = 16 << 10
_MAX_HEADERS = 64
_BACKLOG = 1024
_SHUTDOWN_S = 1.0
"""For requests under way: followers of events and output would wait for ever, and the clients of the rest try again."""
_BEARER = "bearer "


class MethodNotAllowed(InvalidRequest):
    """The path is there, but not for this method."""

    http_status = 405


class _Connection(RequestHandler):
    """aiohttp's connection, with a limit for the first request's head and errors in our form."""

    __slots__ = ("_first",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._first: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._too_slow)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.has_sent_a_request()
        super().connection_lost(exc)

    def has_sent_a_request(self) -> None:
        """Stop the clock of the first request."""
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def _too_slow(self) -> None:
        self._first = None
        self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what aiohttp itself refuses: heads that are no HTTP, too long, or malformed."""
        if status < 500:
            response = error_response(
                request, InvalidRequest(f"this is not a request that can be read: {message or exc or status}")
            )
            response.set_status(status)
        else:
            log.error("aiohttp failed on a request", exc_info=exc)
            response = error_response(request, InternalError("the request failed inside dsec; its log says why"))
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)


class ApiServer:
    """Serves `service` on a unix socket at `socket_path` (mode 0600) and on `tcp`, a bound socket, while the context is open.

    The service is entered by whoever made it. `tcp` stays the caller's to close. Raises OSError on entering if the path cannot be used.
    """

    def __init__(self, service: Service, *, socket_path: Path | None = None, tcp: socket.socket | None = None) -> None:
        self._service = service
        self._socket_path = socket_path
        self._tcp = tcp
        self._router = Router((*ROUTES, *LATER, self._openapi_route()))
        self._timers: dict[str, Any] = {}
        self._counters: dict[tuple[str, int], Any] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            server = _Server(
                self._handle,
                handler_cancellation=True,
                keepalive_timeout=KEEPALIVE_S,
                access_log=None,
                max_line_size=_MAX_LINE,
                max_field_size=_MAX_HEADER,
                max_headers=_MAX_HEADERS,
                auto_decompress=False,
                tcp_keepalive=True,
                lingering_time=30.0,
            )
            stack.push_async_callback(server.shutdown, _SHUTDOWN_S)
            stack.callback(server.pre_shutdown)
            loop = asyncio.get_running_loop()
            if self._socket_path is not None:
                bound = await asyncio.to_thread(_bind_unix, self._socket_path)
                stack.callback(_unlink, self._socket_path)
                stack.push_async_callback(_close, await loop.create_unix_server(server, sock=bound, backlog=_BACKLOG))
            if self._tcp is not None:
                # A duplicate, because the loop closes what it serves.
                listening = await loop.create_server(server, sock=self._tcp.dup(), backlog=_BACKLOG)
                stack.push_async_callback(_close, listening)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def _openapi_route(self) -> Route:
        async def handler(exchange: Exchange) -> web.StreamResponse:
            return web.json_response(_document(), dumps=_dumps)

        return Route(
            method="GET", path="/openapi.json", handler=handler, name="openapi", summary="This document.", public=True
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        request.protocol.has_sent_a_request()  # type: ignore[attr-defined]
        name = "none"
        try:
            path, _, query = request._message.path.partition("?")  # noqa: SLF001 - the raw target: names may be any bytes
            found = self._router.find(path)
            if found is None:
                await self._authenticated(request)
                raise NotFound(f"there is no path {path[:128]!r} here; see /openapi.json")
            route = found[0].get(request.method)
            if route is None:
                raise MethodNotAllowed(f"{path[:128]} takes {', '.join(sorted(found[0]))}, not {request.method[:16]}")
            name = route.name
            principal: Any = None if route.public else await self._authenticated(request)
            exchange = Exchange(self._service, request, route, found[1], principal, query)
            response = await route.handler(exchange)
        except asyncio.CancelledError:
            raise
        except ConnectionError:
            # The client has gone in the midst of its answer: nobody is left to tell.
            request.protocol.force_close()
            raise
        except DsecError as error:
            response = self._failed(request, error)
        except web.HTTPException as error:
            response = self._failed(request, InvalidRequest(f"the WebSocket handshake is not valid: {error.text}"))
        except Exception:
            incident = secrets.token_hex(6)
            log.exception("a request failed", extra={"incident": incident, "route": name})
            message = f"the request failed inside dsec; the log has the reason under incident {incident}"
            response = self._failed(request, InternalError(message, incident=incident))
        self._measure(name, response.status, time.perf_counter() - began)
        return response

    async def _authenticated(self, request: web.BaseRequest) -> Any:
        header = request.headers.get("Authorization", "")
        if header and header[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("the Authorization header must be 'Bearer KEY'")
        return await self._service.auth.authenticate(header[len(_BEARER) :].strip() or None)

    def _failed(self, request: web.BaseRequest, error: DsecError) -> web.StreamResponse:
        self._service.metrics.errors.labels(error.code).inc()
        if request.writer.output_size > 0:
            # The head is out: closing in the midst of a chunk is how the client learns that this is not the end.
            request.protocol.force_close()
            raise ConnectionResetError("an answer failed half-way")
        return error_response(request, error)

    def _measure(self, name: str, status: int, seconds: float) -> None:
        counter = self._counters.get((name, status))
        if counter is None:
            counter = self._counters[name, status] = self._service.metrics.requests.labels(name, str(status))
        counter.inc()
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = self._service.metrics.request_seconds.labels(name)
        timer.observe(seconds)


@functools.cache
def _document() -> dict[str, Any]:
    return openapi.document(ROUTES)


def _dumps(value: Any) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


def _bind_unix(path: Path) -> socket.socket:
    """A bound socket at `path` that only its owner may open: it takes its place by rename, so no moment has another mode."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        bound.bind(str(temporary))
        temporary.chmod(0o600)
        temporary.replace(path)
    except BaseException:
        bound.close()
        _unlink(temporary)
        raise
    return bound


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


async def _close(server: asyncio.AbstractServer) -> None:
    server.close()
