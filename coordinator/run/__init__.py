"""A run in memory, and what decides when its rounds close.

Theory of operation
===================

A *run* trains one model. Its *rounds* follow one another, one open at a time, and round N starts from *state* N of the
model. A model is cut into *fragments*. Each fragment of a round has its own state, with the transitions in
`decide.TRANSITIONS`:

    collecting --closed--> aggregating --published--> published
         ^--contribution lost--'

    collecting    workers train and upload; `decide` says after every change and every tick: Wait until …, or Close
    aggregating   contributors and their weights are fixed; a job on another thread judges and averages them
    published     the delta is durable; workers download it, and worker and coordinator take the same outer step

The round is over when all its fragments are published, and the next one opens as soon as enough workers are ready
(`rounds/opening.py`). The run as a whole has a state too (`RunState`): running, paused, draining, finished or stopped.
`rounds/steering.py` lists what may change it.

One way to change it
--------------------

Everything above changes only by `LiveRun.change`, and in this order:

1. The run's lock is taken. It is reentrant, and there is one per run. If a change depends on what you read, take the
   lock before you read.
2. The block writes rows and registers what will change in memory (`Change.after_commit`). Nothing in memory has changed
   yet. An exception here, or in the commit, leaves database and memory as they were.
3. The transaction commits. Now the change is durable.
4. What was registered is applied to memory, so memory is never ahead of the database.
5. The run *settles* (`coordinator/sync/settling.py`): fragments that are due close, the next round opens, a drained run
   pauses, jobs start, until nothing more follows. Each of these is another change, steps 2 to 4.
6. The requests that wait for what changed are woken (`waiters.py`), and the lock is released.

A tick, a few times a second, does steps 5 and 6 alone, because deadlines pass without any request. `LiveRun` gets
`settle` as an argument, because `settle` calls packages that import this one.

Three things work differently. A heartbeat renews a lease under the lock of `Members`, without run lock or database,
because the run lock may be held during a write to the disk. Long polls first try to answer from the open round in
memory, without the lock. Jobs compute without the lock, and take it for the change that publishes the result.

What is durable when
--------------------

A blob is durable before the row that names it is committed, and the row is committed before the request is answered:

    contribution    blob, row, acknowledgement. It then counts in the delta, unless its verdict leaves it out.
    assignment      rows (round, units, workers) before any worker learns of it
    closing         contributors and weights in the fragment's row, before the first byte is averaged
    delta           blob, row. The sum is in worker-id order, so making it again gives the same bytes.
    outer state     a file that is not fsynced. It is derived again from a checkpoint and the deltas after it.
    checkpoint      blobs and their rows; it counts once all its fragments have one

Leases, heartbeats, deadlines, step rates and the topics to wake are only in memory.

After a crash
-------------

`upkeep/restoring.py` builds the run from its rows, and then it settles. The rest depends on the moment of the crash:

    between blob and row           the blob is deleted, as no row names it; the worker uploads again
    between row and answer         the worker repeats the request and gets the same answer
    between commit and memory      memory is built from the rows, so the change has happened
    between commit and settling    the first settling does what should have followed
    while aggregating              the job starts again, with the contributors of the row
    between delta and outer step   the outer state is behind its round, so the job steps it

Every live worker gets a lease for a full term, and the time of an open round counts from the restart: the clock is
monotonic, and no time of another process is compared with it.
"""
