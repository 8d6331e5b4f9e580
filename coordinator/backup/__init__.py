"""Backups: copies of the database and of the blobs that its rows need, made while the coordinator runs, and restoring
them."""
