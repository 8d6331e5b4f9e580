"""The data directory: what it contains besides blobs. It is locked while a coordinator uses it.

outerstep.db  admin.token  lock
restored                       names the backup that was restored here, until a coordinator has continued from it
claim                          until then too: the id with which a bucket belongs to the restored database
copies/                        local copies of the bucket's blobs; emptied at start
standby-copies/                the same, of what a standby sends
incoming/                      scratch files being received or written; emptied at start
runs/{run}/state/{p}.{0 or 1}  the current outer state; derived from checkpoints and deltas, so not fsynced
"""

import errno
import itertools
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outerstep.common.files import fsync, open_locked, replace_file

RESTORED, CLAIM = "restored", "claim"
COPIES, STANDBY_COPIES = "copies", "standby-copies"
CACHE_BYTES = 4 << 30  # the most that local copies take
# Free space on the disk that uploads never use, so that the database and the work on accepted uploads can continue.
RESERVED_BYTES, RESERVED_SHARE = 256 << 20, 0.01  # whichever is less


class DataDirectory:
    """The data directory of one process. Raises OuterstepError if another one of the same `kind` uses it."""

    def __init__(self, root: Path, kind: str = "coordinator") -> None:
        if not root.is_dir():
            root.mkdir(parents=True)
            fsync(root.parent)
        self.root = root
        refusal = f"{root} is in use by another {kind}; stop it or choose another --data-dir"
        self._lock = open_locked(root / "lock", refusal)
        self._scratch = root / "incoming"
        self._numbers = itertools.count()
        # At a process's start alone: requests of an earlier term of this process delete their own files.
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()

    def scratch(self) -> Path:
        """Return an unused path for a local file. The next start of the coordinator deletes what remains there."""
        return self._scratch / str(next(self._numbers))

    def check_space(self, size: int) -> None:
        """Raise the OSError of a full disk if an upload of `size` bytes would use reserved space."""
        disk = shutil.disk_usage(self._scratch)
        if disk.free - size < min(RESERVED_BYTES, RESERVED_SHARE * disk.total):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._scratch))

    def states(self, run: str) -> "StateFiles":
        folder = self.root / "runs" / run / "state"
        folder.mkdir(parents=True, exist_ok=True)
        return StateFiles(folder)

    def forget(self, run: str) -> None:
        """Remove the local files of a run that was removed."""
        shutil.rmtree(self.root / "runs" / run / "state", ignore_errors=True)

    @property
    def restored(self) -> str | None:
        """A description of the backup that was restored here; None once a coordinator has continued from it."""
        try:
            return (self.root / RESTORED).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def clear_restored(self) -> None:
        """Forget that the directory was restored. Call it once every run has recorded that."""
        if self.restored is not None:
            (self.root / CLAIM).unlink(missing_ok=True)
            (self.root / RESTORED).unlink()
            fsync(self.root)

    def claim(self) -> str:
        """Return the id with which a bucket belongs to the database that is restored here: the same each time."""
        file = self.root / CLAIM
        if not file.exists():
            replace_file(file, lambda new: new.write(secrets.token_hex(16).encode()))
        return file.read_text(encoding="ascii")

    def close(self) -> None:
        self._lock.close()


@dataclass(frozen=True)
class StateFiles:
    """The local files of one run's outer state. If they are lost, they are derived again."""

    folder: Path

    def path(self, fragment: int, round_: int) -> Path:
        """Return the path of a state. Two files alternate: state r + 1 overwrites state r − 1, whose pages are already
        in memory."""
        return self.folder / f"{fragment}.{round_ % 2}"

    def bytes(self) -> int:
        """Return the size of all state files, without those that share their storage with a checkpoint."""
        total = 0
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # replaced meanwhile
                found = path.stat()
                total += found.st_size if found.st_nlink == 1 else 0
        return total

    def remove_all_but(self, current: set[Path]) -> None:
        for path in self.folder.iterdir():
            if path not in current:
                path.unlink()
