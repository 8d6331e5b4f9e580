"""Backups: copies of the database and of the blobs that its rows need. They are made while the coordinator runs, and
can be restored."""
