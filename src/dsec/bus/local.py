"""The bus inside one process: messages are handed over as they are, handlers run in the caller's task."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dsec.api.errors import Conflict, ConnectionFailed, DeadlineExceeded
from dsec.bus.interface import SUBSCRIPTION_BOUND, Bus, Handler, StreamHandler, Subscription

T = TypeVar("T")


class LocalSubscription(Subscription):
    """See `Subscription`."""

    def __init__(self, bound: int) -> None:
        self.dropped = 0
        self._notices: deque[Any] = deque()
        self._bound = bound
        self._arrived = asyncio.Event()

    def put(self, notice: Any) -> None:
        """Keep a notice, dropping the oldest beyond the bound."""
        if len(self._notices) >= self._bound:
            self._notices.popleft()
            self.dropped += 1
        self._notices.append(notice)
        self._arrived.set()

    async def next(self, *, timeout: float) -> Any:
        """The next notice; raises TimeoutError after `timeout` seconds without one."""
        async with asyncio.timeout(timeout):
            while not self._notices:
                self._arrived.clear()
                await self._arrived.wait()
        return self._notices.popleft()

    def clear(self) -> None:
        """Forget what has not been taken yet."""
        self._notices.clear()


class LocalBus(Bus):
    """See `Bus`. `subscription_bound`: notices kept for a slow subscriber."""

    def __init__(self, *, subscription_bound: int = SUBSCRIPTION_BOUND) -> None:
        self._handlers: dict[str, Handler] = {}
        self._streams: dict[str, StreamHandler] = {}
        self._exact: dict[str, set[LocalSubscription]] = {}
        self._prefixes: dict[str, set[LocalSubscription]] = {}
        self._bound = subscription_bound

    async def call(self, subject: str, message: Any, reply_type: type[T], *, timeout: float) -> T:
        """Ask whoever serves `subject`; see `Bus.call`."""
        handler = self._handlers.get(subject)
        if handler is None:
            raise ConnectionFailed(f"nobody answers {subject!r}")
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                reply = await handler(message)
        except TimeoutError as error:
            if scope.expired():
                raise DeadlineExceeded(f"{subject!r} was not answered within {timeout:g} s") from error
            raise
        return _checked(reply, reply_type, subject)

    async def stream(self, subject: str, message: Any, reply_type: type[T], *, timeout: float) -> AsyncIterator[T]:
        """Ask for several replies; see `Bus.stream`."""
        handler = self._streams.get(subject)
        if handler is None:
            raise ConnectionFailed(f"nobody answers {subject!r}")
        deadline = asyncio.get_running_loop().time() + timeout
        replies = handler(message)
        try:
            while True:
                scope = asyncio.timeout_at(deadline)
                try:
                    async with scope:
                        reply = await anext(replies)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    if scope.expired():
                        raise DeadlineExceeded(f"{subject!r} had not finished within {timeout:g} s") from error
                    raise
                yield _checked(reply, reply_type, subject)
        finally:
            close = getattr(replies, "aclose", None)
            if close is not None:
                await close()

    @asynccontextmanager
    async def serve(
        self, subject: str, handler: Handler | None = None, *, stream: StreamHandler | None = None
    ) -> AsyncIterator[None]:
        """Answer `subject` while the context is open; see `Bus.serve`."""
        if (handler is None) == (stream is None):
            raise ValueError("serve takes a handler or a stream")
        if subject in self._handlers or subject in self._streams:
            raise Conflict(f"{subject!r} is served already")
        if handler is not None:
            self._handlers[subject] = handler
        if stream is not None:
            self._streams[subject] = stream
        try:
            yield
        finally:
            self._handlers.pop(subject, None)
            self._streams.pop(subject, None)

    def publish(self, subject: str, notice: Any) -> None:
        """Tell all subscribers. Never waits."""
        for subscription in self._exact.get(subject, ()):
            subscription.put(notice)
        for prefix, subscriptions in self._prefixes.items():
            if subject.startswith(prefix):
                for subscription in subscriptions:
                    subscription.put(notice)

    @asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[Subscription]:
        """Listen to `subject` while the context is open."""
        table, key = (self._prefixes, subject[:-1]) if subject.endswith(">") else (self._exact, subject)
        subscription = LocalSubscription(self._bound)
        table.setdefault(key, set()).add(subscription)
        try:
            yield subscription
        finally:
            with contextlib.suppress(KeyError):
                table[key].discard(subscription)
                if not table[key]:
                    del table[key]


def _checked(reply: Any, reply_type: type[T], subject: str) -> T:
    if not isinstance(reply, reply_type):
        raise TypeError(f"{subject!r} answered with {type(reply).__name__}, not {reply_type.__name__}")
    return reply
