"""One of several coordinators leads. All of them share a PostgreSQL database and a bucket.

Theory of operation
===================

The leader is a coordinator as if it were alone. It has the runs in memory, and nobody else writes their rows. The
others are standbys: they forward requests to the leader (`forwarding.py`), send the deltas and checkpoints that it
names, and wait to take over.

    ../store/lease.py    the row that says who leads: its token and its expiry, and how to take, renew and release it
    election.py    a thread that renews the lease, or takes it when it has expired
    terms.py       what a process does when it begins and ceases to lead: it builds and drops a `Coordinator`
    forwarding.py  the outermost application: the leader answers, a standby forwards
    standby.py     what a standby answers by itself
    sharing.py     puts these together when a process starts

Time
----

The lease lasts LEASE_S by the database's clock. The leader renews it every RENEW_S, and by its own monotonic clock it
stops leading MARGIN_S before the lease that it knows of expires. Wall clocks of coordinators are never compared: a
coordinator also takes the time of day from the database.

Fencing
-------

Clocks decide how soon somebody else leads, never whether the rows stay consistent. Each takeover adds one to the
fencing token in the row `leader`. Each write transaction begins with `SELECT token … FOR UPDATE`, and raises Problem
`superseded` if the token is not its own. The lock is held until the commit. So a takeover waits for the transaction in
progress, and all later ones of the old leader fail, even if it was paused for an hour in the middle of a request. The
new leader first ends the database sessions of the expired lease's holder, so that a paused transaction delays nobody.

A commit whose reply is lost may have happened or not. Memory may then differ from the database, so the leader ends its
term: it takes the lease again, with a new token and behind the same lock, and rebuilds its runs from the rows.

Blobs need no fencing to be written, because they are put if absent and their names contain digests. Blobs are deleted
only while the lease is valid.

A takeover is a restart
-----------------------

A new leader builds its runs with `upkeep/restoring.py`, as after a crash. What was only in the old leader's memory:

    leases of workers              every live worker gets a full term
    deadlines of the open round    begin again
    step rates                     re-derived from the last round's contributions
    who waits for what             requests end with the old leader, and clients repeat them
    shared answers, caches         re-derived
    rate limits, quotas            begin again
    incomplete payloads            dropped; the worker sends the payload again
    grants of direct uploads       dropped; the worker asks again
    queued notifications           dropped; alerts that are still open are sent again
    tokens                         rows; the times of their last use lose up to a minute
    similarity of contributions    begins again
"""
