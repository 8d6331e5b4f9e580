"""What travels on into the next contribution, by what became of the last one."""

import pytest
import torch
from torch import Tensor

from worker.state.work import Late, Missed, Work, carry_of, first_units

WORK = Work(3, [[0, 5], [8, 9]], 1, 6, 1.5, [1.0, 2.0], [torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0, 4.0])])


@pytest.mark.parametrize(
    ("late", "units", "weight", "inner_steps", "loss"),
    [
        ([], [], 0, 0, 0.0),
        ([0, 1], WORK.units, 1, 6, 1.5),  # nobody has consumed the units
        ([1], [], 0, 0, 0.0),  # the units went with fragment 0
        ([0], [], 0, 0, 0.0),
    ],
)
def test_carry(late: list[int], units: list[list[int]], weight: int, inner_steps: int, loss: float) -> None:
    carry = carry_of(WORK, {p: Missed(torch.ones(len(WORK.deltas[p])), 0.5) for p in late})
    assert {p: each.lacking.tolist() for p, each in carry.late.items()} == {p: [[2, 0], [0, 1, 3]][p] for p in late}
    assert all((each.share, each.rounds) == (0.5, [3]) for each in carry.late.values())
    assert (carry.units, carry.weight, carry.inner_steps, carry.loss) == (units, weight, inner_steps, loss)
    assert carry.delta(0) is None or carry.delta(0).tolist() == [1, 0]  # type: ignore[union-attr]


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
    carried: list[dict[int, Late]] = [{}, {}]
    for number, deltas in enumerate(rounds):
        missed = Missed(means(deltas[:2]), 0.5)
        for w in (0, 1):
            late = carried[w]
            sent = deltas[2 + w] + (late[0].delta if late else 0)
            carried[w] = carry_of(Work(number, [[0, 1]], 1, 1, 0.0, [1.0], [sent], late), {0: missed}).late
    made_up = means(torch.stack([each[0].delta for each in carried]))
    published = torch.stack([means(deltas[:2]) for deltas in rounds]).sum(0)
    assert torch.allclose(published + made_up, torch.stack([means(deltas) for deltas in rounds]).sum(0))
    assert carried[0][0].rounds == list(range(late_rounds))


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
