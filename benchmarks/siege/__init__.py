"""What attacks on a coordinator cost the honest training beside them.

__main__   the rows, one after the other, and their table
besieged   a coordinator, workers that train on it, and what is measured of them
worker     one honest worker, a process of its own
attacks    the attacks; attacker.py is the process that makes one
"""
