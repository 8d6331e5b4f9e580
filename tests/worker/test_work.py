"""What travels on into the next contribution, by what became of the last one."""

import pytest
import torch

from worker.work import Outcome, Work, carry_of, first_units

A, LATE = Outcome.ACCEPTED, Outcome.LATE
DELTAS, MEANS = [torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0, 4.0])], {0: torch.ones(2), 1: torch.ones(3)}
WORK = Work(3, [[0, 5], [8, 9]], 1, 6, 1.5, [1.0, 2.0], DELTAS, [[], [2]])


@pytest.mark.parametrize(
    ("outcomes", "late", "units", "inner_steps", "loss"),
    [
        ([A, A], [], [], 0, 0.0),
        ([LATE, LATE], [0, 1], WORK.units, 6, 1.5),  # nobody has consumed the units
        ([A, LATE], [1], [], 0, 0.0),  # the units went with fragment 0
        ([LATE, A], [0], [], 0, 0.0),
    ],
)
def test_carry(outcomes: list[Outcome], late: list[int], units: list[list[int]], inner_steps: int, loss: float) -> None:
    carry = carry_of(WORK, outcomes, {p: MEANS[p] for p in late})
    assert {p: delta.tolist() for p, delta in carry.deltas.items()} == {p: [[2, 0], [0, 1, 3]][p] for p in late}
    assert carry.rounds == {p: [[3], [2, 3]][p] for p in late}
    assert (carry.units, carry.weight, carry.inner_steps, carry.loss) == (units, len(units) // 2, inner_steps, loss)


def test_a_late_contribution_that_is_carried_makes_up_for_the_mean_that_lacked_it() -> None:
    """Of four workers the last is late: two rounds' means together are what they were had it been in time."""
    first, second = torch.randn(2, 4, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = first[:3].mean(0)
    late = Work(0, [[0, 1]], 1, 1, 0.0, [1.0], [first[3]], [[]])
    carry = carry_of(late, [LATE], {0: mean})
    second_mean = (second.sum(0) + carry.deltas[0]) / 4
    assert torch.allclose(mean + second_mean, first.mean(0) + second.mean(0))


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
