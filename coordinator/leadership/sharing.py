"""Starting a coordinator that shares its database with others."""

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

from sqlalchemy import URL

from coordinator.app import create_app
from coordinator.http.connection_limit import ConnectionLimit
from coordinator.leadership.election import Election, StoreProbe
from coordinator.leadership.forwarding import LeadOrForward, forwarding_key
from coordinator.leadership.standby import Standby
from coordinator.leadership.terms import Terms
from coordinator.lease import Fence
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.blobs import OWNER, OpenStore
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.opening import objects_at, usable
from protocol.errors import OuterstepError


def shared_application(
    settings: Settings,
    url: URL,
    connections: ConnectionLimit,
    address: str,
    clock: Callable[[], float],
    store: OpenStore | None,
    election_clock: Callable[[], float] = time.monotonic,
) -> LeadOrForward:
    """Return the application of a coordinator that leads or forwards. `address`: where the others reach it. `clock` is
    that of the runs.

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
        with closing(Database(url)) as database:
            key = forwarding_key(database.secret())
        election = Election(url, address, probe, election_clock)
        connections.peers = election.peers
        build = partial(_coordinator, settings, clock, store, data, election)
        terms = Terms(election, build, partial(create_app, connections=connections), data.close)
        return LeadOrForward(settings, terms, key, Standby(terms, election.engine))
    except BaseException:
        data.close()
        raise


def _nothing() -> None:
    """Ask nothing: the store is in memory."""


def _coordinator(
    settings: Settings,
    clock: Callable[[], float],
    store: OpenStore | None,
    data: DataDirectory,
    election: Election,
    fence: Fence,
) -> Coordinator:
    return Coordinator(
        settings, clock=clock, now=election.now, store=store, fence=fence, data=data, peers=election.peers
    )
