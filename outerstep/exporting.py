"""A run's trained model as files, by the worker's own code. Importing this needs torch and transformers."""

from pathlib import Path

import httpx
from torch import nn
from transformers.utils import logging

from worker.export import export
from worker.link.client import Client


def export_model(http: httpx.Client, run: str, token: str, directory: Path, state: int | None = None) -> nn.Module:
    """Write checkpoint `state` of `run` (None: the latest) into `directory`, and return the model.

    Retries for ever where the coordinator cannot be reached. Raises FileExistsError for a directory that holds
    something, and otherwise what `worker.export.load_checkpoint` raises.
    """
    logging.disable_progress_bar()  # it is over in an instant, and would be drawn into our own display
    return export(Client(http, run, token), directory, state)
