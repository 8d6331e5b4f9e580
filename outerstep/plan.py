"""The cost of a run on given network connections: bytes, seconds and quality for every pair of codecs and H. Pure.

docs/performance.md explains the model, gives the sources of its figures, and compares it with measured runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, get_args

from protocol import wire
from protocol.codecs import CODECS
from protocol.digest import DIGEST_BYTES
from protocol.fragments import cut
from protocol.spec.sections import SyncSpec

INNER_STEPS = (50, 100, 200, 500, 1000, 2000)
FRAGMENT_ELEMENTS: int = SyncSpec.model_fields["fragment_elements"].default

# Fragments in flight at once in worker/rounds/in_flight.py, and the assumed cores of a coordinator.
UPLOADS, DOWNLOADS, COORDINATOR_CORES = 3, 4, 2

PACKET_BYTES = 1448  # payload of a full packet
INITIAL_WINDOW = 10  # packets
ACK_SHARE = 0.04  # of the bytes received: one packet without payload for every two full ones

# As worker/line/line.py does on long connections without BBR: upload connections at first and at most, download
# connections per fragment, and the maximum bytes of a part (fast connections use larger ones).
FAR_S, UP_FIRST, UP_MOST, DOWN_EACH = 0.015, 4, 32, 8
UP_PART_BYTES, DOWN_PART_BYTES = 1 << 18, 1 << 20

FP32_BYTES = 4
NOISE = 0.001  # nats per byte; smaller differences between codecs could not be measured
# DiLoCo ends about GAP_LEAST + GAP_ROUNDS / rounds + GAP_STEPS · H nats per byte above synchronous training.
GAP_LEAST, GAP_ROUNDS, GAP_STEPS = 0.003, 0.6, 9e-5
# Where that was measured: millions of parameters, H, rounds, and the fewest inner steps of a run.
MEASURED_SIZES = "0.14 to 1.5"
MEASURED_INNER_STEPS, MEASURED_ROUNDS, LEAST_STEPS = (25, 500), (6, 240), 2400


@dataclass(frozen=True)
class Workload:
    """The run to plan: `up` and `down` in bit/s of payload, round-trip time `latency_s`, seconds per inner step, total
    inner `steps`, and `loss`, the share of packets lost.

    Each worker has its own connection; the coordinator's is not a bottleneck.
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
class SyncCost:
    """The cost of one worker's sync with a pair of codecs. `loss`: of the codecs, in nats per byte; None: not
    measured."""

    upload_codec: str
    download_codec: str
    upload_bytes: int
    download_bytes: int
    sync_s: float
    loss: float | None


@dataclass(frozen=True)
class Setting:
    """A pair of codecs with a sync every `inner_steps` steps.

    utilisation   share of time in inner steps
    overlap       the smallest `sync.overlap` with which training never waits for the sync: inner steps, or "eager";
                  None if the sync takes longer than the H inner steps
    factor        bytes of per-step fp32 all-reduce / bytes of this sync, both directions together
    loss          loss due to the codecs and `inner_steps`, in nats per byte above synchronous training
    extrapolated  True if H or the number of rounds is outside of what was measured
    """

    cost: SyncCost
    inner_steps: int
    utilisation: float
    overlap: int | str | None
    factor: float
    loss: float | None
    extrapolated: bool


def sync_costs(workload: Workload) -> Iterator[SyncCost]:
    """Yield the cost for every pair of codecs that a run spec may name."""
    uploads, downloads = (get_args(SyncSpec.model_fields[f"{way}load_codec"].annotation) for way in ("up", "down"))
    for up, down in product(uploads, downloads):
        yield sync_cost(workload, up, down)


def sync_cost(
    workload: Workload, up: str, down: str, *, zstd: bool = True, fragment: int = FRAGMENT_ELEMENTS
) -> SyncCost:
    """Return the bytes and seconds of one sync, in fragments of at most `fragment` elements."""
    sizes = fragment_sizes(workload.parameters, fragment)
    upload = {n: contribution_bytes(up, n, zstd=zstd) for n in set(sizes)}
    download = {n: delta_bytes(down, n, workload.workers, zstd=zstd) for n in set(sizes)}
    losses = (CODECS[up].figures.up, CODECS[down].figures.down)
    return SyncCost(
        up,
        down,
        sum(upload[n] for n in sizes),
        sum(download[n] for n in sizes),
        sync_seconds(workload, up, down, [(n, upload[n], download[n]) for n in sizes]),
        None if None in losses else sum(filter(None, losses)),
    )


@dataclass(frozen=True)
class FragmentTimes:
    """Seconds from the start of a sync until one fragment was encoded, its upload acknowledged, its mean computed, and
    its outer step done."""

    encoded: float
    acknowledged: float
    averaged: float
    stepped: float


def sync_seconds(workload: Workload, up: str, down: str, fragments: Sequence[tuple[int, int, int]]) -> float:
    """Return the seconds from the pseudo-gradients to the last outer step. See `fragment_times`."""
    return max(each.stepped for each in fragment_times(workload, up, down, fragments))


def fragment_times(
    workload: Workload, up: str, down: str, fragments: Sequence[tuple[int, int, int]]
) -> Iterator[FragmentTimes]:
    """Yield the times of each fragment in one sync.

    `fragments`: elements, bytes up and bytes down of each. They pass through a pipeline of encoding, upload,
    aggregation, download and outer step, in order. A stage starts with a fragment when the previous stage is done with
    it and a slot is free.
    """
    upload, download = CODECS[up].figures, CODECS[down].figures
    latency_s = workload.latency_s
    up_link, down_link = (
        uplink(workload.up, latency_s, workload.loss),
        downlink(workload.down, latency_s, workload.loss),
    )
    encoded = sent = fetched = on_line = 0.0
    acknowledged, averaged, stepped = ([0.0] * ways for ways in (UPLOADS, COORDINATOR_CORES, DOWNLOADS))
    for elements, upload_bytes, download_bytes in fragments:
        n = elements / 1e9
        encoded = max(encoded, acknowledged[-UPLOADS]) + n / upload.pack
        before, on_line = on_line, on_line + upload_bytes + ACK_SHARE * download_bytes
        sent = max(sent, encoded) + up_link.transfer_s(on_line) - up_link.transfer_s(before)
        late_s = up_link.last_part_s(min(upload_bytes, UP_PART_BYTES))
        acknowledged.append(sent + late_s + latency_s)
        mean_s = n * (workload.workers / upload.accumulate + 1 / download.pack)
        averaged.append(max(averaged[-COORDINATOR_CORES], acknowledged[-1]) + mean_s)
        begun = max(averaged[-1], stepped[-DOWNLOADS])
        fetched = max(fetched, begun) + download_bytes / down_link.bytes_per_s  # all fragments share the connection
        late_s = down_link.last_part_s(min(download_bytes / DOWN_EACH, DOWN_PART_BYTES))
        stepped.append(max(fetched, begun + down_link.transfer_s(download_bytes)) + late_s + n / download.unpack)
        yield FragmentTimes(encoded, acknowledged[-1], averaged[-1], stepped[-1])


def settings(workload: Workload) -> list[Setting]:
    return [setting(workload, each, h) for each in sync_costs(workload) for h in INNER_STEPS]


def setting(workload: Workload, each: SyncCost, inner_steps: int) -> Setting:
    train_s = inner_steps * workload.step_s
    moved = each.upload_bytes + each.download_bytes
    rounds = workload.steps / inner_steps
    loss = None if each.loss is None else each.loss + diloco_gap(inner_steps, rounds)
    waiting_s = each.sync_s + workload.latency_s  # for the next round's assignment
    utilisation, hidden = train_s / (train_s + waiting_s), math.ceil(waiting_s / workload.step_s)
    overlap = hidden if hidden < inner_steps else "eager" if hidden == inner_steps else None
    factor = 2 * allreduce_bytes(workload.workers, workload.parameters, inner_steps) / moved
    return Setting(each, inner_steps, utilisation, overlap, factor, loss, is_extrapolated(inner_steps, rounds))


def diloco_gap(inner_steps: float, rounds: float) -> float:
    """Return how far DiLoCo's loss ends above synchronous training's with the same tokens, in nats per byte.

    Measured with up to 1.5 M parameters and 8 workers, within a factor of two (docs/performance.md). More rounds let
    the outer optimizer converge; in each round the workers drift apart for H steps. Larger models may differ.
    """
    return GAP_LEAST + GAP_ROUNDS / rounds + GAP_STEPS * inner_steps


def is_extrapolated(inner_steps: float, rounds: float) -> bool:
    """Return True if `diloco_gap` was not measured near this H and this number of rounds, or if the run is so short
    that it is known to be too low: a run of 14 rounds of 50 steps loses twice as much."""
    return not (
        MEASURED_INNER_STEPS[0] <= inner_steps <= MEASURED_INNER_STEPS[1]
        and MEASURED_ROUNDS[0] <= rounds <= MEASURED_ROUNDS[1]
        and inner_steps * rounds >= LEAST_STEPS
    )


def recommend(found: list[Setting], wanted: float) -> tuple[Setting, str]:
    """Return the setting with the lowest loss among those that reach the utilisation `wanted`, and the reason.

    Among settings with equal loss, within measurement noise, it is the one with the fewest bytes.
    """
    measured = [each for each in found if each.loss is not None]
    enough = [each for each in measured if each.utilisation >= wanted]
    if not enough:
        best = max(measured, key=lambda each: each.utilisation)
        return best, (
            f"No setting reaches {wanted:.0%} of the time in inner steps; {name(best)} is nearest, with "
            f"{best.utilisation:.0%}."
        )
    least = min(map(_loss, enough))
    equal = [each for each in enough if _loss(each) < least + NOISE]
    best = min(equal, key=lambda each: each.cost.upload_bytes + each.cost.download_bytes)
    return best, (
        f"{name(best)} loses about {_loss(best):.3f} nats per byte compared with synchronous training. No "
        f"setting with at least {wanted:.0%} of the time in inner steps loses less; of several equal ones, this one "
        "sends the fewest bytes." + _range(best)
    )


def _range(each: Setting) -> str:
    """Return what the loss of a setting rests on."""
    if not each.extrapolated:
        return ""
    return (
        " That loss is extrapolated: it was measured with {} M parameters, H from {} to {}, {} to {} rounds, and at "
        "least {:,} inner steps.".format(MEASURED_SIZES, *MEASURED_INNER_STEPS, *MEASURED_ROUNDS, LEAST_STEPS)
    )


def _loss(each: Setting) -> float:
    assert each.loss is not None
    return each.loss


def name(each: Setting) -> str:
    return f"{each.cost.upload_codec} up, {each.cost.download_codec} down, H = {each.inner_steps}"


# --- bytes --------------------------------------------------------------------------------------------------------


def fragment_sizes(parameters: int, fragment: int) -> list[int]:
    """Return the elements of each fragment, as `protocol.fragments.plan_fragments` cuts them, without the tensors."""
    return [stop - start for start, stop in pairwise(cut(parameters, fragment))]


def contribution_bytes(codec: str, elements: int, *, zstd: bool) -> int:
    """Return the bytes of one worker's payload of one fragment, exact except for the estimated zstd ratio."""

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


# --- comparison with all-reduce -----------------------------------------------------------------------------------


def allreduce_bytes(workers: int, parameters: int, steps: int) -> int:
    """Return the bytes that each worker sends, and also receives, in `steps` ring all-reduces of fp32 gradients.

    Each is 2·(n−1)/n of the vector (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    return 2 * (workers - 1) * FP32_BYTES * parameters * steps // workers


def allreduce_seconds(workload: Workload) -> float:
    """Return the seconds of one fp32 ring all-reduce: 2·(n−1) steps, each as slow as the slower direction."""
    moved = allreduce_bytes(workload.workers, workload.parameters, 1)
    return 8 * moved / min(workload.up, workload.down) + 2 * (workload.workers - 1) * workload.latency_s


# --- TCP ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One direction of a worker's network connection, and its TCP connections. A connection that starts, or was idle,
    sends INITIAL_WINDOW packets and twice as many in each round trip (RFC 6928, RFC 5681), until the link is full. With
    losses, none keeps more than about sqrt(3/2 / p) packets in flight (Mathis et al. 1997, doi:10.1145/263932.264023).

    rate         payload bits per second
    latency_s    round-trip time
    loss         share of packets lost
    first, most  TCP connections at the start, and at most
    """

    rate: float
    latency_s: float
    loss: float
    first: int
    most: int

    @property
    def connection_bytes_per_s(self) -> float:
        """The rate of one TCP connection under packet loss."""
        if not self.loss * self.latency_s:
            return self.rate / 8
        return min(self.rate / 8, PACKET_BYTES / self.latency_s * math.sqrt(1.5 / self.loss))

    @property
    def bytes_per_s(self) -> float:
        return min(self.rate / 8, self.most * self.connection_bytes_per_s)

    def transfer_s(self, size: float) -> float:
        """Return the seconds from the first byte sent to the last of `size` bytes, after an idle time."""
        window, sent, seconds = self.first * INITIAL_WINDOW * PACKET_BYTES, 0.0, 0.0
        while sent + window < size and window < self.bytes_per_s * self.latency_s:
            sent, seconds, window = sent + window, seconds + self.latency_s, 2 * window
        return seconds + (size - sent) / self.bytes_per_s

    def last_part_s(self, size: float) -> float:
        """Return the extra seconds that the last part, of `size` bytes, takes because packet loss slows its
        connection."""
        return size / self.connection_bytes_per_s - size / self.bytes_per_s


def uplink(rate: float, latency_s: float, loss: float) -> Link:
    """Return the upload direction of a worker's connection."""
    return Link(rate, latency_s, loss, *((UP_FIRST, UP_MOST) if latency_s >= FAR_S else (1, UP_MOST)))


def downlink(rate: float, latency_s: float, loss: float) -> Link:
    """Return the download direction, for one fragment."""
    return Link(rate, latency_s, loss, *((DOWN_EACH, DOWN_EACH) if latency_s >= FAR_S else (1, DOWN_EACH)))
