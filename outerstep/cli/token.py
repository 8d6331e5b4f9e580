"""The commands `outerstep token create|rotate|ls|audit|revoke`."""

from itertools import islice
from typing import Annotated

import typer

from outerstep.cli.connection import DEFAULT_URL, CaOption, TokenFileOption, TokenOption, UrlOption, operator_client
from outerstep.cli.faults import UsageError, validated
from outerstep.cli.printing import Format, FormatOption, console, print_json, say, time_text
from outerstep.common.quantities import parse_seconds
from outerstep.display import table
from protocol.messages import NewToken, Scope, TokenInfo, TokenRequest

app = typer.Typer(help="Make, list, rotate and revoke tokens. Needs an admin token.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `token ls` shows it.")]
_FLAGS = {
    "scope": "--scope",
    "note": "--note",
    "run": "--run",
    "names": "--names",
    "uses": "--uses",
    "expires_in_s": "--expires",
}


@app.command()
def create(
    scope: Annotated[
        Scope,
        typer.Option(
            help="What it allows: everything; running runs (pause, evict …); joining; reading; or, for boxes that are "
            "to have a token each, being exchanged for worker tokens."
        ),
    ],
    note: Annotated[str, typer.Option(help="Whom it is for; shown by `token ls`.")] = "",
    run: Annotated[str | None, typer.Option("--run", help="The only run that it is for. Default: all.")] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="When it ends: 12h, 30d. Default: never.")
    ] = None,
    names: Annotated[
        int | None,
        typer.Option("--names", help="Of a worker token: how many names workers may join under with it. Default: 1."),
    ] = None,
    uses: Annotated[
        int | None, typer.Option("--uses", help="Of a join token: how often it may be exchanged. Default: 100.")
    ] = None,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Make a token. Its secret is printed now and never again.

    The secret alone goes to stdout, so that a script can keep it. A join token may lie on many boxes: each worker
    exchanges it, by itself, for a worker token of its own, for its name in its run.

    \b
    Example:
      outerstep token create --scope join --uses 20 --expires 7d > join.token
      outerstep token create --scope worker --note "Ann's box" --token-file ./data/admin.token > worker.token
    """
    given = {
        "scope": scope,
        "note": note,
        "run": run,
        "names": names,
        "uses": uses,
        "expires_in_s": _seconds(expires),
    }
    request = validated(TokenRequest, given, _FLAGS)
    with operator_client(url, token, token_file, ca) as client:
        made = client.create_token(request)
    _print_new(made, output)


@app.command()
def rotate(
    token_id: IdArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Give a token another secret: requests with the one before are refused from now on.

    It keeps its id, and so the names that workers have joined under with it; workers that are in a run stay there until
    their lease ends. The new secret alone goes to stdout.

    \b
    Example:
      outerstep token rotate 3f9c21d0 --token-file ./data/admin.token > worker.token
    """
    with operator_client(url, token, token_file, ca) as client:
        made = client.rotate_token(token_id)
    _print_new(made, output)


def _print_new(made: NewToken, output: Format) -> None:
    if output is Format.JSON:
        print_json(made)
        return
    say(f"token {made.id} ({made.scope}); keep its secret, it is not shown again", err=True)
    say(made.token)


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"--expires: {text!r} is not a time such as 12h or 30d") from error


@app.command("ls")
def list_tokens(
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """List the tokens, without their secrets.

    \b
    Example:
      outerstep token ls --token-file ./data/admin.token
    """
    with operator_client(url, token, token_file, ca) as client:
        tokens = list(client.tokens())
    if output is Format.JSON:
        print_json(tokens)
        return
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
    console().print(table(["id", "scope", "run", "for", "created", "expires", "last used", "~note"], rows))


def _for_what(item: TokenInfo) -> str:
    if item.worker is not None:
        return item.worker
    if item.uses is not None:
        return f"{item.used} of {item.uses} used"
    return "" if item.names is None else f"{item.names} {'name' if item.names == 1 else 'names'}"


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else time_text(seconds)


@app.command()
def audit(
    output: FormatOption = Format.TABLE,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many entries, the newest ones.")] = 100,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Tell who did what with a token, or to one, and from which address; newest first.

    \b
    Example:
      outerstep token audit --limit 20 --token-file ./data/admin.token
    """
    with operator_client(url, token, token_file, ca) as client:
        entries = list(islice(client.audit(), limit))
    if output is Format.JSON:
        print_json(entries)
        return
    rows = [
        (time_text(each.at), each.token or "coordinator", each.address or "", each.act, each.run or "", each.message)
        for each in entries
    ]
    console().print(table(["at", "token", "from", "act", "run", "~what"], rows))


@app.command()
def revoke(
    token_id: IdArgument,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Revoke a token: requests with it are refused from now on.

    The leases of workers that joined with it end at once, and so does all that waits or streams by it. Their names stay
    the token's, until `outerstep run release` gives them away. Worker tokens that a join token was exchanged for stay.

    \b
    Example:
      outerstep token revoke 3f9c21d0 --token-file ./data/admin.token
    """
    with operator_client(url, token, token_file, ca) as client:
        client.revoke_token(token_id)
    say(f"token {token_id} is revoked")
