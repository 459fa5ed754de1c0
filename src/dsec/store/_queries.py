"""SQL texts and the mapping between rows and records, for SQLite. No connection and no thread lives here."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from dsec.api.types import Event, SandboxRecord, SandboxSpec, State
from dsec.store._writer import Insert
from dsec.store.interface import RECORD_ENCODER, EventQuery, KeyRow, ListQuery, NewEvent, NewRequest, RequestRow

Row = tuple[Any, ...]

_SANDBOX = "id,project,principal,edge,epoch,seq,state,job,created_at,ended_at,record,spec"
_EVENT = "time,type,project,principal,sandbox_id,data"
_REQUEST = "project,request_id,kind,fingerprint,sandbox_ids,created_at"
_KEY = "hash,name,project,principal,created_at,expires_at"

# ruff: noqa: S608 - only constants of this module go into the texts; every value is bound
PUT_KEY = f"INSERT OR REPLACE INTO keys ({_KEY}) VALUES (?,?,?,?,?,?)"
KEY_BY_HASH = f"SELECT {_KEY} FROM keys WHERE hash = ?"
KEYS_OF_PROJECT = f"SELECT {_KEY} FROM keys WHERE project = ? ORDER BY name, created_at"

INSERT_SANDBOXES = Insert("sandboxes", _SANDBOX)
UPSERT_SANDBOXES = Insert(
    "sandboxes",
    _SANDBOX,
    conflict="ON CONFLICT (id) DO UPDATE SET edge=excluded.edge, epoch=excluded.epoch, seq=excluded.seq,"
    " state=excluded.state, ended_at=excluded.ended_at, record=excluded.record",
)
INSERT_LABELS = Insert("labels", "project,key,value,created_at,sandbox_id", conflict="ON CONFLICT DO NOTHING")
INSERT_EVENTS = Insert("events", _EVENT)
INSERT_REQUEST = f"INSERT INTO requests ({_REQUEST}) VALUES (?,?,?,?,?,?)"
# One row instead of many: each row fetched costs a fight for the interpreter's lock.
FENCES = (
    "SELECT json_group_array(json_array(id, epoch, seq)) FROM sandboxes WHERE id IN (SELECT value FROM json_each(?))"
)
MOVE = (
    "INSERT INTO moved (sandbox_id, edge, epoch) VALUES (?,?,?) ON CONFLICT (sandbox_id) DO UPDATE"
    " SET edge=excluded.edge, epoch=excluded.epoch WHERE excluded.epoch > moved.epoch"
)

_encode = msgspec.msgpack.Encoder().encode
_decode_data = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_ids = msgspec.msgpack.Decoder(tuple[str, ...]).decode


class SpecEncoder:
    """Encodes specs, once for those that are the same object: a batch shares one."""

    def __init__(self) -> None:
        self._last: SandboxSpec | None = None
        self._encoded = b""

    def __call__(self, spec: SandboxSpec) -> bytes:
        if spec is not self._last:
            self._last, self._encoded = spec, _encode(spec)
        return self._encoded


def sandbox_row(record: SandboxRecord, spec: bytes | None, *, ended_at: float | None = None) -> Row:
    """The row of a record; `ended_at` is used where an ended record does not say when."""
    state = record.state
    ended = (record.ended_at or ended_at) if state is State.STOPPED or state is State.FAILED else None
    return (
        record.id,
        record.project,
        record.principal,
        record.edge,
        record.epoch,
        record.seq,
        state._value_,  # a tenth of the time of `value`
        record.job,
        record.created_at,
        ended,
        RECORD_ENCODER.encode(record),
        spec,
    )


def label_rows(record: SandboxRecord) -> list[Row]:
    """The rows by which a sandbox is found by its labels."""
    return [(record.project, key, value, record.created_at, record.id) for key, value in record.labels.items()]


def event_row(event: NewEvent) -> Row:
    """The row of an event; empty data is not stored."""
    data = _encode(event.data) if event.data else None
    return (event.time, event.type, event.project, event.principal, event.sandbox_id, data)


def event(row: Row) -> Event:
    """The event in a row that starts with its seq."""
    seq, time, kind, project, principal, sandbox_id, data = row
    return Event(
        seq=seq,
        time=time,
        type=kind,
        project=project,
        principal=principal,
        sandbox_id=sandbox_id,
        data=_decode_data(data) if data else {},
    )


def key_row(row: Row) -> KeyRow:
    """The key in a row of the keys' columns."""
    return KeyRow(
        hash=bytes(row[0]), name=row[1], project=row[2], principal=row[3], created_at=row[4], expires_at=row[5]
    )


def request_row(request: NewRequest) -> Row:
    """The row of a claimed request id."""
    ids = _encode(request.sandbox_ids)
    return (request.project, request.request_id, request.kind, request.fingerprint, ids, request.created_at)


def find_request(connection: sqlite3.Connection, project: str, request_id: str) -> RequestRow | None:
    """The claim of a request id, if there is one."""
    sql = f"SELECT {_REQUEST} FROM requests WHERE project = ? AND request_id = ?"
    rows = connection.execute(sql, (project, request_id)).fetchall()
    if not rows:
        return None
    row = rows[0]
    return RequestRow(
        project=row[0],
        request_id=row[1],
        kind=row[2],
        fingerprint=bytes(row[3]),
        sandbox_ids=_decode_ids(row[4]),
        created_at=row[5],
    )


def page_query(query: ListQuery) -> tuple[str, list[Any]]:
    """SQL and values of a listing. With labels, the label table leads: it is kept in the order of the listing."""
    labels = list(query.labels.items())
    values: list[Any] = []
    if labels:
        # CROSS JOIN keeps SQLite from turning the order of the tables round.
        source, at, name = "labels l CROSS JOIN sandboxes s ON s.id = l.sandbox_id", "l.created_at", "l.sandbox_id"
        where = ["l.project = ? AND l.key = ? AND l.value = ?"]
        values += [query.project, *labels[0]]
        for key, value in labels[1:]:
            where.append(
                "EXISTS (SELECT 1 FROM labels m WHERE m.project = l.project AND m.key = ? AND m.value = ?"
                " AND m.created_at = l.created_at AND m.sandbox_id = l.sandbox_id)"
            )
            values += [key, value]
    else:
        source, at, name = "sandboxes s", "s.created_at", "s.id"
        where = ["s.project = ?"]
        values.append(query.project)
    if query.living:
        where.append("s.ended_at IS NULL")
    if query.states:
        where.append(f"s.state IN ({','.join('?' * len(query.states))})")
        values += query.states
    if query.job is not None:
        where.append("s.job = ?")
        values.append(query.job)
    if query.after is not None:
        where.append(f"({at}, {name}) < (?, ?)")
        values += query.after
    values.append(query.limit)
    sql = f"SELECT s.record FROM {source} WHERE {' AND '.join(where)} ORDER BY {at} DESC, {name} DESC LIMIT ?"
    return sql, values


def events_query(query: EventQuery) -> tuple[str, list[Any]]:
    """SQL and values of a page of events."""
    where, values = ["project = ?", "seq > ?"], [query.project, query.since]
    if query.sandbox_id is not None:
        where.append("sandbox_id = ?")
        values.append(query.sandbox_id)
    if query.type is not None:
        where.append("type = ?")
        values.append(query.type)
    values.append(query.limit)
    return f"SELECT seq,{_EVENT} FROM events WHERE {' AND '.join(where)} ORDER BY seq LIMIT ?", values


def prune(connection: sqlite3.Connection, before: float, limit: int) -> int:
    """Delete what is older than `before`, at most `limit` rows of each table."""
    old = [row[0] for row in connection.execute("SELECT id FROM sandboxes WHERE ended_at < ? LIMIT ?", (before, limit))]
    names = msgspec.json.encode(old).decode()
    for table, column in (("labels", "sandbox_id"), ("moved", "sandbox_id"), ("sandboxes", "id")):
        connection.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (names,))
    deleted = len(old)
    requests = "SELECT rowid FROM requests WHERE created_at < ? LIMIT ?"
    deleted += connection.execute(f"DELETE FROM requests WHERE rowid IN ({requests})", (before, limit)).rowcount
    # Events are in the order of their time but for moments, so the oldest by seq are the oldest by time.
    oldest = "SELECT seq FROM (SELECT seq, time FROM events ORDER BY seq LIMIT ?) WHERE time < ?"
    deleted += connection.execute(f"DELETE FROM events WHERE seq IN ({oldest})", (limit, before)).rowcount
    return deleted
