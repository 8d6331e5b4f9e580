"""Alembic migrations of the database. An upgraded one equals `coordinator/store/tables.py` (tested)."""
