"""Maintenance of runs: start-up, damaged files, a full disk, rollback and restored databases, removal."""
