"""Alembic runs this module. The coordinator passes its connection and its tables; nothing is read from an ini file."""

from alembic import context

connection, metadata = (context.config.attributes[name] for name in ("connection", "metadata"))
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
