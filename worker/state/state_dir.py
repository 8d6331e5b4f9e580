"""The worker's own directory: its lock, its tokens, its snapshot. Every file is replaced atomically and
durably."""

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
BEFORE = "snapshot-before.pt"  # the one before, while another process of this worker may have no other
STATE = "state-{}.pt"  # two that take turns, 0 and 1
_MEMBER = "member.json"
OWN_TOKEN = "token.json"
LOCK = "lock"

_HELD: set[Path] = set()  # directories that this process works in


@dataclass(frozen=True)
class MemberTokens:
    """`current`: of the last lease. `proposed`: of a join whose answer has not come; it may hold the lease by now."""

    current: str | None
    proposed: str | None


@dataclass(frozen=True)
class OwnToken:
    """The worker token that a join token is exchanged for, and for which worker of which run. `exchanged`: the
    coordinator has said so; else it may know the token by now, or not yet."""

    run: str
    worker: str
    token: str
    exchanged: bool


def rank_directory(directory: Path, rank: int) -> Path:
    """Return where process `rank` of a worker keeps its files, if the worker's are in `directory`."""
    return directory / f"rank-{rank}" if rank else directory


class StateDir:
    """A directory that one process at a time works in. Use as a context manager; raises StateDirBusy and OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        if not self.path.is_dir():
            for each in (self.path.parent, self.path):  # which another process of this worker may make as well
                each.mkdir(parents=True, mode=0o700, exist_ok=True)
            files.fsync(self.path.parent)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if not files.try_lock(self._lock):
            os.close(self._lock)
            if self.path.resolve() in _HELD:
                raise StateDirBusy(
                    f"this process works in {self.path} already: a DiLoCo made earlier, by a notebook cell that ran "
                    "before for example, has not left its run; end its `with` block, close() the DiLoCoOptimizer, or "
                    "restart the process"
                )
            raise StateDirBusy(
                f"another process works in {self.path}: one worker per state directory; "
                "give this one another name (--name), or another directory (--state; in a script, state_dir)"
            )
        _HELD.add(self.path.resolve())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _HELD.discard(self.path.resolve())
        os.close(self._lock)  # and with it the lock

    def replace(self, name: str, write: Callable[[Writer], object]) -> None:
        """Give file `name` the content that `write` writes, as `files.replace_file` does."""
        files.replace_file(self.path / name, write, 0o600)

    def own_token(self) -> OwnToken | None:
        """Return what was saved last; None where nothing was. Raises ValueError for a file that is damaged."""
        try:
            return OwnToken(**json.loads((self.path / OWN_TOKEN).read_text()))
        except FileNotFoundError:
            return None
        except TypeError as error:
            raise ValueError(f"{self.path / OWN_TOKEN} is not what this version writes") from error

    def save_own_token(self, own: OwnToken) -> None:
        """Replace the worker's own token durably."""
        self.replace(OWN_TOKEN, lambda file: file.write(json.dumps(asdict(own)).encode()))

    def member_tokens(self) -> MemberTokens:
        """Return what was saved last; no tokens where nothing was."""
        try:
            document = json.loads((self.path / _MEMBER).read_text())
        except FileNotFoundError:
            return MemberTokens(None, None)
        return MemberTokens(document["member_token"], document.get("proposed"))

    def save_member_tokens(self, tokens: MemberTokens) -> None:
        """Replace the member tokens durably."""
        document = {"member_token": tokens.current, "proposed": tokens.proposed}
        self.replace(_MEMBER, lambda file: file.write(json.dumps(document).encode()))
