"""One synchronisation of other systems, measured beside Outerstep's and gloo's: `python -m benchmarks.peers`.

__main__.py       the command: prepares the environments, runs one system after the other, prints
environments.py   a virtual environment per peer, from requirements/, in a cache folder
running.py        a system's command in a network namespace of its own, down to its last line, which is JSON
comparison.py     the systems' reports as rows, a table and a JSON document (pure)
*_peer.py         one sync of that peer, run in its own environment; they share deltas.py and nothing of Outerstep
"""
