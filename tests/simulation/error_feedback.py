"""I6 with error feedback, by which the work of a unit comes in parts: what a contribution does not have of it, the next
ones of the same worker have.

So what is left out is looked for where it is: with the worker, as it begins its next round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from protocol.codecs.ternary import BLOCK, LEVEL  # the one codec with error feedback that is simulated
from tests.simulation.violation import demand
from tests.simulation.worker_node import ELEMENTS, WorkerNode
from worker.diloco import DiLoCo
from worker.state.work import Carry

Where = tuple[int, int]  # the first unit of a pool, and a fragment
Shares = Mapping[int, set[float]]  # by unit: how much of its work, 1 being all; one of these


@dataclass
class LeftOut:
    """What the codec left out of the work on the units that an accepted contribution to `round` names: its process is to
    carry that on."""

    process: DiLoCo
    round: int
    shares: Shares


@dataclass
class ErrorFeedback:
    """What the contributions have, and what they have not.

    parts       by pool of units and fragment: the sum of what was sent of each unit
    blurred     the pools and fragments that late work was carried into
    left_out    by worker and fragment: of the last contribution
    """

    parts: dict[Where, np.ndarray] = field(default_factory=dict)
    blurred: set[Where] = field(default_factory=set)
    left_out: dict[tuple[str, int], LeftOut] = field(default_factory=dict)

    def check_sent(self, where: str, worker: WorkerNode, header: Any, sent: np.ndarray, whole: Shares) -> None:
        """What is named is sent, unless it is too little for the codec: so may late work be, of which a share is
        carried, beside work that is whole.

        `sent`: the decoded values. `whole`: what the worker has of each unit that it names.
        """
        levels = np.abs(sent).reshape(-1, BLOCK).max(axis=1).repeat(BLOCK)
        missing = [unit for unit, shares in whole.items() if sent[unit] <= 0 and min(shares) * LEVEL >= levels[unit]]
        demand(not missing, "I6", f"{where}: it names units {missing}, whose work is not in it")
        process, rounds = worker.diloco, worker.rounds()
        if process is not None and rounds is not None and rounds.training and rounds.assignment.round == header.round:
            rest = {unit: {share - float(sent[unit]) for share in shares} for unit, shares in whole.items()}
            self.left_out[worker.name, header.fragment] = LeftOut(process, header.round, rest)

    def check_carried(self, worker: WorkerNode, round_: int, carry: Carry) -> None:
        """As a worker begins to train in `round_`: what was left out of its last contribution, it carries; unless it
        has dropped all that it had trained, for then its `carry` has no weight. (It may begin the same round anew.)"""
        for name, fragment in list(self.left_out):
            left = self.left_out[name, fragment]
            if name != worker.name or (left.round >= round_ and carry.weight):
                continue
            del self.left_out[name, fragment]
            if left.process is not worker.diloco or not carry.weight:
                continue
            carried = carry.unsent.get(fragment, torch.zeros(ELEMENTS)).tolist()
            lost = [u for u, shares in left.shares.items() if min(abs(carried[u] - share) for share in shares) > 0.01]
            where = f"round {left.round}, fragment {fragment}, {name}"
            demand(not lost, "I6", f"{where}: a part of the work of units {lost} is neither sent nor carried on")

    def count(self, where: str, key: Where, values: np.ndarray, *, late: bool) -> None:
        """Add `values`, how much of each unit was sent. Where no late work has blurred that, no sum is far from 0 or 1:
        it is off by half of what was sent last, at most."""
        if late:
            self.blurred.add(key)
        total = self.parts.setdefault(key, np.zeros(ELEMENTS))
        total += values
        far = np.flatnonzero((total < -0.6) | (total > 1.6))
        demand(
            key in self.blurred or not len(far),
            "I6",
            f"{where}: of units {far.tolist()} {total[far]} times the work is contributed",
        )
