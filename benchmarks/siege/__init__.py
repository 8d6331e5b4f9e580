"""What attacks on a coordinator cost the honest training that goes on meanwhile.

__main__   runs the rows one after another and prints their table
besieged   a coordinator with workers that train, and the measurements
worker     an honest worker, as a separate process
attacks    the attacks; run as a module, the process that performs one
"""
