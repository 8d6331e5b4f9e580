"""The options by which every operator's command finds its coordinator, and the client that they give."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import httpx
import typer

from outerstep import rest
from outerstep.cli.faults import UsageError
from outerstep.common.connections import CA_VARIABLE, error_text

DEFAULT_URL = "http://127.0.0.1:8470"
TOKEN_VARIABLE = "OUTERSTEP_TOKEN"

UrlOption = Annotated[str, typer.Option("--url", envvar="OUTERSTEP_URL", help="The coordinator's address.")]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        help=f"The bearer token. Others on this machine can read it in the list of processes: "
        f"rather use --token-file or the environment variable {TOKEN_VARIABLE}.",
    ),
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", help="A file that holds the bearer token.")]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        envvar=CA_VARIABLE,
        help="PEM certificates to trust too, such as the coordinator's own.",
    ),
]
LogFileOption = Annotated[Path | None, typer.Option("--log-file", help="File to append the log to, beside stderr.")]


def operator_client(url: str, token: str | None, token_file: Path | None, ca: Path | None) -> rest.Client:
    """Return the client of an operator's command. Raises UsageError for a wrong URL, no valid token, or no
    certificate."""
    try:
        return rest.connect(checked_url(url), find_token(token, token_file, os.environ), ca=ca)
    except ValueError as error:
        raise UsageError(f"--ca: {error}") from error


def checked_url(url: str) -> str:
    """Return `url`. Raises UsageError unless it is an HTTP address."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"{url}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url}: not an address such as {DEFAULT_URL} or https://coordinator.example.org")
    return url


def check_log(flag: str, path: Path | None) -> None:
    """Raise UsageError unless the file that `flag` names can be appended to."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{flag}: {error_text(error)}") from error


def find_token(token: str | None, token_file: Path | None, environment: Mapping[str, str]) -> str:
    """Return the token of the flag, the file or the environment, in this order. Raises UsageError if there is none."""
    if token is not None and token_file is not None:
        raise UsageError("give --token or --token-file, not both")
    if token is not None:
        source, found = "--token", token
    elif token_file is not None:
        source = f"--token-file {token_file}"
        try:
            found = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
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
