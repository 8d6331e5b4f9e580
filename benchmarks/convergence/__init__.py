"""DiLoCo compared with synchronous training: its cost in perplexity, and its saving in bytes.

    python -m benchmarks.convergence [--quick] [--json] [--only ROW …] [--seeds 0 1 2] [--steps 3000]
        [--results FILE]

Each row is a real run on the standard library's text: a coordinator and its workers, each a process, the model `tiny`,
3000 inner steps of 8 sequences of 64 bytes per worker. A synchronous row is one worker with the batch of all workers
and an outer step that only adopts its parameters, as a cluster with per-step all-reduce would compute. Nothing in a run
depends on timing.

Each result is appended to FILE at once, and a row with a result is not run again. So the benchmark can be interrupted
and resumed, also on another machine. docs/convergence.md is generated from FILE (python -m docs.write_convergence).
"""
