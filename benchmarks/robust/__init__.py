"""The quality that hostile and broken workers cost: `python -m benchmarks.robust --help`.

attacks.py    the attacks
training.py   a run under attack, in one process
timing.py     the time of judging and of each rule
"""
