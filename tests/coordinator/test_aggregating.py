"""The mean of contributions, also where a codec sends only some of the values, and the delta that it becomes."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from coordinator.aggregation.fragment import (
    ContributionsLost,
    Delta,
    ResidualLost,
    aggregate_fragment,
    blob_of,
    make_delta,
    store_delta,
)
from coordinator.aggregation.mean import aggregate
from coordinator.aggregation.residual import Residual
from coordinator.aggregation.tasks import Aggregate, Given
from coordinator.store.blobs import RunNames
from coordinator.store.payloads import MemoryBudget
from harness.member import pack_frames
from harness.stores import BytesReader, MemoryBlobs, read, spoil
from protocol.codecs import CODECS
from protocol.digest import Buffer, digest
from protocol.spec.sections import SyncSpec
from protocol.wire import ContributionHeader, Payload, pack_header

F32 = np.float32


def contribution(values: np.ndarray, worker: str, codec: str = "sparse") -> Payload:
    return Payload.from_bytes(payload_bytes(values, worker, codec))


def payload_bytes(values: np.ndarray, worker: str, codec: str) -> bytes:
    frames = pack_frames(values, CODECS[codec], zstd=True)
    header = ContributionHeader(
        run="r",
        round=0,
        fragment=0,
        codec=codec,
        elements=len(values),
        chunk_elements=1 << 18,
        frame_bytes=[len(frame) for frame in frames],
        worker=worker,
        base=bytes(32),
        tokens=1,
        inner_steps=1,
        loss=0.0,
        norm=0.0,
        units=[[0, 1]],
        carried=[],
        carried_share=1.0,
    )
    return pack_header(header) + b"".join(frames)


def decoded(frames: Sequence[Buffer], n: int) -> np.ndarray:
    out, start = np.empty(n, np.float32), 0
    for frame in frames:
        size = min(1 << 18, n - start)
        CODECS["fp32"].decode(np.frombuffer(frame, np.uint8), out[start : start + size])
        start += size
    return out


def test_each_value_is_the_mean_over_the_workers_that_sent_it() -> None:
    """Of 64 values each worker sends one: two the same, the third another, which is not watered down to a third."""
    values = np.zeros((3, 64), np.float32)
    values[0, 5], values[1, 5], values[2, 9] = 8.0, 16.0, -8.0
    payloads = [
        (contribution(each, f"w{i}"), tokens) for i, (each, tokens) in enumerate(zip(values, (1, 3, 4), strict=True))
    ]
    mean = decoded(aggregate(payloads, "fp32", zstd=False), 64)
    weights = [F32(tokens / 8) for tokens in (1, 3, 4)]
    # A single value of 8 has the scale 8/8 and is nearest to 7 of it.
    first = (weights[0] * F32(7) + weights[1] * F32(14)) / (weights[0] + weights[1])
    assert mean[5] == first
    assert mean[9] == -7.0
    assert not np.delete(mean, [5, 9]).any()


@pytest.mark.parametrize("n", [300, (1 << 18) + 5000])
def test_it_is_the_weighted_mean_in_every_chunk(n: int) -> None:
    random = np.random.default_rng(0)
    payloads = [(contribution(random.standard_normal(n).astype(np.float32), f"w{i}"), 1 + i) for i in range(4)]
    mean = decoded(aggregate(payloads, "fp32", zstd=False), n)
    acc, sent = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for payload, tokens in payloads:
        values, weight = np.empty(n, np.float32), F32(tokens / 10)
        payload.decode(values)
        exact = values.astype(np.float64) * float(weight)
        there = values != 0
        acc[there] = acc[there] + exact[there].astype(np.float32)
        sent[there] += weight
    expected = np.divide(acc, sent, out=np.zeros(n, np.float32), where=sent > 0)
    assert np.array_equal(sent > 0, mean != 0)
    assert np.allclose(mean, expected, rtol=0, atol=1e-6)
    assert (sent > 0).mean() > 1 / 64, "no two workers sent different values, so nothing is proved"


def test_a_factor_is_of_the_weight_alone() -> None:
    """Who counts half brings half of its value; the others no more than without it."""
    values = np.array([[4.0, 8.0], [2.0, -2.0]], np.float32)
    payloads = [(contribution(each, f"w{i}", "fp32"), 1) for i, each in enumerate(values)]
    assert decoded(aggregate(payloads, "fp32", zstd=False, factors=[0.5, 1.0]), 2).tolist() == [2.0, 1.0]


def test_a_factor_counts_where_one_alone_has_sent_a_value() -> None:
    """With sparse codecs too, where a mean is over those who sent the value: what one alone sends is not made whole."""
    values = np.zeros((2, 64), np.float32)
    values[0, 5], values[1, 9] = 8.0, 16.0
    payloads = [(contribution(each, f"w{i}"), 1) for i, each in enumerate(values)]
    whole = decoded(aggregate(payloads, "fp32", zstd=False), 64)
    half = decoded(aggregate(payloads, "fp32", zstd=False, factors=[0.5, 1.0]), 64)
    assert (half[5], half[9]) == (whole[5] / 2, whole[9])


class OnceOnly(MemoryBlobs):
    """Blobs that count how often each is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = Counter[str]()

    def open(self, name: str, *, fresh: bool = False) -> BytesReader:
        self.opened[name] += 1
        return super().open(name, fresh=fresh)


def task_of(
    codec: str,
    vectors: Sequence[np.ndarray],
    blobs: MemoryBlobs,
    download: str = "int8",
    round_: int = 0,
    residual: bytes | None = None,
) -> Aggregate:
    """The aggregation of these vectors, whose contributions are put into the store."""
    settings = {"rounds": 2, "upload_codec": codec, "download_codec": download}
    sync = SyncSpec.model_validate(settings)
    task = Aggregate(
        run="r",
        round=round_,
        fragment=0,
        elements=len(vectors[0]),
        base=bytes(32),
        sync=sync,
        contributions={},
        unit_tokens={f"w{i}": 1 for i in range(len(vectors))},
        usual=None,
        clipped=1.25,
        least_agreement=0.25,
        residual=residual,
    )
    for i, values in enumerate(vectors):
        content = payload_bytes(values, f"w{i}", codec)
        task.contributions[f"w{i}"] = Given(digest=digest(content), sha256=None, tokens=1 + i)
        blobs.put(blob_of(task, f"w{i}"), content)
    return task


N = (1 << 18) + 5000  # two chunks


def vectors_of(seed: int) -> list[np.ndarray]:
    """The same signal in three contributions, each with noise."""
    random = np.random.default_rng(seed)
    common = random.standard_normal(N)
    return [(common + random.standard_normal(N)).astype(np.float32) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "download"), [*((codec, "int8") for codec in sorted(CODECS)), ("int8", "2bit")])
@pytest.mark.parametrize("length", [1.0, 4.0], ids=["all count", "one is shortened"])
def test_one_pass_over_the_contributions_gives_the_bytes_of_two(codec: str, download: str, length: float) -> None:
    """Also with the residual of the delta before, if the codec has error feedback."""
    blobs, vectors, residual = OnceOnly(), vectors_of(0), None
    vectors[2] *= np.float32(length)
    if download == "2bit":
        first = task_of(codec, vectors, blobs, download)
        residual = stored(first, aggregate_fragment(first, blobs, b"secret", lambda: 0.0), blobs)
    task = task_of(codec, vectors, blobs, download, 1, residual)
    blobs.opened.clear()
    delta = aggregate_fragment(task, blobs, b"secret", lambda: 0.0)
    factors = {worker: verdict.factor for worker, verdict in delta.judgement.verdicts.items()}
    assert (factors["w2"] == 1) is (length == 1), factors
    once = length == 1 and CODECS[codec].add_weight is None
    assert {blobs.opened[blob_of(task, worker)] for worker in factors} == {1 if once else 2}
    assert (delta.content, delta.residual) == make_delta(task, blobs, factors)
    if residual:
        assert delta.content != make_delta(task.model_copy(update={"residual": None}), blobs, factors)[0]


def test_a_contribution_that_was_damaged_in_the_store_is_lost_in_either_pass() -> None:
    random, blobs = np.random.default_rng(0), MemoryBlobs()
    task = task_of("int8", [random.standard_normal(1000).astype(np.float32) for _ in range(3)], blobs)
    spoil(blobs, blob_of(task, "w1"))
    with pytest.raises(ContributionsLost) as lost:
        aggregate_fragment(task, blobs, b"secret", lambda: 0.0)
    assert lost.value.workers == ["w1"]


# --- residuals of deltas ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_delta_leaves_out_is_in_the_ones_after_it() -> None:
    """Deltas of 2 bits add up to the means, but for the last residual; without feedback they are far from it."""
    residual: bytes | None = None
    blobs, delivered = MemoryBlobs(), np.zeros(N)
    means, careless = np.zeros(N), np.zeros(N)
    for round_ in range(8):
        vectors = vectors_of(round_)
        exact = task_of("fp32", vectors, blobs, "fp32", round_)
        coarse = task_of("fp32", vectors, blobs, "2bit", round_, residual)
        delta = aggregate_fragment(coarse, blobs, b"secret", lambda: 0.0)
        residual = stored(coarse, delta, blobs)
        alone = aggregate_fragment(coarse.model_copy(update={"residual": None}), blobs, b"secret", lambda: 0.0)
        whole = aggregate_fragment(exact, blobs, b"secret", lambda: 0.0)
        for total, each in ((means, whole), (delivered, delta), (careless, alone)):
            total += values_of(each.content)
    left = float(np.linalg.norm(means - delivered))
    assert left < 0.5 * float(np.linalg.norm(means - careless))
    assert residual is not None
    kept = Residual(N, memoryview(read(blobs, RunNames("r").residual(7, 0, residual))))
    undelivered = np.zeros(N, np.float32)
    for index, start in enumerate(range(0, N, 1 << 18)):
        kept.add(undelivered[start : start + (1 << 18)], index)
    assert float(np.linalg.norm(means - delivered - undelivered)) < 0.05 * left, "and the last residual has the rest"


def stored(task: Aggregate, delta: Delta, blobs: MemoryBlobs) -> bytes:
    """Put the delta into the store. The digest of its residual."""
    residual = store_delta(task, delta, blobs, MemoryBudget()).residual
    assert residual is not None
    return residual.digest


def values_of(content: Buffer) -> np.ndarray:
    payload = Payload.from_bytes(content)
    values = np.empty(payload.header.elements, np.float32)
    payload.decode(values)
    return values


@pytest.mark.parametrize(
    ("damage", "said"), [(spoil, "corrupt"), (MemoryBlobs.delete, "missing")], ids=["corrupt", "missing"]
)
def test_a_damaged_residual_is_never_used(damage: Callable[[MemoryBlobs, str], object], said: str) -> None:
    blobs = MemoryBlobs()
    task = task_of("int8", vectors_of(0), blobs, download="2bit")
    residual = stored(task, aggregate_fragment(task, blobs, b"secret", lambda: 0.0), blobs)
    damage(blobs, RunNames("r").residual(0, 0, residual))
    later = task_of("int8", vectors_of(1), blobs, download="2bit", round_=1, residual=residual)
    with pytest.raises(ResidualLost) as lost:
        aggregate_fragment(later, blobs, b"secret", lambda: 0.0)
    assert lost.value.damage == said
