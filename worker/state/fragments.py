"""A model's trainable parameters as fragments: gathered into fp32 vectors, and scattered back.

In a worker with several processes, each fragment is owned by one of them, which alone holds its outer state and
exchanges it with the coordinator. The others send the owner their part of the parameters, and receive their part of the
new ones: no process ever holds more than one fragment of the model beside its own part. Buffers are not averaged.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protocol.fragments import Layout
from worker.errors import ModelError
from worker.ranks import ALONE, Ranks
from worker.state.optimizer_state import ScheduleFreePoints
from worker.state.parameters import held, is_sharded, local_part, reshard, trainable_parameters
from worker.tuning.side_stream import SideStream

_PART, _PART_ON_DEVICE = 1 << 20, 1 << 24  # elements


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of `tensor` as it is now, in host memory. A copy from a GPU is page-locked: the device
    writes into that directly, several times as fast."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor.detach())


class Piece(NamedTuple):
    """Elements [start, stop) of the flattened tensor number `tensor`, and their place in the fragment's vector."""

    tensor: int
    start: int
    stop: int
    place: slice

    def within(self, start: int, stop: int) -> "Piece":
        """Return the part of this piece in [start, stop), which may be empty."""
        first, last = max(self.start, start), min(self.stop, stop)
        offset = self.place.start - self.start
        return Piece(self.tensor, first, last, slice(first + offset, last + offset))


class Fragments:
    """The parameters of a model, fragment by fragment, in the run's layout.

    Vectors are float32[n] with the fragment's n elements, or float32[0] in a process that does not own the fragment. θ
    is the global vector; `carry` is the progress that is in no mean yet. With several `ranks`, all of them call
    whatever reads or writes the model's parameters: `gather`, `scatter`, `rebase`, `norm`, `check`, `progress_since`.

    `points`: what schedule-free optimizers keep beside the parameters; `rebase` moves it with them.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, ranks: Ranks = ALONE, points: ScheduleFreePoints | None = None
    ) -> None:
        self._model, self._ranks, self._found = model, ranks, _identities(model)
        self._points = points or ScheduleFreePoints()
        named = trainable_parameters(model)
        self._parameters = list(named.values())
        self._held = ranks.all([held(name, parameter) for name, parameter in named.items()])
        self._slices, self._elements = layout.fragments, layout.elements
        self.device = local_part(self._parameters[0]).device
        self._is_sharded = any(is_sharded(each) for each in self._parameters)
        self._side_stream = SideStream(self.device)

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def spread(self) -> bool:
        """True if parts of a fragment, or its owner, are in other processes."""
        return self._ranks.size > 1

    def owner(self, p: int) -> int:
        """The rank that owns fragment p."""
        return p % self._ranks.size

    def owns(self, p: int) -> bool:
        """Return True if this process owns fragment p."""
        return self.owner(p) == self._ranks.rank

    @torch.no_grad()
    def gather(self, p: int) -> Tensor:
        """Return a copy of the fragment's parameters, on the model's device."""
        given = self._given(p)
        owner = self.owner(p)
        if not self.owns(p):
            mine = given.get(self._ranks.rank)
            self._ranks.send_receive(
                {owner: torch.cat([self._read(each).float() for each in mine])} if mine else {}, {}
            )
            return torch.empty(0, dtype=torch.float32, device="cpu")
        own = given.pop(owner, [])
        if not given:
            return torch.cat([self._read(each).float() for each in own])
        vector = torch.empty(self._elements[p], dtype=torch.float32, device=self.device)
        received = {rank: vector.new_empty(_length(pieces)) for rank, pieces in given.items()}
        self._ranks.send_receive({}, received)
        for each in own:
            vector[each.place] = self._read(each)
        for rank, pieces in given.items():
            for each, values in zip(pieces, received[rank].split([_length([each]) for each in pieces]), strict=True):
                vector[each.place] = values
        return vector

    def gather_from_all(self, p: int) -> Tensor | None:
        """Return `gather(p)` if other processes have parts, else None: then `pseudo_gradient` reads the model
        itself."""
        return self.gather(p) if self.spread else None

    @torch.no_grad()
    def norm(self) -> float:
        """Return the norm of all parameters here, in fp32; not finite in any process if it is not finite in one."""
        parts = [local_part(each) for each in self._parameters]
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in parts if each.numel()]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        return sum(self._ranks.all(norm))

    def check(self) -> None:
        """Raise ModelError if the model's parameters are not those of the start any more, or if replicated parameters
        differ between processes."""
        reshard(self._model)
        now = _identities(self._model)
        if now != self._found:
            name = next(name for name in self._found | now if self._found.get(name) != now.get(name))
            raise ModelError(
                f"the model's parameters were changed after the run was joined, {name} for one: replaced, frozen, "
                "or moved to another dtype or device; do that before DiLoCo is made"
            )
        if self.spread:
            self._check_replicas()

    @torch.no_grad()
    def _check_replicas(self) -> None:
        shared = [index for index, parts in enumerate(zip(*self._held, strict=True)) if len(set(parts)) < len(parts)]
        sums = {index: int(_sum_of_bits(local_part(self._parameters[index]))) for index in shared}
        theirs, names = self._ranks.all(sums), list(trainable_parameters(self._model))
        for index in shared:
            values = {(stretches[index], each[index]) for stretches, each in zip(self._held, theirs, strict=True)}
            if len(values) > len({stretch for stretch, _ in values}):
                raise ModelError(
                    f"parameter {names[index]} is not the same in all processes of this worker: they train "
                    "separate models, because their gradients are not averaged; wrap the model in "
                    "DistributedDataParallel or fully_shard, and call the wrapper, not the model inside"
                )

    @torch.no_grad()
    def scatter(self, p: int, vector: Tensor) -> None:
        """Write `vector` into the model, cast to each parameter's dtype: temporarily, or after a restart."""
        self._spread(p, lambda piece: vector[piece.place], moves=False)

    @torch.no_grad()
    def rebase(self, p: int, theta: Tensor, carry: Tensor | None, *, moves: bool = True) -> None:
        """Write θ − carry into the model, the start of the inner steps. `moves`: the optimizers' own points move with
        it; False if the model only showed other values for a while."""
        self._spread(p, lambda piece: self._start(piece, theta, carry), moves=moves)

    @torch.no_grad()
    def rounded(self, p: int, vector: Tensor) -> Tensor:
        """Round `vector`, float32[n] in host memory, to what the model would hold of it, and return it."""
        for piece in self._pieces(p):
            if (dtype := self._parameters[piece.tensor].dtype) != torch.float32:
                vector[piece.place] = vector[piece.place].to(dtype)
        return vector

    @torch.no_grad()
    def pseudo_gradient(
        self,
        p: int,
        theta: Tensor,
        carry: Tensor | None = None,
        local: Tensor | None = None,
        after: Any = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return Δ = θ_global − θ_local in host memory. With this sign, the outer optimizer descends.

        θ_local is `local`, a result of `gather` on any device, with `after` the `mark` taken after it; None: the model
        as it is now, if this process has all of it. θ_global is cast to the parameter's dtype, as the model started
        from it, and `carry`, which `rebase` was given, is added exactly: so neither the rounding of a bf16 model nor
        that of its rebase is mistaken for progress, or loses any. `out`: the memory for Δ, float32[n]; None: new,
        page-locked for a GPU, which writes into that directly.
        """
        on_gpu = self.device.type == "cuda"
        trained = torch.empty(len(theta), dtype=torch.float32, device="cpu", pin_memory=on_gpu) if out is None else out
        with self._side_stream.beside(self.mark() if after is None else after):
            for piece in chain.from_iterable(map(self._parts, self._pieces(p))):
                start = self._start(piece, theta, carry).float()
                reached = self._read(piece).float() if local is None else local[piece.place].to(self.device)
                progress = start - reached
                if carry is not None:
                    progress += carry[piece.place].to(self.device)
                trained[piece.place] = progress
        return trained

    @torch.no_grad()
    def progress_since(self, p: int, local: Tensor) -> Tensor:
        """Return `local` − θ_local in host memory. `local` is a result of `gather`, and is overwritten."""
        if self.spread:
            return self.in_host_memory(local.sub_(self.gather(p).to(local.device)))
        for piece in self._pieces(p):
            local[piece.place].sub_(self._read(piece).float().to(local.device))
        return self.in_host_memory(local)

    def in_host_memory(self, vector: Tensor) -> Tensor:
        """Return `vector`, or a copy in host memory as it is now if it is on a GPU."""
        return vector if vector.device.type == "cpu" else host_copy(vector)

    def mark(self) -> Any:
        """Return a mark of what this thread has started on the device so far, for another thread to wait for."""
        return self._side_stream.mark()

    def _parts(self, piece: Piece) -> Iterator[Piece]:
        """Yield parts of the piece of a limited size: what is computed from them takes that much memory."""
        size = _PART if self.device.type == "cpu" else _PART_ON_DEVICE
        for start in range(piece.start, piece.stop, size):
            yield piece.within(start, start + size)

    # --- which process has what -----------------------------------------------------------------------------------

    def _pieces(self, p: int) -> Iterator[Piece]:
        """Yield each slice of fragment p."""
        position = 0
        for stretch in self._slices[p]:
            length = stretch.stop - stretch.start
            yield Piece(stretch.tensor, stretch.start, stretch.stop, slice(position, position + length))
            position += length

    def _held_by(self, rank: int, p: int) -> list[Piece]:
        """Return the pieces of fragment p that process `rank` has."""
        pieces = (each.within(*self._held[rank][each.tensor]) for each in self._pieces(p))
        return [each for each in pieces if each.start < each.stop]

    def _given(self, p: int) -> dict[int, list[Piece]]:
        """Return the pieces of fragment p that each process gives its owner, every element once: what the owner has
        itself, and otherwise what the first process has that holds it. Replicated pieces are held whole."""
        owner, given = self.owner(p), dict[int, list[Piece]]()
        taken: set[tuple[int, int]] = set()
        for rank in sorted(range(self._ranks.size), key=lambda rank: (rank != owner, rank)):
            pieces = [each for each in self._held_by(rank, p) if (each.tensor, each.start) not in taken]
            taken |= {(each.tensor, each.start) for each in pieces}
            if pieces:
                given[rank] = pieces
        return given

    # --- reading and writing --------------------------------------------------------------------------------------

    def _spread(self, p: int, values: Callable[[Piece], Tensor], *, moves: bool) -> None:
        """Write `values(piece)` into the parameters of all processes; only the owner's `values` are asked. `moves`: the
        optimizers' own points move the same way. Raises ModelError if a module around the model holds gathered
        parameters: it would not see the new ones."""
        reshard(self._model)
        if self._is_sharded and p == 0 and _identities(self._model) != self._found:
            raise ModelError(
                "a module around the model, wrapped by fully_shard, still holds gathered parameters and would not "
                "see the run's: call its reshard() after an evaluation, or give DiLoCo that module"
            )
        mine = self._held_by(self._ranks.rank, p)
        if self.owns(p):
            others = {rank: self._held_by(rank, p) for rank in range(self._ranks.size) if rank != self._ranks.rank}
            sent = {
                rank: torch.cat([values(each).to(self.device).float() for each in pieces])
                for rank, pieces in others.items()
                if pieces
            }
            self._ranks.send_receive(sent, {})
            for each in mine:
                self._write(each, values(each), moves=moves)
        elif mine:
            vector = torch.empty(_length(mine), dtype=torch.float32, device=self.device)
            self._ranks.send_receive({}, {self.owner(p): vector})
            for each, part in zip(mine, vector.split([_length([each]) for each in mine]), strict=True):
                self._write(each, part, moves=moves)

    def _read(self, piece: Piece) -> Tensor:
        """Return a piece of a parameter that is here, in its dtype."""
        first = self._held[self._ranks.rank][piece.tensor][0]
        return local_part(self._parameters[piece.tensor]).reshape(-1)[piece.start - first : piece.stop - first]

    def _write(self, piece: Piece, values: Tensor, *, moves: bool) -> None:
        parameter, first = self._parameters[piece.tensor], self._held[self._ranks.rank][piece.tensor][0]
        local, place = local_part(parameter), slice(piece.start - first, piece.stop - first)
        flat = local.reshape(-1)  # a view, or a copy if the parameter's memory has gaps
        point = self._points.of(parameter) if moves else None
        if point is not None:
            point.view(-1)[place] += values.to(flat) - flat[place]
        flat[place].copy_(values)
        if not local.is_contiguous():
            local.copy_(flat.view_as(local))

    def _start(self, piece: Piece, theta: Tensor, carry: Tensor | None) -> Tensor:
        """Return what the training of this piece starts from, in the parameter's dtype."""
        dtype = self._parameters[piece.tensor].dtype
        cast = theta[piece.place].to(self.device).to(dtype)
        return cast if carry is None else (cast.float() - carry[piece.place].to(self.device)).to(dtype)


def _identities(model: nn.Module) -> dict[str, tuple[int, torch.dtype, torch.device]]:
    return {name: (id(each), each.dtype, each.device) for name, each in trainable_parameters(model).items()}


def _length(pieces: list[Piece]) -> int:
    return sum(each.stop - each.start for each in pieces)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return a sum that does not depend on the order of the elements, int64[]."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(-1).view(words).sum(dtype=torch.int64)
