"""The points that schedule-free optimizers keep beside the parameters (arXiv 2405.15682, section 2).

There the parameters are y, at which gradients are taken, and the state has z, which takes the steps; x, their average,
is not kept but follows from the two. A sync moves y to where the run is: z has to go the same way, or the next inner
steps would pull the parameters back to where this worker alone would be.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from worker.state.parameters import local_part

_POINT = "z"  # as schedulefree calls it


class OwnPoints:
    """Those of the optimizers in the sequence that have some."""

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self._optimizers = [each for each in optimizers if keeps_points(each)]

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return what of the parameter's own point is here, in its memory; None where there is none, or none yet."""
        for optimizer in self._optimizers:
            point = optimizer.state.get(parameter, {}).get(_POINT)
            if point is not None:
                return local_part(point)
        return None

    @torch.no_grad()
    def end(self) -> None:
        """Have them be the parameters, so that nothing leads away from these any more."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    point = self.of(parameter)
                    if point is not None:
                        point.copy_(local_part(parameter))


def keeps_points(optimizer: Optimizer) -> bool:
    """Return True if the optimizer is to be told whether its parameters are trained or evaluated, as schedule-free ones
    are."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
