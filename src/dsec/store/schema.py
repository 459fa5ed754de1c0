"""The tables, once for every database. Migrations bring a database to this state; a test compares the two.

A sandbox's record is kept whole as msgpack (`record`), so that a new field needs no migration; the other columns of
`sandboxes` are what queries, fences and sweeps look at.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
)

principals = sa.Table(
    "principals",
    metadata,
    sa.Column("project", sa.Text, sa.ForeignKey("projects.name"), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("hash", sa.LargeBinary, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("principal", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
)

sandboxes = sa.Table(
    "sandboxes",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("principal", sa.Text, nullable=False),
    sa.Column("edge", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("job", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Column("spec", sa.LargeBinary),
)
sa.Index("sandboxes_newest", sandboxes.c.project, sandboxes.c.created_at, sandboxes.c.id)
_living = sandboxes.c.ended_at.is_(None)
sa.Index(
    "sandboxes_living",
    sandboxes.c.project,
    sandboxes.c.created_at,
    sandboxes.c.id,
    sqlite_where=_living,
    postgresql_where=_living,
)
_ended = sandboxes.c.ended_at.is_not(None)
sa.Index("sandboxes_ended", sandboxes.c.ended_at, sqlite_where=_ended, postgresql_where=_ended)

labels = sa.Table(
    "labels",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, primary_key=True),
    sa.Column("created_at", sa.Float, primary_key=True),
    sa.Column("sandbox_id", sa.Text, primary_key=True),
    sqlite_with_rowid=False,
)
sa.Index("labels_sandbox", labels.c.sandbox_id)

moved = sa.Table(
    "moved",
    metadata,
    sa.Column("sandbox_id", sa.Text, primary_key=True),
    sa.Column("edge", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("fingerprint", sa.LargeBinary, nullable=False),
    sa.Column("sandbox_ids", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
sa.Index("requests_created", requests.c.created_at)

events = sa.Table(
    "events",
    metadata,
    # BigInteger on PostgreSQL; SQLite counts up only columns declared INTEGER.
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("principal", sa.Text, nullable=False),
    sa.Column("sandbox_id", sa.Text),
    sa.Column("data", sa.LargeBinary),
    sqlite_autoincrement=True,
)
_about_sandbox = events.c.sandbox_id.is_not(None)
sa.Index(
    "events_sandbox", events.c.sandbox_id, events.c.seq, sqlite_where=_about_sandbox, postgresql_where=_about_sandbox
)
