"""What a bus offers: requests with one reply or several, and notices to whoever listens. Control messages only, never bulk data.

Delivery is at most once; every message that changes something carries an id, so that it may be sent again. A caller that gives up does
not undo anything: what is to be undone is told by a message of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")

Handler = Callable[[Any], Awaitable[Any]]
"""Takes a message, returns the reply. A DsecError that it raises reaches the caller as such."""
StreamHandler = Callable[[Any], AsyncIterator[Any]]
"""Takes a message, yields replies."""

SUBSCRIPTION_BOUND = 1024
"""Notices kept for a slow subscriber; the oldest are dropped beyond, and `Subscription.dropped` counts them."""


class Subscription(ABC):
    """Notices of one subject, in their order, as an async iterator."""

    dropped: int

    @abstractmethod
    async def next(self, *, timeout: float) -> Any:
        """The next notice; raises TimeoutError after `timeout` seconds without one."""

    @abstractmethod
    def clear(self) -> None:
        """Forget what has not been taken yet."""


class Bus(ABC):
    """Joins the parts of dsec. A subject is words with dots between; a subscription may end in `>` for all that begins so."""

    @abstractmethod
    async def call(self, subject: str, message: Any, reply_type: type[T], *, timeout: float) -> T:
        """Ask whoever serves `subject`. Raises ConnectionFailed if nobody does, DeadlineExceeded after `timeout` seconds."""

    @abstractmethod
    def stream(self, subject: str, message: Any, reply_type: type[T], *, timeout: float) -> AsyncIterator[T]:
        """Ask for several replies; `timeout` bounds the whole. Raises as `call` does."""

    @abstractmethod
    def serve(
        self, subject: str, handler: Handler | None = None, *, stream: StreamHandler | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Answer `subject` while the context is open. Raises Conflict if it is served already."""

    @abstractmethod
    def publish(self, subject: str, notice: Any) -> None:
        """Tell all subscribers. Never waits."""

    @abstractmethod
    def subscribe(self, subject: str) -> AbstractAsyncContextManager[Subscription]:
        """Listen to `subject` while the context is open."""
