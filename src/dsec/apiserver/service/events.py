"""Events: a page of them, or all that come. The store is read each time; the bus only says when to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from dsec.api.errors import InvalidRequest
from dsec.api.types import Event, EventPage
from dsec.apiserver.service.records import events_subject
from dsec.bus import Bus
from dsec.iam import Action, Principal, Resource, authorize
from dsec.store import EventQuery, Store

MAX_PAGE = 1000
_RECHECK_S = 5.0
"""Events are looked for at least so often, should a notice be lost."""


class Events:
    """The events of a project."""

    def __init__(self, store: Store, bus: Bus) -> None:
        self._store = store
        self._bus = bus

    async def page(
        self, principal: Principal, *, since: int | None, sandbox_id: str | None, kind: str | None, limit: int
    ) -> EventPage:
        """Events after `since` (None: from the first kept), oldest first. Raises InvalidRequest."""
        query = self._query(principal, since or 0, sandbox_id, kind, limit)
        items = await self._store.events(query)
        return EventPage(items=items, next_since=items[-1].seq if items else query.since)

    async def follow(
        self, principal: Principal, *, since: int | None, sandbox_id: str | None, kind: str | None
    ) -> AsyncGenerator[list[Event], None]:
        """Events after `since` (None: those that come from now on), in groups, for ever; an empty group is a sign of life."""
        if since is None:
            since = await self._store.last_seq()
        async with self._bus.subscribe(events_subject(principal.project)) as news:
            while True:
                news.clear()
                query = self._query(principal, since, sandbox_id, kind, MAX_PAGE)
                items = await self._store.events(query)
                if items:
                    since = items[-1].seq
                yield items
                if len(items) < query.limit:
                    with contextlib.suppress(TimeoutError):
                        await news.next(timeout=_RECHECK_S)
                        # Let a burst gather: one read for many events.
                        await asyncio.sleep(0.005)

    @staticmethod
    def _query(principal: Principal, since: int, sandbox_id: str | None, kind: str | None, limit: int) -> EventQuery:
        authorize(principal, Action.EVENTS, Resource("project", principal.project, principal.project))
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidRequest(f"limit must be 1 to {MAX_PAGE}, not {limit}")
        if since < 0:
            raise InvalidRequest(f"since must not be negative: {since}")
        return EventQuery(project=principal.project, since=since, sandbox_id=sandbox_id, type=kind, limit=limit)
