"""Where a run's state 0 comes from, if not from the model as every worker builds it."""

import logging
from collections.abc import Callable
from functools import partial

from torch import nn

from protocol.errors import Problem
from protocol.spec.model import ModelSpec
from worker.errors import ModelError
from worker.joining.checkpoints import load_parameters
from worker.link.client import Client
from worker.models.building import has_initial_parameters, load_weights

log = logging.getLogger(__name__)


def initial_parameters(model: nn.Module, spec: ModelSpec, client: Client | None = None) -> Callable[[], None] | None:
    """Return what puts state 0 into `model`, as `build_model` made it; None if it is there.

    Only the worker that seeds the run calls it, so only that one needs the weights. Raises ModelError where they are
    another run's and there is no coordinator to ask for them.
    """
    if spec.run is not None:
        if client is None:
            raise ModelError(
                f"model.run = {spec.run!r}: without the run's coordinator nobody has its checkpoint; export it, and "
                "give that directory as model.pretrained"
            )
        return partial(_load_run, client.on(spec.run), model, spec.round)
    if has_initial_parameters(model, spec):
        return None
    return partial(load_weights, model, spec)


def _load_run(client: Client, model: nn.Module, state_round: int | None) -> None:
    try:
        found = load_parameters(client, model, state_round)
    except ModelError as error:
        raise ModelError(
            f"model.run = {client.run!r}: {error}; give the same shape, or the run's export as model.pretrained"
        ) from error
    except Problem as problem:
        checkpoint = "" if state_round is None else f", model.round = {state_round}"
        raise ModelError(f"model.run = {client.run!r}{checkpoint}: {problem.detail}") from problem
    log.info("state 0 is checkpoint %d of the run %s", found, client.run)
