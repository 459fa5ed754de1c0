"""Brings a database to the schema of this release. Older releases' databases are upgraded in place; newer ones are refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.store.interface import StoreError

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0001"
"""The newest revision: a database that has it is opened without loading alembic, which takes a third of a second."""


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "dsec.store:migrations")
    config.set_main_option("path_separator", "os")
    return config


def revisions() -> list[str]:
    """All revisions, oldest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in reversed(list(ScriptDirectory.from_config(_config()).walk_revisions()))]


def current(path: Path) -> str | None:
    """The revision of the SQLite database at `path`; None if there is none yet."""
    if not path.exists():
        return None
    with contextlib.closing(sqlite3.connect(path)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:
            return None
    return str(row[0]) if row else None


def upgrade(path: Path, revision: str = HEAD) -> None:
    """Bring the SQLite database at `path` to `revision`, making it where it is missing. Blocks, also while another process does the same.

    Raises StoreError for a database of a newer release, and where the file cannot be used.
    """
    with _alone(path.parent):
        _upgrade(path, revision)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: of two daemons started at the same moment, the second finds the tables that the first made."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _upgrade(path: Path, revision: str) -> None:
    try:
        present = current(path)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} is not a database of dsec: {error}") from error
    if present == revision:
        return
    if present is not None and present not in revisions():
        raise StoreError(
            f"{path} was written by a newer release of dsec (schema {present}); install that release again"
        )
    import sqlalchemy as sa
    from alembic import command

    config = _config()
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    except sa.exc.SQLAlchemyError as error:
        raise StoreError(f"{path} could not be brought to schema {revision}: {error}") from error
    finally:
        engine.dispose()
