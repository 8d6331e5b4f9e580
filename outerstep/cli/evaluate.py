"""The command `outerstep run evaluate`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.allowing import AllowFactoryOption, MaxParametersOption
from outerstep.cli.connection import (
    DEFAULT_URL,
    CaOption,
    TokenFileOption,
    TokenOption,
    UrlOption,
    find_token,
    operator_client,
)
from outerstep.cli.faults import UsageError, import_extra, validated
from outerstep.cli.printing import Format, FormatOption, print_json, say
from outerstep.cli.run import RunArgument
from outerstep.cli.worker import FLAGS, DataCacheGbOption, DataCacheOption
from outerstep.common.quantities import count_text, held_out_text

COMMAND = "outerstep run evaluate"


def evaluate(
    run: RunArgument,
    state: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, help="The checkpoint to evaluate: the model before this round. Default: the latest."
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Evaluate the model of this directory, by `outerstep run export`, instead."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Evaluate on what is held out of this text. Default: the run's data.source, which has to be the text "
            "that the run is trained on.",
        ),
    ] = None,
    data_cache: DataCacheOption = None,
    data_cache_gb: DataCacheGbOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", metavar="TASK,…", help="With --export: also these tasks of lm-eval, by name or YAML file."
        ),
    ] = None,
    allow_factory: AllowFactoryOption = None,
    max_parameters: MaxParametersOption = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Measure the held-out loss of a checkpoint or an export of a run, on this machine.

    On the run's own held-out tokens, evaluation.max_tokens at most. Needs the worker's libraries (torch, transformers),
    but no GPU.

    \b
    Example:
      outerstep run evaluate my-run --round 100
      outerstep run evaluate my-run --export ./model --tasks hellaswag,arc_easy
    """
    if state is not None and export is not None:
        raise UsageError("give --round or --export, not both")
    if tasks is not None and export is None:
        raise UsageError("--tasks needs --export: lm-eval's tasks are measured on what `outerstep run export` writes")
    settings = import_extra("worker.settings", extra="worker", command=COMMAND)
    given: dict[str, Any] = {"data": data, "data_cache": data_cache, "data_cache_gb": data_cache_gb, "device": device}
    given |= {"allow_factory": allow_factory or None, "max_parameters": max_parameters}
    box = validated(settings.BoxSettings, given, FLAGS)
    secret = find_token(token, token_file, os.environ)
    with operator_client(url, secret, None, ca) as client:
        detail = client.run(run)
        evaluating = import_extra("outerstep.evaluating", extra="worker", command=COMMAND)  # torch takes many seconds
        try:
            found = evaluating.evaluate_model(client.http, secret, detail, box, state=state, exported=export)
        except ValueError as error:
            raise UsageError(f"--device: {error}") from error
    measured = {} if tasks is None or export is None else _measured(export, tasks, device, box.allow_factory)
    if output is Format.JSON:
        print_json({"held_out": found, "tasks": measured})
        return
    say(f"held-out loss {held_out_text(found.loss, found.bits_per_byte)}, over {count_text(found.tokens)} tokens")
    for task, metrics in measured.items():
        figures = ((name.removesuffix(",none"), value) for name, value in metrics.items() if isinstance(value, float))
        say(f"{task}: {', '.join(f'{name} {value:.4f}' for name, value in figures)}")


def _measured(export: Path, tasks: str, device: str, factories: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return what lm-eval measures, by task."""
    module = import_extra("outerstep.tasks", extra="lm-eval", command=f"{COMMAND} --tasks")
    try:
        results: dict[str, dict[str, Any]] = module.run_tasks(export, tasks.split(","), device, factories)
    except ValueError as error:
        raise UsageError(f"--tasks: {error}") from error
    return results
