"""What is left of a directory after a crash: of what was not fsynced, anything or nothing.

The files are real (in memory, where the machine has /dev/shm). Every fsync is noted here: of a file its content, of a
folder its entries. `after_power_loss` then makes a copy of the directory in which everything else may be lost: entries
that were made, renamed or deleted since the folder's last fsync, and contents that were never fsynced, which come back
whole, empty, cut or as zeros. SQLite's own durability is taken for granted: its files survive as they are.
"""

import os
import random
import shutil
import stat
from pathlib import Path

_ALWAYS = ("outerstep.db", "outerstep.db-wal", "outerstep.db.lock", "lock")


class Disk:
    """The durable part of one simulated machine's files."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}  # inode -> content at its last fsync
        self.entries: dict[int, dict[str, int]] = {}  # folder's inode -> name -> inode, at its last fsync
        self.opened: list[int] = []  # keep every inode alive, so that its number is not given away again

    def fsynced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if found.st_ino not in self.contents and found.st_ino not in self.entries:
            self.opened.append(os.dup(descriptor))
        if stat.S_ISDIR(found.st_mode):
            self.entries[found.st_ino] = {
                name: os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_ino for name in os.listdir(descriptor)
            }
        else:
            self.contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def after_kill(self, root: Path, new_root: Path) -> "Disk":
        """The process died, the machine lives: everything is there. Its directory is `new_root` from now on."""
        return _Copy(self, None).tree(root, new_root)

    def after_power_loss(self, root: Path, new_root: Path, rng: random.Random) -> "Disk":
        """The machine died as well."""
        return _Copy(self, rng).tree(root, new_root)

    def close(self) -> None:
        for descriptor in self.opened:
            os.close(descriptor)
        self.opened.clear()


class _Copy:
    def __init__(self, old: Disk, rng: random.Random | None) -> None:
        self._old, self._rng = old, rng
        self._made: dict[int, Path] = {}  # old inode -> its first new name
        self._new = Disk()

    def tree(self, root: Path, new_root: Path) -> Disk:
        new_root.mkdir()
        self._folder(root, new_root)
        return self._new

    def _folder(self, source: Path, target: Path) -> None:
        present = {entry.name: entry.inode() for entry in sorted(os.scandir(source), key=lambda each: each.name)}
        durable = self._old.entries.get(source.stat().st_ino)
        if self._rng is None:
            chosen = present
        else:
            chosen = {}
            for name in sorted(present.keys() | (durable or {}).keys()):
                now, then = present.get(name), (durable or {}).get(name)
                kept = now if name in _ALWAYS or now == then or self._rng.random() < 0.5 else then
                if kept is not None:
                    chosen[name] = kept
        for name, inode in chosen.items():
            self._entry(source / name, inode, target / name, still_there=present.get(name) == inode)
        chosen = {name: inode for name, inode in chosen.items() if (target / name).exists()}
        if self._rng is None and durable is None:
            return
        self._note_folder(target, durable or {}, chosen)

    def _note_folder(self, target: Path, durable: dict[str, int], chosen: dict[str, int]) -> None:
        """What survived a power loss is durable; after a mere kill, only what was so before."""
        new = {name: os.stat(target / name).st_ino for name in chosen}
        kept = new if self._rng is not None else {n: new[n] for n in chosen if durable.get(n) == chosen[n]}
        self._keep_open(target)
        self._new.entries[target.stat().st_ino] = kept

    def _entry(self, source: Path, inode: int, target: Path, *, still_there: bool) -> None:
        if inode in self._made:
            os.link(self._made[inode], target)
            return
        if still_there and source.is_dir():
            target.mkdir()
            self._folder(source, target)
            return
        durable = self._old.contents.get(inode)
        present = source.read_bytes() if still_there else durable
        if present is None:
            return  # deleted and never fsynced: only its entry was durable
        content = present
        if self._rng is not None and durable != present and source.name not in _ALWAYS:
            half = self._rng.randrange(len(present) + 1)
            content = self._rng.choice([present, b"", present[:half], bytes(len(present)), durable or b""])
        target.write_bytes(content)
        if source.exists():
            shutil.copymode(source, target)
        self._made[inode] = target
        if self._rng is not None or durable is not None:
            self._keep_open(target)
            self._new.contents[target.stat().st_ino] = content if self._rng is not None else durable or b""

    def _keep_open(self, path: Path) -> None:
        self._new.opened.append(os.open(path, os.O_RDONLY))
