"""The outer states that an aggregator keeps: it derives each one from a checkpoint and the deltas after it, then steps
it with every new delta. The files are a cache: those that were not used for longest go first."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.aggregation.state_file import MaxMagnitude, StateReader, stepped, write_state
from coordinator.aggregation.tasks import Advance, Advanced, Blob, StateRef
from coordinator.store.blobs import Blobs, FileReader, RunNames
from coordinator.store.payloads import HashedPayload, MemoryBudget, ReadBuffer, digest_of
from protocol.errors import OuterstepError
from protocol.wire import Payload

logger = logging.getLogger(__name__)


class StateLost(OuterstepError):
    """The state cannot be derived: a checkpoint or a delta is damaged, or they lead to another state than recorded."""


class _Kept:
    """The newest state of a fragment that is in a file. `state` is None if there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: StateRef | None = None
        self.bytes = 0


@dataclass(frozen=True)
class _Source:
    """Where checkpoints and deltas are."""

    blobs: Blobs
    memory: MemoryBudget

    @contextmanager
    def delta(self, name: str, digest: bytes) -> Iterator[Payload]:
        content = self.memory.delta(digest)
        if content is not None:
            yield Payload.from_bytes(content)
            return
        with HashedPayload(self.blobs.open(name), ReadBuffer()) as delta:
            yield delta


class States:
    """The states of fragments, in files in `folder`, of at most `limit_bytes` together unless one alone is larger.
    Thread-safe."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit_bytes = folder, limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()  # by run and fragment, the last used last

    def advance(
        self, task: Advance, blobs: Blobs, memory: MemoryBudget, check: Callable[[], object] = lambda: None
    ) -> Advanced:
        """Do the task. `memory` may have its deltas. `check` is called before each outer step, and may raise to end the
        work.

        Raises StateLost, StoreOutage and other OSErrors.
        """
        source = _Source(blobs, memory)
        with self._held(task) as kept:
            if _leads_on(kept.state, task):
                try:
                    return self._advance(task, kept, source, check)
                except StateLost as lost:  # another one since a rollback, or a damaged file
                    logger.info("%s; it is derived again", lost)
            self._fetch(task, kept, source)
            return self._advance(task, kept, source, check)

    def _advance(self, task: Advance, kept: _Kept, source: "_Source", check: Callable[[], object]) -> Advanced:
        """Step the kept state."""
        largest, state = MaxMagnitude(), kept.state
        assert state is not None
        try:
            while state.round < task.round:
                check()
                largest = MaxMagnitude()
                state = self._step(task, state, source, largest)
                if state.round == task.known.round and state != task.known:
                    raise StateLost(
                        f"state {state.round} of fragment {task.fragment} of the run {task.run} has the digest "
                        f"{state.digest.hex()}, the run's is {task.known.digest.hex()}"
                    )
                kept.state = state
            checkpoint = None
            if task.checkpoint:
                path = self._path(task, state.round)
                checkpoint = store_state(source.blobs, task.run, state.round, task.fragment, path)
        except BaseException:
            kept.state = None  # a file may be half written
            raise
        return Advanced(digest=state.digest, largest=largest.largest, checkpoint=checkpoint)

    @contextmanager
    def _held(self, task: Advance) -> Iterator[_Kept]:
        """Let the block use the files of the fragment alone. Then delete others if they are too many."""
        key = task.run, task.fragment
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
        with kept.lock:
            try:
                yield kept
            finally:
                kept.bytes = sum(path.stat().st_size for path in self._paths(key) if path.exists())
        self._make_room()

    def _make_room(self) -> None:
        with self._lock:
            total = sum(kept.bytes for kept in self._kept.values())
            for key, kept in list(self._kept.items())[:-1]:
                if total <= self._limit_bytes or not kept.lock.acquire(blocking=False):
                    continue
                total -= kept.bytes
                for path in self._paths(key):
                    path.unlink(missing_ok=True)
                del self._kept[key]
                kept.state = None
                kept.lock.release()

    def _fetch(self, task: Advance, kept: _Kept, source: "_Source") -> None:
        """Keep the checkpoint's state."""
        checkpoint = task.origin.checkpoint
        name = RunNames(task.run).checkpoint(checkpoint.round, task.fragment, task.origin.blob)
        path = self._path(task, checkpoint.round)
        kept.state = None
        try:
            source.blobs.fetch(name, path)
            with StateReader(FileReader(path)) as reader:
                intact = reader.state_digest() == checkpoint.digest
        except (FileNotFoundError, OuterstepError, ValueError) as error:
            raise StateLost(f"{name}: {error}") from error
        if not intact:
            raise StateLost(f"{name} is corrupt")
        kept.state = checkpoint

    def _step(self, task: Advance, state: StateRef, source: "_Source", largest: MaxMagnitude) -> StateRef:
        """Take the outer step with the delta of the state's round. Return the next state."""
        digest = task.origin.deltas[state.round - task.origin.checkpoint.round]
        name = RunNames(task.run).delta(state.round, task.fragment, digest)
        target = self._path(task, state.round + 1)
        try:
            with StateReader(FileReader(self._path(task, state.round))) as reader, source.delta(name, digest) as delta:
                chunks = largest.watch(stepped(reader, delta, task.outer))
                after = write_state(target, task.run, state.round + 1, task.fragment, task.elements, chunks)
                if isinstance(delta, HashedPayload) and not delta.is_intact(digest):
                    raise StateLost(f"{name} is corrupt")
        except (FileNotFoundError, OuterstepError, ValueError, LookupError) as error:
            raise StateLost(f"{name}: {error}") from error
        return StateRef(round=state.round + 1, digest=after)

    def _path(self, task: Advance, round_: int) -> Path:
        return self._paths((task.run, task.fragment))[round_ % 2]

    def _paths(self, key: tuple[str, int]) -> tuple[Path, Path]:
        """Return the two files of a fragment, which alternate."""
        run, fragment = key
        return self._folder / f"{run}.{fragment}.0", self._folder / f"{run}.{fragment}.1"


def _leads_on(state: StateRef | None, task: Advance) -> bool:
    """Return True if the task's state may be derived from `state`. Whether it belongs to the run shows when it has
    become the known one. A later one than that may be of a history that was dropped."""
    if state is None or not task.origin.checkpoint.round <= state.round <= task.known.round:
        return False
    return state.round not in (task.known.round, task.origin.checkpoint.round) or state in (
        task.known,
        task.origin.checkpoint,
    )


def store_state(blobs: Blobs, run: str, round_: int, fragment: int, path: Path) -> Blob:
    """Make the state file `path` a durable fragment of the checkpoint of `round_`. Raises OSError."""
    with FileReader(path) as reader:
        blob = Blob(digest=digest_of(reader), size=reader.size)
    blobs.put(RunNames(run).checkpoint(round_, fragment, blob.digest), path)
    return blob
