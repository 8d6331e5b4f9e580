"""The training set: text files as bytes, cut into sequences, grouped into numbered work units.

Files are held out by hash of their relative name, so that every worker holds out the same ones. Sequence i is
the bytes [i·L, i·L + L] of the training files put end to end, its L targets being the bytes that follow. Work unit g
belongs to epoch g // units_per_epoch; within an epoch the sequences are in an order drawn from (seed, epoch),
batch_size to a unit.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from protocol.messages import DataSummary
from protocol.spec import RunSpec
from worker.errors import DataError

Tokens = npt.NDArray[np.uint8]

# Directories of the standard library that distributions leave out or add to; without them more machines agree.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_SPECIFIC = "_sysconfigdata"  # these describe the machine that Python was built on


class TextData:
    """A run's training and held-out text. `training` and `held_out` are uint8 token ids; `bytes_per_token` is of the
    held-out text.

    Raises DataError if the files cannot be read or are too few for one work unit.
    """

    bytes_per_token = 1.0

    def __init__(self, spec: RunSpec) -> None:
        self._length = spec.data.sequence_length
        self._batch = spec.inner.batch_size
        self._seed = spec.seed
        files = _read_files(spec.data.source)
        self.training, self.held_out = _split(files, spec.data.holdout)
        self._sequences = max(len(self.training) - 1, 0) // self._length
        self.units_per_epoch = self._sequences // self._batch
        if self.units_per_epoch == 0:
            raise DataError(
                f"data.source = {spec.data.source!r} has {len(self.training)} training bytes; one work unit needs "
                f"{self._batch} sequences of {self._length} bytes and one more: "
                f"{self._batch * self._length + 1}; give more text or a smaller batch_size or sequence_length"
            )
        self.summary = DataSummary(digest=_digest(files), units=self.units_per_epoch)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def unit(self, number: int) -> Tensor:
        """Return work unit `number`, int64[batch_size, sequence_length + 1]."""
        epoch, index = divmod(number, self.units_per_epoch)
        if epoch != self._epoch:
            # RandomState's streams are frozen: the same numbers in every version of numpy.
            order = np.random.RandomState([self._seed, epoch])
            self._epoch, self._order = epoch, order.permutation(self._sequences)
        rows = self._order[index * self._batch : (index + 1) * self._batch]
        return self._rows(self.training, rows)

    def held_out_batches(self, max_tokens: int) -> Iterator[Tensor]:
        """Yield at most `max_tokens` held-out tokens in batches, int64[<= batch_size, sequence_length + 1].

        They are whole sequences, at least one, spaced evenly: the first ones would be of one or two files only.
        """
        available = max(len(self.held_out) - 1, 0) // self._length
        count = min(available, max(max_tokens // self._length, 1))
        rows = np.arange(count) * available // count if count else np.empty(0, np.int64)
        for start in range(0, count, self._batch):
            yield self._rows(self.held_out, rows[start : start + self._batch])

    def _rows(self, tokens: Tokens, rows: npt.NDArray[np.int64]) -> Tensor:
        positions = rows[:, None] * self._length + np.arange(self._length + 1)
        return torch.from_numpy(tokens[positions].astype(np.int64))


Files = list[tuple[str, bytes]]


def _read_files(source: str) -> Files:
    """Return (relative name, content) of every file, in order of name."""
    names = list(_python_stdlib() if source == "python-stdlib" else _text_files(source))
    if not names:
        raise DataError(f"data.source = {source!r} names no files on this machine")
    files = []
    for name, path in sorted(names):
        try:
            files.append((name, path.read_bytes()))
        except OSError as error:
            raise DataError(f"data.source = {source!r}: {error}") from error
    return files


def _python_stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, lambda directory: directory not in _SKIPPED_DIRECTORIES):
        if path.suffix == ".py" and not path.name.startswith(_BUILD_SPECIFIC):
            yield name, path


def _text_files(source: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a directory, except hidden ones, or of a glob. Names are relative to the directory, or to the
    part of the glob that has no wildcards."""
    expanded = Path(source).expanduser()
    if expanded.is_dir():
        yield from _walk(expanded, lambda directory: not directory.startswith("."))
        return
    fixed = Path(expanded.anchor)
    for part in expanded.parts[len(fixed.parts) : -1]:
        if glob.has_magic(part):
            break
        fixed /= part
    for match in glob.glob(str(expanded), recursive=True):
        path = Path(match)
        if path.is_file():
            yield path.relative_to(fixed).as_posix(), path


def _walk(root: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = filter(wanted, subdirectories)
        for name in names:
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _split(files: Files, holdout: float) -> tuple[Tokens, Tokens]:
    """Return training and held-out bytes. Of several files at least one is held out, that of the smallest hash."""
    if len(files) == 1:
        # A single file cannot be held out as a whole: its end is.
        content = np.frombuffer(files[0][1], np.uint8)
        border = len(content) - int(len(content) * holdout)
        return content[:border], content[border:]
    draws = {name: int.from_bytes(blake3(name.encode()).digest()[:8], "little") / 2**64 for name, _ in files}
    limit = max(holdout, np.nextafter(min(draws.values()), 1)) if holdout > 0 else 0.0
    training = b"".join(content for name, content in files if draws[name] >= limit)
    held_out = b"".join(content for name, content in files if draws[name] < limit)
    return np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8)


def _digest(files: Files) -> str:
    hasher = blake3()
    for name, content in files:
        hasher.update(f"{name}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()
