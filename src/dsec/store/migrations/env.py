"""Alembic's entry point: runs migrations on the connection that dsec.store.migrate hands over."""

from alembic import context

from dsec.store.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
