"""Training data as numbered work units: each is a batch that depends on nothing but the set, the seed and its number.

Text (`sources/`) is tokenised into a token set (`tokens/`), whose shards may be on another machine (`fetching/`).
`order.py` shuffles its sequences, `training_set.py` reads them as batches, and `loader.py` makes those ahead of time.
Start at `open_training_set.py`, which chooses what a run's `data.source` needs.
"""
