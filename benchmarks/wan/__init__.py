"""The time of a sync over long lines, compared with the line's limit: `python -m benchmarks.wan`.

__main__.py   the command, and its tables
rows.py       the measured lines, their limits and targets (pure)
measuring.py  a coordinator and workers behind their lines; the measurements of a row, and of training
plain.py      a plain TCP transfer of the same size, both ends
changing.py   syncs over a line that changes
worker.py     a worker: a process behind its line that takes orders (harness/remote_process.py)
"""
