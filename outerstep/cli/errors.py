"""Errors of commands: usage errors, exit codes (outerstep/common/exit_codes.py), and missing extras."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

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


def flag_of(name: str) -> str:
    """Return the flag of a field of a settings class."""
    return "--" + name.replace("_", "-")


def validated(model: type[Model], given: Mapping[str, Any], flags: Mapping[str, str] = MappingProxyType({})) -> Model:
    """Return a `model` with the values given on the command line. `flags` has what to give instead of `flag_of` a key.

    A key that was not given (None) gets its value from the environment, if `model` is a settings class, or its default.
    Raises UsageError that names the flag or variable, its value, and what is allowed.
    """
    try:
        return model(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise UsageError(explain_all(error.errors(), one=lambda each: _explain(each, model, given, flags))) from error


def _explain(error: Any, model: type[BaseModel], given: Mapping[str, Any], flags: Mapping[str, str]) -> str:
    key = str(error["loc"][0]) if error["loc"] else ""
    is_secret = key in model.model_fields and not model.model_fields[key].repr
    text, flag = explain(error, echo=not is_secret), flags.get(key, flag_of(key))
    if given.get(key) is not None:
        return flag + text.removeprefix(key)
    if key in model.model_fields:
        variable = str(model.model_config.get("env_prefix", "")).upper() + key.upper()
        if error["type"] == "missing":
            return f"{flag} is missing, and so is {variable} in the environment"
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
