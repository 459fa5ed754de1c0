"""What became of requests that change something and that the guest keeps no table of: the same id acts once.

Kept in memory, bounded in number and time. After a restart of the apiserver a repeat acts anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dsec.api.errors import DsecError, OutcomeUnknown

T = TypeVar("T")

MAX_OUTCOMES = 8192
KEPT_S = 600.0
"""Clients repeat for half a minute; ten are generous."""


class Outcomes:
    """Outcomes by (project, sandbox, request id)."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, str, str], tuple[float, asyncio.Future[Any]]] = OrderedDict()

    async def once(self, key: tuple[str, str, str], work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, or return (waiting for it) what it returned the first time. What failed with a DsecError may be tried again.

        Cancelled: the outcome stays unknown, and a repeat is told so (OutcomeUnknown).
        """
        self._forget_old()
        entry = self._known.get(key)
        if entry is not None:
            result: T = await asyncio.shield(entry[1])
            return result
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._known[key] = (self._clock() + KEPT_S, future)
        try:
            done = await work()
        except DsecError as error:
            del self._known[key]
            _settle(future, error)
            raise
        except BaseException:
            _settle(
                future, OutcomeUnknown("an earlier request with this id was cut off: a part of it may have happened")
            )
            raise
        future.set_result(done)
        return done

    def _forget_old(self) -> None:
        now = self._clock()
        while self._known:
            key, (until, future) = next(iter(self._known.items()))
            if until > now and len(self._known) < MAX_OUTCOMES:
                return
            if not future.done():
                self._known.move_to_end(key)
                return
            del self._known[key]


def _settle(future: asyncio.Future[Any], error: BaseException) -> None:
    future.set_exception(error)
    future.exception()  # nobody may be waiting for it
