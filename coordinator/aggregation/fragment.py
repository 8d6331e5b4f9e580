"""Aggregating a closed fragment: its contributions are read, measured, judged and averaged into a delta.

The same task always gives the same bytes, whichever process does it.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from coordinator.aggregation.judging import Evidence, Judgement, Verdict, judge
from coordinator.aggregation.mean import aggregate, aggregated, encoded
from coordinator.aggregation.measuring import Measure, Sketcher, measure_payload, sketch_chunks
from coordinator.aggregation.residual import Residual
from coordinator.aggregation.tasks import Aggregate, Aggregated, Blob, Collected, Given
from coordinator.store.blobs import Blobs, Reader, RunNames, StoreOutage
from coordinator.store.payloads import (
    HashedPayload,
    MemoryBudget,
    ReadBuffer,
    StoredPayload,
    fault_in,
    has_digest,
    sha256_of,
)
from outerstep.common.files import aligned
from protocol.codecs import CODECS
from protocol.digest import Buffer, digest
from protocol.errors import OuterstepError, WireError, WireFault
from protocol.wire import (
    CHUNK_ELEMENTS,
    DIFFERENCES,
    ContributionHeader,
    Contributor,
    DeltaHeader,
    Payload,
    pack_frame,
    pack_header,
)

PLAUSIBLE = 2.0  # times the norm of θ
ONE_PASS_ELEMENTS = 1 << 24  # the largest fragment that is averaged in memory
AHEAD = 1  # contributions that are being read, or wait to be averaged
NOTHING: Mapping[str, Any] = MappingProxyType({})

logger = logging.getLogger(__name__)


class ContributionsLost(OuterstepError):
    """The acknowledged contributions of `workers` are damaged or missing in the store."""

    def __init__(self, workers: list[str]) -> None:
        super().__init__(f"the disk has lost the contribution of {', '.join(workers)}")
        self.workers = workers


class ResidualLost(OuterstepError):
    """The last delta's residual is damaged or missing in the store. `damage`: see `fault_in`."""

    def __init__(self, damage: str) -> None:
        super().__init__(f"the last delta's residual is {damage}")
        self.damage = damage


class NoneValid(OuterstepError):
    """No contribution to a fragment is a valid payload. `reasons`: by worker."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        said = "; ".join(f"{worker}: {reason}" for worker, reason in sorted(reasons.items()))
        super().__init__(f"no contribution is valid: {said}")
        self.workers = sorted(reasons)


@dataclass(frozen=True)
class Delta:
    """A delta that is not stored yet, and how it was judged. `invalid`: the workers whose contribution is no valid
    payload. `residual`: the delta's encoding error; None without error feedback."""

    content: memoryview
    residual: memoryview | None
    judgement: Judgement
    invalid: tuple[str, ...]


def aggregate_fragment(
    task: Aggregate,
    blobs: Blobs,
    secret: bytes,
    theta_norm: Callable[[], float],
    *,
    measures: Mapping[str, Measure] = NOTHING,
    contents: Mapping[str, memoryview] = NOTHING,
    check: Callable[[], object] = lambda: None,
) -> Delta:
    """Do the task. `theta_norm` returns the norm of the fragment's θ. `measures` and `contents`: what is known of the
    contributions, by worker; the others are read from the store. `check` is called now and then, and may raise to end
    the work.

    Raises ContributionsLost, ResidualLost and NoneValid; StoreOutage; OSError, WireError, ValueError or LookupError if
    a blob cannot be read and yet is not lost.
    """
    try:
        key = sketch_key(secret, task.run, task.round, task.fragment)
        whole = None if measures or contents else _one_pass(task, blobs, key, check)
        judgement, invalid = _judged(task, blobs, key, theta_norm, whole.measures if whole else measures, check)
        factors = {worker: verdict.factor for worker, verdict in judgement.verdicts.items()}
        if whole is not None and all(factor == 1 for factor in factors.values()):
            content, residual = _delta_of(task, factors, whole.frames), whole.residual
        else:
            content, residual = make_delta(task, blobs, factors, contents, check)
        return Delta(content, residual, judgement, invalid)
    except StoreOutage:
        raise  # nothing is known about the blobs
    except (OSError, WireError, ValueError, LookupError):  # a blob is missing, unreadable or corrupt
        if lost := lost_contributions(task, blobs):
            raise ContributionsLost(lost) from None
        raise


def store_delta(task: Aggregate, delta: Delta, blobs: Blobs, memory: MemoryBudget) -> Aggregated:
    """Make the delta durable, and keep it in memory while there is room. Return the task's result. Raises OSError."""
    found, residual = stored(task, delta.content, delta.residual, blobs, memory)
    return Aggregated.of(delta.judgement, delta.invalid, found.digest, Payload.from_bytes(delta.content), residual)


def stored(
    collected: Collected, content: memoryview, residual: memoryview | None, blobs: Blobs, memory: MemoryBudget
) -> tuple[Blob, Blob | None]:
    """Make a delta and its residual durable, and keep the delta in memory while there is room. Return their blobs.
    Raises OSError."""
    names, kept = RunNames(collected.run), None
    if residual is not None:
        kept = Blob(digest=digest(residual), size=len(residual))
        blobs.put(names.residual(collected.round, collected.fragment, kept.digest), residual)
    found = Blob(digest=digest(content), size=len(content))
    blobs.put(names.delta(collected.round, collected.fragment, found.digest), content)
    memory.add_delta(found.digest, content)
    return found, kept


def blob_of(collected: Collected, worker: str) -> str:
    """Return the name of a contribution's blob."""
    each = collected.contributions[worker]
    return RunNames(collected.run).contribution(collected.round, collected.fragment, worker, each.digest)


def lost_contributions(collected: Collected, blobs: Blobs) -> list[str]:
    """Return the workers whose contribution's blob is missing or corrupt, in worker-id order."""
    return [
        worker
        for worker, each in sorted(collected.contributions.items())
        if not has_digest(blobs, blob_of(collected, worker), each.digest)
    ]


# --- measuring and judging --------------------------------------------------------------------------------------------


def sketch_key(secret: bytes, run: str, round_: int, fragment: int) -> bytes:
    """Return the key of a fragment's sketches (`aggregation/measuring.py`). `secret`: the deployment's."""
    return digest(secret + f"{run}/{round_}/{fragment}".encode())


def examine(blobs: Blobs, name: str, each: Given, key: bytes) -> Measure | str:
    """Read an accepted contribution, the blob `name`, and measure it. Return the reason if its worker has uploaded
    something else to the store than a valid payload with the announced digest.

    Raises OSError, WireError, ValueError or LookupError if the blob is missing, unreadable or not what was
    acknowledged.
    """
    if each.sha256 is None:
        with StoredPayload(blobs.open(name)) as payload:
            return measure_payload(payload, key)
    try:
        return _measured(blobs.open(name), each.digest, key)
    except WireError as error:
        logger.debug("%s: %s; it is read again from the store", name, error)
    try:
        return _measured(blobs.open(name, fresh=True), each.digest, key)
    except WireError as error:
        with blobs.open(name, fresh=True) as reader:
            if sha256_of(reader) != each.sha256:
                raise ValueError(f"{name} has other bytes than were uploaded") from error
        return f"it is no valid payload: {error}"


def _measured(reader: Reader, digest: bytes, key: bytes) -> Measure:
    """Measure a payload. Raises WireError if it is not valid, or has another digest."""
    with HashedPayload(reader, ReadBuffer()) as payload:
        if not isinstance(payload.header, ContributionHeader):
            raise WireError(WireFault.HEADER, f"it is a {payload.header.kind}")
        measured = measure_payload(payload, key)
        if not payload.is_intact(digest):
            raise WireError(WireFault.LENGTH, "its BLAKE3 digest is not the announced one")
        return measured


def _judged(
    task: Aggregate,
    blobs: Blobs,
    key: bytes,
    theta_norm: Callable[[], float],
    measures: Mapping[str, Measure],
    check: Callable[[], object],
) -> tuple[Judgement, tuple[str, ...]]:
    """Judge the contributions. Those whose bytes are no valid payload, which only a direct upload can be, are left out.
    Return the judgement, and the workers that have sent those. Raises NoneValid."""
    found: dict[str, Measure | str] = {}
    for worker, each in task.contributions.items():
        check()
        found[worker] = measures.get(worker) or examine(blobs, blob_of(task, worker), each, key)
    invalid = {worker: each for worker, each in found.items() if isinstance(each, str)}
    valid = {worker: each for worker, each in found.items() if not isinstance(each, str)}
    if not valid:
        raise NoneValid(invalid)
    excluded = {worker: task.excluded[worker] for worker in valid if worker in task.excluded}
    if len(excluded) < len(valid):
        valid = {worker: each for worker, each in valid.items() if worker not in excluded}
    else:
        excluded = {}
    given = task.contributions
    total = sum(given[worker].tokens for worker in valid)
    evidence = {
        worker: Evidence(
            measure,
            weight=given[worker].tokens / total,
            work=max(given[worker].tokens, given[worker].work) / task.unit_tokens[worker],
            late=given[worker].lateness.late,
            missed=given[worker].lateness.missed,
            all_late=given[worker].lateness.all_late,
        )
        for worker, measure in sorted(valid.items())
    }
    bounded = task.usual is None and len(valid) <= 2
    judgement = judge(
        evidence,
        task.usual,
        _plausible_norm(theta_norm()) if bounded else math.inf,
        rule=task.sync.aggregation,
        clipped=task.clipped,
        least_agreement=task.least_agreement,
        usual_spread=task.usual_spread,
    )
    left_out = {worker: Verdict(0.0, reason) for worker, reason in (invalid | excluded).items()}
    verdicts = dict(sorted({**judgement.verdicts, **left_out}.items()))
    return replace(judgement, verdicts=verdicts), tuple(sorted(invalid))


def _plausible_norm(theta_norm: float) -> float:
    """Return a norm that no honest first round exceeds: infinite if θ is all zeros, because that shows no scale."""
    return PLAUSIBLE * theta_norm if theta_norm > 0 else math.inf


# --- in one pass ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Whole:
    """The measures of all contributions, by worker. If each has the factor 1, `frames` are those of their mean, and
    `residual` is its encoding error."""

    measures: Mapping[str, Measure]
    frames: Sequence[Buffer]
    residual: memoryview | None


def _one_pass(task: Aggregate, blobs: Blobs, key: bytes, check: Callable[[], object]) -> _Whole | None:
    """Measure and average the contributions while each is read once. Most often all of them count, and then nothing has
    to be read again. The next one is read meanwhile.

    Return None if the fragment is too large to be in memory, if the codec leaves values out, or if a contribution is
    not what was announced.
    """
    codec = CODECS[task.sync.upload_codec]
    if codec.add_weight is not None or task.elements > ONE_PASS_ELEMENTS:
        return None
    residual = residual_of(task, blobs)
    in_order = sorted(task.contributions.items())
    total = sum(each.tokens for _, each in in_order)
    measures: dict[str, Measure] = {}
    acc = np.zeros(task.elements, np.float32)
    # Memory in turn: for the one in use, and those that are read meanwhile.
    memory = cycle([ReadBuffer() for _ in range(AHEAD + 1)])
    to_read = zip((blob_of(task, worker) for worker, _ in in_order), memory, strict=False)
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reading:
        ahead = deque(reading.submit(_content, blobs, *each) for each in islice(to_read, AHEAD))
        try:
            for worker, each in in_order:
                check()
                content = ahead.popleft().result()
                ahead.extend(reading.submit(_content, blobs, *next_one) for next_one in islice(to_read, 1))
                if digest(content) != each.digest:
                    return None
                payload = Payload.from_bytes(content)
                sketcher = Sketcher(len(acc), key)
                weight, start = np.float32(each.tokens / total), 0
                for chunk, n in sketch_chunks(payload, sketcher):
                    codec.accumulate(chunk, weight, acc[start : start + n])
                    start += n
                measures[worker] = sketcher.measure()
        except StoreOutage:
            raise
        except (OSError, WireError, ValueError, LookupError) as error:
            logger.info("%s: round %d is averaged in two passes: %s", task.run, task.round, error)
            return None
        finally:
            for read in ahead:
                read.cancel()
    frames = encoded(acc, task.sync.download_codec, residual, zstd=task.sync.zstd)
    return _Whole(measures, frames, None if residual is None else residual.content)


def residual_of(collected: Collected, blobs: Blobs) -> Residual | None:
    """Return the error feedback of the delta; None if the codec has none. Raises ResidualLost and StoreOutage."""
    if not CODECS[collected.sync.download_codec].error_feedback:
        return None
    if collected.residual is None:
        return Residual(collected.elements)
    name = RunNames(collected.run).residual(collected.round - 1, collected.fragment, collected.residual)
    try:
        content = _content(blobs, name, ReadBuffer())
        if digest(content) != collected.residual:
            raise ResidualLost("corrupt")
        return Residual(collected.elements, content)
    except StoreOutage:
        raise
    except (OSError, ValueError) as error:
        if damage := fault_in(blobs, name, collected.residual):
            raise ResidualLost(damage) from error
        raise


def _content(blobs: Blobs, name: str, memory: ReadBuffer) -> memoryview:
    """Read a whole blob into `memory`. Raises OSError."""
    with blobs.open(name, fresh=True) as reader:
        content = memory.of(reader.size)
        if reader.read_into(content, 0) != reader.size:
            raise OSError(f"{name} ends too early")
    return content


# --- averaging --------------------------------------------------------------------------------------------------------


def make_delta(
    collected: Collected,
    blobs: Blobs,
    factors: Mapping[str, float],
    contents: Mapping[str, memoryview] = NOTHING,
    check: Callable[[], object] = lambda: None,
) -> tuple[memoryview, memoryview | None]:
    """Aggregate the contributions into a delta. Return it, a payload in memory, and its residual (None without error
    feedback). Raises ContributionsLost and ResidualLost, and like `aggregate_fragment`.

    `factors` multiply the weights, by worker. A worker with factor 0 is left out; not all factors may be 0.

    Payloads in `contents` are used from memory. The other blobs are read once, and their digests are checked while
    reading. The same contributions, `base` and `residual` always give the same bytes.
    """
    residual, sync = residual_of(collected, blobs), collected.sync
    with _opened(collected, blobs, factors, contents) as opened:
        frames = aggregate(
            opened.payloads,
            sync.download_codec,
            zstd=sync.zstd,
            factors=opened.factors,
            residual=residual,
            check=check,
        )
    return _delta_of(collected, factors, frames), None if residual is None else residual.content


def make_difference(collected: Collected, blobs: Blobs, factors: Mapping[str, float], worker: str) -> memoryview:
    """Return the mean without `worker` minus the mean of all, as a payload in memory, encoded with DIFFERENCES. Raises
    ContributionsLost, and like `aggregate_fragment`.

    The delta's encoding error, and what it has made up for of earlier ones, are in neither mean: they would look like
    the worker's doing."""
    without, codec = {**factors, worker: 0.0}, CODECS[DIFFERENCES]
    frames: list[Buffer] = []
    with _opened(collected, blobs, factors) as every, _opened(collected, blobs, without) as others:
        means = zip(*(aggregated(opened.payloads, opened.factors) for opened in (others, every)), strict=True)
        for lacking, whole in means:
            raw = np.empty(codec.size(len(whole)), np.uint8)
            codec.encode(lacking - whole, raw)
            frames.append(pack_frame(raw, zstd=collected.sync.zstd))
    return _concatenate([head_of(collected, without, [len(frame) for frame in frames], DIFFERENCES), *frames])


@dataclass(frozen=True)
class _Opened:
    """Contributions that are being read, in worker-id order: payloads and weights in tokens, and their factors."""

    payloads: list[tuple[Payload, int]]
    factors: list[float]


@contextmanager
def _opened(
    collected: Collected, blobs: Blobs, factors: Mapping[str, float], contents: Mapping[str, memoryview] = NOTHING
) -> Iterator[_Opened]:
    """Open the contributions whose factor is not 0. Raises ContributionsLost at the end of the block if the bytes that
    were read are not those that were acknowledged."""
    in_order = sorted((worker, each) for worker, each in collected.contributions.items() if factors[worker] > 0)
    buffer = ReadBuffer()
    stored: dict[str, HashedPayload] = {}
    with ExitStack() as stack:
        payloads: list[tuple[Payload, int]] = []
        for worker, each in in_order:
            if worker in contents:
                payloads.append((Payload.from_bytes(contents[worker]), each.tokens))
                continue
            reader = blobs.open(blob_of(collected, worker))
            stored[worker] = stack.enter_context(HashedPayload(reader, buffer))
            payloads.append((stored[worker], each.tokens))
        yield _Opened(payloads, [factors[worker] for worker, _ in in_order])
        given = collected.contributions
        if lost := [worker for worker, each in stored.items() if not each.is_intact(given[worker].digest)]:
            raise ContributionsLost(lost)


def _delta_of(collected: Collected, factors: Mapping[str, float], frames: Sequence[Buffer]) -> memoryview:
    return _concatenate([head_of(collected, factors, [len(frame) for frame in frames]), *frames])


def head_of(
    collected: Collected, factors: Mapping[str, float], frame_bytes: Sequence[int], codec: str | None = None
) -> bytes:
    """Return the beginning of the delta, before its frames. `codec`: None for the run's."""
    return pack_header(
        DeltaHeader(
            run=collected.run,
            round=collected.round,
            fragment=collected.fragment,
            codec=codec or collected.sync.download_codec,
            elements=collected.elements,
            chunk_elements=CHUNK_ELEMENTS,
            frame_bytes=list(frame_bytes),
            base=collected.base,
            contributors=[
                Contributor(worker=worker, tokens=each.tokens, factor=factors[worker])
                for worker, each in sorted(collected.contributions.items())
                if factors[worker] > 0
            ],
        )
    )


def _concatenate(parts: Iterable[Buffer]) -> memoryview:
    parts = list(parts)
    content, start = aligned(sum(len(part) for part in parts)), 0
    for part in parts:
        content[start : start + len(part)] = memoryview(part).cast("B")
        start += len(part)
    return content
