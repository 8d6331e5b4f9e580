"""The snapshot: what a killed worker needs in order to continue as if nothing had happened. There is one per round.

Its outer state is in a separate file: a copy, written while the training goes on (saver.py), or the very file that the
worker keeps it in. The rest is taken after the H
inner steps and is durable before the last upload, so before the round can close with this work in it.

Killed after that, a worker resumes the sync: uploads are idempotent. Killed during the inner steps that follow, it
resumes there as well, finds its contribution accepted and the deltas published, and so comes to the exact start of the
next round: state r + 1 from the deltas, the inner optimizer as it was at the end of round r. Then it trains on the same
units again. Late work that was carried is in the work saved after it, or is found to be late again.

Killed before the snapshot is durable, it does the same from the snapshot of the round before. Before the first one, it
starts from state 0 or a checkpoint with a cold inner optimizer, which needs no snapshot.
"""

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from blake3 import blake3
from torch import Tensor
from torch.optim import Optimizer

from outerstep.common.files import Sink
from protocol.digest import DIGEST_BYTES, Buffer, digest
from protocol.fragments import Layout
from protocol.messages import RunDetail
from worker.errors import ModelError
from worker.ranks import ALONE, Ranks
from worker.state.mapped import MappedArrays
from worker.state.optimizer_state import Stretch, reassembled, stretches
from worker.state.outer_state import OuterState
from worker.state.state_dir import BEFORE, SNAPSHOT, STATE, STATE_FILE, StateDir, rank_directory
from worker.state.work import Carry, Contribution, Late, RoundStart, Work

_VERSION = 8
_ANOTHER = "it is not the outer state that the snapshot belongs to"
_PIECE_BYTES = 1 << 18  # pieces stay in the cache while they are hashed and copied

# What torch.load and the look-ups after it raise for a damaged file: it may seek anywhere, for example.
_DAMAGE = (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The work done on state `work.round` of the run, with the states of the inner optimizers and the GradScaler after
    it. Or, if training goes on while fragments are in flight, the start of that round, with the states before it. In a
    worker with several processes, this process's part.

        partial       the worker left in the middle of the round
        warmup_left   inner steps until a joiner's optimizer is warm
        slot          number of the outer state's file
        digests       the state digests of the outer state
        held          by optimizer: the stretches of its parameters that this process had (`optimizer_state.stretches`)
        ranks         this process's rank, and the number of processes
        settings      the settings of each optimizer as the script started
        shared        the outer state's file is the one that the worker keeps it in
    """

    work: Work | RoundStart
    partial: bool
    inner_optimizers: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    warmup_left: int
    slot: int
    digests: list[bytes]
    held: list[list[Stretch]] = field(default_factory=list)
    ranks: tuple[int, int] = (0, 1)
    settings: list[list[dict[str, Any]]] = field(default_factory=list)
    shared: bool = False


def identity(run: RunDetail, layout: Layout, worker: str) -> str:
    """Return what a snapshot belongs to: this very run (not another of the same name), its layout, this worker."""
    parts = (run.spec_digest, repr(run.created_at), layout.digest().hex(), worker)
    return digest("\n".join(parts).encode()).hex()


def save_state(files: StateDir, owner: str, slot: int, state: OuterState) -> None:
    """Make the outer state durable, which must not change before this returns. It replaces the state of the snapshot
    before the last one, so that snapshot is deleted if it is still there. Raises OSError."""
    (files.path / BEFORE).unlink(missing_ok=True)
    if state.in_files:
        state.sync(slot)
        return
    document = {
        "version": _VERSION,
        "identity": owner,
        "theta": state.theta,
        "momentum": state.momentum,
        "digests": state.digests,
    }
    files.replace(STATE.format(slot), partial(write_document, document))


def save(files: StateDir, owner: str, snapshot: Snapshot, after_piece: Callable[[], object] = lambda: None) -> None:
    """Write the snapshot, whose outer state is durable. Nothing in it may change before this returns. The previous one
    is kept if another process may be killed before it has written its own. `after_piece` is called after each large
    piece of it. Raises OSError."""
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
        "held": snapshot.held,
        "ranks": snapshot.ranks,
        "settings": snapshot.settings,
        "shared": snapshot.shared,
    }
    if snapshot.ranks[1] > 1 and (files.path / SNAPSHOT).exists():
        (files.path / SNAPSHOT).rename(files.path / BEFORE)
    files.replace(SNAPSHOT, partial(write_document, document, after_piece=after_piece))


def remove_other_states(files: StateDir, *, shared: bool, processes: int) -> None:
    """Remove outer states that a worker with other settings has left: the snapshots do not need them any more."""
    own = STATE_FILE.format("*", processes) if shared else STATE.format("*")
    for path in files.path.glob("state-*"):
        if not path.match(own):
            path.unlink()


class _Hashed:
    """A file that hashes what `torch.save` writes into it."""

    def __init__(self, file: Sink, after_piece: Callable[[], object]) -> None:
        self._file, self.hasher, self._after_piece = file, blake3(), after_piece

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.hasher.update(piece)
            self._file.write(piece)
        if len(view) > _PIECE_BYTES:
            self._after_piece()
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write_document(document: dict[str, Any], file: Sink, after_piece: Callable[[], object] = lambda: None) -> None:
    """Write `document` as `torch.save` does, followed by the BLAKE3 digest of that. `after_piece` is called after each
    large piece of it."""
    hashed = _Hashed(file, after_piece)
    # torch's zip files have checksums that nothing reads, and that only an option for the whole process can leave out.
    # The plain format has none; `torch.load` reads either.
    torch.save(document, cast(IO[bytes], hashed), _use_new_zipfile_serialization=False)
    file.write(hashed.hasher.digest())


def load(
    files: StateDir, owner: str, state: OuterState, optimizers: Sequence[Optimizer] = (), ranks: Ranks = ALONE
) -> Snapshot | None:
    """Return the snapshot, on the CPU, and load its outer state into `state`. Return None if there is none, and with a
    warning if it is damaged or belongs to something else; `state` may then contain anything.

    With several processes, all get their parts of the worker's newest complete snapshot, even if another number of
    processes saved it. `optimizers` determine which part of the inner optimizers' states is wanted. Raises ModelError
    if the snapshot has other optimizers.
    """
    directory = files.path if ranks.is_first else files.path.parent
    for round_number, size in ranks.on_first(lambda: _rounds_in(files, owner)):
        parts = [ranks.rank] if size == ranks.size else range(size)
        read = [
            _read(rank_directory(directory, rank), owner, state.layout, round_number, (rank, size)) for rank in parts
        ]
        if any(each is None for each in ranks.all(None if None in read else True)):
            continue
        saved = [each for each in read if each is not None]
        found = ranks.together(partial(_joined, saved, state, optimizers))
        if None in ranks.all(found and True):
            continue
        state.reach(round_number)
        return found
    return None


def _rounds_in(files: StateDir, owner: str) -> list[tuple[int, int]]:
    """Return the rounds of the first process's snapshots, newest first, with their number of processes."""
    documents = (_read_document(path, owner) for path in _paths(files.path))
    return [(_round_of(each), _ranks_of(each)[1]) for each in documents if each is not None]


def _paths(directory: Path) -> list[Path]:
    return [path for name in (SNAPSHOT, BEFORE) if (path := directory / name).exists()]


@dataclass(frozen=True)
class _OuterState:
    """θ and u, by fragment that the process owned, and the file that has them."""

    path: Path
    theta: Mapping[int, Tensor]
    momentum: Mapping[int, Tensor]


_Saved = tuple[Snapshot, _OuterState]


def _read(directory: Path, owner: str, layout: Layout, round_number: int, ranks: tuple[int, int]) -> _Saved | None:
    """Return what process `ranks` saved of that round, with its outer state; None if it saved none. The digests of a
    shared outer state are not checked yet."""
    for path in _paths(directory):
        document = _read_document(path, owner)
        if document is None or _round_of(document) != round_number or _ranks_of(document) != ranks:
            continue
        try:
            snapshot = _snapshot_of(document)
        except _DAMAGE as error:
            _warn_damaged(path, error)
            continue
        state = _read_shared(directory, layout, snapshot) if snapshot.shared else _read_copy(directory, owner, snapshot)
        if state is not None:
            return snapshot, state
    return None


def _read_copy(directory: Path, owner: str, snapshot: Snapshot) -> _OuterState | None:
    path = directory / STATE.format(snapshot.slot)
    document = _read_document(path, owner)
    if document is None:
        return None
    if document["digests"] != snapshot.digests:
        _warn_damaged(path, ValueError(_ANOTHER))
        return None
    return _OuterState(path, dict(enumerate(document["theta"])), dict(enumerate(document["momentum"])))


def _read_shared(directory: Path, layout: Layout, snapshot: Snapshot) -> _OuterState | None:
    rank, size = snapshot.ranks
    path = directory / STATE_FILE.format(snapshot.slot, size)
    sizes = [n if p % size == rank else 0 for p, n in enumerate(layout.elements) for _ in range(2)]
    try:
        values = MappedArrays.existing(path, sizes).values
    except (OSError, ValueError) as error:
        _warn_damaged(path, error)
        return None
    return _OuterState(path, dict(enumerate(values[::2])), dict(enumerate(values[1::2])))


def _round_of(document: dict[str, Any]) -> int:
    number: int = document["midway" if "midway" in document else "work"]["round"]
    return number


def _ranks_of(document: dict[str, Any]) -> tuple[int, int]:
    rank, size = document["ranks"]
    return rank, size


def _snapshot_of(document: dict[str, Any]) -> Snapshot:
    return Snapshot(
        work=_read_work(document),
        partial=document["partial"],
        inner_optimizers=document["inner_optimizers"],
        scaler=document["scaler"],
        warmup_left=document["warmup_left"],
        slot=document["slot"],
        digests=document["digests"],
        held=document["held"],
        ranks=_ranks_of(document),
        settings=document["settings"],
        shared=document.get("shared", False),
    )


def _joined(saved: list[_Saved], state: OuterState, optimizers: Sequence[Optimizer]) -> Snapshot | None:
    """Return this process's part of `saved`, the snapshots of all processes or of this one, and load its outer state.
    Return None if that is damaged."""
    first, size = saved[0][0], saved[0][0].ranks[1]
    of = {snapshot.ranks[0]: (snapshot, outer) for snapshot, outer in saved}
    in_place = len(saved) == 1 and first.shared and state.in_files
    if in_place:
        state.begin_at(first.slot)
    for p in state.own:
        snapshot, outer = of[p % size]
        if not in_place:
            state.set(p, outer.theta[p], outer.momentum[p])
        if state.fragment_digest(p) != snapshot.digests[p // size]:
            _warn_damaged(outer.path, ValueError(f"fragment {p}: {_ANOTHER}"))
            return None
    parts = [snapshot for snapshot, _ in saved]
    held = [stretches(each) for each in optimizers]
    inner = first.inner_optimizers
    if len(parts) > 1 or (first.held and first.held != held):
        if len(held) != len(inner):
            raise ModelError(
                f"the inner optimizers are not those of the snapshot in this state_dir: there are {len(held)} of "
                f"them, and {len(inner)} in the snapshot"
            )
        inner = [
            reassembled([(each.held[index], each.inner_optimizers[index]) for each in parts], wanted)
            for index, wanted in enumerate(held)
        ]
    return replace(first, work=_work_of(parts, set(state.own), size), inner_optimizers=inner, held=held)


def _work_of(parts: list[Snapshot], own: set[int], size: int) -> Work | RoundStart:
    """Return the part of all these processes' work that belongs to the fragments `own`."""
    first = parts[0].work
    if isinstance(first, Work):
        all_of_them = [each for part in parts for each in cast(Work, part.work).contributions]
        return Work(first.round, sorted((c for c in all_of_them if c.fragment in own), key=lambda c: c.fragment))
    starts = {part.ranks[0]: cast(RoundStart, part.work) for part in parts}
    local = [
        starts[p % size].local[p] if p in own else torch.empty(0, dtype=torch.float32, device="cpu")
        for p in range(len(first.local))
    ]
    carried = [start.carry for start in starts.values()]
    late = {p: each for carry in carried for p, each in carry.late.items() if p in own}
    unsent = {p: each for carry in carried for p, each in carry.unsent.items() if p in own}
    ahead = {p: each for carry in carried for p, each in carry.ahead.items() if p in own}
    return RoundStart(first.round, local, replace(first.carry, late=late, unsent=unsent, ahead=ahead))


def _read_document(path: Path, owner: str) -> dict[str, Any] | None:
    """Return the document in the file; None, with a warning, if it is missing, damaged or belongs to something else."""
    try:
        _check(path)
        document: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if document["version"] != _VERSION or document["identity"] != owner:
            log.warning("%s belongs to another run, spec, model or worker: ignored", path)
            return None
    except _DAMAGE as error:
        _warn_damaged(path, error)
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
            raise ValueError("its bytes are not those that were written")


def _warn_damaged(path: Path, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}".split(". ")[0]
    log.warning("%s is damaged (%s): ignored", path, reason)


def _written(work: Work | RoundStart) -> dict[str, Any]:
    """Return `work` as the entry of the document. Tensors are not copied."""
    if isinstance(work, RoundStart):
        carry = vars(work.carry) | {"late": {p: vars(late) for p, late in work.carry.late.items()}}
        fresh = carry.pop("fresh")
        return {"midway": vars(work) | {"carry": carry, "fresh": [fresh.get(p, 0) for p in range(len(work.local))]}}
    contributions = [vars(each) | {"late": each.late and vars(each.late)} for each in work.contributions]
    return {"work": {"round": work.round, "contributions": contributions}}


def _read_work(document: dict[str, Any]) -> Work | RoundStart:
    if "midway" in document:
        start = document["midway"]
        late = {p: Late(**each) for p, each in start["carry"]["late"].items()}
        carry = Carry(**start["carry"] | {"late": late, "fresh": dict(enumerate(start["fresh"]))})
        return RoundStart(start["round"], start["local"], carry)
    work = document["work"]
    made = ({**one, "late": one["late"] and Late(**one["late"])} for one in work["contributions"])
    return Work(work["round"], [Contribution(**one) for one in made])
