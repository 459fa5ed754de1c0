"""The service: everything an ingress can ask for, without HTTP in it. Owns the tasks that outlive a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Self

from dsec.api.dataplane import DataPlane
from dsec.api.errors import DsecError
from dsec.api.token import TokenKey
from dsec.api.types import NodeList
from dsec.apiserver.metrics import Metrics
from dsec.apiserver.service.events import Events
from dsec.apiserver.service.files import Files
from dsec.apiserver.service.guest import Guests
from dsec.apiserver.service.images import ImageService
from dsec.apiserver.service.ports import Images, Placement
from dsec.apiserver.service.processes import Processes
from dsec.apiserver.service.records import StoreSink
from dsec.apiserver.service.sandboxes import Sandboxes
from dsec.apiserver.service.tasks import Detached
from dsec.bus import Bus
from dsec.iam import Action, Authenticator, Principal, Resource, authorize
from dsec.store import Store, StoreError

log = logging.getLogger(__name__)

KEPT_S = 7 * 86_400.0
"""How long records of ended sandboxes, events and request ids are kept."""
_PRUNE_EVERY_S = 600.0


class Service:
    """Use with `async with`: leaving it ends what still runs for clients that have gone."""

    def __init__(
        self,
        *,
        store: Store,
        bus: Bus,
        auth: Authenticator,
        placement: Placement,
        images: Images,
        planes: Mapping[str, DataPlane],
        tokens: TokenKey,
        metrics: Metrics,
        records: StoreSink,
        kept_s: float = KEPT_S,
    ) -> None:
        self.auth = auth
        self.metrics = metrics
        self.images = ImageService(images)
        self._store = store
        self._placement = placement
        self._kept_s = kept_s
        self._tasks = Detached()
        guests = Guests(store, planes, tokens)
        self.sandboxes = Sandboxes(
            store=store,
            bus=bus,
            placement=placement,
            images=self.images,
            guests=guests,
            tasks=self._tasks,
            metrics=metrics,
            records=records,
        )
        self.processes = Processes(guests, self._tasks, metrics)
        self.files = Files(guests, self._tasks)
        self.events = Events(store, bus)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start(self._prune())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._tasks.__aexit__(*exc_info)

    async def nodes(self, principal: Principal) -> NodeList:
        """All nodes that answer."""
        authorize(principal, Action.NODES, Resource("nodes", "", None))
        return NodeList(nodes=await self._placement.nodes())

    async def metrics_text(self, principal: Principal) -> bytes:
        """The metrics, with the nodes' figures of this moment."""
        authorize(principal, Action.METRICS, Resource("metrics", "", None))
        for node in await self._placement.nodes():
            self.metrics.alive.labels(node.edge).set(node.sandboxes)
            self.metrics.memory_available.labels(node.edge).set(node.memory_available)
        return self.metrics.text()

    async def _prune(self) -> None:
        """Delete what is old, a little at a time so that writers do not wait."""
        while True:
            try:
                deleted = 1
                while deleted:
                    deleted = await self._store.prune(before=time.time() - self._kept_s)
                    await asyncio.sleep(0.05)
            except (DsecError, StoreError):
                log.exception("old records could not be deleted")
            await asyncio.sleep(_PRUNE_EVERY_S)
