"""One thread that writes to SQLite, many operations a transaction. Owns the writing connection, the queue and the group commit.

Each sqlite3 call gives the interpreter's lock away and has to win it back from the event loop, so operations are written with few
statements of many rows; see `Insert`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from dsec.store.interface import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], Any]

MAX_PENDING = 4096
"""Operations that may wait (each at most a batch of sandboxes); a caller beyond them waits for room."""
MAX_GROUP = 256
"""Operations in one transaction: enough to make the commit's cost vanish, few enough that nobody waits long."""
BUSY_TIMEOUT_MS = 10_000
_CHUNKS = (128, 32, 8, 1)


class Insert:
    """An INSERT of any number of rows, made of a few prepared sizes."""

    def __init__(self, table: str, columns: str, *, conflict: str = "") -> None:
        row = "(" + ",".join("?" * len(columns.split(","))) + ")"
        # Only constants of this package go into the text; every value is bound.
        self._sql = {
            size: f"INSERT INTO {table} ({columns}) VALUES {','.join([row] * size)} {conflict}"  # noqa: S608
            for size in _CHUNKS
        }

    def run(self, connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert the rows in their order."""
        start = 0
        for size in _CHUNKS:
            while len(rows) - start >= size:
                connection.execute(self._sql[size], list(chain.from_iterable(rows[start : start + size])))
                start += size


def connect(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """Open a connection with the pragmas that every connection of dsec has."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA journal_mode=WAL")
    # NORMAL may lose the last moments before a power cut, never consistency; the edge's journal brings back what ran.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA cache_size=-16384")
    if readonly:
        connection.execute("PRAGMA query_only=ON")
    return connection


class GroupWriter:
    """Runs operations in the order of their submission; a caller goes on once the transaction with its operation is committed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[tuple[Operation, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._pending = 0
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._connection = connect(path)
        self._thread = threading.Thread(target=self._run, name="dsec-store", daemon=True)
        self._thread.start()

    async def submit(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run `operation` inside a transaction; return its result after the commit. Raises StoreError."""
        while self._pending >= MAX_PENDING:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise StoreError("the store is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._pending += 1
        self._queue.put((operation, future))
        return await future

    async def aclose(self) -> None:
        """Write what is queued, then end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        last = False
        while not last:
            group: list[tuple[Operation, asyncio.Future[Any]]] = []
            entry = self._queue.get()
            while entry is not None:
                group.append(entry)
                if len(group) >= MAX_GROUP:
                    break
                try:
                    entry = self._queue.get_nowait()
                except queue.Empty:
                    break
            else:
                last = True
            if group:
                outcomes = self._commit([operation for operation, _ in group])
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                    self._loop.call_soon_threadsafe(self._deliver, [future for _, future in group], outcomes)
        self._connection.close()

    def _commit(self, operations: list[Operation]) -> list[Any]:
        """Results (or StoreErrors) of the operations. One that fails must not undo its neighbours: they run again alone."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            results = [operation(connection) for operation in operations]
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - the outer edge of this thread; the caller gets the error
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if len(operations) > 1:
                return [self._commit([operation])[0] for operation in operations]
            failure = StoreError(f"{self._path} could not be written: {error}")
            failure.__cause__ = error
            return [failure]
        return results

    def _deliver(self, futures: list[asyncio.Future[Any]], outcomes: list[Any]) -> None:
        self._pending -= len(futures)
        self._room.set()
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, StoreError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
