"""The first schema. Frozen: later changes are later revisions."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "principals",
        sa.Column("project", sa.Text, sa.ForeignKey("projects.name"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("hash", sa.LargeBinary, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("principal", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
    )
    _sandboxes()
    op.create_table(
        "moved",
        sa.Column("sandbox_id", sa.Text, primary_key=True),
        sa.Column("edge", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "requests",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False),
        sa.Column("sandbox_ids", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("requests_created", "requests", ["created_at"])
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("principal", sa.Text, nullable=False),
        sa.Column("sandbox_id", sa.Text),
        sa.Column("data", sa.LargeBinary),
        sqlite_autoincrement=True,
    )
    about = sa.text("sandbox_id IS NOT NULL")
    op.create_index("events_sandbox", "events", ["sandbox_id", "seq"], sqlite_where=about, postgresql_where=about)


def _sandboxes() -> None:
    op.create_table(
        "sandboxes",
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
    living, ended = sa.text("ended_at IS NULL"), sa.text("ended_at IS NOT NULL")
    newest = ["project", "created_at", "id"]
    op.create_index("sandboxes_newest", "sandboxes", newest)
    op.create_index("sandboxes_living", "sandboxes", newest, sqlite_where=living, postgresql_where=living)
    op.create_index("sandboxes_ended", "sandboxes", ["ended_at"], sqlite_where=ended, postgresql_where=ended)
    op.create_table(
        "labels",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, primary_key=True),
        sa.Column("created_at", sa.Float, primary_key=True),
        sa.Column("sandbox_id", sa.Text, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("labels_sandbox", "labels", ["sandbox_id"])


def downgrade() -> None:
    for table in ("events", "requests", "moved", "labels", "sandboxes", "keys", "principals", "projects", "meta"):
        op.drop_table(table)
