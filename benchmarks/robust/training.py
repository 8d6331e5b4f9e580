"""DiLoCo in one process with some attacking workers; the real parts judge, average and step."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.faults import CPU, WORKERS, Replica, contribution
from benchmarks.robust.attacks import ATTACKS, AWAY
from coordinator.aggregation.mean import aggregate
from harness.screening import Screening
from protocol.codecs import CODECS
from protocol.errors import CodecError
from protocol.spec.run import RunSpec, parse_spec
from protocol.wire import CHUNK_ELEMENTS, DeltaHeader, Payload, pack_header
from worker.codecs import round_trip, unpack_payload
from worker.data.open_training_set import TextData
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
wait = "always"
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


@dataclass(frozen=True)
class Result:
    """A result. `loss`: held-out, None if the run ended because no worker could encode its work any more. `refused`:
    honest contributions that did not count in full. `left_out`: hostile ones that did not count, of `attacking`."""

    loss: float | None
    refused: int
    left_out: int
    attacking: int


def run(spec: RunSpec, data: TextData, attack: str | None, hostile: int, workers: int = WORKERS) -> Result:
    """Train a run whose first `hostile` workers attack or are absent; `attack` None: all are honest."""
    training = Training(spec, data, attack, hostile, workers)
    loss = None
    with suppress(CodecError):
        for number in range(spec.sync.rounds):
            training.play(number)
        loss = training.held_out_loss()
    return Result(loss, training.refused, training.left_out, training.attacking)


class Training:
    """A run under attack, as in `run`."""

    def __init__(self, spec: RunSpec, data: TextData, attack: str | None, hostile: int, workers: int) -> None:
        self.spec, self.data, self.hostile = spec, data, hostile
        self.away, self.attack = attack == AWAY, ATTACKS.get(attack or "")
        self.replicas = [Replica(spec, data) for _ in range(workers)]
        self.state = OuterState(self.replicas[0].layout, spec.outer, pin_memory=False)
        for p in range(len(self.state)):
            self.state.set(p, self.replicas[0].fragments.gather(p), None)
        self.draw, self.screening, self.next_unit = np.random.default_rng([spec.seed, 1]), Screening(spec), 0
        self.deltas = [list[Tensor]() for _ in range(len(self.state))]  # published, by fragment
        self.missed = 0  # rounds in a row, by the hostile workers
        self.refused = self.left_out = self.attacking = 0

    def play(self, number: int) -> None:
        """Run a round. All workers train, so the honest ones get the same units whatever the others do."""
        works = [self._trained(replica, number) for replica in self.replicas]
        attack = self.attack if self.attack is not None and self.attack.is_on(number) else None
        absent = self.away or (attack is not None and attack.misses(number))
        codec = self.spec.sync.upload_codec
        carries = [dict[int, Tensor]() for _ in works]
        for p in range(len(self.state)):
            own = torch.stack([work[p].delta for work in works])
            deltas = own.clone()
            if attack is not None:
                deltas[: self.hostile] = attack.values(own, self.hostile, self.deltas[p], self.draw)
            sent = {}
            for worker, work in enumerate(works):
                if worker >= self.hostile or not absent:
                    made = replace(work[p], delta=deltas[worker])
                    sent[worker] = contribution(worker, made, self.state, self.spec)
                if CODECS[codec].error_feedback:  # of its honest work, or huge errors would add up
                    carries[worker][p] = own[worker] - round_trip(own[worker], codec)
            for worker, factor in self._step(sent, p).items():
                hostile = attack is not None and worker < self.hostile
                self.attacking += hostile
                self.left_out += hostile and factor == 0
                self.refused += not hostile and factor < 1
        self.missed = self.missed + 1 if absent else 0
        for replica, unsent in zip(self.replicas, carries, strict=True):
            replica.carry = Carry(unsent=unsent)

    def held_out_loss(self) -> float:
        final = Replica(self.spec, self.data)
        for p in range(len(self.state)):
            final.fragments.rebase(p, self.state.reached(p), None)
        return evaluate(final.model, self.data, self.spec.evaluation.max_tokens, CPU).loss

    def _trained(self, replica: Replica, number: int) -> list[Contribution]:
        replica.begin(self.state)
        units = range(self.next_unit, self.next_unit + self.spec.sync.inner_steps)
        self.next_unit = units.stop
        loss = replica.train(units, number * self.spec.sync.inner_steps)
        return replica.collect(number, self.state, units, loss)

    def _step(self, sent: dict[int, tuple[Payload, int]], p: int) -> dict[int, float]:
        """Judge, aggregate and step like the coordinator; return the factors by worker."""
        sync, (first, _) = self.spec.sync, next(iter(sent.values()))
        factors = self.screening.judge(p, sent, dict.fromkeys(range(self.hostile), self.missed))
        counting = [worker for worker, factor in factors.items() if factor > 0]
        frames = aggregate(
            [sent[worker] for worker in counting],
            sync.download_codec,
            zstd=False,
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
        payload = Payload.from_bytes(pack_header(delta) + b"".join(frames))
        self.state.step(p, payload)
        self.deltas[p].append(unpack_payload(payload, CPU, first.header.elements))
        return factors
