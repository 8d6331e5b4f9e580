"""Alembic migrations of the database. A test checks that a migrated database equals `coordinator/store/tables.py`."""
