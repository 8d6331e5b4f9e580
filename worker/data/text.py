"""Text files as bytes: the training set of `data.tokenizer = "bytes"`, put end to end in memory.

docs/wire-format.md has the rules: which files, the digest, what is held out.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from outerstep.common.connections import error_text
from protocol.spec.run import RunSpec
from worker.data.ids import BYTES
from worker.data.sequences import InMemory, Sequences
from worker.data.sources.binary import check_text
from worker.data.sources.files import Named, held_out_names, source_files
from worker.errors import DataError


class TextData(Sequences):
    """A run's training and held-out text. `training` and `held_out` are uint8 token ids.

    Raises DataError if the files cannot be read, are no text, or are too few for one work unit.
    """

    def __init__(self, spec: RunSpec) -> None:
        source = spec.data.source
        try:
            files = source_files(source)
            check_text(source, files)
            self.training, self.held_out, digest = _read(files, spec.data.holdout)
        except OSError as error:
            raise DataError(f"data.source = {source!r}: {error_text(error)}") from error
        super().__init__(
            spec,
            InMemory(self.training),
            InMemory(self.held_out),
            digest=digest,
            vocabulary=BYTES,
            bytes_per_token=1.0 if len(self.held_out) else None,
        )


def _read(files: Named, holdout: float) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], str]:
    """Return training bytes, held-out bytes and the digest of all. Each file is read once, to where it belongs."""
    sizes = {name: path.stat().st_size for name, path in files}
    held_out = held_out_names(sizes, holdout) if len(files) > 1 else set()
    held_out_bytes = sum(sizes[name] for name in held_out)
    parts = [np.empty(size, np.uint8) for size in (sum(sizes.values()) - held_out_bytes, held_out_bytes)]
    places, hasher = [0, 0], blake3()
    for name, path in files:
        part, size = int(name in held_out), sizes[name]
        content = parts[part][places[part] : places[part] + size]
        _read_into(path, content)
        places[part] += size
        hasher.update(f"{name}\0{size}\0".encode())
        hasher.update(content.data)
    if len(files) == 1:
        # A single file cannot be held out as a whole: its end is.
        parts = np.split(parts[0], [len(parts[0]) - int(len(parts[0]) * holdout)])
    return parts[0], parts[1], hasher.hexdigest()


def _read_into(path: Path, content: npt.NDArray[np.uint8]) -> None:
    with path.open("rb", buffering=0) as file:
        view, read = content.data, 0
        while count := file.readinto(view[read:]):
            read += count
        if read < len(content) or file.read(1):
            raise DataError(f"{path} changed while it was read; let nobody write to it, and start again")
