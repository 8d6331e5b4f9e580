"""Options that several commands share: how they find the coordinator, and options from a settings class."""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from outerstep import rest
from outerstep.cli.errors import UsageError, flag_of
from outerstep.common.connections import CA_VARIABLE, error_text
from protocol.text import decoded, printable

DEFAULT_URL = "http://127.0.0.1:8470"
TOKEN_VARIABLE = "OUTERSTEP_TOKEN"

# --- the coordinator ----------------------------------------------------------------------------------------------

UrlOption = Annotated[str, typer.Option("--url", envvar="OUTERSTEP_URL", help="The coordinator's address.")]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        help="The bearer token. Others on this machine can read it in the process list: prefer --token-file or the "
        f"environment variable {TOKEN_VARIABLE}.",
    ),
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", help="A file that contains the bearer token.")]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        envvar=CA_VARIABLE,
        help="PEM certificates to trust as well, such as the coordinator's own.",
    ),
]


@dataclass(frozen=True)
class Connection:
    """What the connection options of an operator's command say."""

    url: str
    given_token: str | None
    token_file: Path | None
    ca: Path | None

    def token(self) -> str:
        """Return the token. Raises UsageError if there is none."""
        return find_token(self.given_token, self.token_file, os.environ)

    def open(self) -> rest.Client:
        """Return a client. Raises UsageError for a wrong URL, no valid token, or no certificate."""
        try:
            return rest.connect(checked_url(self.url), self.token(), ca=self.ca)
        except ValueError as error:
            raise UsageError(f"--ca: {error}") from error


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options --url, --token, --token-file and --ca, which it gets as its parameter `connection`."""

    @wraps(command)
    def with_options(*, url: str, token: str | None, token_file: Path | None, ca: Path | None, **given: Any) -> None:
        command(**given, connection=Connection(url, token, token_file, ca))

    options = [
        option("url", UrlOption, DEFAULT_URL),
        option("token", TokenOption),
        option("token_file", TokenFileOption),
        option("ca", CaOption),
    ]
    with_options.__signature__ = Signature(parameters(command, "connection", options))  # type: ignore[attr-defined]
    return with_options


def option(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Return a parameter that typer makes an option of."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parameters(command: Callable[..., Any], name: str, instead: Sequence[Parameter] = ()) -> list[Parameter]:
    """Return the parameters of a command, with others `instead` of the one called `name`."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    kept = ([each.replace(kind=Parameter.KEYWORD_ONLY)] if each.name != name else instead for each in found)
    return [each for some in kept for each in some]


def checked_url(url: str) -> str:
    """Return `url`. Raises UsageError if it is not an HTTP address."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"{url}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url}: not an address such as {DEFAULT_URL} or https://coordinator.example.org")
    return url


def check_log(flag: str, path: Path | None) -> None:
    """Raise UsageError if the file given by `flag` cannot be appended to."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{flag}: {error_text(error)}") from error


def find_token(token: str | None, token_file: Path | None, environment: Mapping[str, str]) -> str:
    """Return the token from the flag, the file or the environment, in this order. Raises UsageError without one."""
    if token is not None and token_file is not None:
        raise UsageError("give --token or --token-file, not both")
    if token is not None:
        source, found = "--token", token
    elif token_file is not None:
        source = f"--token-file {token_file}"
        try:
            found = decoded(token_file.read_bytes()).strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"{source}: {reason}") from error
    else:
        source, found = TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE, "").strip()
        if not found:
            raise UsageError(
                f"a token is needed: --token-file FILE, or {TOKEN_VARIABLE} in the environment; "
                "a coordinator writes its first one to admin.token in its data directory"
            )
    if not found or not all("!" <= character <= "~" for character in found):
        raise UsageError(f"{source}: this is not a token (one word of visible ASCII characters)")
    return found


# --- options from a settings class ------------------------------------------------------------------------------


def with_settings(model: type[BaseModel], names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these fields of `model`, with its description as help. The command gets the
    values in its parameter `given`, for `validated`: None for what is not on the command line, so that the environment
    or the default decides."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_options(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            command(**values, given={name: None if value == [] else value for name, value in given.items()})

        options = [option(name, _option_of(name, model.model_fields[name])) for name in names]
        with_options.__signature__ = Signature(parameters(command, "given", options))  # type: ignore[attr-defined]
        return with_options

    return decorate


def _option_of(name: str, field: FieldInfo) -> Any:
    assert field.description is not None
    text = field.description[0].upper() + field.description[1:] + "."
    if field.is_required():
        text += " Required."
    elif field.default not in (None, False, (), PydanticUndefined):
        text += f" Default: {field.default}."
    kind, metavar = _kind_of(field.annotation)
    flag = flag_of(name) + (f"/--no-{name.replace('_', '-')}" if field.default is True else "")
    return Annotated[kind | None, typer.Option(flag, metavar=metavar, help=text)]


def _kind_of(annotation: Any) -> tuple[Any, str | None]:
    """Return the type of the option for a field of this type, and how help shows it (None: as typer does): text if only
    the settings class can read it. A path is text, too: as a Path, an address loses a slash before it is refused."""
    is_union = get_origin(annotation) in (Union, UnionType)
    kind, *others = [each for each in get_args(annotation) if each is not NoneType] if is_union else [annotation]
    if get_origin(kind) is tuple:
        return list[str], "<str>"
    if kind is Path:
        return str, "<path>"
    return kind if not others and (kind in (bool, int, float) or get_origin(kind) is Literal) else str, None


# --- what the run's spec may do on this machine -----------------------------------------------------------------


def owner_at_terminal() -> Callable[[str], bool] | None:
    """Return a function that asks the machine's owner a question; None without a terminal, and under torchrun."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty() and "LOCAL_RANK" not in os.environ
    return _ask if at_terminal else None


def _ask(question: str) -> bool:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is an answer
    try:
        return typer.confirm(printable(question), err=True)
    except typer.Abort:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
