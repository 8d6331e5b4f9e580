"""`outerstep doctor`: checks whether this machine can train a run, without joining it.

`examine.py` has the order of the checks. Each check is two functions: one that looks and may do I/O, and a pure one
that judges what was seen and returns findings. Nothing is changed on the coordinator or in the worker's state
directory.
"""
