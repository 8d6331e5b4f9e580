"""The command `outerstep doctor`: the options are those of `outerstep worker`, whatever these are."""

import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer

from outerstep.cli.connection import TOKEN_VARIABLE, checked_url, find_token
from outerstep.cli.faults import UsageError, import_extra, validated
from outerstep.cli.printing import Format, FormatOption, print_json, say, say_lines
from outerstep.cli.worker import FLAGS, worker
from protocol.text import printable

# Settings of the worker's that its options call something else.
_OPTIONS = {"state_dir": "state", "compile": "compile_model"}
_OF_NO_SYNC = {"no_sync", "spec"}  # which needs no coordinator, and so no doctor


def with_options_of_worker(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command the options of `outerstep worker`, as far as they are for joining a run, and its own."""
    given = inspect.signature(worker, eval_str=True).parameters.values()
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters = [each for each in given if each.name not in _OF_NO_SYNC] + own
    positional = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = inspect.Signature(positional)  # type: ignore[attr-defined]
    return command


@with_options_of_worker
def doctor(*, output: FormatOption = Format.TABLE, **options: Any) -> None:
    """Say whether this machine can train a run as a worker, and what to fix where it cannot.

    Takes the same options as `outerstep worker`, and looks at everything that this would need: the address, the token,
    the run, the state directory, the data, the model. It takes a few inner steps on the device, measures the line, and
    says how long a round would take. It does not join the run, and changes neither that nor the state directory.

    \b
    Example:
      OUTERSTEP_TOKEN=… outerstep doctor https://coordinator.example.org --run my-run
    """
    settings_of = import_extra("worker.settings", extra="worker", command="outerstep doctor")
    url, run = options["url"], options["run"]
    if url is None:
        raise UsageError("Missing argument 'URL': the coordinator's address")
    if run is None:
        raise UsageError("Missing option '--run': the run to join")
    if "LOCAL_RANK" in os.environ:
        raise UsageError("torchrun has started this: start outerstep doctor without it, with --gpus N")
    token = find_token(options["token"], options["token_file"], os.environ)
    given = {key: options.get(_OPTIONS.get(key, key)) for key in FLAGS}
    settings = validated(
        settings_of.WorkerSettings, given | {"url": checked_url(url), "run": run, "token": token}, FLAGS
    )
    examining = import_extra("outerstep.doctor.examining", extra="worker", command="outerstep doctor")
    finding = import_extra("outerstep.doctor.finding", extra="worker", command="outerstep doctor")
    teller = _Silent() if output is Format.JSON else _Lines()
    found = examining.examine(settings, options["gpus"] or 1, teller)
    command = worker_command(options)
    verdict = finding.verdict(found, command)
    if output is Format.JSON:
        document = {
            "exit_code": verdict.code,
            "verdict": verdict.lines[0],
            "command": command,
            "findings": [asdict(each) for each in found],
        }
        print_json(document)
    else:
        say_lines("\n" + "\n  ".join(map(printable, verdict.lines)))
    raise typer.Exit(verdict.code)


def worker_command(options: dict[str, Any]) -> str:
    """Return the command that starts the worker with these options. A token that was given as such stands for itself:
    it is no secret for a terminal's history."""
    words, defaults = ["outerstep", "worker", options["url"]], inspect.signature(worker).parameters
    for parameter in inspect.signature(worker, eval_str=True).parameters.values():
        value = options.get(parameter.name)
        if parameter.name in {"url", "token"} | _OF_NO_SYNC or value == defaults[parameter.name].default:
            continue
        flag = _flag(parameter)
        for each in value if isinstance(value, list) else [value]:
            words += [flag] if each is True else [flag, str(each)]
    said = shlex.join(words)
    return said if options["token"] is None else f"{TOKEN_VARIABLE}=… {said}"


def _flag(parameter: inspect.Parameter) -> str:
    option = next(each for each in parameter.annotation.__metadata__ if isinstance(each, typer.models.OptionInfo))
    names = [option.default, *(option.param_decls or ())]
    return next(str(name) for name in names if str(name).startswith("--"))


class _Silent:
    """Shows nothing of an examination."""

    def begin(self, name: str) -> None:
        pass

    def found(self, finding: Any) -> None:
        pass


class _Lines:
    """Shows a line for each finding; its name before it is looked for, so that one sees what takes long."""

    def __init__(self) -> None:
        self._begun = ""

    def begin(self, name: str) -> None:
        say(f"{name:<12}", end=False)
        self._begun = name

    def found(self, finding: Any) -> None:
        if self._begun != finding.name:
            say(f"{finding.name:<12}", end=False)
        say(f" {finding.state:<8} {finding.said}")
        if finding.remedy:
            say(f"{'':<21} → {finding.remedy}")
        self._begun = ""
