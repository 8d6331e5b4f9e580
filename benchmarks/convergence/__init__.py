"""The table of this field: what DiLoCo costs in perplexity beside synchronous training, and in bytes.

    python -m benchmarks.convergence [--quick] [--json] [--only ROW …] [--seeds 0 1 2] [--results FILE]

Each row is a real run on the standard library's text: a coordinator and its workers, each a process, the model `tiny`,
3000 inner steps of 8 sequences of 64 bytes per worker. A synchronous row is one worker whose batch is that of all
workers, and whose outer step only takes its parameters over: what a cluster with per-step all-reduce computes. Nothing
in a run depends on timing.

What a row has found is appended to FILE at once, and a row that is in it is not run again: so the benchmark goes on
where it was ended, and on another machine. docs/convergence.md is written from it (python -m docs.write_convergence).
"""
