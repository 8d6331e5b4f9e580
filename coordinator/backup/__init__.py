"""Backups: a copy of the database and of the blobs that its rows need, made while the coordinator runs; restoring."""
