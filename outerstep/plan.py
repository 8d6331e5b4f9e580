"""The costs of a run on given lines: bytes, seconds and quality of every pair of codecs and H. Pure arithmetic.

docs/performance.md explains the model, gives the sources of the figures, and compares it with measured runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, get_args

from outerstep import tcp
from protocol import wire
from protocol.codecs import CODECS
from protocol.digest import DIGEST_BYTES
from protocol.fragments import cut
from protocol.spec.sections import SyncSpec

INNER_STEPS = (50, 100, 200, 500, 1000, 2000)
FRAGMENT_ELEMENTS: int = SyncSpec.model_fields["fragment_elements"].default

# What worker/rounds/in_flight.py has under way at once, and the cores that a coordinator is taken to have.
UPLOADS, DOWNLOADS, COORDINATOR_CORES = 3, 4, 2

FP32_BYTES = 4
NOISE = 0.001  # nats per byte: smaller differences between codecs were not told apart
GAP_ROUNDS = 1.1  # DiLoCo ends about this / rounds above synchronous training, in nats per byte


@dataclass(frozen=True)
class Workload:
    """The run to plan: lines in bit/s of payload, `latency_s` of a round trip, seconds per inner step, `steps` in all,
    and the share of packets that the lines lose.

    Every worker has a line of its own; the coordinator's is no bottleneck.
    """

    parameters: int
    up: float
    down: float
    step_s: float
    workers: int
    latency_s: float
    steps: int
    loss: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """One sync of one worker with a pair of codecs. `loss` is the codecs', nats per byte; None: not measured."""

    upload_codec: str
    download_codec: str
    upload_bytes: int
    download_bytes: int
    sync_s: float
    loss: float | None


@dataclass(frozen=True)
class Setting:
    """An exchange every `inner_steps` steps.

    utilisation   the share of time in inner steps
    overlap       the least `sync.overlap` with which the training never waits for this exchange: inner steps, or
                  "eager"; None if it takes longer than the H inner steps
    factor        bytes of per-step fp32 all-reduce / bytes of this exchange, both directions together
    loss          loss by the codecs and by `inner_steps`, nats per byte, above synchronous training
    """

    exchange: Exchange
    inner_steps: int
    utilisation: float
    overlap: int | str | None
    factor: float
    loss: float | None


def exchanges(workload: Workload) -> Iterator[Exchange]:
    """Yield an exchange for every pair of codecs that a run spec may name."""
    uploads, downloads = (get_args(SyncSpec.model_fields[f"{way}load_codec"].annotation) for way in ("up", "down"))
    for up, down in product(uploads, downloads):
        yield exchange(workload, up, down)


def exchange(
    workload: Workload, up: str, down: str, *, zstd: bool = True, fragment: int = FRAGMENT_ELEMENTS
) -> Exchange:
    """Return the bytes and the seconds of one sync, in fragments of at most `fragment` elements."""
    sizes = fragment_sizes(workload.parameters, fragment)
    upload = {n: contribution_bytes(up, n, zstd=zstd) for n in set(sizes)}
    download = {n: delta_bytes(down, n, workload.workers, zstd=zstd) for n in set(sizes)}
    losses = (CODECS[up].figures.up, CODECS[down].figures.down)
    return Exchange(
        up,
        down,
        sum(upload[n] for n in sizes),
        sum(download[n] for n in sizes),
        sync_seconds(workload, up, down, [(n, upload[n], download[n]) for n in sizes]),
        None if None in losses else sum(filter(None, losses)),
    )


@dataclass(frozen=True)
class Passage:
    """When, in seconds from a sync's beginning, one fragment's upload began and was acknowledged, its mean was there,
    and it was downloaded and stepped."""

    encoded: float
    acknowledged: float
    averaged: float
    stepped: float


def sync_seconds(workload: Workload, up: str, down: str, fragments: Sequence[tuple[int, int, int]]) -> float:
    """Return the time from the pseudo-gradients to the last outer step, in seconds. See `passages`."""
    return max(each.stepped for each in passages(workload, up, down, fragments))


def passages(workload: Workload, up: str, down: str, fragments: Sequence[tuple[int, int, int]]) -> Iterator[Passage]:
    """Yield each fragment's way through one sync.

    `fragments`: elements, bytes up and bytes down of each. They go through a pipeline of encoding, upload, aggregation,
    download and outer step, in order; a stage begins with a fragment when the stage before is done with it and there is
    a free place.
    """
    upload, download = CODECS[up].figures, CODECS[down].figures
    latency_s = workload.latency_s
    way_up, way_down = (
        way(rate, latency_s, workload.loss) for way, rate in ((tcp.up, workload.up), (tcp.down, workload.down))
    )
    encoded = sent = fetched = on_line = 0.0
    acknowledged, averaged, stepped = ([0.0] * ways for ways in (UPLOADS, COORDINATOR_CORES, DOWNLOADS))
    for elements, upload_bytes, download_bytes in fragments:
        n = elements / 1e9
        encoded = max(encoded, acknowledged[-UPLOADS]) + n / upload.pack
        before, on_line = on_line, on_line + upload_bytes + tcp.ACK_SHARE * download_bytes
        sent = max(sent, encoded) + way_up.transfer_s(on_line) - way_up.transfer_s(before)
        late_s = way_up.last_part_s(min(upload_bytes, tcp.UP_PART_BYTES))
        acknowledged.append(sent + late_s + latency_s)
        mean_s = n * (workload.workers / upload.accumulate + 1 / download.pack)
        averaged.append(max(averaged[-COORDINATOR_CORES], acknowledged[-1]) + mean_s)
        begun = max(averaged[-1], stepped[-DOWNLOADS])
        fetched = max(fetched, begun) + download_bytes / way_down.bytes_per_s  # of the line, which all share
        late_s = way_down.last_part_s(min(download_bytes / tcp.DOWN_EACH, tcp.DOWN_PART_BYTES))
        stepped.append(max(fetched, begun + way_down.transfer_s(download_bytes)) + late_s + n / download.unpack)
        yield Passage(encoded, acknowledged[-1], averaged[-1], stepped[-1])


def settings(workload: Workload) -> list[Setting]:
    return [setting(workload, each, h) for each in exchanges(workload) for h in INNER_STEPS]


def setting(workload: Workload, each: Exchange, inner_steps: int) -> Setting:
    train_s = inner_steps * workload.step_s
    moved = each.upload_bytes + each.download_bytes
    loss = None if each.loss is None else each.loss + GAP_ROUNDS * inner_steps / workload.steps
    waiting_s = each.sync_s + workload.latency_s  # the next round's assignment
    utilisation, hidden = train_s / (train_s + waiting_s), math.ceil(waiting_s / workload.step_s)
    overlap = hidden if hidden < inner_steps else "eager" if hidden == inner_steps else None
    factor = 2 * allreduce_bytes(workload.workers, workload.parameters, inner_steps) / moved
    return Setting(each, inner_steps, utilisation, overlap, factor, loss)


def recommend(found: list[Setting], wanted: float) -> tuple[Setting, str]:
    """Return the setting of the least loss that reaches the utilisation `wanted`, and a sentence that says why.

    Of several with the same loss, within the noise of the measurement, it is the one with the fewest bytes.
    """
    measured = [each for each in found if each.loss is not None]
    enough = [each for each in measured if each.utilisation >= wanted]
    if not enough:
        best = max(measured, key=lambda each: each.utilisation)
        return best, (
            f"No setting reaches {wanted:.0%} in inner steps: {name(best)} comes nearest, with {best.utilisation:.0%}."
        )
    least = min(map(_loss, enough))
    equal = [each for each in enough if _loss(each) < least + NOISE]
    best = min(equal, key=lambda each: each.exchange.upload_bytes + each.exchange.download_bytes)
    return best, (
        f"{name(best)} loses about {_loss(best):.3f} nats per byte against synchronous training, no more than any "
        f"other that keeps {wanted:.0%} of the time for inner steps, and moves the fewest bytes of those."
    )


def _loss(each: Setting) -> float:
    assert each.loss is not None
    return each.loss


def name(each: Setting) -> str:
    return f"{each.exchange.upload_codec} up, {each.exchange.download_codec} down, H = {each.inner_steps}"


# --- bytes --------------------------------------------------------------------------------------------------------


def fragment_sizes(parameters: int, fragment: int) -> list[int]:
    """Return the elements of each fragment, as `protocol.fragments.plan_fragments` cuts them, without the tensors."""
    return [stop - start for start, stop in pairwise(cut(parameters, fragment))]


def contribution_bytes(codec: str, elements: int, *, zstd: bool) -> int:
    """Return the bytes of one worker's payload of one fragment: exact but for the estimate of zstd's ratio."""

    def header(frame_bytes: list[int]) -> wire.Header:
        return wire.ContributionHeader.model_construct(
            **_header(codec, elements, frame_bytes),
            worker="worker-0",
            base=bytes(DIGEST_BYTES),
            tokens=1 << 24,
            inner_steps=500,
            loss=2.5,
            norm=1.5,
            units=[[1 << 24, (1 << 24) + 500]],
            carried=[],
            carried_share=1.0,
        )

    return _payload_bytes(codec, elements, header, zstd=zstd)


def delta_bytes(codec: str, elements: int, workers: int, *, zstd: bool) -> int:
    """Return the bytes of the delta of one fragment."""
    contributors = [wire.Contributor(worker=f"worker-{index}", tokens=1 << 24, factor=1.0) for index in range(workers)]

    def header(frame_bytes: list[int]) -> wire.Header:
        return wire.DeltaHeader.model_construct(
            **_header(codec, elements, frame_bytes), base=bytes(DIGEST_BYTES), contributors=contributors
        )

    return _payload_bytes(codec, elements, header, zstd=zstd)


def _header(codec: str, elements: int, frame_bytes: list[int]) -> dict[str, Any]:
    common = {"run": "my-run", "round": 100, "fragment": 100, "codec": codec}
    return {**common, "elements": elements, "chunk_elements": wire.CHUNK_ELEMENTS, "frame_bytes": frame_bytes}


def _payload_bytes(codec: str, elements: int, header: Callable[[list[int]], wire.Header], *, zstd: bool) -> int:
    ratio = CODECS[codec].figures.zstd if zstd else 1.0
    frames = [round(ratio * CODECS[codec].size(n)) for n in wire.chunk_sizes(elements, wire.CHUNK_ELEMENTS)]
    return len(wire.pack_header(header(frames))) + sum(frames)


# --- what it is compared with -------------------------------------------------------------------------------------


def allreduce_bytes(workers: int, parameters: int, steps: int) -> int:
    """Return the bytes that each worker sends, and receives, in `steps` ring all-reduces of fp32 gradients.

    Each is 2·(n−1)/n of the vector (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    return 2 * (workers - 1) * FP32_BYTES * parameters * steps // workers


def allreduce_seconds(workload: Workload) -> float:
    """Return the seconds of one fp32 ring all-reduce on these lines: 2·(n−1) steps, each as slow as the slower way."""
    moved = allreduce_bytes(workload.workers, workload.parameters, 1)
    return 8 * moved / min(workload.up, workload.down) + 2 * (workload.workers - 1) * workload.latency_s
