"""What [privacy] does to contributions before they leave: clipping, the secret of their noise, and the count of them.

The Gaussian mechanism, as in DP-FedAvg (McMahan et al. 2018, 1710.06963), but the noise is each worker's own: what
it sends of a round is at most S long, in L2 norm, and has N(0, (z·S)²) added to each value. What is sent together
is clipped together, to S·√share, its share of the model's elements: so all of a round is never longer than S, however
its fragments leave. Whatever a pseudo-gradient is made of, work carried over from earlier rounds and the inner
optimizer's state among it, goes through the same bound; so each round is one more Gaussian mechanism with the same
noise, and no more than that.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from protocol.spec.sections import PrivacySpec
from worker.privacy.noise import KEY_BYTES
from worker.privacy.spent import Spent
from worker.ranks import ALONE, Ranks
from worker.state.work import Contribution

# A clipped vector is this much shorter than it may be, so that no rounding to fp32 makes it longer.
_ROUNDING = 1 - 2.0**-20


class Protection:
    """Protects the contributions of one worker. `elements`: of each fragment. `draw` gives the key of a contribution's
    noise, secret bytes that the operating system vouches for. Of several `ranks`, all protect what is sent together at
    once."""

    def __init__(
        self,
        spec: PrivacySpec,
        elements: Sequence[int],
        spent: Spent,
        ranks: Ranks = ALONE,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._spec, self._elements, self._spent, self._ranks, self._draw = spec, elements, spent, ranks, draw
        self._before = max(ranks.all(spent.contributions)) - spent.contributions  # that another process has counted

    @property
    def contributions(self) -> float:
        """Contributions that have left this worker so far."""
        return self._before + self._spent.contributions

    def count(self, fragments: Sequence[int]) -> None:
        """Count fragments that are about to leave; durable when this returns. All processes call it for all of them."""
        self._spent.add(sum(self._elements[p] for p in fragments))

    def together(self, made: list[Contribution], fragments: Sequence[int]) -> list[Contribution]:
        """Return `made`, this process's contributions to `fragments`, all of which are sent together, as they may
        leave; and count them. Their tensors are used up."""
        self.count(fragments)
        squares = sum(self._ranks.all(sum(_norm(each.delta) ** 2 for each in made)))
        factor = self._factor(math.sqrt(squares), fragments)
        return [self._protected(each, factor) for each in made]

    def alone(self, made: Contribution) -> Contribution:
        """Return a contribution that is sent by itself, and is counted already, as it may leave. Its tensor is used
        up."""
        return self._protected(made, self._factor(_norm(made.delta), [made.fragment]))

    def _factor(self, norm: float, fragments: Sequence[int]) -> float:
        share = sum(self._elements[p] for p in fragments) / sum(self._elements)
        bound = self._spec.clip_norm * math.sqrt(share) * _ROUNDING
        return 1.0 if norm <= bound else bound / norm

    def _protected(self, made: Contribution, factor: float) -> Contribution:
        delta = made.delta if factor == 1.0 else made.delta.mul_(factor)
        key = self._draw(KEY_BYTES) if self._spec.noise else b""
        return replace(made, delta=delta, norm=_norm(delta), loss=None, clipped=factor, noise_key=key.hex())


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
