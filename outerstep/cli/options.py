"""Options that several commands share: how they find the coordinator, and what a run's spec may do on this machine."""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from outerstep import rest
from outerstep.cli.errors import UsageError
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
LogFileOption = Annotated[Path | None, typer.Option("--log-file", help="File to append the log to, besides stderr.")]


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

    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(command, eval_str=True)
    own = [each.replace(kind=kind) for name, each in signature.parameters.items() if name != "connection"]
    options = [
        inspect.Parameter("url", kind, default=DEFAULT_URL, annotation=UrlOption),
        inspect.Parameter("token", kind, default=None, annotation=TokenOption),
        inspect.Parameter("token_file", kind, default=None, annotation=TokenFileOption),
        inspect.Parameter("ca", kind, default=None, annotation=CaOption),
    ]
    with_options.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return with_options


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
                f"a token is needed: --token-file FILE, {TOKEN_VARIABLE} in the environment, or --token TOKEN; "
                "a coordinator writes its first one to admin.token in its data directory"
            )
    if not found or not all("!" <= character <= "~" for character in found):
        raise UsageError(f"{source}: this is not a token (one word of visible ASCII characters)")
    return found


# --- what the run's spec may do on this machine -----------------------------------------------------------------

AllowFactoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-factory",
        metavar="MODULE:NAME",
        help="Code that the run's spec may name and that then runs on this machine. Repeatable. Default: none.",
        show_default=False,
    ),
]
DataRootOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data-root",
        metavar="DIR|ADDRESS",
        help="Where the run's spec may read data, tokenizers and weights: a directory, an address prefix, or hub:NAME. "
        "Repeatable. Default: nowhere.",
        show_default=False,
    ),
]
MaxParametersOption = Annotated[
    str | None,
    typer.Option(
        "--max-parameters",
        metavar="COUNT",
        help="The largest model from the run's spec that is built here: 70B. Default: 20B.",
        show_default=False,
    ),
]


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
