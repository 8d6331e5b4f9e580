"""What travels on into the next contribution, by what became of the last one."""

import pytest
import torch

from worker.work import Carry, Outcome, Work, carry_of

A, LATE = Outcome.ACCEPTED, Outcome.LATE
WORK = Work(3, [[0, 5], [8, 9]], 6, 1.5, [1.0, 2.0], [torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("outcomes", "late", "units", "inner_steps"),
    [
        ([A, A], [], [], 0),
        ([LATE, LATE], [0, 1], WORK.units, 6),  # nobody has consumed the units
        ([A, LATE], [1], [], 0),  # the units went with fragment 0
        ([LATE, A], [0], [], 0),
    ],
)
def test_carry(outcomes: list[Outcome], late: list[int], units: list[list[int]], inner_steps: int) -> None:
    carry = carry_of(WORK, outcomes)
    assert carry == Carry({p: WORK.deltas[p] for p in late}, units, inner_steps)
