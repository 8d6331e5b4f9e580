"""The coordinator: membership, rounds, aggregation and the REST interface. Imports neither torch nor the worker.

    store/      what outlives the process: files, database, tables, tokens
    tuning/     what only makes it faster
    runs/       the control plane: rounds.py (when a round closes, pure), live_run.py (a run in memory, and its one way
                to change), membership, assigning, units, opening, closing
    sync/       the data plane, in the order of the data's way: contributing → aggregating → publishing → outer_state
                and checkpointing
    upkeep/     after a start (restoring.py), corrupt files, a full disk, a database from a backup
    api/        the shell: routes, and what they show

settling.py does what follows from a change; service.py is all of it as one object. Who may import whom is said in
docs/design.md and checked by tests/test_imports.py.
"""
