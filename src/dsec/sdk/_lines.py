"""Splits a streamed answer into lines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream without their ends; empty ones (keep-alives) are left out, as is a last one that was cut off."""
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line:
                yield line
