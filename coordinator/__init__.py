"""The coordinator: membership, rounds, aggregation and the REST interface. Imports neither torch nor the worker.

    store/      what outlives the process: files, database, tables, tokens
    tuning/     what only makes it faster
    screening/  what a contribution may count, by its norm and its direction (pure)
    runs/       a run: live_run.py (in memory, and its one way to change), rounds.py (when a round closes, pure),
                opening and closing them, units
    workers/    what workers ask and tell: joining, leaving, assignments, accounts
    sync/       the data plane, in the order of the data's way: contributing → aggregating → publishing → outer_state
                and checkpointing
    upkeep/     after a start (restoring.py), corrupt files, a full disk, a database from a backup
    backup/     a copy of the database and of the blobs that it needs, and its way back
    http/       what HTTP asks of every route: problems, limits, authentication, long polls
    metrics/    what Prometheus scrapes
    api/        the routes
    dashboard/  the page for people, a client of those

settling.py does what follows from a change, reports.py has what is shown of a run; service.py is all of it as one
object. Who may import whom is said in
docs/design.md and checked by tests/test_imports.py.
"""
