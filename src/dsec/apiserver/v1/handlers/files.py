"""Handlers of files and archives in a sandbox. Nothing here holds a whole file."""

from __future__ import annotations

from aiohttp import web

from dsec.api.errors import InvalidRequest
from dsec.api.types import FileWritten
from dsec.apiserver.v1.exchange import BYTES, Exchange

TAR = "application/x-tar"


async def read(exchange: Exchange) -> web.StreamResponse:
    """GET .../files."""
    opened = exchange.service.files.read(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        offset=exchange.integer("offset", 0),
        limit=exchange.integer("limit", None),
        user=exchange.text("user"),
    )
    async with opened as pieces:
        return await exchange.streamed(BYTES, pieces)


async def write(exchange: Exchange) -> web.StreamResponse:
    """PUT .../files."""
    append = exchange.flag("append", default=False)
    opened = exchange.service.files.write(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        mode=exchange.integer("mode", None, base=8),
        append=append,
        parents=exchange.flag("parents", default=True),
        user=exchange.text("user"),
    )

    async def work() -> FileWritten:
        async with opened as upload:
            async for piece in exchange.pieces():
                await upload.send(piece)
            return await upload.written()

    # Writing the same again is harmless, appending it is not.
    request_id = exchange.request_id() if append else None
    return exchange.answer(await exchange.service.files.once(exchange.principal, exchange.values[0], request_id, work))


async def stat(exchange: Exchange) -> web.StreamResponse:
    """GET .../files:stat."""
    entry = await exchange.service.files.stat(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        follow=exchange.flag("follow", default=False),
        user=exchange.text("user"),
    )
    return exchange.answer(entry)


async def listing(exchange: Exchange) -> web.StreamResponse:
    """GET .../files:list."""
    found = await exchange.service.files.list(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        depth=exchange.integer("depth", 1),
        user=exchange.text("user"),
    )
    return exchange.answer(found)


async def mkdir(exchange: Exchange) -> web.StreamResponse:
    """POST .../files:mkdir."""
    await exchange.drain_empty()
    await exchange.service.files.mkdir(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        mode=exchange.integer("mode", None, base=8),
        parents=exchange.flag("parents", default=False),
        user=exchange.text("user"),
        request_id=exchange.request_id(),
    )
    return exchange.answer({})


async def remove(exchange: Exchange) -> web.StreamResponse:
    """POST .../files:remove."""
    await exchange.drain_empty()
    await exchange.service.files.remove(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        recursive=exchange.flag("recursive", default=False),
        user=exchange.text("user"),
        request_id=exchange.request_id(),
    )
    return exchange.answer({})


async def move(exchange: Exchange) -> web.StreamResponse:
    """POST .../files:move."""
    await exchange.drain_empty()
    await exchange.service.files.move(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        exchange.required("to"),
        overwrite=exchange.flag("overwrite", default=True),
        user=exchange.text("user"),
        request_id=exchange.request_id(),
    )
    return exchange.answer({})


async def chmod(exchange: Exchange) -> web.StreamResponse:
    """POST .../files:chmod."""
    await exchange.drain_empty()
    mode = exchange.integer("mode", None, base=8)
    if mode is None:
        raise InvalidRequest("the query parameter 'mode' is missing")
    await exchange.service.files.chmod(
        exchange.principal, exchange.values[0], exchange.required("path"), mode=mode, user=exchange.text("user")
    )
    return exchange.answer({})


async def chown(exchange: Exchange) -> web.StreamResponse:
    """POST .../files:chown."""
    await exchange.drain_empty()
    exchange.required("owner")
    await exchange.service.files.chown(
        exchange.principal,
        exchange.values[0],
        exchange.required("path"),
        owner=exchange.text("owner") or "",
        follow=exchange.flag("follow", default=True),
        user=exchange.text("user"),
    )
    return exchange.answer({})


async def get_archive(exchange: Exchange) -> web.StreamResponse:
    """GET .../files:archive."""
    opened = exchange.service.files.archive(
        exchange.principal, exchange.values[0], exchange.required("path"), user=exchange.text("user")
    )
    async with opened as pieces:
        return await exchange.streamed(TAR, pieces)


async def put_archive(exchange: Exchange) -> web.StreamResponse:
    """PUT .../files:archive."""
    opened = exchange.service.files.unpack(
        exchange.principal, exchange.values[0], exchange.required("path"), user=exchange.text("user")
    )
    async with opened as upload:
        async for piece in exchange.pieces():
            await upload.send(piece)
        return exchange.answer(await upload.unpacked())
