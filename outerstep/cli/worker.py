"""The command `outerstep worker`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.connection import TokenFileOption, TokenOption, checked_url, find_token
from outerstep.cli.faults import import_extra, validated

FLAGS = {
    "url": "URL",
    "run": "--run",
    "token": "--token",
    "name": "--name",
    "state_dir": "--state",
    "device": "--device",
    "data": "--data",
    "threads": "--threads",
}


def worker(
    url: Annotated[str, typer.Argument(metavar="URL", help="The coordinator's address.")],
    run: Annotated[str, typer.Option("--run", help="The run to join.")],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="This worker's name in the run. Default: this machine's name.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help="Directory for this worker's local checkpoint. Default: ~/.local/state/outerstep/RUN/NAME.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps … Default: auto, the fastest there is.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="Where this machine has the training set. Default: data.source, as the run's spec has it."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of torch. Default: torch's own choice.")
    ] = None,
) -> None:
    """Join a run as a worker and train until it ends.

    A worker only makes requests to the coordinator: no open port is needed. The same command again after a crash goes
    on where this worker was; SIGTERM or Ctrl-C leaves the run cleanly.

    \b
    Example:
      OUTERSTEP_TOKEN=… outerstep worker https://coordinator.example.org --run my-run
    """
    agent = import_extra("worker.agent", extra="worker", command="outerstep worker")
    settings = import_extra("worker.settings", extra="worker", command="outerstep worker")
    given: dict[str, Any] = {
        "url": checked_url(url),
        "run": run,
        "token": find_token(token, token_file, os.environ),
        "name": name,
        "state_dir": state,
        "device": device,
        "data": data,
        "threads": threads,
    }
    raise typer.Exit(agent.run_worker(validated(settings.WorkerSettings, given, FLAGS)))
