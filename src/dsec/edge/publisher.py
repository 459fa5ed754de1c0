"""Carries changes from the edge to the store, in order and in batches, so that nothing on the hot path waits for a commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from dsec.edge.ports import Change, RecordSink

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.5


class Publisher:
    """One queue and one task. `committed` is called with the ids of ended sandboxes that the store has kept."""

    def __init__(self, sink: RecordSink, committed: Callable[[list[str]], None]) -> None:
        self._sink = sink
        self._committed = committed
        self._queue: list[Change] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def backlog(self) -> int:
        """Changes that are not committed yet."""
        return len(self._queue)

    def put(self, change: Change) -> None:
        """Queue a change, which goes out after the next `kick`; the record in it must be a copy."""
        self._queue.append(change)

    def kick(self) -> None:
        """Publish what is queued."""
        if self._queue and not self._wake.is_set():
            self._wake.set()
            self._idle.clear()

    async def run(self) -> None:
        """Publish until cancelled. A batch that the sink refuses is tried again: order is kept, nothing is dropped."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._queue = self._queue, []
            while True:
                try:
                    await self._sink.changed(batch)
                    break
                except Exception:
                    log.exception("changes could not be stored; trying again", extra={"changes": len(batch)})
                    await asyncio.sleep(_RETRY_S)
            ended = [record.id for record, _, _ in batch if record.state.ended]
            if ended:
                self._committed(ended)
            if not self._queue:
                self._idle.set()

    async def flushed(self, *, timeout_s: float) -> None:
        """Wait until everything put so far is committed; raises TimeoutError."""
        self.kick()
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()
