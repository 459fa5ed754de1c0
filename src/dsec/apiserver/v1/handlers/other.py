"""Handlers of events, images, nodes, metrics and health."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from aiohttp import web

from dsec.api.errors import Unsupported
from dsec.apiserver.v1.exchange import NDJSON, Exchange, write
from dsec.apiserver.v1.version import VERSION

_lines = msgspec.json.Encoder().encode_lines


async def events(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/events."""
    since = exchange.integer("since", None)
    sandbox_id, kind = exchange.text("sandbox"), exchange.text("type")
    if not exchange.flag("follow", default=False):
        limit = exchange.integer("limit", 100)
        page = await exchange.service.events.page(
            exchange.principal, since=since, sandbox_id=sandbox_id, kind=kind, limit=limit
        )
        return exchange.answer(page)
    following = exchange.service.events.follow(exchange.principal, since=since, sandbox_id=sandbox_id, kind=kind)
    left = exchange.integer("limit", None)
    async with aclosing(following) as groups:
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        await response.prepare(exchange.request)
        async for group in groups:
            wanted = group if left is None else group[:left]
            left = None if left is None else left - len(wanted)
            if wanted:
                await write(response, _lines(wanted))
            if left == 0:
                break
        await response.write_eof()
    return response


async def images(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/images."""
    return exchange.answer(await exchange.service.images.list(exchange.principal))


async def nodes(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/nodes."""
    return exchange.answer(await exchange.service.nodes(exchange.principal))


async def metrics(exchange: Exchange) -> web.StreamResponse:
    """GET /metrics."""
    text = await exchange.service.metrics_text(exchange.principal)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def healthz(exchange: Exchange) -> web.StreamResponse:
    """GET /healthz."""
    return exchange.answer({"status": "ok", "version": VERSION})


async def later(exchange: Exchange) -> web.StreamResponse:
    """Paths of later releases."""
    path = exchange.request.rel_url.raw_path
    raise Unsupported(f"{path[:128]} is part of a later release; this one runs container sandboxes on one host")
