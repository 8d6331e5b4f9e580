"""The coordinator: membership, rounds, aggregation and the REST interface. Imports neither torch nor the worker.

Read in the order of the data's way: `rounds.py` (when a round closes, pure), `live_run.py` (a run in memory),
`membership.py`, `seeding.py`, `assigning.py`, then `contributing.py` → `aggregating.py` → `publishing.py` →
`outer_state.py` and `checkpointing.py`; `restoring.py` after a start, `service.py` around it all, `api/` as the shell.
What may go wrong: `storage.py` (a full disk), `losing.py`, `verifying.py` and `delta_file.py` (spoilt files),
`setting_aside.py` (a database from a backup), `diverging.py`. What the operator does: `steering.py`.
"""
