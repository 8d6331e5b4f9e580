"""A run's checkpoint, loaded into a model: for exports and evaluations, and as another run's state 0."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from protocol import wire
from protocol.errors import Problem
from protocol.fragments import Layout, first_difference
from protocol.messages import CheckpointDetail, RunDetail, RunState
from protocol.outer_step import reached
from protocol.spec.model import MAX_PARAMETERS, ModelSpec
from protocol.spec.run import RunSpec
from worker.codecs import unpack_payload
from worker.errors import ModelError
from worker.joining.averaging import base_of, mean_of_fragment
from worker.link.client import Client
from worker.models.building import has_initial_parameters, load_weights
from worker.state.fragments import Fragments
from worker.state.parameters import frozen_summary, tensor_specs

_HOST = torch.device("cpu")
_PAUSE_S = 0.2

log = logging.getLogger(__name__)


def load_parameters(client: Client, model: nn.Module, state_round: int | None = None, average: int = 1) -> int:
    """Load the trained parameters of checkpoint `state_round` (None: the latest) of the client's run into `model`, at
    the point that the outer optimizer has reached (`protocol.outer_step.reached`); return its number. With `average`,
    the mean of that many states up to it (averaging.py).

    If the latest is deleted during the download because a newer one exists, the newer one is loaded.

    The latest checkpoint of a finished run is its final state. This waits for it: the coordinator takes its last outer
    step a moment after the run has finished. Raises Problem `not-found` for a checkpoint that does not exist, `gone`
    for a deleted one, `file-lost` for one that the coordinator's disk has lost; ModelError for a model with other
    shapes, or with other frozen parameters, than the run's, or if the states to average are not kept.
    """
    run = _settled(client, state_round)
    frozen = frozen_summary(model)
    if run.frozen is not None and frozen != run.frozen:
        raise ModelError(
            f"the frozen parameters here ({frozen or 'none'}) are not those of the run {client.run} "
            f"({run.frozen}); load the weights that its workers have"
        )

    def checked(layout: Layout) -> nn.Module:
        difference = first_difference(layout.tensors, tensor_specs(model))
        if difference:
            raise ModelError(f"the model built here is not the model of the run {client.run}: {difference}")
        return model

    return _load(client, run.spec, state_round, average, checked)[0]


def load_bare_parameters(
    client: Client, state_round: int | None = None, max_parameters: int = MAX_PARAMETERS, average: int = 1
) -> nn.Module:
    """Return a module with only the trained parameters of a checkpoint, under their names; otherwise like
    `load_parameters`. Raises ModelError if the checkpoint announces more than `max_parameters`."""
    run = _settled(client, state_round)

    def bare(layout: Layout) -> nn.Module:
        if layout.total_elements > max_parameters:
            raise ModelError(
                f"the run {client.run} has {layout.total_elements:,} parameters, and at most {max_parameters:,} are "
                f"allowed here; if that is right, set OUTERSTEP_MAX_PARAMETERS={layout.total_elements}"
            )
        return _bare(layout)

    return _load(client, run.spec, state_round, average, bare)[1]


def _bare(layout: Layout) -> nn.Module:
    module = nn.Module()
    for tensor in layout.tensors:
        *path, name = tensor.name.split(".")
        owner = module
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(name, nn.Parameter(torch.empty(tensor.shape, dtype=torch.float32, device="cpu")))
    return module


def _settled(client: Client, state_round: int | None) -> RunDetail:
    run = client.run_detail()
    while state_round is None and run.state is RunState.FINISHED and run.state_digest is None:
        client.pause(_PAUSE_S)
        run = client.run_detail()
    return run


def _load(
    client: Client, spec: RunSpec, state_round: int | None, average: int, model_for: Callable[[Layout], nn.Module]
) -> tuple[int, nn.Module]:
    """Load a checkpoint into the model that `model_for` returns for its layout; return its number, and the model."""
    gone: int | None = None
    while True:
        checkpoint = client.checkpoint(state_round)
        model = model_for(checkpoint.layout)
        try:
            _fetch_into(model, client, checkpoint, spec, average)
        except Problem as problem:
            if state_round is not None or problem.slug not in ("gone", "not-found", "file-lost"):
                raise
            if checkpoint.round == gone:  # it is still the latest: asking again would bring the same
                raise
            gone = checkpoint.round
            log.info("%s: asking for the latest checkpoint again", problem.detail)
            client.pause(_PAUSE_S)
        else:
            return checkpoint.round, model


def _fetch_into(model: nn.Module, client: Client, checkpoint: CheckpointDetail, spec: RunSpec, average: int) -> None:
    fragments, outer, last = Fragments(model, checkpoint.layout), spec.outer, checkpoint.round
    if average > 1:
        base = client.checkpoint(base_of(client.checkpoints(), last, average, client.run))
        for p in range(len(checkpoint.fragments)):
            fragments.scatter(p, mean_of_fragment(client, spec, base, p, last, average))
        return
    for p, elements in enumerate(checkpoint.layout.elements):
        limit_bytes = wire.max_payload_bytes("fp32", 2 * elements)
        payload = client.checkpoint_fragment(checkpoint.round, checkpoint.fragments[p], limit_bytes)
        theta, momentum = unpack_payload(payload, _HOST, 2 * elements).numpy().reshape(2, elements)
        point = reached(theta, momentum, learning_rate=outer.learning_rate, beta=outer.momentum)
        fragments.scatter(p, torch.from_numpy(point))


def initial_parameters(model: nn.Module, spec: ModelSpec, client: Client) -> Callable[[], None] | None:
    """Return the function that loads state 0 into `model` as `build_model` made it; None if the model holds it already.

    Only the worker that seeds the run calls it, so only that one needs the weights.
    """
    if spec.run is not None:
        return partial(_load_run, client.for_run(spec.run), model, spec.round)
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
