"""The outer state on this worker: θ_global and the outer momentum u of every fragment, in host memory or in a file.

In a file, the state is mapped into memory, and a fragment's pages are given back after each use: they are needed only
during a sync, and the inner steps have the memory for themselves. What is in use stays in the page cache. The same file
has the round's pseudo-gradient, which is needed until its fragment is merged.

The same published bytes and the same arithmetic make it bit-identical on every worker and the coordinator. State
digests prove that, fragment by fragment, before every step.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protocol.digest import Buffer, StateHash, model_digest
from protocol.fragments import Layout
from protocol.outer_step import outer_step_by, reached
from protocol.spec.sections import OuterSpec
from protocol.wire import DeltaHeader, Payload, StateHeader
from worker.codecs import unpack_payload
from worker.errors import Resync
from worker.state.fragments import Fragments

_HOST = torch.device("cpu")
_F32 = 4  # bytes
_MADV_POPULATE_WRITE = 23  # Python has no name for it


_MAPPED_FROM = 1 << 23  # elements; smaller outer states stay in memory


def is_mapped(elements: int, device: torch.device, *, offload: bool = False) -> bool:
    """Return True if a worker that trains on `device` keeps the outer state of this many elements in a file. With a
    GPU, the state stays in page-locked memory, from which it is copied to the device, unless `offload` needs the
    memory."""
    return sys.platform == "linux" and (device.type != "cuda" or offload) and elements >= _MAPPED_FROM


def tensor_bytes(tensor: Tensor) -> Buffer:
    """Return the memory of a contiguous CPU tensor, without copying."""
    return tensor.numpy().view(np.uint8).data


class OuterState:
    """The outer state at state `round` of the run. `round` is None while there is none, or while fragments are at
    different rounds: `begin_changes` sets it to None before fragments are loaded or stepped one by one, and `reach`
    sets it once all of them have arrived.

    Different threads may load and step different fragments at once. `pin_memory`: page-lock θ, which is copied to a
    GPU. `owns`: whether a fragment is this process's; the others have no elements here, and no method may be called for
    them. `mapped_in`: the directory of the file that the state is in, without a name, so that it ends with the process;
    None: memory. Raises OSError if the file does not fit on the disk.
    """

    def __init__(
        self,
        layout: Layout,
        outer: OuterSpec,
        *,
        pin_memory: bool,
        owns: Callable[[int], bool] = lambda p: True,
        mapped_in: Path | None = None,
    ) -> None:
        self._round: int | None = None
        self.own = [p for p in range(len(layout.fragments)) if owns(p)]
        elements = [n if owns(p) else 0 for p, n in enumerate(layout.elements)]
        self._maps: list[mmap.mmap | None] = [None] * len(elements)  # θ, then u
        self._delta_maps: list[mmap.mmap | None] = [None] * len(elements)
        if mapped_in is None:
            self.theta = [torch.zeros(n, dtype=torch.float32, pin_memory=pin_memory) for n in elements]
            self.momentum = [torch.zeros(n, dtype=torch.float32) for n in elements]
            self._deltas: list[Tensor | None] = [None] * len(elements)
        else:
            self._maps = _mapped([2 * _F32 * n for n in elements], mapped_in)
            self._delta_maps = _mapped([_F32 * n for n in elements], mapped_in)
            self.theta = [_values(each, 0, n) for each, n in zip(self._maps, elements, strict=True)]
            self.momentum = [_values(each, n, n) for each, n in zip(self._maps, elements, strict=True)]
            self._deltas = [_values(each, 0, n) for each, n in zip(self._delta_maps, elements, strict=True)]
        self._digests: list[bytes | None] = [None] * len(layout.fragments)
        self._outer = outer
        self.changes = 0  # counted, to tell whether the state has changed
        self.reader: Future[Any] | None = None  # reads all of the state; nothing changes before it is done

    def __len__(self) -> int:
        return len(self.theta)

    @property
    def round(self) -> int | None:
        return self._round

    def begin_changes(self) -> None:
        """Note that fragments are about to change one by one, so that the state as a whole is of no round."""
        self._round = None

    def reach(self, round_number: int) -> None:
        """Note that all fragments are at this round."""
        self._round = round_number

    def fragment_digest(self, p: int) -> bytes:
        """Return the state digest of fragment p. It is computed when first needed: not during a sync, which everyone
        waits for, but during the next inner steps (saver.py). From then on, `is_intact` notices a flipped bit."""
        known = self._digests[p]
        return self._rehash(p) if known is None else known

    def reached(self, p: int) -> Tensor:
        """Return the parameters of fragment p to evaluate, float32[n] (`protocol.outer_step.reached`)."""
        lr, beta = self._outer.learning_rate, self._outer.momentum
        return torch.from_numpy(reached(self.theta[p].numpy(), self.momentum[p].numpy(), learning_rate=lr, beta=beta))

    def room_for_delta(self, p: int) -> Tensor | None:
        """Return the memory for this round's pseudo-gradient of fragment p, float32[n], if it is in a file; None if it
        is not: then each round allocates its own."""
        _populate(self._delta_maps[p])
        return self._deltas[p]

    def release(self, p: int) -> None:
        """Give back the memory pages of fragment p, if it is in a file: its next use reads them again."""
        _give_back(self._maps[p])

    def release_delta(self, p: int) -> None:
        """Do the same for its pseudo-gradient."""
        _give_back(self._delta_maps[p])

    def release_all(self) -> None:
        """Call `release` for every fragment."""
        for p in self.own:
            self.release(p)

    def release_deltas(self) -> None:
        """Call `release_delta` for every fragment."""
        for p in self.own:
            self.release_delta(p)

    @property
    def digests(self) -> list[bytes]:
        """The state digests of the fragments that this process owns, in order."""
        return [self.fragment_digest(p) for p in self.own]

    def digest(self) -> bytes:
        """Return the digest of the whole outer state, all of which must be here."""
        return model_digest(self.digests)

    def set(self, p: int, theta: Tensor, momentum: Tensor | None) -> None:
        """Set fragment p to `theta` and `momentum` (None: zero, as in state 0), float32[n] each."""
        self._await_reader()
        self.changes += 1
        self.theta[p].copy_(theta)
        if momentum is None:
            self.momentum[p].zero_()
        else:
            self.momentum[p].copy_(momentum)
        self._rehash(p)

    def take(self, fragments: Fragments) -> None:
        """Set all fragments to what the model holds, as in state 0. All processes call it at once."""
        for p in range(len(self)):
            local = fragments.gather(p)
            if fragments.owns(p):
                self.set(p, local, None)

    def load(self, p: int, payload: Payload) -> None:
        """Load fragment p from a payload of kind `state`: θ, then u. Raises Resync for any other payload."""
        if not isinstance(payload.header, StateHeader):
            raise Resync(f"fragment {p} of a checkpoint is a payload of kind {payload.header.kind!r}, not 'state'")
        n, given = len(self.theta[p]), payload.header.elements
        if given != 2 * n:
            raise Resync(f"fragment {p} of a checkpoint has {given} values, the layout says {2 * n}")
        values = unpack_payload(payload, _HOST, 2 * n)
        self.set(p, values[:n], values[n:])

    def step(self, p: int, payload: Payload) -> None:
        """Take one outer step on fragment p, chunk by chunk while the chunk is in the cache.

        Raises Resync if the delta belongs to another outer state, and WireError if its values are not finite; then
        nothing has changed.
        """
        header = payload.header
        if not isinstance(header, DeltaHeader) or header.elements != len(self.theta[p]) or header.fragment != p:
            raise Resync(
                f"the payload for the delta of fragment {p} is of another kind: {header.kind}, {header.elements} "
                "elements"
            )
        if header.base != self.fragment_digest(p):
            raise Resync(
                f"the delta of round {header.round}, fragment {p} belongs to outer state {header.base.hex()[:12]}; "
                f"this worker holds {self.fragment_digest(p).hex()[:12]}"
            )
        payload.check()
        self._await_reader()
        self.changes += 1
        size = header.chunk_elements
        self._digests[p] = None
        _populate(self._maps[p])
        lr, beta = self._outer.learning_rate, self._outer.momentum
        for index, (theta, momentum) in enumerate(
            zip(self.theta[p].split(size), self.momentum[p].split(size), strict=True)
        ):
            data = payload.chunk(index)
            outer_step_by(payload.codec, data, theta.numpy(), momentum.numpy(), learning_rate=lr, beta=beta)
        self.release(p)

    def is_intact(self, p: int) -> bool:
        """Return True if fragment p still matches its digest, or if none was computed before. A bit that flips in
        memory must not get into an average: from now on the digest shows it, and the coordinator rejects what is based
        on it."""
        known = self._digests[p]
        return self._rehash(p) == known or known is None

    def _await_reader(self) -> None:
        if self.reader is not None:
            wait([self.reader])

    def _rehash(self, p: int) -> bytes:
        state_hash = StateHash()
        state_hash.update(tensor_bytes(self.theta[p]), tensor_bytes(self.momentum[p]))
        self._digests[p] = digest = state_hash.digest()
        self.release(p)
        return digest


def _mapped(sizes: Sequence[int], directory: Path) -> list[mmap.mmap | None]:
    """Return a mapping of this many bytes each into one file without a name; None where the size is 0."""
    unit = mmap.ALLOCATIONGRANULARITY
    room = [-(-size // unit) * unit for size in sizes]
    with tempfile.TemporaryFile(dir=directory) as file:
        if sum(room):
            try:  # a full disk would kill the process at some later write
                os.posix_fallocate(file.fileno(), 0, sum(room))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(directory)) from error
        starts = [sum(room[:index]) for index in range(len(room))]
        return [
            mmap.mmap(file.fileno(), size, offset=start) if size else None
            for start, size in zip(starts, sizes, strict=True)
        ]


def _values(pages: mmap.mmap | None, start: int, n: int) -> Tensor:
    return (
        torch.empty(0) if pages is None else torch.frombuffer(pages, dtype=torch.float32, count=n, offset=_F32 * start)
    )


def _populate(pages: mmap.mmap | None) -> None:
    """Map pages for writing, all at once: one by one, it takes several times as long."""
    if pages is not None:
        with suppress(OSError):  # Linux before 5.14: they are mapped as they are written
            pages.madvise(_MADV_POPULATE_WRITE)


def _give_back(pages: mmap.mmap | None) -> None:
    if pages is not None:
        pages.madvise(mmap.MADV_DONTNEED)
