"""What the first workers of a run would bring, found out beforehand, so that its spec can pin it."""

import torch

from protocol.spec.run import RunSpec
from protocol.spec.sections import PinSpec
from worker.allowing import allowed_by, permit
from worker.box import check_suited, shard_cache
from worker.data.open_training_set import open_training_set
from worker.models.building import build_model
from worker.settings import BoxSettings
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.parameters import frozen_summary, tensor_specs


def pins_of(spec: RunSpec, settings: BoxSettings, *, state: bool) -> PinSpec:
    """Build the run's model in host memory and open its training set. `state`: pin state 0 too, where the model is made
    by the spec and not taken from another run.

    Raises NotAllowed, DataError and ModelError, as a worker would at its start, and LayoutError.
    """
    permit(spec, allowed_by(settings))
    check_suited(spec, 1)
    model = build_model(spec, torch.device("cpu"), settings.max_parameters)
    layout = spec.sync.plan_layout(tensor_specs(model))
    frozen = frozen_summary(model)
    digest = None
    if not spec.data.private:
        data = open_training_set(spec.with_source(settings.data), shards=shard_cache(settings))
        digest = data.summary.digest
        data.close()
    held = None
    if state and spec.model.run is None:
        held = OuterState(layout, spec.outer, pin_memory=False)
        held.take(Fragments(model, layout))
    return PinSpec(
        layout=layout.digest().hex(),
        frozen=frozen.digest if frozen else None,
        data=digest,
        state=held.digest().hex() if held else None,
    )
