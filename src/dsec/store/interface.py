"""What a store offers, whatever database is behind it. Owns the contract; tests/contract holds its suite.

The one rule: a sandbox's row is fenced. A change with an older (epoch, seq) than the row has is dropped together with its event,
so that an edge which was declared dead cannot overwrite what its successor wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dsec.api.types import Event, SandboxRecord, SandboxSpec


class NewEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event that has no `seq` yet. Not tracked by the collector: thousands a second come and go, none in a cycle."""

    time: float
    type: str
    project: str
    principal: str = ""
    sandbox_id: str | None = None
    data: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request id to claim. `fingerprint` tells a repeat from another request that uses the same id."""

    project: str
    request_id: str
    kind: str
    fingerprint: bytes
    sandbox_ids: tuple[str, ...]
    created_at: float


RequestRow = NewRequest
"""A claimed request id as the store has it."""


class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sandbox's new record and what is told about it."""

    record: SandboxRecord
    event: NewEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """An API key: only its keyed hash is kept. `expires_at` None: never."""

    hash: bytes
    name: str
    project: str
    principal: str
    created_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """A page of a project's sandboxes, newest first. `states` empty: all; `labels` and `job` must match exactly."""

    project: str
    states: tuple[str, ...] = ()
    living: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    job: str | None = None
    limit: int = 100
    after: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Events of a project with `seq` > `since`, oldest first."""

    project: str
    since: int = 0
    sandbox_id: str | None = None
    type: str | None = None
    limit: int = 100


class StoreError(Exception):
    """The database refused or failed; the cause is chained."""


class Store(ABC):
    """State that outlives processes. Every method is bounded by the store's own deadline and raises StoreError past it.

    A write has happened when its call returns; a call that is cancelled may have happened.
    """

    @abstractmethod
    async def aclose(self) -> None:
        """Finish queued writes and close. Idempotent."""

    # Facts about the installation

    @abstractmethod
    async def meta(self, key: str) -> bytes | None:
        """The value kept under `key`."""

    @abstractmethod
    async def claim_meta(self, key: str, value: bytes) -> bytes:
        """Keep `value` under `key` unless there is one already; return the one that is kept."""

    @abstractmethod
    async def next_number(self, key: str) -> int:
        """Count up the number kept under `key` (from 1) and return it: epochs come from here."""

    # Projects, principals, keys

    @abstractmethod
    async def add_principal(self, project: str, principal: str, *, now: float) -> None:
        """Make the project and the principal where they are missing."""

    @abstractmethod
    async def add_key(self, key: KeyRow) -> None:
        """Keep a key; one with the same hash is replaced."""

    @abstractmethod
    async def key(self, key_hash: bytes) -> KeyRow | None:
        """The key of that hash, expired or not."""

    @abstractmethod
    async def keys(self, project: str) -> list[KeyRow]:
        """All keys of a project, by name."""

    @abstractmethod
    async def remove_key(self, project: str, name: str) -> int:
        """Remove the project's keys of that name; returns how many there were."""

    # Sandboxes

    @abstractmethod
    async def create(
        self,
        items: Sequence[tuple[SandboxRecord, SandboxSpec]],
        events: Sequence[NewEvent],
        *,
        request: NewRequest | None = None,
    ) -> RequestRow | None:
        """Insert sandboxes and events in one transaction and claim `request`; None when done.

        If the request id is taken nothing is inserted and the earlier claim is returned.
        """

    @abstractmethod
    async def change(self, changes: Sequence[Change]) -> list[bool]:
        """Apply changes in order, in one transaction; False marks one that was fenced off (its event is dropped too).

        A record that the store does not have (lost with the last moments before a power cut) is inserted.
        """

    @abstractmethod
    async def get(self, sandbox_id: str) -> SandboxRecord | None:
        """A sandbox's record."""

    @abstractmethod
    async def get_many(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxRecord]:
        """The records that exist, by id."""

    @abstractmethod
    async def spec(self, sandbox_id: str) -> SandboxSpec | None:
        """What a sandbox was started from."""

    @abstractmethod
    async def page(self, query: ListQuery) -> list[SandboxRecord]:
        """At most `query.limit` records, newest first."""

    @abstractmethod
    async def living(self, edge: str) -> list[SandboxRecord]:
        """All records of an edge that have not ended, in no order."""

    @abstractmethod
    async def move(self, sandbox_id: str, edge: str, epoch: int) -> None:
        """Note that a sandbox lives on another edge than its id says; an older epoch never replaces a newer one."""

    @abstractmethod
    async def moved(self, sandbox_id: str) -> tuple[str, int] | None:
        """Where a moved sandbox lives now: (edge, epoch)."""

    # Requests and events

    @abstractmethod
    async def request(self, project: str, request_id: str) -> RequestRow | None:
        """An earlier claim of that request id."""

    @abstractmethod
    async def add_events(self, events: Sequence[NewEvent]) -> None:
        """Append events."""

    @abstractmethod
    async def events(self, query: EventQuery) -> list[Event]:
        """At most `query.limit` events, oldest first. Sequence numbers have no late arrivals: what is missing stays missing."""

    @abstractmethod
    async def last_seq(self) -> int:
        """The highest sequence number given so far; 0 before the first event."""

    @abstractmethod
    async def prune(self, *, before: float, limit: int = 1000) -> int:
        """Delete at most `limit` each of ended sandboxes, requests and events older than `before`; returns rows deleted."""


RECORD_ENCODER = msgspec.msgpack.Encoder()
RECORD_DECODER = msgspec.msgpack.Decoder(SandboxRecord)
SPEC_DECODER = msgspec.msgpack.Decoder(SandboxSpec)
