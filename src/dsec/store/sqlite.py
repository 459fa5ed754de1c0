"""The store in SQLite: WAL, one writing thread with group commit, two threads for long reads.

Looking up a few rows by their key happens in the loop's thread: it takes 10-20 us where handing it to a thread and back takes 200-400.
Records are encoded before they are queued, so that a caller may go on changing its record.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.api.types import Event, SandboxRecord, SandboxSpec
from dsec.store import _queries as q
from dsec.store._writer import GroupWriter, connect
from dsec.store.interface import (
    RECORD_DECODER,
    SPEC_DECODER,
    Change,
    EventQuery,
    KeyRow,
    ListQuery,
    NewEvent,
    NewRequest,
    RequestRow,
    Store,
    StoreError,
)
from dsec.store.migrate import upgrade

T = TypeVar("T")

DEADLINE_S = 30.0
"""A write or read that takes longer is given up: the disk hangs, or somebody else holds the database."""
_READERS = 2
_FEW = 16
"""Rows looked up in the loop's thread at most."""


class SqliteStore(Store):
    """See `Store`. Make it with `open_store`."""

    def __init__(self, path: Path) -> None:
        self._writer = GroupWriter(path)
        self._path = path
        self._lookups = connect(path, readonly=True)
        self._local = threading.local()
        self._reading: list[sqlite3.Connection] = []
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="dsec-read", initializer=self._connect_reader)

    def _connect_reader(self) -> None:
        connection = connect(self._path, readonly=True)
        self._local.connection = connection
        self._reading.append(connection)

    async def aclose(self) -> None:
        """Finish queued writes and close. Idempotent."""
        await self._writer.aclose()
        self._lookups.close()
        await asyncio.to_thread(self._readers.shutdown, wait=True)
        while self._reading:
            self._reading.pop().close()

    async def _write(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._writer.submit(operation)
        except TimeoutError as error:
            raise StoreError(f"{self._path} did not take a write within {DEADLINE_S:.0f} s") from error

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.get_running_loop().run_in_executor(
                    self._readers, functools.partial(self._query, query)
                )
        except TimeoutError as error:
            raise StoreError(f"{self._path} did not answer within {DEADLINE_S:.0f} s") from error
        except (sqlite3.Error, RuntimeError) as error:
            raise StoreError(f"{self._path} could not be read: {error}") from error

    def _query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return query(self._local.connection)

    def _look_up(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows that are found by a key. Fetching all of them ends the statement, and with it the hold on the log's old pages."""
        try:
            return self._lookups.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} could not be read: {error}") from error

    async def _row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        rows = self._look_up(sql, *values)
        return rows[0] if rows else None

    async def _rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return await self._read(lambda connection: connection.execute(sql, values).fetchall())

    # Facts about the installation

    async def meta(self, key: str) -> bytes | None:
        """The value kept under `key`."""
        row = await self._row("SELECT value FROM meta WHERE key = ?", key)
        return bytes(row[0]) if row else None

    async def claim_meta(self, key: str, value: bytes) -> bytes:
        """Keep `value` under `key` unless there is one already; return the one that is kept."""

        def claim(connection: sqlite3.Connection) -> bytes:
            connection.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", (key, value))
            return bytes(connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

        return await self._write(claim)

    async def next_number(self, key: str) -> int:
        """Count up the number kept under `key` (from 1) and return it."""

        def count(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            number = int(row[0]) + 1 if row else 1
            connection.execute(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (key, str(number).encode()),
            )
            return number

        return await self._write(count)

    # Projects, principals, keys

    async def add_principal(self, project: str, principal: str, *, now: float) -> None:
        """Make the project and the principal where they are missing."""

        def add(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO projects VALUES (?, ?) ON CONFLICT DO NOTHING", (project, now))
            connection.execute(
                "INSERT INTO principals VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (project, principal, now)
            )

        await self._write(add)

    async def add_key(self, key: KeyRow) -> None:
        """Keep a key; one with the same hash is replaced."""
        row = (key.hash, key.name, key.project, key.principal, key.created_at, key.expires_at)
        await self._write(lambda connection: connection.execute(q.PUT_KEY, row))

    async def key(self, key_hash: bytes) -> KeyRow | None:
        """The key of that hash, expired or not."""
        row = await self._row(q.KEY_BY_HASH, key_hash)
        return q.key_row(row) if row else None

    async def keys(self, project: str) -> list[KeyRow]:
        """All keys of a project, by name."""
        return [q.key_row(row) for row in await self._rows(q.KEYS_OF_PROJECT, (project,))]

    async def remove_key(self, project: str, name: str) -> int:
        """Remove the project's keys of that name; returns how many there were."""
        sql = "DELETE FROM keys WHERE project = ? AND name = ?"
        return await self._write(lambda c: c.execute(sql, (project, name)).rowcount)

    # Sandboxes

    async def create(
        self,
        items: Sequence[tuple[SandboxRecord, SandboxSpec]],
        events: Sequence[NewEvent],
        *,
        request: NewRequest | None = None,
    ) -> RequestRow | None:
        """Insert sandboxes and events in one transaction and claim `request`; see `Store.create`."""
        encode_spec = q.SpecEncoder()
        rows = [q.sandbox_row(record, encode_spec(spec)) for record, spec in items]
        label_rows = [row for record, _ in items if record.labels for row in q.label_rows(record)]
        event_rows = [q.event_row(event) for event in events]

        def insert(connection: sqlite3.Connection) -> RequestRow | None:
            if request is not None:
                earlier = q.find_request(connection, request.project, request.request_id)
                if earlier is not None:
                    return earlier
                connection.execute(q.INSERT_REQUEST, q.request_row(request))
            q.INSERT_SANDBOXES.run(connection, rows)
            q.INSERT_LABELS.run(connection, label_rows)
            q.INSERT_EVENTS.run(connection, event_rows)
            return None

        return await self._write(insert)

    async def change(self, changes: Sequence[Change]) -> list[bool]:
        """Apply changes in order, fenced; see `Store.change`."""
        prepared = [
            (
                change.record.id,
                (change.record.epoch, change.record.seq),
                q.sandbox_row(change.record, None, ended_at=change.event.time),
                q.event_row(change.event),
                q.label_rows(change.record),
            )
            for change in changes
        ]
        ids = msgspec.json.encode([entry[0] for entry in prepared]).decode()

        def apply(connection: sqlite3.Connection) -> list[bool]:
            found = connection.execute(q.FENCES, (ids,)).fetchone()[0]
            fences: dict[str, tuple[int, int]] = {name: (epoch, seq) for name, epoch, seq in msgspec.json.decode(found)}
            known = set(fences)
            outcome, rows, events, labels = [], {}, [], []
            for name, fence, row, event, its_labels in prepared:
                fresh = name not in fences or fence > fences[name]
                outcome.append(fresh)
                if fresh:
                    fences[name] = fence
                    rows[name] = row
                    events.append(event)
                    if name not in known:
                        labels += its_labels
            q.UPSERT_SANDBOXES.run(connection, list(rows.values()))
            q.INSERT_LABELS.run(connection, labels)
            q.INSERT_EVENTS.run(connection, events)
            return outcome

        return await self._write(apply)

    async def get(self, sandbox_id: str) -> SandboxRecord | None:
        """A sandbox's record."""
        row = await self._row("SELECT record FROM sandboxes WHERE id = ?", sandbox_id)
        return RECORD_DECODER.decode(row[0]) if row else None

    async def get_many(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxRecord]:
        """The records that exist, by id."""
        wanted = msgspec.json.encode(list(sandbox_ids)).decode()
        sql = "SELECT record FROM sandboxes WHERE id IN (SELECT value FROM json_each(?))"
        few = len(sandbox_ids) <= _FEW
        rows = self._look_up(sql, wanted) if few else await self._rows(sql, (wanted,))
        records = [RECORD_DECODER.decode(row[0]) for row in rows]
        return {record.id: record for record in records}

    async def spec(self, sandbox_id: str) -> SandboxSpec | None:
        """What a sandbox was started from."""
        row = await self._row("SELECT spec FROM sandboxes WHERE id = ?", sandbox_id)
        return SPEC_DECODER.decode(row[0]) if row and row[0] is not None else None

    async def page(self, query: ListQuery) -> list[SandboxRecord]:
        """At most `query.limit` records, newest first."""
        sql, values = q.page_query(query)
        return [RECORD_DECODER.decode(row[0]) for row in await self._rows(sql, values)]

    async def living(self, edge: str) -> list[SandboxRecord]:
        """All records of an edge that have not ended, in no order."""
        sql = "SELECT record FROM sandboxes WHERE ended_at IS NULL AND edge = ?"
        return [RECORD_DECODER.decode(row[0]) for row in await self._rows(sql, (edge,))]

    async def move(self, sandbox_id: str, edge: str, epoch: int) -> None:
        """Note that a sandbox lives on another edge than its id says."""
        await self._write(lambda connection: connection.execute(q.MOVE, (sandbox_id, edge, epoch)))

    async def moved(self, sandbox_id: str) -> tuple[str, int] | None:
        """Where a moved sandbox lives now: (edge, epoch)."""
        row = await self._row("SELECT edge, epoch FROM moved WHERE sandbox_id = ?", sandbox_id)
        return (str(row[0]), int(row[1])) if row else None

    # Requests and events

    async def request(self, project: str, request_id: str) -> RequestRow | None:
        """An earlier claim of that request id."""
        try:
            return q.find_request(self._lookups, project, request_id)
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} could not be read: {error}") from error

    async def add_events(self, events: Sequence[NewEvent]) -> None:
        """Append events."""
        rows = [q.event_row(event) for event in events]
        await self._write(lambda connection: q.INSERT_EVENTS.run(connection, rows))

    async def events(self, query: EventQuery) -> list[Event]:
        """At most `query.limit` events, oldest first."""
        sql, values = q.events_query(query)
        return [q.event(row) for row in await self._rows(sql, values)]

    async def last_seq(self) -> int:
        """The highest sequence number given so far."""
        row = await self._row("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
        return int(row[0]) if row else 0

    async def prune(self, *, before: float, limit: int = 1000) -> int:
        """Delete at most `limit` each of ended sandboxes, requests and events older than `before`."""
        return await self._write(lambda connection: q.prune(connection, before, limit))


@asynccontextmanager
async def open_store(path: Path) -> AsyncIterator[SqliteStore]:
    """Open (making or upgrading it first) the database at `path`; its folder must exist. Raises StoreError."""
    await asyncio.to_thread(upgrade, path)
    await asyncio.to_thread(path.chmod, 0o600)
    store = SqliteStore(path)
    try:
        yield store
    finally:
        await store.aclose()
