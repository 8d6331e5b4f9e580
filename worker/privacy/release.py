"""The last stage of a contribution before it is uploaded: what a private run clips, adds noise to, and counts.

The algorithm (worker/rounds/) passes every contribution through one `Release`, which changes nothing by default. A run
with [privacy] has a `PrivateRelease`: the Gaussian mechanism, as in DP-FedAvg (McMahan et al. 2018, arXiv 1710.06963),
except that each worker adds its own noise. What a worker sends of one round is at most S long (L2 norm), and N(0,
(z·S)²) is added to each value. Fragments that are sent together are clipped together, to S·√share, where `share` is
their part of the model's elements: so a whole round is never longer than S, however its fragments are sent. Everything
in a pseudo-gradient passes through the same bound, including work carried over from earlier rounds and the effect of
the inner optimizer's state. So each round is one more Gaussian mechanism with the same noise, and nothing more.

Epsilon grows with the number of contributions sent. They are counted before they are sent, and durably: a process that
is killed may count a contribution that nobody received, but never misses one. One contribution is a whole round;
fragments sent separately count as their share of the parameters.
"""

import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protocol.messages import EvaluationReport, Metrics
from protocol.spec.run import RunSpec
from protocol.spec.sections import PrivacySpec
from worker.privacy.noise import KEY_BYTES, with_noise
from worker.ranks import ALONE, Ranks
from worker.state.state_dir import StateDir
from worker.state.work import Contribution

_FILE = "privacy.json"

# A clipped vector is shorter than its bound by this factor, so that rounding to fp32 never makes it longer.
_ROUNDING = 1 - 2.0**-20

log = logging.getLogger(__name__)


class Release:
    """Releases contributions unchanged.

    `spec` is the run's [privacy] section. With `durable_first`, no upload begins before all of the round's work is
    durable.
    """

    spec: PrivacySpec | None = None
    durable_first = False

    def count(self, fragments: Sequence[int]) -> None:
        """Count fragments that are about to be sent; durable when this returns. All ranks call it, for all
        fragments."""

    def together(self, made: Iterable[Contribution], fragments: Sequence[int]) -> Iterable[Contribution]:
        """Count `fragments`, which are sent together, and return this process's contributions to them, `made`, as they
        may be sent. Their tensors may be changed. All ranks call it."""
        return made

    def alone(self, made: Contribution) -> Contribution:
        """Return a contribution that is sent by itself, and is counted already, as it may be sent. Its tensor may be
        changed."""
        return made

    def uploaded(self, contribution: Contribution) -> tuple[Tensor, float]:
        """Return the values to upload, float32[n] in host memory, and their L2 norm."""
        return contribution.delta, contribution.norm

    def evaluation(self, evaluate: Callable[[], EvaluationReport] | None) -> Callable[[], EvaluationReport] | None:
        """Return what measures the held-out loss, None if this worker must not report one."""
        return evaluate

    def metrics(self, metrics: Metrics) -> Metrics:
        """Return the metrics that may be reported to the coordinator."""
        return metrics

    def end_round(self) -> None:
        """Log what has been released so far."""


class PrivateRelease(Release):
    """Clips contributions, adds noise, and counts them. `elements`: of each fragment. `draw` returns the secret bytes
    of the key for a contribution's noise. With several `ranks`, all of them clip what is sent together by one common
    norm."""

    durable_first = True  # after a kill, a contribution must not be made again with other noise

    def __init__(
        self,
        spec: PrivacySpec,
        elements: Sequence[int],
        spent: "Spent",
        ranks: Ranks = ALONE,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.spec: PrivacySpec = spec
        self._elements, self._spent, self._ranks, self._draw = elements, spent, ranks, draw
        self._before = max(ranks.all(spent.contributions)) - spent.contributions  # counted by another process

    @property
    def contributions(self) -> float:
        """Contributions that this worker has sent so far."""
        return self._before + self._spent.contributions

    def count(self, fragments: Sequence[int]) -> None:
        self._spent.add(sum(self._elements[p] for p in fragments))

    def together(self, made: Iterable[Contribution], fragments: Sequence[int]) -> list[Contribution]:
        made = list(made)
        self.count(fragments)
        squares = sum(self._ranks.all(sum(_norm(each.delta) ** 2 for each in made)))
        factor = self._factor(math.sqrt(squares), fragments)
        return [self._clipped(each, factor) for each in made]

    def alone(self, made: Contribution) -> Contribution:
        return self._clipped(made, self._factor(_norm(made.delta), [made.fragment]))

    def uploaded(self, contribution: Contribution) -> tuple[Tensor, float]:
        if not self.spec.noise:
            return contribution.delta, contribution.norm
        # Raises ValueError for a contribution without a key.
        noisy = with_noise(contribution.delta, self.spec.noise, bytes.fromhex(contribution.noise_key))
        return noisy, _norm(noisy)

    def evaluation(self, evaluate: Callable[[], EvaluationReport] | None) -> None:
        return None  # a held-out loss would be reported without noise

    def metrics(self, metrics: Metrics) -> Metrics:
        return metrics.model_copy(update={"loss": None, "private_contributions": self.contributions})

    def end_round(self) -> None:
        log.info("%g contributions released under [privacy] so far", self.contributions)

    def _factor(self, norm: float, fragments: Sequence[int]) -> float:
        share = sum(self._elements[p] for p in fragments) / sum(self._elements)
        bound = self.spec.clip_norm * math.sqrt(share) * _ROUNDING
        return 1.0 if norm <= bound else bound / norm

    def _clipped(self, made: Contribution, factor: float) -> Contribution:
        delta = made.delta if factor == 1.0 else made.delta.mul_(factor)
        key = self._draw(KEY_BYTES) if self.spec.noise else b""
        return replace(made, delta=delta, norm=_norm(delta), loss=None, clipped=factor, noise_key=key.hex())


def release_for(spec: RunSpec, elements: Sequence[int], files: StateDir | None, owner: str, ranks: Ranks) -> Release:
    """Return the release of a worker of this run, whose fragments have `elements`. `owner` names the run in the count,
    which is kept in `files`. Raises ValueError and OSError as `Spent` does."""
    if spec.privacy is None:
        return Release()
    release = PrivateRelease(spec.privacy, elements, Spent(files, owner, sum(elements)), ranks)
    log.info(
        "the run is private: contributions are clipped to a norm of %g and sent with Gaussian noise of %g on each "
        "value; losses are not reported; %g contributions released so far",
        *(spec.privacy.clip_norm, spec.privacy.noise, release.contributions),
    )
    if not spec.data.private:
        log.warning("data.private is false: the text is the same for all workers, so the noise protects little")
    return release


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


@dataclass(frozen=True)
class Count:
    """Elements that were sent (`left` this worker), of a model with `elements`."""

    left: int
    elements: int

    @property
    def contributions(self) -> float:
        return self.left / self.elements


class Spent:
    """The count of one run, kept in `files`, or only in memory if there is no directory. The file also keeps the counts
    of other runs of this worker. Raises ValueError for a damaged file, and OSError."""

    def __init__(self, files: StateDir | None, owner: str, elements: int) -> None:
        self._files, self._owner = files, owner
        self._all = {} if files is None else _read(files)
        self._count = self._all.get(owner, Count(0, elements))

    @property
    def contributions(self) -> float:
        """Contributions sent so far."""
        return self._count.contributions

    def add(self, elements: int) -> None:
        """Count elements that are about to be sent; durable when this returns."""
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
            f"{path} is damaged ({error}): it counts what has left this worker; restore a copy, or delete it and add "
            "the number that the log reported last to every later count"
        ) from error
    return found
