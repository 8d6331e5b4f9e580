"""Runs over time: start-up, damaged files, a full disk, rollback and restored databases, removal."""
