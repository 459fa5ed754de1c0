"""Keeps what the nodes last said and places requests: the thin shell around `choose`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from dsec.api.control import NodeQuery
from dsec.api.errors import DsecError
from dsec.api.types import NodeInfo
from dsec.bus import Bus
from dsec.bus.edges import node_subject
from dsec.placement.choose import NodeView, Overlay, PlacementRequest, Refusal, choose

FRESH_S = 1.0
"""A node's figures are used for so long before it is asked again; the overlay covers the own choices in between."""
_ASK_TIMEOUT_S = 2.0


class Placer:
    """Places sandboxes on the edges it knows. The list of edges is fixed until membership comes with the fleet."""

    def __init__(
        self,
        bus: Bus,
        edges: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._bus = bus
        self._edges = tuple(edges)
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._overlay = Overlay()
        self._views: list[NodeView] = []
        self._asked = float("-inf")
        self._asking = asyncio.Lock()

    async def place(self, *, kind: str, cpus: float, memory_bytes: int, count: int) -> NodeInfo:
        """The node that shall start `count` sandboxes alike. Raises NoCapacity or Unsupported with the reason."""
        now = self._clock()
        self._overlay.expire(now=now)
        request = PlacementRequest(kind=kind, cpus=cpus, memory_bytes=memory_bytes, count=count)
        if now - self._asked > FRESH_S:
            async with self._asking:
                # Others who waited here find the answer that the first one got.
                if now - self._asked > FRESH_S:
                    await self._ask()
        chosen = choose(self._views, request, overlay=self._overlay, rng=self._rng)
        if isinstance(chosen, Refusal):
            raise chosen.error
        self._overlay.add(chosen.edge, request, now=now)
        return chosen

    async def nodes(self) -> list[NodeInfo]:
        """All nodes that answer, asked now."""
        await self._ask()
        return [view.info for view in self._views if view.healthy]

    async def _ask(self) -> None:
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(self._ask_one(edge)) for edge in self._edges]
        before = {view.info.edge: view.info for view in self._views}
        views = []
        for edge, task in zip(self._edges, asking, strict=True):
            info = task.result()
            if info is not None:
                views.append(NodeView(info=info))
            elif edge in before:
                views.append(NodeView(info=before[edge], healthy=False))
        self._views = views
        self._asked = self._clock()

    async def _ask_one(self, edge: str) -> NodeInfo | None:
        try:
            return await self._bus.call(node_subject(edge), NodeQuery(), NodeInfo, timeout=_ASK_TIMEOUT_S)
        except DsecError:
            return None
