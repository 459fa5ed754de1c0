"""The bridge from the sync classes to the async ones: one event loop on one background thread for each `Client`.

Nothing here forks, and a KeyboardInterrupt in a waiting call cancels the coroutine and waits for its clean-up.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from dsec.api.errors import ConnectionFailed

T = TypeVar("T")
R = TypeVar("R")

CANCEL_S = 15.0
"""How long an interrupted call's clean-up may take: longer than the transport's own bound for it."""


class Portal:
    """Runs coroutines on its own thread's event loop.

    `closer` runs before the loop ends: at `close`, when the portal is no longer referred to, or at the interpreter's exit.
    """

    def __init__(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        # The thread must not refer to the portal, or nothing would ever collect it.
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="dsec-client", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._thread, closer)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result. An exception in the waiting thread (Ctrl-C) cancels it first."""
        if not self._finalizer.alive or threading.current_thread() is self._thread:
            coroutine.close()
            raise ConnectionFailed("this client is closed, or is used from its own event loop")
        return _run(self._loop, coroutine)

    def iterate(self, source: AsyncIterator[T], wrap: Callable[[T], R]) -> Iterator[R]:
        """Iterate over an async iterator; leaving the loop early closes it."""
        try:
            while True:
                item = self.run(_next(source))
                if isinstance(item, _End):
                    return
                yield wrap(item)
        finally:
            close = getattr(source, "aclose", None)
            if close is not None and self._finalizer.alive:
                self.run(close())

    def close(self) -> None:
        """Run the closer and end the thread. Idempotent."""
        self._finalizer()


class _End:
    """Marks the end of an iteration."""


async def _next(source: AsyncIterator[T]) -> T | _End:
    return await anext(source, _End())


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _shut_down(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, closer: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    if threading.current_thread() is thread:
        loop.stop()  # the last reference went away in the loop's own thread: nobody may wait for it here
        return
    try:
        _run(loop, closer())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CANCEL_S)


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    outcome: Future[T] = Future()
    tasks: list[asyncio.Task[T]] = []
    try:
        # Within the block: Ctrl-C may come at any instruction, also right after the task was asked for.
        loop.call_soon_threadsafe(_start, loop, coroutine, outcome, tasks)
        return outcome.result()
    except BaseException:
        if not outcome.done():
            loop.call_soon_threadsafe(_cancel, coroutine, outcome, tasks)
            wait([outcome], timeout=CANCEL_S)
        raise


def _cancel(coroutine: Coroutine[Any, Any, T], outcome: Future[T], tasks: list[asyncio.Task[T]]) -> None:
    if tasks:
        tasks[0].cancel()
    else:  # it was never asked for
        coroutine.close()
        outcome.cancel()


def _start(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    outcome: Future[T],
    tasks: list[asyncio.Task[T]],
) -> None:
    task = loop.create_task(coroutine)
    tasks.append(task)
    task.add_done_callback(lambda done: _hand_over(done, outcome))


def _hand_over(task: asyncio.Task[T], outcome: Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
        return
    error = task.exception()
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
