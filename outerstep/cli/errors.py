"""Errors of commands: usage errors, exit codes (outerstep/common/exit_codes.py), and missing extras."""

import importlib
from types import ModuleType
from typing import Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from outerstep.common.connections import WrongVariable
from outerstep.common.exit_codes import Exit
from outerstep.shadowing import refuse_shadow
from protocol.errors import OuterstepError, Problem, Remedy, SpecError, Transient
from protocol.validation_errors import explain, explain_all

Model = TypeVar("Model", bound=BaseModel)

OUR_PACKAGES = frozenset({"coordinator", "migrations", "outerstep", "protocol", "worker"})


class UsageError(OuterstepError):
    """A flag, a variable or a file has a wrong value."""


def exit_code(error: OuterstepError) -> Exit:
    """Return the exit code of a command that ends with `error`."""
    match error:
        case UsageError() | SpecError() | WrongVariable():
            return Exit.USAGE
        case Transient():
            return Exit.RETRY
        case Problem() if error.remedy is Remedy.RETRY:
            return Exit.RETRY
        case _:
            return Exit.REFUSED


def validated(model: type[Model], given: dict[str, Any], flags: dict[str, str]) -> Model:
    """Return a `model` with the values given on the command line; `flags` has the flag of each key.

    A key that was not given (None) gets its value from the environment, if `model` is a settings class, or its default.
    Raises UsageError that names the flag or variable, its value, and what is allowed.
    """
    try:
        return model(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise UsageError(explain_all(error.errors(), one=lambda each: _explain(each, model, given, flags))) from error


def from_options(ctx: typer.Context, model: type[Model]) -> Model:
    """Return a `model` from those options of the command that are named like its keys; see `validated`."""
    given = {key: value for key, value in ctx.params.items() if key in model.model_fields}
    return validated(model, given, flags_of(ctx.command))


def flags_of(command: Any) -> dict[str, str]:
    """Return the flag of each of a command's options, by the option's name."""
    return {each.name: each.opts[0] for each in command.params}


def _explain(error: Any, model: type[BaseModel], given: dict[str, Any], flags: dict[str, str]) -> str:
    key = str(error["loc"][0]) if error["loc"] else ""
    is_secret = key in model.model_fields and not model.model_fields[key].repr
    text = explain(error, echo=not is_secret)
    if given.get(key) is not None:
        return flags[key] + text.removeprefix(key)
    if key in model.model_fields:
        variable = str(model.model_config.get("env_prefix", "")).upper() + key.upper()
        if error["type"] == "missing":
            return f"{flags[key]} is missing, and so is {variable} in the environment"
        return variable + text.removeprefix(key)
    return text


def check_not_hidden(package: str) -> None:
    """Raise UsageError if one of the user's files shadows our `package`."""
    try:
        refuse_shadow(package)
    except ImportError as error:
        raise UsageError(str(error)) from error


def import_extra(module: str, *, extra: str, command: str) -> ModuleType:
    """Import `module`, which needs the libraries of pip's `outerstep[extra]` and our package `extra`, if there is one.
    Raises UsageError if the libraries are not installed, or if one of the user's files shadows the package."""
    if extra in OUR_PACKAGES:
        check_not_hidden(extra)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OUR_PACKAGES:
            raise
        raise UsageError(
            f"`{command}` needs {missing}, which is not installed; run: pip install 'outerstep[{extra}]'"
        ) from error
