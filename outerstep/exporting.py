"""Export of a run's trained model, by the worker's own code. Importing this needs torch and transformers."""

from pathlib import Path

import httpx
from torch import nn
from transformers.utils import logging

from protocol.spec.model import MAX_PARAMETERS
from worker.export import export
from worker.link.client import Client


def export_model(
    http: httpx.Client,
    run: str,
    token: str,
    directory: Path,
    state: int | None = None,
    *,
    merge: bool = False,
    factories: tuple[str, ...] = (),
    max_parameters: int = MAX_PARAMETERS,
) -> nn.Module:
    """Write checkpoint `state` of `run` (None: the latest) into `directory`, with its adapters merged if `merge`, and
    return the model, which code of `factories` may make.

    Retries for ever while the coordinator cannot be reached. Raises what `worker.export.export` raises.
    """
    logging.disable_progress_bar()  # it is over in an instant, and would spoil our own display
    client = Client(http, run, token)
    return export(client, directory, state, merge=merge, factories=factories, max_parameters=max_parameters)
