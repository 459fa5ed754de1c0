"""Handlers of commands and processes in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from aiohttp import WSMsgType, web

from dsec.api.errors import DsecError, InternalError, InvalidRequest
from dsec.api.types import ExecRequest, SignalRequest
from dsec.apiserver.service.attach import Attached, Ended, Gap
from dsec.apiserver.v1.exchange import Exchange

_MAX_MESSAGE = 1 << 20
"""Bytes of stdin in one WebSocket message."""
_CLOSE_S = 5.0
_BINARY_INPUT = 'binary messages are stdin; the only text message is {"stdin": "close"}'

_encode = msgspec.json.Encoder().encode


class _Control(msgspec.Struct, forbid_unknown_fields=True):
    """A text message of the client's."""

    stdin: str


async def run(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/sandboxes/{id}/exec."""
    request = await exchange.body(ExecRequest)
    if request.request_id is None:
        request.request_id = exchange.request_id()
    return exchange.answer(await exchange.service.processes.run(exchange.principal, exchange.values[0], request))


async def start(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/sandboxes/{id}/processes."""
    request = await exchange.body(ExecRequest)
    if request.request_id is None:
        request.request_id = exchange.request_id()
    return exchange.answer(await exchange.service.processes.start(exchange.principal, exchange.values[0], request))


async def listing(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes/{id}/processes."""
    return exchange.answer(await exchange.service.processes.list(exchange.principal, exchange.values[0]))


async def get(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes/{id}/processes/{p}."""
    return exchange.answer(await exchange.service.processes.get(exchange.principal, *exchange.values))


async def wait(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes/{id}/processes/{p}/wait."""
    timeout = exchange.number("timeout")
    return exchange.answer(await exchange.service.processes.wait(exchange.principal, *exchange.values, timeout=timeout))


async def signal(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/sandboxes/{id}/processes/{p}/signal."""
    request = await exchange.body(SignalRequest)
    await exchange.service.processes.signal(exchange.principal, exchange.values[0], exchange.values[1], request)
    return exchange.answer({})


async def stream(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes/{id}/processes/{p}/stream: a WebSocket."""
    if exchange.request.headers.get("Upgrade", "").lower() != "websocket":
        raise InvalidRequest("this is a WebSocket: send Upgrade: websocket")
    since = (exchange.integer("since_stdout", 0), exchange.integer("since_stderr", 0))
    if min(since) < 0:
        raise InvalidRequest("since_stdout and since_stderr must not be negative")
    follow = exchange.flag("follow", default=True)
    attached = await exchange.service.processes.attach(exchange.principal, *exchange.values, since=since, follow=follow)
    async with attached:
        # No heartbeat: a client held back by a process that does not read would be taken for dead.
        socket = web.WebSocketResponse(compress=False, max_msg_size=_MAX_MESSAGE, timeout=_CLOSE_S)
        await socket.prepare(exchange.request)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_read_input(socket, attached))
            sending = group.create_task(_send_output(socket, attached))
            await asyncio.wait((reading, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not socket.closed:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await socket.close()
            reading.cancel()
            sending.cancel()
    return socket


async def _send_output(socket: web.WebSocketResponse, attached: Attached) -> None:
    """Send until the process has ended; `send_bytes` waits for a slow client, and so does the process."""
    try:
        while True:
            item = await attached.receive()
            if isinstance(item, bytes):
                await socket.send_bytes(item)
            elif isinstance(item, Gap):
                await socket.send_str(_encode({"gap": list(item)}).decode())
            elif isinstance(item, Ended):
                await socket.send_str(_encode({"result": item.result}).decode())
                return
            else:
                await socket.send_str('{"running":true}')
                return
    except ConnectionError:
        return
    except DsecError as error:
        await _send_error(socket, error)


async def _read_input(socket: web.WebSocketResponse, attached: Attached) -> None:
    """Pass stdin on until the client closes."""
    try:
        async for message in socket:
            try:
                if message.type is WSMsgType.BINARY:
                    await attached.write(message.data)
                elif message.type is WSMsgType.TEXT:
                    _check_control(message.data)
                    await attached.close_stdin()
            except DsecError as error:
                await _send_error(socket, error)
    except ConnectionError:
        return


def _check_control(text: str) -> None:
    try:
        control = msgspec.json.decode(text, type=_Control)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(_BINARY_INPUT) from error
    if control.stdin != "close":
        raise InvalidRequest(_BINARY_INPUT)


async def _send_error(socket: web.WebSocketResponse, error: DsecError) -> None:
    body = (
        error.body() if not isinstance(error, InternalError) else InternalError("the stream failed inside dsec").body()
    )
    with contextlib.suppress(ConnectionError):
        await socket.send_str(_encode({"error": body}).decode())
