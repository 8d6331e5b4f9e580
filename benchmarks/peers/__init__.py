"""One sync of other systems, compared with Outerstep's and gloo's: `python -m benchmarks.peers`.

__main__.py       the command: prepares the environments, runs one system after another, prints
environments.py   a virtual environment per peer, from requirements/, in a cache folder; running commands in a separate
                  network namespace
comparison.py     the systems' reports as rows, a table and a JSON document (pure)
*_peer.py         one sync of that peer, run in its environment; they share deltas.py and import nothing of Outerstep
"""
