"""What hostile and broken workers cost, in quality; `python -m benchmarks.robust --help`.

attacks.py    what they send
training.py   a run with an attack upon it, in one process
timing.py     how long judging and each rule take
"""
