"""What travels on into the next contribution, by what became of the last one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from worker.state.work import Carry, Contribution, Late, Missed, first_units, units_left


def contribution(delta: Tensor, *, round_number: int = 3, late: Late | None = None) -> Contribution:
    return Contribution(round_number, 0, [[0, 5], [8, 9]], 1, 6, 1.5, 1.0, delta, late)


def test_late_work_is_what_the_mean_lacks_of_it() -> None:
    late = contribution(torch.tensor([1.0, 2.0, 4.0])).missed(Missed(torch.ones(3), 0.5))
    assert (late.lacking.tolist(), late.share, late.rounds) == ([0, 1, 3], 0.5, [3])
    assert late.part.tolist() == [0, 0.5, 1.5]


def test_what_is_carried_is_told_by_fragment() -> None:
    late = Late(torch.tensor([2.0]), 0.5, [3])
    carry = Carry(units=[[0, 1]], late={0: late}).with_ahead(0, torch.tensor([10.0]))
    carry = carry.with_residual(replace(contribution(torch.tensor([5.0])), fragment=1), torch.tensor([3.0]))
    deltas = [carry.part(p) for p in range(3)]
    assert [None if each is None else each.tolist() for each in deltas] == [[11.0], [3.0], None]
    carry = carry.with_residual(contribution(torch.tensor([5.0])), None)
    assert (carry.part(0), carry.units) == (None, [[0, 1]])


def means(deltas: Tensor) -> Tensor:
    return deltas.mean(0)


@pytest.mark.parametrize("late_rounds", [1, 2])
def test_late_work_makes_up_for_the_means_that_lacked_it(late_rounds: int) -> None:
    """Two of four workers are late for some rounds, in time for none, and their work is in the mean of two at last:
    all rounds' means together are then those of two rounds of all four that had been in time, as far as they took part.

    In the last round the same two come alone: so half of what is lacking, in a mean over half of the workers.
    """
    generator = torch.Generator().manual_seed(0)
    rounds = torch.randn(late_rounds, 4, 50, dtype=torch.float64, generator=generator)
    carried: list[Late | None] = [None, None]
    for number, deltas in enumerate(rounds):
        missed = Missed(means(deltas[:2]), 0.5)
        for w in (0, 1):
            late = carried[w]
            sent = deltas[2 + w] + (late.part if late else 0)
            carried[w] = contribution(sent, round_number=number, late=late).missed(missed)
    first, second = carried
    assert first is not None
    assert second is not None
    made_up = means(torch.stack([first.part, second.part]))
    published = torch.stack([means(deltas[:2]) for deltas in rounds]).sum(0)
    assert torch.allclose(published + made_up, torch.stack([means(deltas) for deltas in rounds]).sum(0))
    assert first.rounds == list(range(late_rounds))


@pytest.mark.parametrize(
    ("fresh", "waited", "ahead"),
    [({}, 0, 0), ({0: 8, 1: 8}, 0, 8), ({0: 8, 1: 8}, 1, 8), ({0: 8, 1: 8}, 7, 2), ({0: 2, 1: 8}, 3, 0)],
)
def test_steps_while_others_were_waited_for_are_beyond_the_next_h(
    fresh: dict[int, int], waited: int, ahead: int
) -> None:
    assert Carry(fresh=fresh, waited=waited).steps_ahead == ahead


@pytest.mark.parametrize(("back_to", "kept"), [(5, True), (4, False), (2, False)])
def test_late_work_on_rounds_that_a_backup_has_undone_is_dropped(back_to: int, kept: bool) -> None:
    """The rounds are still to come for the run: no contribution to them, or to one before, may list them as carried."""
    carry = Carry(late={1: Late(torch.zeros(3), 0.5, [2, 4])})
    assert carry.is_of_rounds_before(back_to) == kept


def test_first_units() -> None:
    units = [[3, 5], [9, 10], [20, 30]]
    assert [first_units(units, count) for count in (0, 1, 2, 3, 5, 13, 99)] == [
        [],
        [[3, 4]],
        [[3, 5]],
        [[3, 5], [9, 10]],
        [[3, 5], [9, 10], [20, 22]],
        units,
        units,
    ]


def test_units_left() -> None:
    """The coordinator consumes the units of the largest contribution that it accepts; none of them is named again."""
    units = [[3, 5], [9, 10], [20, 30]]
    assert [units_left(units, consumed) for consumed in (0, 1, 2, 3, 5, 13)] == [
        units,
        [[4, 5], [9, 10], [20, 30]],
        [[9, 10], [20, 30]],
        [[20, 30]],
        [[22, 30]],
        [],
    ]
