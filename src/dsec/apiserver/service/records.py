"""Where edges tell what became of their sandboxes: the store keeps it, the bus says that there is news."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
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


SETTLE_S = 0.05
"""How long `settled` waits for the edge to tell the change itself; a commit takes about a millisecond."""
_REMEMBERED = 16_384


_ENDED = (State.STOPPED, State.FAILED)


def reason_data(record: SandboxRecord) -> dict[str, Any]:
    """What an event says of a record beside its type."""
    return {"reason": record.reason.value} if record.reason else {}


class StoreSink:
    """Implements the edge's RecordSink, and tells the service when a change is kept."""

    def __init__(
        self, store: Store, bus: Bus, metrics: Metrics, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._bus = bus
        self._metrics = metrics
        self._now = wall_clock
        self._kept: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, list[tuple[tuple[int, int], asyncio.Future[None]]]] = {}

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
        self._count(changes, applied)
        publish_news(self._bus, [record.project for record, _, _ in changes])
        if len(self._kept) > _REMEMBERED:
            self._kept.clear()
        for record, _, _ in changes:
            self._remember(record.id, (record.epoch, record.seq))

    def _count(self, changes: Sequence[tuple[SandboxRecord, str, dict[str, Any]]], applied: Sequence[bool]) -> None:
        counted = Counter[tuple[str, str]]()
        for (record, kind, _), fresh in zip(changes, applied, strict=True):
            counted["event" if fresh else "fenced", kind] += 1
            if fresh and record.state in _ENDED:
                counted["ended", record.reason.value if record.reason else "unknown"] += 1
        for (what, name), count in counted.items():
            if what == "event":
                self._metrics.events.labels(name).inc(count)
            elif what == "ended":
                self._metrics.ended.labels(name).inc(count)
            else:
                self._metrics.fenced.inc(count)

    def _remember(self, name: str, fence: tuple[int, int]) -> None:
        if fence > self._kept.get(name, (-1, -1)):
            self._kept[name] = fence
        waiting = self._waiting.pop(name, None)
        if waiting:
            for wanted, future in waiting:
                if wanted > fence:
                    self._waiting.setdefault(name, []).append((wanted, future))
                elif not future.done():
                    future.set_result(None)

    async def settled(self, records: Sequence[SandboxRecord]) -> None:
        """Return when the store has these records, or newer ones: a client is told of a change only when it finds it too.

        The edge tells each change itself; where it has not within a moment, it is written here, and the edge's own telling is fenced off.
        """
        waiting = []
        for record in records:
            fence = (record.epoch, record.seq)
            if self._kept.get(record.id, (-1, -1)) < fence:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.setdefault(record.id, []).append((fence, future))
                waiting.append((record, future))
        if not waiting:
            return
        await asyncio.wait([future for _, future in waiting], timeout=SETTLE_S)
        late = [record for record, future in waiting if not future.done()]
        if late:
            await self.changed([(record, f"sandbox.{record.state.value}", reason_data(record)) for record in late])

    async def known(self, edge: str) -> list[SandboxRecord]:
        """The records of `edge` that the store holds for living."""
        return await self._store.living(edge)
