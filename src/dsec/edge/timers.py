"""Deadlines of thousands of sandboxes with one timer of the loop."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

_SLACK: Final = 1024
"""Stale entries that are tolerated before the heap is rebuilt, beside as many as there are living ones."""
_NEVER: Final = float("inf")


class Timed(Protocol):
    """What can be scheduled: `due` is this module's to write, the time of its one valid entry."""

    due: float


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """Calls `fire(items)` when items are due. Activity need not be told: fire early, look, schedule again.

    `clock` gives the time that deadlines are in. An item's entry is found stale by its `due`, so cancelling costs nothing.
    """

    def __init__(self, fire: Callable[[list[T]], None], clock: Callable[[], float]) -> None:
        self._fire = fire
        self._clock = clock
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0
        self._living = 0
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = _NEVER

    def schedule(self, item: T, due: float) -> None:
        """(Re)schedule `item`; an infinite `due` cancels it."""
        if item.due == due:
            return
        self._living += (due != _NEVER) - (item.due != _NEVER)
        item.due = due
        if due == _NEVER:
            return
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, item))
        if len(self._heap) > 2 * self._living + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].due == entry[0]]
            heapq.heapify(self._heap)
        if due < self._armed_for:
            self._arm()

    def close(self) -> None:
        """Fire no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._heap.clear()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_for = _NEVER
        if self._heap:
            self._armed_for = self._heap[0][0]
            delay = max(0.001, self._armed_for - self._clock())
            self._handle = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._handle = None
        # While firing, `schedule` need not arm: it is done once, below.
        self._armed_for = -1.0
        now = self._clock()
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, item = heapq.heappop(self._heap)
            if item.due == when:
                item.due = _NEVER
                self._living -= 1
                due.append(item)
        try:
            if due:
                self._fire(due)
        finally:
            self._arm()
