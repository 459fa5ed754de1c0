"""Every older revision can be upgraded, and the newest is what schema.py says."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from dsec.store import open_store
from dsec.store.migrate import HEAD, current, revisions, upgrade
from dsec.store.schema import metadata


def test_head_is_the_newest_revision() -> None:
    assert revisions()[-1] == HEAD


@pytest.mark.parametrize("revision", revisions())
async def test_upgrade_from_every_revision(tmp_path: Path, revision: str) -> None:
    path = tmp_path / "dsec.db"
    upgrade(path, revision)
    assert current(path) == revision
    upgrade(path)
    assert current(path) == HEAD
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
    async with open_store(path) as store:
        assert await store.last_seq() == 0


def test_the_migrated_tables_are_those_of_the_schema(tmp_path: Path) -> None:
    """compare_metadata does not see partial indexes' conditions, so compare SQLite's own texts."""
    texts = []
    migrated, direct = tmp_path / "a.db", tmp_path / "b.db"
    upgrade(migrated)
    engine = sa.create_engine(f"sqlite:///{direct}", poolclass=sa.NullPool)
    metadata.create_all(engine)
    engine.dispose()
    for path in (migrated, direct):
        engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
        with engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE name != 'alembic_version'"))
            texts.append({name: " ".join((sql or "").split()) for name, sql in rows if "alembic" not in name})
        engine.dispose()
    assert texts[0] == texts[1]
