"""The worker's state directory: its lock, its tokens, its snapshot. Every file is replaced atomically and durably."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from outerstep.common import files
from outerstep.common.files import Writer
from worker.errors import StateDirBusy

SNAPSHOT = "snapshot.pt"
BEFORE = "snapshot-before.pt"  # the previous one, which another process of this worker may still need
STATE = "state-{}.pt"  # copies of an outer state in memory; two, used in turn: 0 and 1
STATE_FILE = "state-{}-of-{}.bin"  # the outer state of one of several processes, in three files that take turns
_MEMBER = "member.json"
WORKER_TOKEN = "token.json"
LOCK = "lock"

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
    """A directory used by one process at a time. Use as a context manager; raises StateDirBusy and OSError."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

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
                    "before for example, has not left its run; end its `with` block, close() the DiLoCoOptimizer, "
                    "or restart the process"
                )
            raise StateDirBusy(
                f"another process uses {self.path}. If it is an earlier process of this worker, end it (`fuser "
                f"{self.path / LOCK}` shows its number) and start again, and the worker continues from its snapshot. A "
                "second worker needs another name (--name) or directory (--state; in a script, state_dir)"
            )
        _HELD.add(self.path.resolve())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _HELD.discard(self.path.resolve())
        self._lock.close()  # releases the lock

    def replace(self, name: str, write: Callable[[Writer], object]) -> None:
        """Replace file `name` by what `write` writes (see `files.replace_file`)."""
        files.replace_file(self.path / name, write, 0o600)

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
