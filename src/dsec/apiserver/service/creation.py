"""One create request under way: its results as they come, for everybody who asked with the same request id.

The rule: what nobody took delivery of is stopped when the last one who waited for it goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from dsec.api.types import BatchItem


@dataclass(slots=True)
class Creation:
    """Results in the order of their coming; `ids` in the order of the batch."""

    project: str
    edge: str
    ids: tuple[str, ...]
    fingerprint: bytes
    results: list[BatchItem] = field(default_factory=list)
    waiters: int = 0
    delivered: int = 0
    """Results that at least one waiter has taken delivery of (the first so many of `results`)."""
    cancelled: bool = False
    _answered: set[int] = field(default_factory=set)
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every sandbox has its result."""
        return len(self.results) == len(self.ids)

    def add(self, items: Sequence[BatchItem]) -> None:
        """Take in results and wake those who wait. A second result for the same sandbox is dropped."""
        fresh = [item for item in items if item.index not in self._answered]
        self._answered.update(item.index for item in fresh)
        self.results += fresh
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def unanswered(self) -> list[int]:
        """Indexes without a result."""
        return [index for index in range(len(self.ids)) if index not in self._answered]

    def undelivered(self) -> list[str]:
        """Ids that nobody has taken delivery of, ready or not."""
        taken = {item.index for item in self.results[: self.delivered]}
        return [name for index, name in enumerate(self.ids) if index not in taken]

    async def groups(self) -> AsyncGenerator[list[BatchItem], None]:
        """Yield results in groups; a group counts as delivered when the next one is asked for."""
        taken = 0
        while taken < len(self.ids):
            if taken == len(self.results):
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(waiter)
                await waiter
                continue
            group = self.results[taken:]
            taken = len(self.results)
            yield group
            self.delivered = max(self.delivered, taken)
