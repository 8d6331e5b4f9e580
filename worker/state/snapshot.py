"""The snapshot: what a killed worker needs to go on as if nothing had happened. One per round.

Its outer state is in a file of its own, written while the training goes on (saver.py). The rest is taken after the H
inner steps and is durable before the last upload, so before the round can close with this work in it. Whoever is killed
after that resumes the sync: uploads are idempotent. Whoever is killed during the inner steps that follow resumes there
as well, finds its contribution accepted and the deltas published, and so comes to the next round's exact start: state
r + 1 from the deltas, the inner optimizer as it was at the end of round r; then it trains on the same units again. Late
work that was carried along is in the work that was saved after it, or found late again. Whoever is killed before it is
durable does so from the snapshot of the round before; and before the first one, the start is state 0 or a checkpoint,
and a cold inner optimizer, which needs no snapshot.
"""

import logging
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from blake3 import blake3
from torch import Tensor

from protocol.digest import DIGEST_BYTES, Buffer, digest
from protocol.direct import Writer
from protocol.fragments import Layout
from protocol.messages import RunDetail
from worker.state.fragments import host_copy
from worker.state.outer_state import OuterState
from worker.state.state_dir import SNAPSHOT, STATE, StateDir
from worker.state.work import Carry, Contribution, Late, RoundStart, Work

_VERSION = 6
_PIECE_BYTES = 1 << 18  # that stay in the cache while they are hashed and copied

# What torch.load and the look-ups after it raise for a file whose bytes are wrong: it seeks to nonsense, for example.
_DAMAGE = (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The work done on state `work.round` of the run, and the states of the inner optimizers, and of the GradScaler if
    there is one, after it. Or, where training goes on while fragments travel, what that round starts from, and theirs
    before it.

    `digests` are the outer state's, which is in a file of its own, number `slot`. `partial`: the worker left in the
    middle of the round. `warmup_left`: inner steps until a joiner is warm.
    """

    work: Work | RoundStart
    partial: bool
    inner_optimizers: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    warmup_left: int
    slot: int
    digests: list[bytes]


def identity(run: RunDetail, layout: Layout, worker: str) -> str:
    """Return what a snapshot belongs to: this very run (not another one of the same name), its layout, this worker."""
    parts = (run.spec_digest, repr(run.created_at), layout.digest().hex(), worker)
    return digest("\n".join(parts).encode()).hex()


def save_state(files: StateDir, owner: str, slot: int, state: OuterState) -> None:
    """Write the outer state, which may not change before this returns. Raises OSError."""
    document = {
        "version": _VERSION,
        "identity": owner,
        "theta": state.theta,
        "momentum": state.momentum,
        "digests": state.digests,
    }
    files.replace(STATE.format(slot), partial(write_document, document))


def save(files: StateDir, owner: str, snapshot: Snapshot) -> None:
    """Write the snapshot, whose outer state is durable. Nothing in it may change before this returns. Raises
    OSError."""
    document = {
        "version": _VERSION,
        "identity": owner,
        **_written(snapshot.work),
        "partial": snapshot.partial,
        "inner_optimizers": snapshot.inner_optimizers,
        "scaler": snapshot.scaler,
        "warmup_left": snapshot.warmup_left,
        "slot": snapshot.slot,
        "digests": snapshot.digests,
    }
    files.replace(SNAPSHOT, partial(write_document, document))


class _Hashed:
    """A file that hashes what `torch.save` writes into it."""

    def __init__(self, file: Writer) -> None:
        self._file, self.hasher = file, blake3()

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.hasher.update(piece)
            self._file.write(piece)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write_document(document: dict[str, Any], file: Writer) -> None:
    """Write `document` as `torch.save` does, and then the BLAKE3 digest of that."""
    hashed = _Hashed(file)
    # torch's zip files have checksums of their own, which nobody looks at and which can be left out by an option of the
    # whole process only. The plain format has none; `torch.load` reads either.
    torch.save(document, cast(IO[bytes], hashed), _use_new_zipfile_serialization=False)
    file.write(hashed.hasher.digest())


def load(files: StateDir, owner: str, state: OuterState) -> Snapshot | None:
    """Return the snapshot, on the CPU, and load its outer state into `state`. Return None where there is none, and with
    a warning where it is not ours or damaged; `state` may have anything in it then."""
    path = files.path / SNAPSHOT
    if not path.exists():
        return None
    document = read_document(path, owner, _VERSION)
    if document is None:
        return None
    try:
        snapshot = Snapshot(
            work=_read_work(document),
            partial=document["partial"],
            # Older processes wrote the state of one.
            inner_optimizers=(
                document["inner_optimizers"] if "inner_optimizers" in document else [document["inner_optimizer"]]
            ),
            scaler=document.get("scaler"),  # which older processes did not write
            warmup_left=document["warmup_left"],
            slot=document["slot"],
            digests=document["digests"],
        )
    except _DAMAGE as error:
        _say_damaged(path, error)
        return None
    path = files.path / STATE.format(snapshot.slot)
    document = read_document(path, owner, _VERSION)
    if document is None:
        return None
    try:
        if document["digests"] != snapshot.digests:
            raise ValueError("it is not the outer state that the snapshot belongs to")
        for p in range(len(state)):
            state.set(p, document["theta"][p], document["momentum"][p])
        if state.digests != snapshot.digests:
            raise ValueError("its bytes are not those that were saved")
    except _DAMAGE as error:
        _say_damaged(path, error)
        return None
    state.round = snapshot.work.round
    return snapshot


def read_document(path: Path, owner: str, version: int) -> dict[str, Any] | None:
    """Return the document in it; None, with a warning, where it is not ours, damaged or missing."""
    try:
        _check(path)
        document: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if document["version"] != version or document["identity"] != owner:
            log.warning("%s belongs to another run, spec, model or worker: ignored", path)
            return None
    except _DAMAGE as error:
        _say_damaged(path, error)
        return None
    return document


def _check(path: Path) -> None:
    hasher = blake3()
    with path.open("rb") as file:
        left = path.stat().st_size - DIGEST_BYTES
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            hasher.update(piece)
            left -= len(piece)
        if file.read() != hasher.digest():
            raise ValueError("its bytes are not those that were saved")


def _say_damaged(path: Path, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}".split(". ")[0]
    log.warning("%s is damaged (%s): ignored", path, reason)


def copied(value: Any) -> Any:
    """Return the same dictionaries, lists and tuples, with copies of the tensors in host memory."""
    if isinstance(value, Tensor):
        return host_copy(value)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value


# The fields of Work in the file that its contributions have in common, and those that they have one each of.
_COMMON = ("round", "units", "weight", "inner_steps", "loss")


def _written(work: Work | RoundStart) -> dict[str, Any]:
    """Return `work` as it stands in the document, by its name there. Tensors are not copied."""
    if isinstance(work, RoundStart):
        carry = vars(work.carry) | {"late": {p: vars(late) for p, late in work.carry.late.items()}}
        fresh = carry.pop("fresh")
        return {"midway": vars(work) | {"carry": carry, "fresh": [fresh.get(p, 0) for p in range(len(work.local))]}}
    contributions = work.contributions
    common = {name: getattr(contributions[0], name) for name in _COMMON}
    late = {each.fragment: vars(each.late) for each in contributions if each.late is not None}
    each = {"norms": [each.norm for each in contributions], "deltas": [each.delta for each in contributions]}
    return {"work": common | each | {"late": late}}


def _read_work(document: dict[str, Any]) -> Work | RoundStart:
    if "midway" in document:
        start = document["midway"]
        late = {p: Late(**each) for p, each in start["carry"]["late"].items()}
        carry = Carry(**start["carry"] | {"late": late, "fresh": dict(enumerate(start["fresh"]))})
        return RoundStart(start["round"], start["local"], carry)
    work = document["work"]
    common = {name: work[name] for name in _COMMON}
    late = {p: Late(**each) for p, each in work["late"].items()}
    each = enumerate(zip(work["norms"], work["deltas"], strict=True))
    return Work([Contribution(**common, fragment=p, norm=n, delta=d, late=late.get(p)) for p, (n, d) in each])
