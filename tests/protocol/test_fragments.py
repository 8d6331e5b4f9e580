"""Fragments cover every element exactly once, in order, and are balanced within one element; the last one tapers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LayoutError
from protocol.fragments import LAST_ELEMENTS, MAX_FRAGMENTS, Layout, TensorSpec, first_difference, plan_fragments

shapes = st.lists(st.lists(st.integers(0, 30), max_size=2), min_size=1, max_size=8)


def tensors(*shapes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("strided", [False, True])
@given(shapes=shapes, fragment_elements=st.integers(1, 5000))
def test_every_element_is_in_exactly_one_fragment(
    shapes: list[list[int]], fragment_elements: int, strided: bool
) -> None:
    specs = [TensorSpec(name=f"layers.{i}.w" if i else "embedding", shape=shape) for i, shape in enumerate(shapes)]
    total = sum(spec.elements for spec in specs)
    if total == 0 or -(-total // fragment_elements) > MAX_FRAGMENTS:
        return
    layout = plan_fragments(specs, fragment_elements, strided=strided)

    pieces = [piece for fragment in layout.fragments for piece in fragment]
    position = dict.fromkeys(range(len(specs)), 0)
    for before, after in pairwise(pieces):
        assert strided or before.tensor <= after.tensor
    for piece in pieces:
        assert piece.start == position[piece.tensor] < piece.stop
        position[piece.tensor] = piece.stop
    assert position == {i: spec.elements for i, spec in enumerate(specs)}

    assert max(layout.elements) <= fragment_elements
    assert max(layout.elements) - min(layout.elements) <= 1
    assert len(layout.fragments) == -(-total // fragment_elements)
    assert sum(layout.elements) == layout.total_elements == total


@pytest.mark.slow
@given(total=st.integers(1, 1 << 31), fragment_elements=st.integers(1 << 16, 1 << 28))
def test_a_large_last_fragment_is_halved_until_it_is_small(total: int, fragment_elements: int) -> None:
    count = -(-total // fragment_elements)
    if count > MAX_FRAGMENTS:
        return
    elements = plan_fragments(tensors([total]), fragment_elements).elements
    equal, halves = elements[: count - 1], elements[count - 1 :]
    assert sum(elements) == total
    assert max([*equal, sum(halves)]) - min([*equal, sum(halves)]) <= 1
    assert halves[-1] < 2 * LAST_ELEMENTS
    for index, half in enumerate(halves[:-1]):
        assert half >= LAST_ELEMENTS
        assert sum(halves[index + 1 :]) - half in (0, 1)


def test_the_digest_tells_layouts_apart() -> None:
    one = plan_fragments(tensors([10], [2]), 5)
    assert one.digest() == Layout.model_validate_json(one.model_dump_json()).digest()
    assert one.digest() != plan_fragments(tensors([10], [2]), 6).digest()
    assert one.digest() != plan_fragments(tensors([2], [10]), 5).digest()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no trainable elements"),
        (tensors([0], [3, 0]), "no trainable elements"),
        ([*tensors([1]), *tensors([1])], "'t0' is listed twice"),
        (tensors([-1]), "a dimension is negative"),
        (tensors([-2, -2]), "a dimension is negative"),
        (tensors([1 << 59, 1 << 59]), "sync.fragment_elements"),
    ],
)
def test_models_that_cannot_be_cut(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_fragments(specs, 256)


def test_the_first_difference_is_named() -> None:
    assert first_difference(tensors([1], [2]), tensors([1], [2])) is None
    for run, worker, said in (
        (tensors([1], [2]), tensors([1], [3]), "t1 is [3], the run's is [2]"),
        (tensors([1], [2]), tensors([1]), "t1 [2] is missing"),
        (tensors([1]), tensors([1], [2], [3]), "t1 [2] is not in the run, and 1 more"),
        (tensors([1]), tensors([1]) * 2, "is listed twice"),
        (tensors([1], [1]), tensors([1], [1])[::-1], "tensor 0 is t1, the run's is t0"),
    ):
        assert said in str(first_difference(run, worker))
