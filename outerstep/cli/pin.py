"""The command `outerstep run pin`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.allowing import AllowFactoryOption, DataRootOption, MaxParametersOption
from outerstep.cli.faults import import_extra, validated
from outerstep.cli.printing import say
from outerstep.cli.run import read_spec
from outerstep.cli.worker import FLAGS

COMMAND = "outerstep run pin"


def pin(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec; - reads it from stdin.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Where this machine has the training set. Default: the spec's data.source."),
    ] = None,
    without_state: Annotated[
        bool, typer.Option("--without-state", help="Do not pin state 0: workers may make it with other versions.")
    ] = False,
    allow_factory: AllowFactoryOption = None,
    data_root: DataRootOption = None,
    max_parameters: MaxParametersOption = None,
) -> None:
    """Write the section [pins] of a run spec: what its workers have to bring, as this machine has it.

    Without it the first worker to join settles the model's shape and the training set, and the first to be asked makes
    state 0. Append what is printed to the spec before the run is created. It builds the model and opens the training
    set, so it needs the worker's libraries (torch, transformers), but no GPU and no coordinator.

    \b
    Example:
      outerstep run pin run.toml >> run.toml
      outerstep run create run.toml --token-file ./data/admin.token
    """
    _, parsed = read_spec(spec)
    settings = import_extra("worker.settings", extra="worker", command=COMMAND)
    given: dict[str, Any] = {
        "data": data,
        "allow_factory": allow_factory or None,
        "data_root": data_root or None,
        "max_parameters": max_parameters,
    }
    box = validated(settings.BoxSettings, given, FLAGS)
    pinning = import_extra("outerstep.pinning", extra="worker", command=COMMAND)
    found = pinning.pins_of(parsed, box, state=not without_state)
    say("")
    say("[pins]")
    for key, value in found.model_dump(exclude_none=True).items():
        say(f'{key} = "{value}"')
