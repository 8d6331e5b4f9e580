"""The time to judge and to average the contributions to a fragment, by rule."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.faults import WORKERS
from coordinator.aggregation.mean import aggregate
from coordinator.screening.judging import Evidence, judge
from coordinator.screening.measuring import measure_payload
from protocol.codecs import CODECS
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Payload, pack_frames, pack_header

TIMED = 3


def timed(elements: int, codec: str, rules: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each rule for 8 received contributions of this many elements; and of accepting one
    contribution: `checked` (the check alone) and `found` (with the evidence)."""
    payloads = [_noise(elements, codec, worker) for worker in range(WORKERS)]
    weighted, first = [(payload, 1) for payload in payloads], payloads[0]
    evidence = {f"{w}": Evidence(measure_payload(each, b"key"), 1 / WORKERS, 1.0) for w, each in enumerate(payloads)}

    def aggregated(rule: str) -> None:
        judged = judge(evidence, rule=rule)
        factors = [each.factor for each in judged.verdicts.values()]
        aggregate(weighted, "int8", zstd=True, factors=factors)

    acts: dict[str, Callable[[], object]] = {rule: partial(aggregated, rule) for rule in rules}
    acts |= {"checked": first.check, "found": partial(measure_payload, first, b"key")}
    took: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(TIMED):  # in turn, so that a slow moment of the machine affects all
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            took[name].append(time.perf_counter() - began)
    return {name: min(each) for name, each in took.items()}


def _noise(elements: int, codec: str, seed: int) -> Payload:
    values = (1e-3 * np.random.default_rng(seed).standard_normal(elements)).astype(np.float32)
    frames = pack_frames(values, CODECS[codec], zstd=True)
    header = ContributionHeader(
        run="r",
        round=0,
        fragment=0,
        codec=codec,
        elements=elements,
        chunk_elements=CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
        worker=f"w{seed}",
        base=bytes(32),
        tokens=1,
        inner_steps=1,
        loss=None,
        norm=1.0,
        units=[[0, 1]],
        carried=[],
        carried_share=1.0,
    )
    return Payload.from_bytes(pack_header(header) + b"".join(map(bytes, frames)))
