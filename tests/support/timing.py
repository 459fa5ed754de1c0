"""Deadlines of the tests. Every limit goes through `scaled`, so that one factor suits a slow or busy machine.

`DSEC_TEST_SCALE` (default 1.0) multiplies all limits; it never multiplies what a test asks of the product (a timeout of one
second stays one second), only how long the test is willing to wait.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, overload

SCALE = float(os.environ.get("DSEC_TEST_SCALE", "1.0"))

T = TypeVar("T")


def scaled(seconds: float) -> float:
    """`seconds` on this machine."""
    return seconds * SCALE


@overload
async def eventually(probe: Callable[[], Awaitable[T]], *, within_s: float, what: str, every_s: float = 0.05) -> T: ...


@overload
async def eventually(probe: Callable[[], T], *, within_s: float, what: str, every_s: float = 0.05) -> T: ...


async def eventually(probe: Callable[[], Any], *, within_s: float, what: str, every_s: float = 0.05) -> Any:
    """Call `probe` until it returns something true, and return that. Fails after `within_s` (scaled) naming `what`."""
    deadline = time.monotonic() + scaled(within_s)
    while True:
        value = probe()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {scaled(within_s):.1f} s: {what} (last: {value!r})")
        await asyncio.sleep(every_s)


def eventually_sync(probe: Callable[[], T], *, within_s: float, what: str, every_s: float = 0.05) -> T:
    """`eventually` for code without a loop."""
    deadline = time.monotonic() + scaled(within_s)
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {scaled(within_s):.1f} s: {what} (last: {value!r})")
        time.sleep(every_s)


class Stopwatch:
    """Wall clock of a `with` block, in seconds."""

    def __init__(self) -> None:
        self._start = 0.0
        self._end: float | None = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start, up to the end of the block."""
        return (self._end or time.monotonic()) - self._start

    def assert_below(self, limit_s: float) -> None:
        """Fail unless the block took less than `limit_s` (scaled)."""
        assert self.seconds < scaled(limit_s), f"took {self.seconds:.2f} s, limit {scaled(limit_s):.2f} s"
