"""The commands `outerstep token create|ls|revoke`."""

from typing import Annotated

import typer

from outerstep.cli.connection import DEFAULT_URL, CaOption, TokenFileOption, TokenOption, UrlOption, operator_client
from outerstep.cli.faults import validated
from outerstep.cli.printing import Format, FormatOption, console, print_json, time_text
from outerstep.display import table
from protocol.messages import Scope, TokenRequest

app = typer.Typer(help="Make, list and revoke tokens. Needs an admin token.", no_args_is_help=True)


@app.command()
def create(
    scope: Annotated[Scope, typer.Option(help="What it allows: everything, joining runs, or only reading.")],
    note: Annotated[str, typer.Option(help="Whom it is for; shown by `token ls`.")] = "",
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Make a token. Its secret is printed now and never again.

    The secret alone goes to stdout, so that a script can keep it.

    \b
    Example:
      outerstep token create --scope worker --note "Ann's box" --token-file ./data/admin.token > worker.token
    """
    request = validated(TokenRequest, {"scope": scope, "note": note}, {"scope": "--scope", "note": "--note"})
    with operator_client(url, token, token_file, ca) as client:
        made = client.create_token(request)
    if output is Format.JSON:
        print_json(made)
        return
    typer.echo(f"token {made.id} ({made.scope}); keep its secret, it is not shown again", err=True)
    typer.echo(made.token)


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
    rows = [(item.id, item.scope.value, time_text(item.created_at), item.note) for item in tokens]
    console().print(table(["id", "scope", "created", "~note"], rows))


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `token ls` shows it.")],
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Revoke a token: requests with it are refused from now on.

    Workers that joined with it keep their leases; stop the run, or its workers, to end those.

    \b
    Example:
      outerstep token revoke 3f9c21d0 --token-file ./data/admin.token
    """
    with operator_client(url, token, token_file, ca) as client:
        client.revoke_token(token_id)
    typer.echo(f"token {token_id} is revoked")
