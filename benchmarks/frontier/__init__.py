"""How much loss each saving of bytes costs: the frontier, by codec, H, number of rounds and outer optimizer.

    python -m benchmarks.frontier [--steps 3000] [--only ROW …] [--seeds 0] [--jobs 1] [--device cpu]
        [--results FILE] [--json]

Eight workers train the model `tiny` with Muon on the standard library's sources, as in `benchmarks.convergence`, but in
one process and in plain torch (model.py, training.py): for exploration. What a page claims is measured again with real
workers there. `loss` is held out, nats per byte; `mean of 8` that of the mean of the last eight states, for synchronous
training taken every 50 steps. Bytes are what a worker sends and receives in all, relative to a ring all-reduce of fp32
gradients at every step. Results are appended to docs/frontier.jsonl, and rows that are there are not run again.
"""
