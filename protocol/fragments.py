"""Fragments: how a model's trainable tensors become a few fp32 vectors of about equal length.

The trainable tensors, in model order or strided, form one long vector, which is cut into nearly equal parts. If all
fragments are sent together, the last part is halved repeatedly. So a large embedding is cut, small tensors are packed
together, and a fragment is an ordered list of slices. Every participant computes the same layout from the same tensors.
Tied tensors are listed once.
"""

import re
from math import prod
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from protocol.digest import digest
from protocol.errors import LayoutError

MAX_FRAGMENTS = 1 << 16
# While the last fragment's delta is downloaded, nothing else is uploaded. So the last fragment is small, but large
# enough that its bytes take longer than a round trip.
LAST_ELEMENTS = 1 << 19
# Bounded because a client's shapes are untrusted: products of unbounded numbers cannot even be printed in an error.
Dimension = Annotated[int, Field(gt=-(1 << 60), lt=1 << 60)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSpec(_Strict):
    """One trainable tensor: its name in the model and its shape."""

    name: str = Field(min_length=1, max_length=512)
    shape: list[Dimension] = Field(max_length=16)

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Slice(_Strict):
    """Elements [start, stop) of the flattened tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


class Layout(_Strict):
    """The tensors of a run and their fragments. Fragment p is the concatenation of its slices."""

    tensors: Annotated[list[TensorSpec], FailFast()]
    fragments: Annotated[list[Annotated[list[Slice], FailFast()]], FailFast()]

    @model_validator(mode="after")
    def _slices_are_of_its_tensors(self) -> Self:
        sizes = [tensor.elements for tensor in self.tensors]
        for p, fragment in enumerate(self.fragments):
            for each in fragment:
                if not (0 <= each.tensor < len(sizes) and 0 <= each.start < each.stop <= sizes[each.tensor]):
                    raise ValueError(f"fragment {p} has a slice outside the tensors: {each}")
        return self

    @property
    def elements(self) -> list[int]:
        """The number of elements of each fragment."""
        return [sum(part.stop - part.start for part in fragment) for fragment in self.fragments]

    @property
    def total_elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    def digest(self) -> bytes:
        return digest(self.model_dump_json().encode())


def plan_fragments(
    tensors: list[TensorSpec], fragment_elements: int, *, strided: bool = False, taper: bool = True
) -> Layout:
    """Cut `tensors` into fragments of at most `fragment_elements` elements; see `cut`.

    `strided`: a fragment has layers that are far apart, as Streaming DiLoCo does (arXiv 2501.18512, figure 4).

    Raises LayoutError for no elements, a negative dimension, a duplicate name, or more than MAX_FRAGMENTS fragments.
    """
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise LayoutError(f"tensor {tensor.name!r} is listed twice; list a tied tensor once")
        if any(dimension < 0 for dimension in tensor.shape):
            raise LayoutError(f"tensor {tensor.name!r} has shape {tensor.shape}: a dimension is negative")
        seen.add(tensor.name)
    total = sum(tensor.elements for tensor in tensors)
    if total == 0:
        raise LayoutError("the model has no trainable elements")

    count = -(-total // fragment_elements)
    if count > MAX_FRAGMENTS:
        raise LayoutError(
            f"{total} trainable elements make {count} fragments of {fragment_elements}; at most {MAX_FRAGMENTS} are "
            "allowed. Increase sync.fragment_elements"
        )
    bounds = cut(total, fragment_elements, taper=taper)
    fragments: list[list[Slice]] = [[] for _ in bounds[1:]]
    p, position = 0, 0  # position: index of the tensor's first element in the long vector
    for index in _strided(tensors, count) if strided else range(len(tensors)):
        tensor, start = tensors[index], 0
        while start < tensor.elements:
            stop = min(tensor.elements, bounds[p + 1] - position)
            fragments[p].append(Slice(tensor=index, start=start, stop=stop))
            if position + stop == bounds[p + 1]:
                p += 1
            start = stop
        position += tensor.elements
    return Layout(tensors=tensors, fragments=fragments)


def _strided(tensors: list[TensorSpec], count: int) -> list[int]:
    """Return the tensors' indices, those of layers 0, count, 2·count, … first, then those of 1, count + 1, …

    A tensor's layer is the first number in its name. Tensors without a number come first if they precede all layers in
    the model (embedding), otherwise last (head).
    """
    layers = [re.search(r"\.(\d+)\.", tensor.name) for tensor in tensors]
    numbered = [index for index, layer in enumerate(layers) if layer]
    if not numbered:
        return list(range(len(tensors)))

    def place(index: int) -> tuple[int, int, int]:
        layer = layers[index]
        if layer is None:
            return (-1 if index < numbered[0] else count, 0, index)
        number = int(layer[1])
        return (number % count, number, index)

    return sorted(range(len(tensors)), key=place)


def cut(total: int, fragment_elements: int, *, taper: bool = True) -> list[int]:
    """Return the fragments' bounds in one long vector of `total` > 0 elements, from 0 to `total`.

    The vector is cut into the fewest parts of at most `fragment_elements` elements, nearly equal in size. With `taper`
    the last part is halved, then its last half, and so on while the halves have at least LAST_ELEMENTS elements.
    """
    count = -(-total // fragment_elements)
    bounds = [total * p // count for p in range(count)]
    while taper and total - bounds[-1] >= 2 * LAST_ELEMENTS:
        bounds.append((bounds[-1] + total) // 2)
    return [*bounds, total]


def first_difference(ours: list[TensorSpec], theirs: list[TensorSpec]) -> str | None:
    """Return how another model's tensors differ from the run's, naming the first; None if they are the same."""
    run, other = ({tensor.name: tensor for tensor in tensors} for tensors in (ours, theirs))
    missing = [tensor for name, tensor in run.items() if name not in other]
    added = [tensor for name, tensor in other.items() if name not in run]
    if missing:
        return f"the run's trained tensor {missing[0].name} {missing[0].shape} is missing{_and_more(missing)}"
    if added:
        return f"its trained tensor {added[0].name} {added[0].shape} is not in the run{_and_more(added)}"
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.name != b.name:
            return f"its tensors are in another order: tensor {index} is {b.name}, the run's is {a.name}"
        if a != b:
            return f"its tensor {a.name} is {b.shape}, the run's is {a.shape}"
    return None if len(ours) == len(theirs) else "one of its tensors is listed twice"


def _and_more(tensors: list[TensorSpec]) -> str:
    return f", and {len(tensors) - 1} more" if len(tensors) > 1 else ""
