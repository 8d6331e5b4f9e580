"""`outerstep run`: the commands on one run."""
