"""Handlers of `/v1/sandboxes` but for what happens inside a sandbox."""

from __future__ import annotations

import msgspec
from aiohttp import web

from dsec.api.errors import InvalidRequest
from dsec.api.types import CreateBatch, CreateSandbox, StopRequest, TimeoutUpdate
from dsec.apiserver.v1.exchange import NDJSON, Exchange, write

_lines = msgspec.json.Encoder().encode_lines


async def create(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/sandboxes."""
    request = await exchange.body(CreateSandbox)
    if request.request_id is None:
        request.request_id = exchange.request_id()
    return exchange.answer(await exchange.service.sandboxes.create(exchange.principal, request))


async def batch(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/sandboxes:batch."""
    request = await exchange.body(CreateBatch)
    if request.sandbox.request_id is None:
        request.sandbox.request_id = exchange.request_id()
    async with exchange.service.sandboxes.batch(exchange.principal, request) as groups:
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        await response.prepare(exchange.request)
        async for group in groups:
            await write(response, _lines(group))
        await response.write_eof()
    return response


async def stop_many(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/sandboxes:stop."""
    request = await exchange.body(StopRequest)
    return exchange.answer(await exchange.service.sandboxes.stop_many(exchange.principal, request))


async def page(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes."""
    labels = {}
    for pair in exchange.texts("label"):
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"label must be name=value, not {pair[:64]!r}")
        labels[name] = value
    found = await exchange.service.sandboxes.page(
        exchange.principal,
        state=exchange.text("state"),
        labels=labels,
        job=exchange.text("job"),
        limit=exchange.integer("limit", 100),
        cursor=exchange.text("cursor"),
    )
    return exchange.answer(found)


async def get(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes/{id}."""
    return exchange.answer(await exchange.service.sandboxes.get(exchange.principal, exchange.values[0]))


async def update(exchange: Exchange) -> web.StreamResponse:
    """PATCH /v1/sandboxes/{id}."""
    request = await exchange.body(TimeoutUpdate)
    record = await exchange.service.sandboxes.set_timeouts(exchange.principal, exchange.values[0], request)
    return exchange.answer(record)


async def stop(exchange: Exchange) -> web.StreamResponse:
    """DELETE /v1/sandboxes/{id}."""
    await exchange.drain_empty()
    return exchange.answer(await exchange.service.sandboxes.stop(exchange.principal, exchange.values[0]))


async def usage(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/sandboxes/{id}/usage."""
    return exchange.answer(await exchange.service.sandboxes.usage(exchange.principal, exchange.values[0]))
