"""The quality that faults cost: DiLoCo with 8 workers in one process; some workers are late or absent.

    python -m benchmarks.faults [--quick] [--json] [--seed 0] [--only SCENARIO ...]

There is no network, but the parts are the real ones, with the defaults of a run spec: the model `tiny` on the standard
library's sources, the worker's inner step, codecs, carry and outer step, the coordinator's mean. Only which workers are
late or absent is random.

  clean       every contribution arrives; waiting for the slowest worker gives the same result
  come and go every worker is late in one round of eight, and sometimes leaves for some rounds, an eighth of all
              rounds; its carried work is then lost, and it rejoins with a cold inner optimizer
  dropped     every contribution misses its round with probability 1/2, and its worker then
    carried   continues from θ_new with the part of its work that the mean lacks, like `outerstep worker`
    kept      continues from its own parameters, without the delta, as in the DiLoCo paper (arXiv 2311.08105, section 3)
    forgotten continues from θ_new: its work is lost
  late        one worker misses every round, or each with probability 1/2, and carries its work
  auto H      the workers' speeds range from 1 to 4, and the inner steps of a round are proportional

"Left out, shortened, harmful" counts the contributions that the coordinator's screening would have left out or
shortened, and those without which the held-out loss would be clearly lower (coordinator/trust/leaving_out.py, in every
round). All of these workers are honest, so it should leave out none and find none harmful; neither is applied here.

Perplexity is exp of the held-out loss, nats per byte. Time is virtual: a round lasts until the slowest worker has done
its inner steps; 1 is a round of H steps at mean speed. Synchronisation takes no time.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coordinator.aggregation.mean import aggregate
from coordinator.run import step_rates
from coordinator.trust.leaving_out import FEWEST, harm
from harness.screening import Screening
from protocol.fragments import plan_fragments
from protocol.messages import WithoutLosses, WithoutReport
from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import SyncSpec
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Contributor, DeltaHeader, Payload, pack_header
from worker.box import PROBE_TOKENS
from worker.codecs import pack_fragment, unpack_payload
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.inner.loss import mean_loss
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.schedules import Schedule
from worker.inner.step import clip_gradients
from worker.models.building import build_model
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.parameters import tensor_specs
from worker.state.work import Carry, Contribution, Missed

WORKERS = 8
CPU = torch.device("cpu")
SPEEDS = np.linspace(1.0, 4.0, WORKERS) / 2.5  # inner steps per unit of time: from 1 to 4, then 1 on average

SPEC = """
name = "faults"
seed = {seed}
[model]
preset = "tiny"
[data]
sequence_length = {sequence_length}
[inner]
batch_size = {batch_size}
warmup_steps = {warmup_steps}
[sync]
wait = "always"
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = 50_000
[evaluation]
max_tokens = {evaluation_tokens}
"""


@dataclass(frozen=True)
class Size:
    """The size of a run."""

    rounds: int
    inner_steps: int
    batch_size: int
    sequence_length: int
    warmup_steps: int
    evaluation_tokens: int

    def spec(self, seed: int) -> RunSpec:
        return parse_spec(SPEC.format(seed=seed, **asdict(self)))


FULL = Size(40, 50, 8, 64, 100, 131_072)
QUICK = Size(6, 10, 4, 32, 20, 16_384)  # shows only that it works

# The workers of `present` that miss a round; never all, as a round needs one contribution to close.
Late = Callable[[set[int], np.random.Generator], set[int]]


def none_late(present: set[int], draw: np.random.Generator) -> set[int]:
    return set()


def each_with(probability: float) -> Late:
    def late(present: set[int], draw: np.random.Generator) -> set[int]:
        while True:
            missing = present & set(np.flatnonzero(draw.random(WORKERS) < probability).tolist())
            if missing != present:
                return missing

    return late


def the_last_at_times(present: set[int], draw: np.random.Generator) -> set[int]:
    return the_last(present, draw) if draw.random() < 0.5 else set()


def the_last(present: set[int], draw: np.random.Generator) -> set[int]:
    return {WORKERS - 1}


def all_of_them(before: set[int], draw: np.random.Generator) -> set[int]:
    return set(range(WORKERS))


def some_of_them(before: set[int], draw: np.random.Generator) -> set[int]:
    """Let one of 21 workers leave per round, and one of 3 absent ones rejoin: an eighth is absent, never all."""
    while True:
        drawn = draw.random(WORKERS)
        present = {worker for worker in range(WORKERS) if drawn[worker] < (20 / 21 if worker in before else 1 / 3)}
        if present:
            return present


@dataclass(frozen=True)
class Scenario:
    """A scenario. `late`: the workers that miss a round. `then`: what such a worker continues from. `present`: the
    workers of a round, from those of the round before. `auto`: True if H is proportional to each worker's speed."""

    late: Late = none_late
    then: Literal["carried", "kept", "forgotten"] = "carried"
    present: Callable[[set[int], np.random.Generator], set[int]] = all_of_them
    auto: bool = False

    def inner_steps(self, sync: SyncSpec) -> list[int]:
        """Return each worker's inner steps per round."""
        if not self.auto:
            return [sync.inner_steps] * WORKERS
        fastest = float(SPEEDS.max())
        h = round(sync.inner_steps * fastest)  # so a round takes as long as H inner steps at mean speed
        return [step_rates.inner_steps(h, speed, fastest) for speed in SPEEDS.tolist()]


CLEAN = "clean"
SCENARIOS = {
    CLEAN: Scenario(),
    "come and go": Scenario(each_with(1 / 8), present=some_of_them),
    "dropped 50 %, carried": Scenario(each_with(1 / 2)),
    "dropped 50 %, kept": Scenario(each_with(1 / 2), "kept"),
    "dropped 50 %, forgotten": Scenario(each_with(1 / 2), "forgotten"),
    "one of 8 late at times": Scenario(the_last_at_times),
    "one of 8 always late": Scenario(the_last),
    "speeds 1 to 4, auto H": Scenario(auto=True),
}

TARGETS = {
    "come and go": "at most +1 %",
    "dropped 50 %, carried": "at most +2.1 %",
    "one of 8 late at times": "at most +0.5 %",
    "one of 8 always late": "at most +0.5 %",
    "speeds 1 to 4, auto H": "2 times as fast",
}


class Replica:
    """A worker: a model, its inner optimizer, and the part of its work that is in no delta yet."""

    def __init__(self, spec: RunSpec, data: TextData) -> None:
        self.spec, self.data = spec, data
        self.model = build_model(spec, CPU)
        self.parameters = list(self.model.parameters())
        self.layout = plan_fragments(tensor_specs(self.model), spec.sync.fragment_elements)
        self.fragments = Fragments(self.model, self.layout)
        self.join()
        self.warmup_left = 0

    def join(self) -> None:
        """Start with a cold inner optimizer and no carried work."""
        self.optimizers = build_inner_optimizers(self.model, self.spec.inner)
        self.schedule = Schedule(self.spec, self.optimizers)
        self.carry = Carry()
        self.warmup_left = self.spec.inner.joiner_warmup_steps

    def begin(self, state: OuterState) -> None:
        """Start from the global parameters plus its own progress that is not in them yet."""
        for p, theta in enumerate(state.theta):
            self.fragments.rebase(p, theta, self.carry.part(p))

    def train(self, units: range, first_step: float, steps_per_unit: float = 1.0) -> float:
        """Take one inner step per unit, like `worker/train.py`; return the mean loss. The learning rate is that of
        global step `first_step`, and `steps_per_unit` steps later for each further unit."""
        self.model.train()
        losses = []
        for index, unit in enumerate(units):
            warm = self.spec.inner.joiner_warmup_steps + 1
            self.schedule.set(int(first_step + index * steps_per_unit), 1 - self.warmup_left / warm)
            self.warmup_left = max(self.warmup_left - 1, 0)
            loss = mean_loss(self.model, self.data.unit(unit))
            loss.backward()
            clip_gradients(self.parameters, self.spec.inner)
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def collect(self, round_number: int, state: OuterState, units: range, loss: float) -> list[Contribution]:
        """Return the contributions: each fragment's pseudo-gradient and its units."""
        carry = self.carry
        deltas = [self.fragments.pseudo_gradient(p, theta, carry.part(p)) for p, theta in enumerate(state.theta)]
        return [
            Contribution(
                round=round_number,
                fragment=p,
                units=[*carry.units, [units.start, units.stop]],
                weight=len(units),
                inner_steps=carry.inner_steps + len(units),
                loss=loss,
                norm=float(torch.linalg.vector_norm(delta)),
                delta=delta,
                late=carry.late.get(p),
            )
            for p, delta in enumerate(deltas)
        ]

    def carry_on(self, work: list[Contribution], means: dict[int, Tensor], share: float) -> None:
        """Carry all of the late `work` into the next contributions."""
        late, first = {each.fragment: each.missed(Missed(means[each.fragment], share)) for each in work}, work[0]
        self.carry = Carry(late, first.units, first.weight, first.inner_steps, first.loss)


def contribution(worker: int, work: Contribution, state: OuterState, spec: RunSpec) -> tuple[Payload, int]:
    """Return a worker's contribution to a fragment as the coordinator decodes it, and its weight in tokens."""
    p, frames = work.fragment, pack_fragment(work.delta, spec.sync.upload_codec, zstd=False)
    tokens = work.weight * spec.unit_tokens
    header = ContributionHeader(
        run=spec.name,
        round=work.round,
        fragment=p,
        codec=spec.sync.upload_codec,
        elements=len(work.delta),
        chunk_elements=CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
        worker=f"worker-{worker}",
        base=state.digests[p],
        tokens=tokens,
        inner_steps=work.inner_steps,
        loss=work.loss,
        norm=work.norm,
        units=work.units,
        carried=[],
        carried_share=1.0,
    )
    return Payload.from_bytes(pack_header(header) + b"".join(frames)), tokens


def step(contributions: Sequence[tuple[Payload, int]], p: int, state: OuterState, spec: RunSpec) -> Tensor:
    """Take the outer step with the coordinator's mean, encoded as a delta. Return the decoded delta, float32[n]."""
    headers = [payload.header for payload, _ in contributions]
    frames = aggregate(contributions, spec.sync.download_codec, zstd=False)
    header = DeltaHeader(
        run=spec.name,
        round=headers[0].round,
        fragment=p,
        codec=spec.sync.download_codec,
        elements=headers[0].elements,
        chunk_elements=CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
        base=state.digests[p],
        contributors=[
            Contributor(worker=header.worker, tokens=header.tokens, factor=1.0)
            for header in headers
            if isinstance(header, ContributionHeader)
        ],
    )
    payload = Payload.from_bytes(pack_header(header) + b"".join(frames))
    state.step(p, payload)
    return unpack_payload(payload, torch.device("cpu"), payload.header.elements)


class LeavingOut:
    """Leaves out each contribution to a state in turn, as evaluators do."""

    def __init__(self, spec: RunSpec, data: TextData) -> None:
        self._spec, self._data, self._replica = spec, data, Replica(spec, data)
        self._before = evaluate(self._replica.model, data, PROBE_TOKENS, CPU).loss  # of the last state

    def harmful(self, state: OuterState, sent: Mapping[int, Mapping[int, tuple[Payload, int]]]) -> int:
        """Return how many of the contributions to the last round have harmed `state`. `sent`: by fragment and worker,
        each with its tokens."""
        reached, start = self._losses(state, {}), self._losses(state, {}, ahead=True)
        workers = sent[0] if len(sent[0]) >= FEWEST else {}
        without = {str(worker): _differences(sent, worker) for worker in workers}
        before, self._before = self._before, reached
        if not without:
            return 0
        report = WithoutReport(
            reached=WithoutLosses(loss=reached, without={w: self._losses(state, d) for w, d in without.items()}),
            start=WithoutLosses(
                loss=start, without={w: self._losses(state, d, ahead=True) for w, d in without.items()}
            ),
        )
        return len(harm(report, before))

    def _losses(self, state: OuterState, differences: Mapping[int, Tensor], *, ahead: bool = False) -> float:
        """Return the loss at x, or `ahead` at θ, if the last delta had these differences."""
        outer = self._spec.outer
        step = outer.learning_rate * (1 + outer.momentum if ahead else 1)
        for p in range(len(state)):
            point = state.theta[p].clone() if ahead else state.reached(p)
            self._replica.fragments.rebase(p, point - step * differences.get(p, 0.0), None)
        return evaluate(self._replica.model, self._data, PROBE_TOKENS, CPU).loss


def _differences(sent: Mapping[int, Mapping[int, tuple[Payload, int]]], without: int) -> dict[int, Tensor]:
    """Return the mean without a worker minus the mean, by fragment."""
    found = {}
    for p, each in sent.items():
        values = {w: unpack_payload(payload, CPU, payload.header.elements) for w, (payload, _) in each.items()}
        total = sum(tokens for _, tokens in each.values())
        mean = sum(values[w] * (tokens / total) for w, (_, tokens) in each.items())
        own = each[without][1]
        found[p] = (mean - values[without]) * (own / (total - own))
    return found


@dataclass(frozen=True)
class Result:
    """A result. `loss`: held-out, nats per byte. `tokens`: trained on; `counted`: those in a delta. `time`: virtual.
    `left_out`, `shortened`: how many of the `judged` contributions the screening would leave out or shorten. `harmful`:
    how many contributions would be found to have harmed the model."""

    loss: float
    tokens: int
    counted: int
    time: float
    seconds: float
    judged: int
    left_out: int
    shortened: int
    harmful: int


def run(scenario: Scenario, spec: RunSpec, data: TextData) -> Result:
    """Run all rounds."""
    began = time.perf_counter()
    replicas = [Replica(spec, data) for _ in range(WORKERS)]
    state = OuterState(replicas[0].layout, spec.outer, pin_memory=False)
    for p in range(len(state)):
        state.set(p, replicas[0].fragments.gather(p), None)

    draw = np.random.default_rng([spec.seed, 0])
    inner_steps = scenario.inner_steps(spec.sync)
    next_unit = tokens = counted = 0
    virtual, screening, factors = 0.0, Screening(spec), list[float]()
    leaving_out, harmful = LeavingOut(spec, data), 0
    present = set(range(WORKERS))
    kept: set[int] = set()  # workers that continue from their own parameters
    for number in range(spec.sync.rounds):
        before, present = present, scenario.present(present, draw) if number else present
        for worker in present - before:
            replicas[worker].join()
        works = {}
        for worker in sorted(present):
            replica, steps = replicas[worker], inner_steps[worker]
            if worker not in kept:
                replica.begin(state)
            units = range(next_unit, next_unit + steps)
            next_unit = units.stop
            loss = replica.train(units, number * spec.sync.inner_steps, spec.sync.inner_steps / steps)
            works[worker] = replica.collect(number, state, units, loss)
            tokens += steps * spec.unit_tokens
        late = scenario.late(present, draw)
        on_time = sorted(present - late)
        means, sent = {}, dict[int, Mapping[int, tuple[Payload, int]]]()
        for p in range(len(state)):
            in_time = {worker: contribution(worker, works[worker][p], state, spec) for worker in on_time}
            carries = {worker: works[worker][p].late for worker in on_time}
            carried = {worker: len(carry.rounds) for worker, carry in carries.items() if carry is not None}
            factors += screening.judge(p, in_time, carried).values()
            means[p], sent[p] = step(list(in_time.values()), p, state, spec), in_time
        harmful += leaving_out.harmful(state, sent)
        for worker, work in works.items():
            if worker not in late:
                counted += sum(stop - first for first, stop in work[0].units) * spec.unit_tokens
            if scenario.then == "carried":
                replicas[worker].carry = Carry()
                if worker in late:
                    replicas[worker].carry_on(work, means, len(on_time) / len(present))
        kept = late if scenario.then == "kept" else set()
        virtual += max(inner_steps[worker] / SPEEDS[worker] for worker in present)

    final = Replica(spec, data)
    for p in range(len(state)):
        final.fragments.rebase(p, state.reached(p), None)
    loss = evaluate(final.model, data, spec.evaluation.max_tokens, CPU).loss
    in_rounds = float(virtual) / spec.sync.inner_steps
    left_out, shortened = factors.count(0.0), sum(0 < factor < 1 for factor in factors)
    seconds = time.perf_counter() - began
    return Result(loss, tokens, counted, in_rounds, seconds, len(factors), left_out, shortened, harmful)


def measure(size: Size, seed: int, names: Sequence[str]) -> dict[str, Any]:
    spec = size.spec(seed)
    data = TextData(spec)
    results: dict[str, Result] = {}
    for name in names:
        results[name] = run(SCENARIOS[name], spec, data)
        print(f"{name}: {results[name].loss:.4f} after {results[name].seconds:.0f} s", file=sys.stderr, flush=True)
    clean = results[CLEAN]
    return {
        "benchmark": "faults",
        "seed": seed,
        "workers": WORKERS,
        **asdict(size),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "scenarios": {
            name: {
                **asdict(result),
                "perplexity": math.exp(result.loss),
                "perplexity_change": math.exp(result.loss - clean.loss) - 1,
                "speedup": clean.time / result.time,
            }
            for name, result in results.items()
        },
    }


def table(result: dict[str, Any]) -> Table:
    steps = f"{result['rounds']} rounds of {result['inner_steps']} inner steps"
    shown = Table(title=f"{result['workers']} workers, {steps}; seed {result['seed']}", title_justify="left")
    shown.add_column("scenario")
    columns = ("loss", "perplexity", "against clean", "target", "tokens that counted", "time", "times as fast")
    for name in (*columns, "left out, shortened, harmful"):
        shown.add_column(name, justify="right")
    for name, row in result["scenarios"].items():
        shown.add_row(
            name,
            f"{row['loss']:.4f}",
            f"{row['perplexity']:.4f}",
            f"{row['perplexity_change']:+.2%}",
            TARGETS.get(name, ""),
            f"{row['counted'] / row['tokens']:.0%}",
            f"{row['time']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['left_out']}, {row['shortened']} of {row['judged']}; {row['harmful']}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="what late, lost and leaving workers cost in quality")
    parser.add_argument("--quick", action="store_true", help="a tenth of the training, which shows only that it works")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the faults")
    others = [name for name in SCENARIOS if name != CLEAN]
    parser.add_argument("--only", nargs="+", choices=others, default=others, metavar="SCENARIO", help="beside clean")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(QUICK if arguments.quick else FULL, arguments.seed, [CLEAN, *arguments.only])
    Console(width=132).print(table(result))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
