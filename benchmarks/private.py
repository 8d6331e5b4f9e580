"""The quality that [privacy] costs: DiLoCo in one process with workers that clip their contributions and add noise.

    python -m benchmarks.private [--quick] [--json] [--seed 0] [--workers 4] [--clip 5.0] [--noise 0 0.001 0.01]

There is no network, but the parts are the real ones: the model `tiny` on the standard library's sources, the worker's
inner step, clipping, noise and codec, the coordinator's mean. `loss` is the held-out loss of the last state, nats per
byte; `norm` the median norm of a round's pseudo-gradient before it is clipped; epsilon is of one worker, against an
observer of its contributions, after all rounds at delta = 1e-6; it needs `pip install 'outerstep[privacy]'`.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.faults import CPU, Replica, Size, contribution, step
from outerstep.privacy import epsilon
from protocol.spec.run import RunSpec
from protocol.spec.sections import PrivacySpec
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.privacy.noise import with_noise
from worker.privacy.release import PrivateRelease, Spent
from worker.state.outer_state import OuterState
from worker.state.work import Contribution

FULL = Size(rounds=10, inner_steps=10, batch_size=4, sequence_length=64, warmup_steps=10, evaluation_tokens=32_768)
QUICK = Size(rounds=2, inner_steps=2, batch_size=2, sequence_length=32, warmup_steps=2, evaluation_tokens=4096)


@dataclass(frozen=True)
class Result:
    """A result. `noise`: the multiplier, None without clipping. `epsilon`: None if unbounded."""

    workers: int
    noise: float | None
    loss: float
    norm: float
    epsilon: float | None


class Protected:
    """A worker's protection with reproducible noise, which protects nothing."""

    def __init__(self, spec: PrivacySpec, elements: list[int], seed: int) -> None:
        self._spec, self._fragments = spec, range(len(elements))
        spent = Spent(None, "benchmark", sum(elements))
        self._protection = PrivateRelease(spec, elements, spent, draw=random.Random(seed).randbytes)

    def sent(self, work: list[Contribution]) -> list[Contribution]:
        """Return the contribution of one round's work."""
        made = self._protection.together(work, self._fragments)
        return [replace(each, delta=self._with_noise(each)) for each in made]

    def _with_noise(self, each: Contribution) -> torch.Tensor:
        return (
            with_noise(each.delta, self._spec.noise, bytes.fromhex(each.noise_key)) if self._spec.noise else each.delta
        )


def run(spec: RunSpec, data: TextData, workers: int, privacy: PrivacySpec | None) -> Result:
    """Run all rounds."""
    replicas = [Replica(spec, data) for _ in range(workers)]
    elements, steps = replicas[0].layout.elements, spec.sync.inner_steps
    seeds = (spec.seed << 32 | index for index in range(workers))
    protected = [Protected(privacy, elements, seed) for seed in seeds] if privacy else []
    state = OuterState(replicas[0].layout, spec.outer, pin_memory=False)
    for p in range(len(state)):
        state.set(p, replicas[0].fragments.gather(p), None)
    norms, next_unit = list[float](), 0
    for number in range(spec.sync.rounds):
        works = []
        for index, replica in enumerate(replicas):
            replica.begin(state)
            units = range(next_unit, next_unit + steps)
            next_unit = units.stop
            loss = replica.train(units, number * steps)
            work = replica.collect(number, state, units, loss)
            norms.append(math.hypot(*(each.norm for each in work)))
            works.append(protected[index].sent(work) if protected else work)
        for p in range(len(state)):
            step([contribution(index, work[p], state, spec) for index, work in enumerate(works)], p, state, spec)
    final = Replica(spec, data)
    for p in range(len(state)):
        final.fragments.rebase(p, state.reached(p), None)
    loss = evaluate(final.model, data, spec.evaluation.max_tokens, CPU).loss
    spent = epsilon(privacy, spec.sync.rounds) if privacy else math.inf
    noise = privacy.noise_multiplier if privacy else None
    return Result(workers, noise, loss, statistics.median(norms), None if math.isinf(spent) else spent)


def table(results: Sequence[Result], clip: float, size: Size) -> Table:
    title = f"{size.rounds} rounds of {size.inner_steps} inner steps, clip_norm = {clip:g}"
    shown = Table("workers", "noise_multiplier", "loss", "norm", "epsilon", title=title, title_justify="left")
    for each in results:
        noise = "no [privacy]" if each.noise is None else f"{each.noise:g}"
        shown_epsilon = "unbounded" if each.epsilon is None else f"{each.epsilon:,.3g}"
        shown.add_row(str(each.workers), escape(noise), f"{each.loss:.4f}", f"{each.norm:.3g}", shown_epsilon)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="what clipping and noise cost in quality")
    parser.add_argument("--quick", action="store_true", help="a run that shows only that it works")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the noise")
    parser.add_argument("--workers", nargs="+", type=int, default=[4])
    parser.add_argument("--clip", type=float, default=5.0, help="clip_norm")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.001, 0.01], help="noise_multiplier")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if arguments.quick else FULL
    spec = size.spec(arguments.seed)
    data, results = TextData(spec), list[Result]()
    for workers in arguments.workers:
        for noise in (None, *arguments.noise):
            privacy = None if noise is None else PrivacySpec(clip_norm=arguments.clip, noise_multiplier=noise)
            results.append(run(spec, data, workers, privacy))
            print(results[-1], file=sys.stderr, flush=True)
    Console(width=120).print(table(results, arguments.clip, size))
    if arguments.json:
        print(json.dumps({"benchmark": "private", "clip": arguments.clip, "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    main()
