"""What the edge needs from its surroundings; the composition root passes the implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from dsec.api.types import SandboxRecord

Change = tuple[SandboxRecord, str, dict[str, Any]]
"""A record as it is after a change (a copy: the edge does not touch it again), the event's type, the event's data."""

LayerPath = Callable[[str], Path]
"""The EROFS file of a layer, by digest. Raises ImageError if this node does not have it."""


class RecordSink(Protocol):
    """Keeps records and events: the store and the bus behind one interface."""

    async def changed(self, changes: Sequence[Change]) -> None:
        """Commit `changes`, in order, in one transaction, and publish their events.

        Called by one task, with what came together while the last call ran. Returning means that it is kept: the edge's journal
        then forgets the ended ones. A change may come again after a crash: (epoch, seq) of the record says so, and a record
        that is not newer than the kept one is ignored. May create the record where the store does not know it.
        """

    async def known(self, edge: str) -> list[SandboxRecord]:
        """The records of `edge` that the store holds for living (any state that is not an end)."""
