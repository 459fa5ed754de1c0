"""Work that goes on when the client that asked for it has gone: owned by the service, ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Detached:
    """Runs coroutines in a task group of its own. Use with `async with`; leaving it cancels what still runs."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start `work`; the future has its outcome. Await it through `asyncio.shield` to leave it running when cancelled."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = self._group.create_task(_drive(work, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future


async def _drive(work: Coroutine[Any, Any, T], future: asyncio.Future[T]) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:  # noqa: BLE001 - handed to whoever waits; one failure must not end the group
        if not future.done():
            future.set_exception(error)
            future.exception()  # nobody may be waiting any more
    else:
        if not future.done():
            future.set_result(result)
