"""Run by alembic. The coordinator passes its own connection; nothing is read from an ini file."""

from alembic import context

from coordinator.store.tables import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
