"""The outer state on this worker: θ_global and the outer momentum u of every fragment, in host memory or in files.

In files, it takes memory only while it is used, during a sync, and the inner steps have that for themselves. There are
three, which take turns: what changes is written into one that no snapshot needs, so a snapshot names the file of its
state and copies nothing. One more file has the round's pseudo-gradient, which is needed until its fragment is merged.

The same published bytes and the same arithmetic make it bit-identical on every worker and the coordinator. State
digests prove that, fragment by fragment, before every step.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
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
from worker.state.mapped import MappedArrays
from worker.state.state_dir import STATE_FILE

_HOST = torch.device("cpu")
_FP32: dict[str, Any] = {"dtype": torch.float32, "device": _HOST}  # whatever default a script has set
_FILES = 3  # one of the current state, one of the last durable work, one for changes
_PIECE = 1 << 18  # elements
MAPPED_FROM = 1 << 23  # elements; smaller outer states stay in memory


def is_mapped(elements: int, device: torch.device, *, offload: bool = False) -> bool:
    """Return True if a worker that trains on `device` keeps the outer state of this many elements in files. With a
    GPU, the state stays in page-locked memory, from which it is copied to the device, unless `offload` needs the
    memory."""
    return sys.platform == "linux" and (device.type != "cuda" or offload) and elements >= MAPPED_FROM


def tensor_bytes(tensor: Tensor) -> Buffer:
    """Return the memory of a contiguous CPU tensor, without copying."""
    return tensor.numpy().view(np.uint8).data


class OuterState:
    """The outer state at state `round` of the run. `round` is None while there is none, or while fragments are at
    different rounds: `begin_changes` sets it to None before fragments are loaded or stepped one by one, and `reach`
    sets it once all of them have arrived.

    Different threads may load and step different fragments at once. `pin_memory`: page-lock θ, which is copied to a
    GPU. `owns`: whether a fragment is this process's; the others have no elements here, and no method may be called for
    them. `mapped_in`: the directory of the files that the state is in; None: memory. Files have the number of
    `processes` in their names, which owns other fragments. Raises OSError if they do not fit on the disk.
    """

    def __init__(
        self,
        layout: Layout,
        outer: OuterSpec,
        *,
        pin_memory: bool,
        owns: Callable[[int], bool] = lambda p: True,
        mapped_in: Path | None = None,
        processes: int = 1,
    ) -> None:
        self._round: int | None = None
        self.layout = layout
        self.own = [p for p in range(len(layout.fragments)) if owns(p)]
        elements = [n if owns(p) else 0 for p, n in enumerate(layout.elements)]
        self._files: list[MappedArrays] = []
        self._pseudo_gradient_file: MappedArrays | None = None
        if mapped_in is None:
            self.theta = [torch.zeros(n, **_FP32, pin_memory=pin_memory) for n in elements]
            self.momentum = [torch.zeros(n, **_FP32) for n in elements]
        else:
            paths = [mapped_in / STATE_FILE.format(slot, processes) for slot in range(_FILES)]
            both = [n for n in elements for _ in range(2)]  # θ, u of the first fragment, and so on
            self._files = [MappedArrays.kept(path, both) for path in paths]
            self._pseudo_gradient_file = MappedArrays.without_a_name(mapped_in, elements)
            self.theta, self.momentum = self._files[0].values[::2], self._files[0].values[1::2]
        self._slots = [0] * len(elements)  # of the file that each fragment is in
        self._free = 0  # the file that changes go into
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

    def reached(self, p: int, difference: Payload | None = None) -> Tensor:
        """Return the parameters of fragment p to evaluate, float32[n] (`protocol.outer_step.reached`): x.

        `difference`: D, if the last delta Δ is to be Δ + D. With x = θ₋ − η·Δ, θ₋ being the θ before, that is x − η·D.
        """
        lr, beta = self._outer.learning_rate, self._outer.momentum
        x = torch.from_numpy(reached(self.theta[p].numpy(), self.momentum[p].numpy(), learning_rate=lr, beta=beta))
        return x if difference is None else x - lr * unpack_payload(difference, _HOST, len(x))

    def start(self, p: int, difference: Payload | None) -> Tensor:
        """Return θ of fragment p as it would be with Δ + D, float32[n]: θ − η·(1 + μ)·D, since D is in u, too."""
        if difference is None:
            return self.theta[p]
        step = self._outer.learning_rate * (1 + self._outer.momentum)
        return self.theta[p] - step * unpack_payload(difference, _HOST, len(self.theta[p]))

    def alone(self, p: int, local: Tensor) -> Tensor:
        """Return θ of fragment p as it would be after a round with this worker alone, whose parameters are `local`,
        float32[n]: with Δ = θ − local that is θ − η·(μ²·u + (1 + μ)·Δ), the outer step in terms of u before it."""
        lr, beta, found = self._outer.learning_rate, self._outer.momentum, torch.empty_like(local)
        of_each = (found, self.theta[p], self.momentum[p], local)
        for out, theta, momentum, now in zip(*(each.split(_PIECE) for each in of_each), strict=True):
            torch.sub(theta, now, out=out).mul_(1 + beta).add_(momentum, alpha=beta * beta).mul_(-lr).add_(theta)
        self.release(p)
        return found

    @property
    def looks_ahead(self) -> bool:
        """True if θ, from which workers train on, is another point than `reached`."""
        return self._outer.momentum > 0

    def room_for_pseudo_gradient(self, p: int) -> Tensor | None:
        """Return the memory for this round's pseudo-gradient of fragment p, float32[n], if it is in a file; None if it
        is not: then each round allocates its own."""
        if self._pseudo_gradient_file is None:
            return None
        self._pseudo_gradient_file.populate(p)
        return self._pseudo_gradient_file.values[p]

    def release(self, p: int) -> None:
        """Give back the memory of fragment p, if it is in a file: its next use reads it again."""
        if self._files:
            for index in (2 * p, 2 * p + 1):
                self._files[self._slots[p]].release(index)

    def release_pseudo_gradient(self, p: int) -> None:
        """Do the same for its pseudo-gradient."""
        if self._pseudo_gradient_file is not None:
            self._pseudo_gradient_file.release(p)

    def release_pseudo_gradients(self) -> None:
        """Call `release_pseudo_gradient` for every fragment."""
        for p in self.own:
            self.release_pseudo_gradient(p)

    @property
    def in_files(self) -> bool:
        """True if the state is in files, which a snapshot shares."""
        return bool(self._files)

    def keep(self, work_slot: int) -> int:
        """Keep the state as it is: return the slot, the number of the file that it is in. Changes go into another file
        from now on, which is not `work_slot` either, that of the last work. A state in memory has to be written to a
        file of the slot that is returned."""
        if not self._files:
            return 0 if work_slot else 1
        for p in self.own:  # those that did not change with the others
            if self._slots[p] != self._free:
                self._write(p, 0, self.theta[p], self.momentum[p])
                self._move(p, self._free)
        slot = self._free
        self._free = next(each for each in range(_FILES) if each not in (slot, work_slot))
        return slot

    def sync(self, slot: int) -> None:
        """Make the state that is kept in the file of this slot durable. Raises OSError."""
        self._files[slot].sync()

    def begin_at(self, slot: int) -> None:
        """Begin with what the last process kept in the file of this slot."""
        self.changes += 1
        for p in self.own:
            self._move(p, slot)
            self._digests[p] = None
        self._free = (slot + 1) % _FILES

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
        momentum = torch.zeros(1, **_FP32).expand(len(theta)) if momentum is None else momentum
        if self._files:
            theta = theta.to(_HOST, torch.float32)
            for index, (t, u) in enumerate(zip(theta.split(_PIECE), momentum.split(_PIECE), strict=True)):
                self._write(p, index * _PIECE, t, u.contiguous())
            self._move(p, self._free)
        else:
            self.theta[p].copy_(theta)
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
        self._digests[p] = None
        lr, beta, size = self._outer.learning_rate, self._outer.momentum, header.chunk_elements
        scratch = torch.empty(2, min(size, header.elements), **_FP32) if self._files else None
        for index, chunk in enumerate(zip(self.theta[p].split(size), self.momentum[p].split(size), strict=True)):
            if scratch is not None:
                chunk = tuple(new[: len(old)].copy_(old) for new, old in zip(scratch, chunk, strict=True))
            theta, momentum = (each.numpy() for each in chunk)
            outer_step_by(payload.codec, payload.chunk(index), theta, momentum, learning_rate=lr, beta=beta)
            if scratch is not None:
                self._write(p, index * size, *chunk)
                self.release(p)
        if self._files:
            self._move(p, self._free)

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

    def _write(self, p: int, start: int, theta: Tensor, momentum: Tensor) -> None:
        """Write these values of fragment p, from element `start` on, into the file that changes go into."""
        file = self._files[self._free]
        file.write(2 * p, start, tensor_bytes(theta))
        file.write(2 * p + 1, start, tensor_bytes(momentum))

    def _move(self, p: int, slot: int) -> None:
        """Note that fragment p is in the file of this slot."""
        self.release(p)
        self._slots[p] = slot
        self.theta[p], self.momentum[p] = self._files[slot].values[2 * p : 2 * p + 2]
