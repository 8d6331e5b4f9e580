"""Replacing the secret that the coordinators of a database share. From it are derived

- the tickets and proofs of requests between coordinators (`tickets.py`),
- the signs of sketches (`screening/measuring.py`), of the leader and of aggregators.

A term keeps one secret, so that all contributions to a fragment are measured with the same signs: the leader's term
ends, in the transaction that replaces the secret. Other coordinators read the secret together with the lease, and
aggregators with each task.
"""

from collections.abc import Callable
from contextlib import closing

from sqlalchemy import URL

from coordinator import lease
from coordinator.store import audit
from coordinator.store.database import Database
from coordinator.store.identity import Actor


def rotate_secret(url: URL, now: Callable[[], float]) -> None:
    """Replace the secret in the database at `url`, which is migrated, while coordinators run. Raises OuterstepError if
    it cannot be used, or is SQLite and in use; may raise OSError."""
    with closing(Database(url)) as database, database.write() as session:
        lease.rotate_secret(session)
        audit.note(session, now(), Actor(), "secret-rotated", "the secret of the coordinators was replaced")
