"""The commands on a run's model, which need the worker's libraries: `outerstep run export|chat|pin`."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.errors import UsageError, import_extra, validated
from outerstep.cli.options import Connection, owner_at_terminal, with_connection
from outerstep.cli.printing import say, say_part
from outerstep.cli.run.runs import RunArgument, read_spec
from outerstep.cli.worker import with_permissions
from outerstep.common.connections import error_text
from outerstep.common.files import check_new
from protocol.errors import OuterstepError
from worker.settings import BoxSettings

AverageOption = Annotated[
    int,
    typer.Option(
        "--average",
        metavar="N",
        min=1,
        max=1000,
        help="The mean of the last N states instead of the last one. Needs the deltas since the first of them, which "
        "are kept back to the oldest checkpoint.",
    ),
]


@with_connection
@with_permissions
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="A new or empty directory to write.", show_default=False)],
    state: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, help="The checkpoint to export: the model before this round. Default: the latest."
        ),
    ] = None,
    average: AverageOption = 1,
    *,
    given: dict[str, Any],
    merge: Annotated[
        bool, typer.Option("--merge", help="With model.lora: write the whole model instead of only the adapters.")
    ] = False,
    connection: Connection,
) -> None:
    """Write a run's model as a Hugging Face directory, which `AutoModelForCausalLM.from_pretrained` loads.

    Needs the worker's libraries (torch, transformers), but no GPU. Adapters are written in peft's format, for the model
    that they were trained on. The run's tokenizer is included; a run on bytes has none: its token ids are the bytes of
    UTF-8 text. A model from your own function is written as model.safetensors next to the spec; so are the trained
    parameters of a run whose scripts bring the model. Somebody else may have written the spec: such a function, which
    runs here, must be allowed by --allow-code, and the places of the tokenizer and of model.pretrained, which are
    read here, by --data-root. At a terminal you are asked.

    \b
    Example:
      outerstep run export my-run --out ./model
    """
    box = box_settings(**given)
    token = connection.token()
    try:
        check_new(out)
    except FileExistsError as error:
        raise UsageError(f"--out: {error}") from error
    except OSError as error:
        raise UsageError(f"--out: {error_text(error)}") from error
    with connection.open() as client:
        client.run(run)  # fails at once without a coordinator, while the export below would retry for ever
        models = import_extra("outerstep.models", extra="worker", command="outerstep run export")
        try:
            models.export_model(
                client.http,
                run,
                token,
                out,
                state,
                merge=merge,
                allowed=allowed_by("outerstep run export", box),
                ask=owner_at_terminal(),
                max_parameters=box.max_parameters,
                average=average,
            )
        except OSError as error:
            raise UsageError(f"--out: {error_text(error)}") from error
    say(f"the model of run {run} is in {out}")


@with_connection
@with_permissions
def chat(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run's name, unless --export is given.")] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Talk to the model in this directory, written by `outerstep run export`."),
    ] = None,
    state: Annotated[
        int | None,
        typer.Option("--round", min=0, help="The checkpoint: the model before this round. Default: the latest."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0.0, max=100.0, help="0: the most likely tokens. Default: the model's own setting."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    *,
    given: dict[str, Any],
    connection: Connection,
) -> None:
    """Talk to a run's model, or to an export.

    Type a message and Enter; /reset starts a new conversation, Ctrl-C stops an answer, Ctrl-D ends. Needs the worker's
    libraries (torch, transformers) and the run's tokenizer with its chat template.

    \b
    Example:
      outerstep run chat my-run --token-file ./data/admin.token
      outerstep run chat --export ./model --temperature 0
    """
    if (run is None) == (export is None):
        raise UsageError("give the name of a run, or --export with a directory")
    if export is not None and state is not None:
        raise UsageError("--round is a checkpoint of a run: leave it out with --export")
    chats = import_extra("outerstep.chat", extra="worker", command="outerstep run chat")
    box = box_settings(**given)
    permitted = allowed_by("outerstep run chat", box), box.max_parameters, owner_at_terminal()
    try:
        if run is None:
            model, tokenizer = chats.of_export(export, device, *permitted)
        else:
            token = connection.token()
            with connection.open() as client:
                client.run(run)  # fails at once without a coordinator
                model, tokenizer = chats.of_run(client.http, run, token, device, state, *permitted)
    except ValueError as error:
        raise UsageError(f"--device: {error}") from error
    _converse(chats.Chat(model, tokenizer, system=system, max_tokens=max_tokens, temperature=temperature))


def _converse(chat: Any) -> None:
    """Hold a conversation until the end of the input."""
    shown = sys.stdin.isatty()
    with suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit its line
    while True:
        try:
            question = input("> " if shown else "")
        except EOFError:
            return
        if question.strip() == "/reset":
            chat.reset()
        elif question.strip():
            try:
                chat.ask(question, say_part)
            except KeyboardInterrupt:
                say("")
                say("stopped; this answer is not part of the conversation", err=True)
                continue
            except OuterstepError as error:
                say(f"{error}; /reset starts a new conversation", err=True)
                continue
            say("")


def box_settings(data: str | None = None, **given: Any) -> BoxSettings:
    """Return the box's settings with the options that were given. `data`: the text that the command was given, if any.
    OUTERSTEP_DATA does not count: it is where a worker has the text of its run, which may be another one. Raises
    UsageError for a wrong option."""
    return validated(BoxSettings, given | {"data": data}).model_copy(update={"data": data})


def allowed_by(command: str, box: Any) -> Any:
    """Return `worker.allowing.Allowed` with what the box settings allow."""
    return import_extra("worker.allowing", extra="worker", command=command).allowed_by(box)


@with_permissions
def pin(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec; - reads it from stdin.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Where this machine has the training set. Default: the spec's data.source."),
    ] = None,
    without_state: Annotated[
        bool,
        typer.Option(
            "--without-state", help="Do not pin state 0, so that workers may build it with other versions of torch."
        ),
    ] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Print the section [pins] of a run spec: digests that its workers must match, computed on this machine.

    Without it, the first worker to join decides the model's shape and the training set, and the worker that seeds the
    run decides state 0. Append the output to the spec before you create the run. The command builds the model and opens
    the training set, so it needs the worker's libraries (torch, transformers), but no GPU and no coordinator.

    \b
    Example:
      outerstep run pin run.toml >> run.toml
      outerstep run create run.toml --token-file ./data/admin.token
    """
    _, parsed = read_spec(spec)
    box = box_settings(data=data, **given)
    models = import_extra("outerstep.models", extra="worker", command="outerstep run pin")
    found = models.pins_of(parsed, box, state=not without_state)
    say("")
    say("[pins]")
    for key, value in found.model_dump(exclude_none=True).items():
        say(f'{key} = "{value}"')
