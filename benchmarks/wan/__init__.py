"""One sync over long lines against what the line allows: `python -m benchmarks.wan`.

__main__.py   the command: row after row
rows.py       the lines that are measured, their limits and targets (pure)
measuring.py  a coordinator, workers behind their lines, and what one row is made of
plain.py      one TCP transfer of as many bytes, both ends of it
training.py   the share of the workers' time that is left for inner steps
changing.py   syncs over a line that changes
worker.py     a worker: a process behind its line, which takes orders (harness/orders.py)
peers.py      torchft and hivemind over the same lines
showing.py    tables
"""
