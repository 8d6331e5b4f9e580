"""A worker's inner steps without a coordinator or a network, for loops in virtual time: the model, the data, the inner
optimizer and the schedule are the worker's."""

from collections.abc import Sequence

import torch

from protocol.spec.run import RunSpec
from worker.data.open_training_set import TextData
from worker.inner.loss import mean_loss
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.schedules import Schedule
from worker.inner.step import clip_gradients
from worker.models.building import build_model

CPU = torch.device("cpu")


class Replica:
    """A model and its inner optimizer."""

    def __init__(self, spec: RunSpec, data: TextData) -> None:
        self._spec, self._data = spec, data
        self.model = build_model(spec, CPU)
        self._parameters = list(self.model.parameters())
        self._optimizers = build_inner_optimizers(self.model, spec.inner)
        self._schedule = Schedule(spec, self._optimizers)

    def train(self, units: Sequence[int], first_step: float, steps_per_unit: float = 1.0) -> None:
        """Take one inner step per unit, like `worker/train.py`. The learning rate is that of global step `first_step`,
        and `steps_per_unit` steps later for each further unit."""
        self.model.train()
        for index, unit in enumerate(units):
            self._schedule.set(int(first_step + index * steps_per_unit))
            mean_loss(self.model, self._data.unit(unit)).backward()
            clip_gradients(self._parameters, self._spec.inner)
            for optimizer in self._optimizers:
                optimizer.step()
            self.model.zero_grad()
