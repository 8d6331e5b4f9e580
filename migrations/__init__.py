"""Alembic migrations of the coordinator's database. An upgraded database equals `coordinator/tables.py` (tested)."""
