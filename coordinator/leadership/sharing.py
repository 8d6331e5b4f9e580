"""Starting a coordinator that shares its database with others."""

import time
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI
from prometheus_client.registry import Collector
from sqlalchemy import URL

from coordinator.http.connection_limit import ConnectionLimit
from coordinator.leadership.election import Election
from coordinator.leadership.forwarding import LeadOrForward
from coordinator.leadership.standby import Standby
from coordinator.leadership.terms import Terms
from coordinator.service import Coordinator, Term
from coordinator.settings import Settings
from coordinator.store.blobs import OWNER, Blobs, OpenStore, StoreProbe
from coordinator.store.data_directory import STANDBY_COPIES, DataDirectory
from coordinator.store.database import Database, Fence, bucket_of
from coordinator.store.lease import Peers
from coordinator.store.opening import objects_at, shared_bucket, usable
from protocol.errors import OuterstepError

STANDBY_CACHE_BYTES = 1 << 30


def shared_application(
    settings: Settings,
    url: URL,
    connections: ConnectionLimit,
    address: str,
    clock: Callable[[], float],
    store: OpenStore | None,
    application: Callable[[Coordinator], FastAPI],
    own_metrics: Callable[[Peers], Collector],
    election_clock: Callable[[], float] = time.monotonic,
) -> LeadOrForward:
    """Return the application of a coordinator that leads or forwards. `address`: where the others reach it. `clock` is
    that of the runs. `application`: that of a term. `own_metrics`: what a standby exports.

    Migrates the database. Raises OuterstepError if the database or the bucket cannot be used.
    """
    if store is None and settings.blobs is None:
        raise OuterstepError(
            "with PostgreSQL, blobs are in a bucket, so that another coordinator finds them: give --blobs URL, or use "
            "SQLite for a coordinator that keeps them in its data directory"
        )
    probe = StoreProbe(_nothing, election_clock)
    if settings.blobs is not None:
        objects = objects_at(settings.blobs)
        usable(objects)
        probe = StoreProbe(partial(objects.get, OWNER), election_clock)
    data = DataDirectory(settings.data_dir)
    try:
        Database(url).close()
        election = Election(url, address, probe, election_clock)
        connections.peers = election.peers

        def build(fence: Fence) -> Coordinator:
            term = Term(fence, data, election.peers, probe, election.errors)
            return Coordinator(settings, clock=clock, now=election.now, store=store, term=term)

        terms = Terms(election, build, application, data.close)
        blobs = partial(store, data) if store else partial(_opened, settings.blobs or "", url, data)
        return LeadOrForward(settings, terms, Standby(terms, election.engine, own_metrics(election.peers)), blobs)
    except BaseException:
        data.close()
        raise


def _opened(place: str, database: URL, data: DataDirectory) -> Blobs:
    """Open the bucket at `place`. Raises OuterstepError unless it is that of the coordinators of the database."""
    found = bucket_of(database)
    if found is None:
        raise OuterstepError("the coordinators have no bucket yet")
    # A folder of its own: while a term begins, both are in use.
    return shared_bucket(found[0], place, data, STANDBY_CACHE_BYTES, STANDBY_COPIES)


def _nothing() -> None:
    """Ask nothing: the store is in memory."""
