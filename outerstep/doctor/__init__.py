"""`outerstep doctor`: whether this box can train a run, found out without joining it.

`examining.py` has the order of the checks. Each check is two functions: one that looks, with whatever it has to ask,
and one that judges what was seen, which is pure and returns findings. Nothing is changed on the coordinator, nor in the
worker's state directory.
"""
