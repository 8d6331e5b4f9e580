"""The commands `outerstep token create|rotate|ls|revoke`."""

from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import typer
from rich.table import Table

from outerstep.cli.asking import Answer, asks
from outerstep.cli.errors import UsageError, validated
from outerstep.cli.options import Connection, with_connection
from outerstep.cli.printing import say, time_text
from outerstep.common.quantities import parse_seconds
from outerstep.display import table
from outerstep.rest import Client
from protocol.messages import AuditEntry, NewToken, Scope, TokenInfo, TokenRequest

AUDIT_ENTRIES = 100

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `token ls` shows it.")]


@asks
def create(
    client: Client,
    scope: Annotated[
        Scope,
        typer.Option(
            help="What it allows: everything; operating runs (pause, evict …); joining; reading; or exchanging it for "
            "worker tokens, one per box."
        ),
    ],
    note: Annotated[str, typer.Option(help="A note, such as its owner; shown by `token ls`.")] = "",
    run: Annotated[str | None, typer.Option("--run", help="The only run that it is valid for. Default: all.")] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="Time until it expires: 12h, 30d. Default: never.")
    ] = None,
    names: Annotated[
        int | None,
        typer.Option("--names", help="Of a worker token: how many names workers may join under. Default: 1."),
    ] = None,
    uses: Annotated[
        int | None, typer.Option("--uses", help="Of a join token: how often it may be exchanged. Default: 100.")
    ] = None,
) -> Answer:
    """Create a token. Its secret is printed only once.

    Only the secret goes to stdout, so that a script can store it. You can put the same join token on many boxes: each
    worker exchanges it automatically for its own worker token, valid for its name in its run.

    \b
    Example:
      outerstep token create --scope join --uses 20 --expires 7d > join.token
      outerstep token create --scope worker --note "Ann's box" --token-file ./data/admin.token > worker.token
    """
    given = {"scope": scope, "note": note, "run": run, "names": names, "uses": uses, "expires_in_s": _seconds(expires)}
    flags = {key: f"--{key}" for key in given} | {"expires_in_s": "--expires"}
    return _new(client.create_token(validated(TokenRequest, given, flags)))


@asks
def rotate(client: Client, token_id: IdArgument) -> Answer:
    """Give a token a new secret: requests with the old one are rejected from now on.

    It keeps its id, and so the names that its workers joined under. Workers in a run stay until their lease ends. Only
    the new secret goes to stdout.

    \b
    Example:
      outerstep token rotate 3f9c21d0 --token-file ./data/admin.token > worker.token
    """
    return _new(client.rotate_token(token_id))


def _new(made: NewToken) -> Answer:
    def secret() -> str:
        say(f"token {made.id} ({made.scope}); store its secret, it is not shown again", err=True)
        return made.token

    return Answer(made, secret)


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"--expires: {text!r} is not a time such as 12h or 30d") from error


@asks
def list_tokens(
    client: Client,
    audit: Annotated[
        bool, typer.Option("--audit", help="Show the audit log instead: what was done with tokens and to them.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="With --audit: entries, the newest ones. Default: 100.")
    ] = None,
) -> Answer:
    """List the tokens, without their secrets.

    The audit log, newest first, says what each token did, what was done to tokens, and from which address.

    \b
    Example:
      outerstep token ls --token-file ./data/admin.token
      outerstep token ls --audit --limit 20
    """
    if audit:
        entries = list(islice(client.audit(), limit or AUDIT_ENTRIES))
        return Answer(entries, lambda: _audit_table(entries))
    if limit is not None:
        raise UsageError("--limit needs --audit")
    tokens = list(client.tokens())
    return Answer(tokens, lambda: _token_table(tokens))


def _token_table(tokens: Iterable[TokenInfo]) -> Table:
    rows = [
        (
            item.id,
            item.scope.value,
            item.run or "all",
            _for_what(item),
            time_text(item.created_at),
            _time(item.expires_at),
            _time(item.last_used_at),
            item.note,
        )
        for item in tokens
    ]
    return table(["id", "scope", "run", "for", "created", "expires", "last used", "~note"], rows)


def _for_what(item: TokenInfo) -> str:
    if item.worker is not None:
        return item.worker
    if item.uses is not None:
        return f"{item.used} of {item.uses} used"
    return "" if item.names is None else f"{item.names} {'name' if item.names == 1 else 'names'}"


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else time_text(seconds)


def _audit_table(entries: Iterable[AuditEntry]) -> Table:
    rows = [
        (time_text(each.at), each.token or "coordinator", each.address or "", each.act, each.run or "", each.message)
        for each in entries
    ]
    return table(["at", "token", "from", "act", "run", "~what"], rows)


@with_connection
def revoke(token_id: IdArgument, *, connection: Connection) -> None:
    """Revoke a token: requests with it are rejected from now on.

    The leases of workers that joined with it end at once, as do its waiting and streaming requests. The workers' names
    stay reserved until `outerstep run member` releases them. Worker tokens from an exchanged join token stay valid.

    \b
    Example:
      outerstep token revoke 3f9c21d0 --token-file ./data/admin.token
    """
    with connection.open() as client:
        client.revoke_token(token_id)
    say(f"token {token_id} is revoked")
