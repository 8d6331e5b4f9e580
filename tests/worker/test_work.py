"""What travels on into the next contribution, by what became of the last one."""

import pytest
import torch

from worker.work import Carry, Outcome, Work, carry_of, first_units

A, LATE = Outcome.ACCEPTED, Outcome.LATE
WORK = Work(3, [[0, 5], [8, 9]], 6, 1.5, [1.0, 2.0], [torch.ones(2), torch.ones(3)])


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
    carry = carry_of(WORK, outcomes)
    assert carry == Carry({p: WORK.deltas[p] for p in late}, units, inner_steps, loss)


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
