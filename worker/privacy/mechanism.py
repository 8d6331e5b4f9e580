"""How many contributions have left this worker under [privacy], which is what epsilon grows with.

Counted before they leave, and durably: a process that is killed may count one that nobody has seen, but never the other
way round. One is a whole round's; where fragments leave one by one, each is its share of the parameters.

What [privacy] does to contributions before they leave: clipping, the secret of their noise, and the count of them.

The Gaussian mechanism, as in DP-FedAvg (McMahan et al. 2018, 1710.06963), but the noise is each worker's own: what
it sends of a round is at most S long, in L2 norm, and has N(0, (z·S)²) added to each value. What is sent together
is clipped together, to S·√share, its share of the model's elements: so all of a round is never longer than S, however
its fragments leave. Whatever a pseudo-gradient is made of, work carried over from earlier rounds and the inner
optimizer's state among it, goes through the same bound; so each round is one more Gaussian mechanism with the same
noise, and no more than that.
"""

import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protocol.spec.sections import PrivacySpec
from worker.privacy.noise import KEY_BYTES
from worker.ranks import ALONE, Ranks
from worker.state.state_dir import StateDir
from worker.state.work import Contribution

_FILE = "privacy.json"


@dataclass(frozen=True)
class Count:
    """Elements that have left, of a model that has `elements`."""

    left: int
    elements: int

    @property
    def contributions(self) -> float:
        return self.left / self.elements


class Spent:
    """The count of one run, in `files`; in memory alone where there is no directory. The file keeps those of other runs
    that this worker was in. Raises ValueError for a file that is damaged, and OSError."""

    def __init__(self, files: StateDir | None, owner: str, elements: int) -> None:
        self._files, self._owner = files, owner
        self._all = {} if files is None else _read(files)
        self._count = self._all.get(owner, Count(0, elements))

    @property
    def contributions(self) -> float:
        """Contributions that have left so far."""
        return self._count.contributions

    def add(self, elements: int) -> None:
        """Count what is about to leave; return once that is durable."""
        self._count = Count(self._count.left + elements, self._count.elements)
        if self._files is not None:
            self._all[self._owner] = self._count
            document = {owner: vars(count) for owner, count in self._all.items()}
            self._files.replace(_FILE, lambda file: file.write(json.dumps(document).encode()))


def _read(files: StateDir) -> dict[str, Count]:
    path = files.path / _FILE
    try:
        found = {owner: Count(**count) for owner, count in json.loads(path.read_text()).items()}
        if not all(type(each.left) is type(each.elements) is int and each.left >= 0 for each in found.values()):
            raise TypeError("counts are whole numbers")
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): it counts what has left this worker; put back a copy, or delete it and add "
            "what the log told last to what is counted from now on"
        ) from error
    return found


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
