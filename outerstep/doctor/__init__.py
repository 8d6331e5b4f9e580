"""`outerstep doctor`: goes through a worker's start stage by stage, without joining the run, and measures the line.

`examine.py` has the order of the stages. Almost everything that can be wrong is found by the worker's own functions,
whose errors are shown. The run is left as it is; what the worker itself would keep stays: its state directory, and data
that were prepared or fetched.
"""
