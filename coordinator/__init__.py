"""The coordinator: membership, rounds, aggregation and the REST interface. It imports neither torch nor the worker.

In the order in which a contribution passes through them:

    server.py           the process: uvicorn around the application of api/app.py, with its middleware and routes
    http/               limits on connections and bodies, authentication, problems, uploads, downloads, long polls
    api/                the routes: each one gathers its parameters, calls a decision below, and returns the result
    service.py          the Coordinator: all runs, tokens and threads as one object
    sync/               the data plane: contributing.py checks and stores a contribution, publishing.py publishes the
                        mean of each closed fragment, outer_state.py takes the outer step, checkpointing.py saves it;
                        settling.py runs after every change: closes fragments, opens the next round, publishes
    aggregation/        the work on a fragment's bytes that this needs, which aggregators can also do: measuring and
                        judging contributions, the mean, the outer step
    rounds/             who takes part: joining and leaving, leases, assignments, reports; opening and closing rounds,
                        and steering the run (pause, resume, drain, stop)
    trust/              what follows from verdicts and held-out losses: the guard, quarantine, leaving out
    run/                a run in memory. Every change goes through `with run.change() as change:` (live_run.py);
                        decide.py decides when a fragment closes, as a pure function; units/ has which work units
                        belong to which worker
    store/              database, blobs, data directory, tokens, the lease of the leader

Outside the path of a request:

    reporting/          what the REST interface shows of a run, and what is wrong now (alerts.py)
    quotas.py, settings.py, process.py
    upkeep/             start-up, damaged files, a full disk, rollback
    backup/             scheduled copies of the database and its blobs, and how to restore them
    notifications/      alerts and events, to webhooks and services
    api/metrics/        for Prometheus
    dashboard/          the web page, a client of the REST interface

docs/design.md says which package may import which; tests/test_imports.py checks it.
"""
