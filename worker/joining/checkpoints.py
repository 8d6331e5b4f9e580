"""A run's checkpoint, put into a model.

Where a run's state 0 comes from, if not from the model as every worker builds it.
"""

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
from protocol.spec.sections import OuterSpec
from worker.codecs import unpack_payload
from worker.errors import ModelError
from worker.link.client import Client
from worker.models.building import has_initial_parameters, load_weights
from worker.state.fragments import Fragments
from worker.state.parameters import frozen_summary, tensor_specs

_HOST = torch.device("cpu")
_PAUSE_S = 0.2

log = logging.getLogger(__name__)


def load_parameters(client: Client, model: nn.Module, state_round: int | None = None) -> int:
    """Put the trained parameters of checkpoint `state_round` (None: the latest) of the client's run into `model`, as
    far as the outer optimizer has reached (`protocol.outer_step.reached`); return its number.

    Where the latest is deleted while it is fetched, because there is a later one, that is taken.

    The latest of a finished run is its final state; this waits for it, because the coordinator takes its own last outer
    step a moment after the run has finished. Raises Problem `not-found` for a checkpoint that does not exist, `gone`
    for one that was deleted, `file-lost` for one that the coordinator's disk has lost; ModelError for a model of
    another shape, or with other frozen parameters than the run's.
    """
    run = _settled(client, state_round)
    frozen = frozen_summary(model)
    if run.frozen is not None and frozen != run.frozen:
        raise ModelError(
            f"the frozen parameters here ({frozen or 'none'}) are not those of the run {client.run} ({run.frozen}); "
            "load the weights that its workers have"
        )

    def checked(layout: Layout) -> nn.Module:
        difference = first_difference(layout.tensors, tensor_specs(model))
        if difference:
            raise ModelError(f"the model built here is not the model of the run {client.run}: {difference}")
        return model

    return _load(client, run.spec.outer, state_round, checked)[0]


def load_bare_parameters(
    client: Client, state_round: int | None = None, max_parameters: int = MAX_PARAMETERS
) -> nn.Module:
    """Return a module that is nothing but the trained parameters of a checkpoint, otherwise as `load_parameters` has
    them, by their names. Raises ModelError if the checkpoint says that it has more than `max_parameters`."""
    run = _settled(client, state_round)

    def bare(layout: Layout) -> nn.Module:
        if layout.total_elements > max_parameters:
            raise ModelError(
                f"the run {client.run} has {layout.total_elements:,} parameters, and at most {max_parameters:,} are "
                f"allowed here; if that is right, add: --max-parameters {layout.total_elements}"
            )
        return _bare(layout)

    return _load(client, run.spec.outer, state_round, bare)[1]


def _bare(layout: Layout) -> nn.Module:
    module = nn.Module()
    for tensor in layout.tensors:
        *path, name = tensor.name.split(".")
        owner = module
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(name, nn.Parameter(torch.empty(tensor.shape)))
    return module


def _settled(client: Client, state_round: int | None) -> RunDetail:
    run = client.run_detail()
    while state_round is None and run.state is RunState.FINISHED and run.state_digest is None:
        client.pause(_PAUSE_S)
        run = client.run_detail()
    return run


def _load(
    client: Client, outer: OuterSpec, state_round: int | None, model_for: Callable[[Layout], nn.Module]
) -> tuple[int, nn.Module]:
    """Put a checkpoint into the model for its layout; return its number, and the model."""
    gone: int | None = None
    while True:
        checkpoint = client.checkpoint(state_round)
        model = model_for(checkpoint.layout)
        try:
            _fetch_into(model, client, checkpoint, outer)
        except Problem as problem:
            if state_round is not None or problem.slug not in ("gone", "not-found", "file-lost"):
                raise
            if checkpoint.round == gone:  # and yet it is still the latest: asking again would bring the same
                raise
            gone = checkpoint.round
            log.info("%s: asking again for the latest checkpoint", problem.detail)
            client.pause(_PAUSE_S)
        else:
            return checkpoint.round, model


def _fetch_into(model: nn.Module, client: Client, checkpoint: CheckpointDetail, outer: OuterSpec) -> None:
    fragments = Fragments(model, checkpoint.layout)
    for p, elements in enumerate(checkpoint.layout.elements):
        limit_bytes = wire.max_payload_bytes("fp32", 2 * elements)
        payload = client.checkpoint_fragment(checkpoint.round, checkpoint.fragments[p], limit_bytes)
        theta, momentum = unpack_payload(payload, _HOST, 2 * elements).numpy().reshape(2, elements)
        point = reached(theta, momentum, learning_rate=outer.learning_rate, beta=outer.momentum)
        fragments.scatter(p, torch.from_numpy(point))


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
