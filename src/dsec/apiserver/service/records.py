"""Where edges tell what became of their sandboxes: the store keeps it, the bus says that there is news."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dsec.api.types import SandboxRecord, State
from dsec.apiserver.metrics import Metrics
from dsec.bus import Bus
from dsec.store import Change, NewEvent, Store


def events_subject(project: str) -> str:
    """Where it is told that a project has new events. The notice says nothing else: the events are read from the store."""
    return f"events.{project}"


def publish_news(bus: Bus, projects: Iterable[str]) -> None:
    """Tell followers that these projects have new events."""
    for project in set(projects):
        bus.publish(events_subject(project), None)


class StoreSink:
    """Implements the edge's RecordSink."""

    def __init__(
        self, store: Store, bus: Bus, metrics: Metrics, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._bus = bus
        self._metrics = metrics
        self._now = wall_clock

    async def changed(self, changes: Sequence[tuple[SandboxRecord, str, dict[str, Any]]]) -> None:
        """Commit `changes` in order in one transaction and publish their events; older ones than the kept are dropped."""
        now = self._now()
        applied = await self._store.change(
            [
                Change(
                    record=record,
                    event=NewEvent(
                        time=now,
                        type=kind,
                        project=record.project,
                        principal=record.principal,
                        sandbox_id=record.id,
                        data=data,
                    ),
                )
                for record, kind, data in changes
            ]
        )
        for (record, kind, _), fresh in zip(changes, applied, strict=True):
            if fresh:
                self._count(record, kind)
            else:
                self._metrics.fenced.inc()
        publish_news(self._bus, [record.project for record, _, _ in changes])

    def _count(self, record: SandboxRecord, kind: str) -> None:
        self._metrics.events.labels(kind).inc()
        if record.state in (State.STOPPED, State.FAILED):
            self._metrics.ended.labels(record.reason.value if record.reason else "unknown").inc()

    async def known(self, edge: str) -> list[SandboxRecord]:
        """The records of `edge` that the store holds for living."""
        return await self._store.living(edge)
