"""When snapshots are written: the outer state as soon as training on it starts, the work at the end of the round.

So less is left to write at the end, when everyone waits. The outer state has several files, used in turn: the one that
the last saved work belongs to stays until other work is durable. Writing also computes the state's digests. A state
that is in files already is not written again: it only has to become durable.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial as bound
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer

from protocol.messages import Stage
from worker.accounts.stages import Stages
from worker.ranks import ALONE, Ranks
from worker.state import snapshot
from worker.state.optimizer_state import Stretch
from worker.state.outer_state import OuterState
from worker.state.snapshot import Snapshot
from worker.state.state_dir import StateDir
from worker.state.work import RoundStart, Work


class Saver:
    """Writes snapshots into `files`, one after the other, on its own thread; writes nothing if there is no directory.
    `owner` is the snapshot's `identity`. With several `ranks`, each has a directory and a Saver."""

    def __init__(
        self, files: StateDir | None, owner: str, state: OuterState, stages: Stages, ranks: Ranks = ALONE
    ) -> None:
        self._files, self._owner, self._state, self._stages = files, owner, state, stages
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, "snapshot")
        # The slots of the outer state written last, and of the one that the last work belongs to.
        self._state_slot = self._work_slot = 0
        self._written: tuple[int, int] | None = None  # round and changes of the outer state written last
        self._digests: Future[list[bytes]] = Future()  # of that one, once it is durable
        self._saved = False  # whether work of this process is durable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def load(self, optimizers: Sequence[Optimizer] = ()) -> Snapshot | None:
        """Return what the last process with this directory saved, with its outer state loaded; None if there is no
        complete snapshot. `optimizers` are the inner optimizers whose states are wanted."""
        if self._files is None:
            return None
        found = snapshot.load(self._files, self._owner, self._state, optimizers, self._ranks)
        if found is not None:
            self._state_slot = self._work_slot = found.slot
            if found.shared == self._state.in_files and found.ranks == (self._ranks.rank, self._ranks.size):
                self._written = (found.work.round, self._state.changes)
                self._digests.set_result(found.digests)
        return found

    def save_state(self) -> None:
        """Compute the outer state's digests, so that a bit that flips from now on is noticed, and start to write the
        state unless it was written before. It does not change until that is done."""
        if self._state.round is None:
            return
        now = (self._state.round, self._state.changes)
        if now == self._written:
            return
        self._written, self._state_slot = now, self._state.keep(self._work_slot)
        self._digests = self._thread.submit(self._write_state, self._state_slot)
        self._state.reader = self._digests

    def _write_state(self, slot: int) -> list[bytes]:
        digests = self._state.digests
        if self._files is not None:
            with self._stages(Stage.SNAPSHOT):
                snapshot.save_state(self._files, self._owner, slot, self._state)
        return digests

    def save(
        self,
        work: Work | RoundStart,
        *,
        partial: bool,
        optimizers: Callable[[], list[dict[str, Any]]],
        held: Callable[[], list[list[Stretch]]] = list,
        settings: list[list[dict[str, Any]]] | None = None,
        scaler: Callable[[], dict[str, Any] | None],
        warmup_left: int,
    ) -> Future[None] | None:
        """Start to write `work`, done on the current outer state, with the states of the inner optimizers and the
        GradScaler after it. Those are requested only if there is a directory.

        Nothing passed in may change before the future is done. The future raises OSError.
        """
        self.save_state()
        if self._files is None or self._written is None:
            return None
        assert self._written[0] == work.round, "what is trained on is written as the training begins"
        self._work_slot = self._state_slot
        taken = bound(
            Snapshot,
            work,
            partial,
            optimizers(),
            scaler(),
            warmup_left,
            self._work_slot,
            held=held(),
            ranks=(self._ranks.rank, self._ranks.size),
            settings=settings or [],
            shared=self._state.in_files,
        )
        write = self._stages.timed(Stage.SNAPSHOT, self._write)
        return self._thread.submit(write, self._files, self._digests, taken)

    def _write(self, files: StateDir, state: Future[list[bytes]], taken: Callable[..., Snapshot]) -> None:
        digests = state.result()  # it ran before this on the same thread; without it, the snapshot is useless
        snapshot.save(files, self._owner, taken(digests=digests), self._state.release_pseudo_gradients)
        if self._saved:  # so the snapshot before this one is of this process as well
            snapshot.remove_other_states(files, shared=self._state.in_files, processes=self._ranks.size)
        self._saved = True
