"""The client's namespaces, one for each HTTP collection: images, nodes, events."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from dsec.api import types as t
from dsec.sdk import _calls
from dsec.sdk._lines import lines
from dsec.sdk._transport import lost_errors

if TYPE_CHECKING:
    from dsec.sdk._transport import Transport


class AsyncImages:
    """`client.images`: what sandboxes can be made from."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[t.ImageInfo]:
        """List all images by name; sizes are bytes on disk."""
        return (await self._transport.call(_calls.images())).images


class AsyncNodes:
    """`client.nodes`: the hosts."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[t.NodeInfo]:
        """List all nodes with the kinds they can start and how full they are; memory is bytes."""
        return (await self._transport.call(_calls.nodes())).nodes


class AsyncEvents:
    """`client.events`: what happened, in order."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(
        self,
        *,
        since: int | None = None,
        sandbox_id: str | None = None,
        event_type: str | None = None,
        limit: int | None = None,
    ) -> builtins.list[t.Event]:
        """Events after the sequence number `since`, oldest first, at most `limit`; of one sandbox or type if given."""
        call = _calls.events(since=since, sandbox_id=sandbox_id, event_type=event_type, limit=limit, follow=False)
        return (await self._transport.call(call)).items

    async def follow(
        self,
        *,
        since: int | None = None,
        sandbox_id: str | None = None,
        event_type: str | None = None,
    ) -> AsyncIterator[t.Event]:
        """Yield events after `since` (None: from now on) as they happen, without end; a lost connection loses none and repeats none."""
        while True:
            call = _calls.events(since=since, sandbox_id=sandbox_id, event_type=event_type, limit=None, follow=True)
            try:
                async with self._transport.stream(call) as answer:
                    async for line in lines(answer.content):
                        event = _calls.event(line)
                        since = event.seq
                        yield event
            except lost_errors():
                pass
            await asyncio.sleep(0.1)  # the stream ended: the server restarts
