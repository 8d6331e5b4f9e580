"""The worker's state directory: its lock, its tokens, its snapshot. Every file is replaced atomically and durably, and
waits for room while the disk is full."""

import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from outerstep.common import files
from outerstep.common.files import Sink
from outerstep.common.quantities import bytes_text, duration_text
from worker.errors import StateDirBusy

SNAPSHOT = "snapshot.pt"
BEFORE = "snapshot-before.pt"  # the previous one, which another process of this worker may still need
STATE = "state-{}.pt"  # copies of an outer state in memory; two, used in turn: 0 and 1
STATE_FILE = "state-{}-of-{}.bin"  # the outer state of one of several processes, in three files that take turns
_MEMBER = "member.json"
WORKER_TOKEN = "token.json"
LOCK = "lock"

LOOKS_S = 5.0  # between attempts while the disk is full
LOGS_EVERY = 120  # attempts
DISK_FULL = "disk full"  # the phase that is shown meanwhile

log = logging.getLogger(__name__)

_HELD: set[Path] = set()  # directories that this process has locked


@dataclass(frozen=True)
class MemberTokens:
    """`current`: of the last lease. `proposed`: of a join whose answer has not arrived; it may hold the lease by
    now."""

    current: str | None
    proposed: str | None


@dataclass(frozen=True)
class WorkerToken:
    """The worker token that a join token is exchanged for, with its run and worker. `exchanged`: the coordinator has
    confirmed it; otherwise it may or may not know the token."""

    run: str
    worker: str
    token: str
    exchanged: bool


def rank_directory(directory: Path | str, rank: int) -> Path:
    """Return the directory of process `rank`, for a worker with files in `directory`."""
    return Path(directory, f"rank-{rank}") if rank else Path(directory)


class StateDir:
    """A directory used by one process at a time. Use as a context manager; raises StateDirBusy and OSError.

    While its disk is full, `pause` is called with the seconds until the next attempt; what it raises ends the waiting.
    None: a full disk is an OSError. `show` is called with what the worker does instead of its phase; None: no more.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        pause: Callable[[float], object] | None = None,
        show: Callable[[str | None], object] = lambda phase: None,
    ) -> None:
        self.path, self._pause, self._show = Path(path), pause, show

    def __enter__(self) -> Self:
        if not self.path.is_dir():
            for each in (self.path.parent, self.path):  # another process of this worker may make it as well
                each.mkdir(parents=True, mode=0o700, exist_ok=True)
            files.fsync(self.path.parent)
        self._lock = os.fdopen(os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "w")
        if not files.try_lock(self._lock):
            self._lock.close()
            if self.path.resolve() in _HELD:
                raise StateDirBusy(
                    f"this process already uses {self.path}: an earlier DiLoCo, made by a notebook cell that ran "
                    "before for example, has not left its run; end its `with` block, or restart the process"
                )
            raise StateDirBusy(
                f"another process uses {self.path}. If it is an earlier process of this worker, end it (`fuser "
                f"{self.path / LOCK}` shows its number) and start again, and the worker continues from its snapshot. A "
                "second worker needs another name (--name) or directory (--state-dir; in a script, state_dir)"
            )
        _HELD.add(self.path.resolve())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _HELD.discard(self.path.resolve())
        self._lock.close()  # releases the lock

    def replace(self, name: str, write: Callable[[Sink], object]) -> None:
        """Replace file `name` by what `write` writes (see `files.replace_file`); while the disk is full, wait for room.
        Raises OSError, and what `pause` raises."""
        try:
            files.replace_file(self.path / name, write, 0o600)
        except OSError as error:
            if error.errno not in files.FULL or self._pause is None:
                raise
            self._show(DISK_FULL)
            try:
                self._replace_later(name, write, self._pause)
            finally:
                self._show(None)

    def _replace_later(self, name: str, write: Callable[[Sink], object], pause: Callable[[float], object]) -> None:
        needed = files.size_of(write)
        for attempt in itertools.count():
            free = files.free_bytes(self.path)
            if attempt % LOGS_EVERY == 0:
                log.warning(
                    "the disk of %s is full: %s needs %s, %s are free; this worker waits for room",
                    *(self.path, name, bytes_text(needed), bytes_text(free)),
                )
            pause(LOOKS_S)
            if files.free_bytes(self.path) < needed:
                continue
            try:
                files.replace_file(self.path / name, write, 0o600)
            except OSError as error:
                if error.errno not in files.FULL:  # a quota, or what only root may use
                    raise
            else:
                log.info("there is room in %s again, after %s", self.path, duration_text(LOOKS_S * (attempt + 1)))
                return

    def worker_token(self) -> WorkerToken | None:
        """Return the saved token; None if there is none. Raises ValueError for a damaged file."""
        try:
            return WorkerToken(**json.loads((self.path / WORKER_TOKEN).read_text()))
        except FileNotFoundError:
            return None
        except TypeError as error:
            raise ValueError(f"{self.path / WORKER_TOKEN} was not written by this version") from error

    def save_worker_token(self, own: WorkerToken) -> None:
        """Replace the worker token durably."""
        self.replace(WORKER_TOKEN, lambda file: file.write(json.dumps(asdict(own)).encode()))

    def member_tokens(self) -> MemberTokens:
        """Return the saved tokens, empty ones if there are none."""
        try:
            document = json.loads((self.path / _MEMBER).read_text())
        except FileNotFoundError:
            return MemberTokens(None, None)
        return MemberTokens(document["member_token"], document.get("proposed"))

    def save_member_tokens(self, tokens: MemberTokens) -> None:
        """Replace the member tokens durably."""
        document = {"member_token": tokens.current, "proposed": tokens.proposed}
        self.replace(_MEMBER, lambda file: file.write(json.dumps(document).encode()))
