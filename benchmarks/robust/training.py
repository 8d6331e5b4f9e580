"""DiLoCo with 8 workers in one process, some of whom attack; judged, averaged and stepped by the real parts."""

import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.faults import CPU, WORKERS, Replica, contribution
from benchmarks.robust.attacks import ATTACKS, AWAY, ONCE, ONCE_ONLY
from coordinator.screening.judging import Evidence, Judgement, judge
from coordinator.screening.measuring import find
from coordinator.sync.aggregating import aggregate
from coordinator.sync.screened import EARLIER_ROUNDS
from protocol.codecs import CODECS
from protocol.digest import digest
from protocol.errors import CodecError
from protocol.spec.run import RunSpec, parse_spec
from protocol.wire import CHUNK_ELEMENTS, DeltaHeader, Payload, pack_header
from worker.codecs import round_trip
from worker.data.text import TextData
from worker.inner.evaluation import evaluate
from worker.state.outer_state import OuterState
from worker.state.work import Carry, Contribution

SPEC = """
name = "robust"
seed = {seed}
[model]
preset = "tiny"
[data]
sequence_length = {sequence_length}
[inner]
batch_size = {batch_size}
warmup_steps = {warmup_steps}
[outer]
momentum = {momentum}
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = 50_000
upload_codec = "{codec}"
aggregation = "{rule}"
[evaluation]
max_tokens = {evaluation_tokens}
"""


@dataclass(frozen=True)
class Size:
    rounds: int
    inner_steps: int
    batch_size: int
    sequence_length: int
    warmup_steps: int
    evaluation_tokens: int

    def spec(self, seed: int, rule: str, codec: str) -> RunSpec:
        momentum = 0.0 if CODECS[codec].add_weight is not None else 0.9
        return parse_spec(SPEC.format(seed=seed, rule=rule, codec=codec, momentum=momentum, **asdict(self)))


FULL = Size(16, 25, 8, 64, 40, 65_536)
QUICK = Size(5, 2, 2, 32, 2, 4096)


class History:
    """What was found in earlier rounds, as the coordinator keeps it; by fragment, and by worker."""

    def __init__(self) -> None:
        self._references: dict[int, list[float]] = {}
        self._ratios: dict[tuple[int, int], list[float]] = {}

    def usual(self, p: int) -> float | None:
        return _median(self._references.get(p))

    def usual_of(self, p: int, worker: int) -> float | None:
        return _median(self._ratios.get((p, worker)))

    def add(self, p: int, judgement: Judgement) -> None:
        if judgement.reference is None:
            return
        self._references.setdefault(p, []).append(judgement.reference)
        for worker, verdict in judgement.verdicts.items():
            if verdict.factor > 0 and verdict.ratio is not None:
                self._ratios.setdefault((p, int(worker)), []).append(verdict.ratio)


def _median(known: list[float] | None) -> float | None:
    return statistics.median(known[-EARLIER_ROUNDS:]) if known else None


@dataclass(frozen=True)
class Result:
    """The held-out loss, None where the run ended because no worker could encode its work any more; how many
    contributions of honest workers did not count in full; how many of hostile ones did not count at all, and of how
    many."""

    loss: float | None
    refused: int
    left_out: int
    attacking: int


def run(spec: RunSpec, data: TextData, attack: str | None, hostile: int) -> Result:
    """Train a run of which the first `hostile` of the workers attack, or are away; None: all are honest."""
    training = Training(spec, data, attack, hostile)
    loss = None
    with suppress(CodecError):
        for number in range(spec.sync.rounds):
            training.play(number)
        loss = training.held_out_loss()
    return Result(loss, training.refused, training.left_out, training.attacking)


class Training:
    """A run with an attack upon it, as in `run`."""

    def __init__(self, spec: RunSpec, data: TextData, attack: str | None, hostile: int) -> None:
        self.spec, self.data, self.attack, self.hostile = spec, data, attack, hostile
        replicas = [Replica(spec, data) for _ in range(WORKERS)]
        self.state = OuterState(replicas[0].layout, spec.outer, pin_memory=False)
        for p in range(len(self.state)):
            self.state.set(p, replicas[0].fragments.gather(p), None)
        self.replicas = {w: each for w, each in enumerate(replicas) if attack != AWAY or w >= hostile}
        self.draw, self.history, self.next_unit = np.random.default_rng([spec.seed, 1]), History(), 0
        self.refused = self.left_out = self.attacking = 0

    def play(self, number: int) -> None:
        """Play a round."""
        works = {worker: self._trained(replica, number) for worker, replica in self.replicas.items()}
        attack = ATTACKS.get(self.attack or "")
        if self.attack == ONCE_ONLY and number != ONCE:
            attack = None
        codec, carries = self.spec.sync.upload_codec, {worker: dict[int, Tensor]() for worker in works}
        for p in range(len(self.state)):
            own = torch.stack([work[p].delta for work in works.values()])
            deltas = own.clone()
            if attack is not None:
                deltas[: self.hostile] = attack(own, self.hostile, self.draw)
            sent = {}
            for (worker, work), delta, honest in zip(works.items(), deltas, own, strict=True):
                sent[worker] = contribution(worker, replace(work[p], delta=delta), self.state, self.spec)
                if CODECS[codec].error_feedback:  # of its own work, or what is a million times too long would add up
                    carries[worker][p] = honest - round_trip(honest, codec)
            for worker, factor in self._step(sent, p).items():
                hostile = attack is not None and worker < self.hostile
                self.attacking += hostile
                self.left_out += hostile and factor == 0
                self.refused += not hostile and factor < 1
        for worker, unsent in carries.items():
            self.replicas[worker].carry = Carry(unsent=unsent)

    def held_out_loss(self) -> float:
        final = Replica(self.spec, self.data)
        for p in range(len(self.state)):
            final.fragments.rebase(p, self.state.reached(p), None)
        return evaluate(final.model, self.data, self.spec.evaluation.max_tokens, CPU).loss

    def _trained(self, replica: Replica, number: int) -> list[Contribution]:
        replica.begin(self.state)
        units = range(self.next_unit, self.next_unit + self.spec.sync.schedule_steps)
        self.next_unit = units.stop
        loss = replica.train(units, number * self.spec.sync.schedule_steps)
        return replica.collect(number, self.state, units, loss)

    def _step(self, sent: dict[int, tuple[Payload, int]], p: int) -> dict[int, float]:
        """Judge, aggregate and step, as the coordinator does. Return the factors by worker."""
        sync, history, (first, _) = self.spec.sync, self.history, next(iter(sent.values()))
        key, total = digest(f"{first.header.round}/{p}".encode()), sum(tokens for _, tokens in sent.values())
        evidence = {}
        for worker, (payload, tokens) in sent.items():
            found, usual = find(payload, key), history.usual_of(p, worker)
            share = tokens / total
            evidence[str(worker)] = Evidence(found.measure, share, found.units, found.carried, usual, found.worked)
        judgement = judge(evidence, history.usual(p), rule=sync.aggregation)
        history.add(p, judgement)
        factors = {worker: judgement.verdicts[str(worker)].factor for worker in sent}
        counting = [worker for worker, factor in factors.items() if factor > 0]
        frames = aggregate(
            [sent[worker] for worker in counting],
            sync.download_codec,
            zstd=False,
            rule=sync.aggregation,
            factors=[factors[worker] for worker in counting],
        )
        delta = DeltaHeader(
            run=self.spec.name,
            round=first.header.round,
            fragment=p,
            codec=sync.download_codec,
            elements=first.header.elements,
            chunk_elements=CHUNK_ELEMENTS,
            frame_bytes=[len(frame) for frame in frames],
            base=self.state.digests[p],
            contributors=[],
        )
        self.state.step(p, Payload.from_bytes(pack_header(delta) + b"".join(frames)))
        return factors
