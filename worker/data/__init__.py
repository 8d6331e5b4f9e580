"""What is trained on, in numbered work units, each a batch that is a pure function of its number.

The way of the data: text (`sources/`) becomes a token set (`making/`, `tokens/`), whose shards may be far away
(`fetching/`); its sequences get an order (`order.py`, `sequences.py`); batches are made ahead of need (`loader.py`).
`opening.py` finds out which of this a run needs.
"""
