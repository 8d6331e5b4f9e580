"""Writes docs/commands.md from what each command says with --help: `python docs/write_commands.py`, in the repository.

A test fails while the page is not what this writes.
"""

from collections.abc import Iterator
from pathlib import Path

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.common.exit_codes import IN_WORDS

PAGE = Path(__file__).parent / "commands.md"
WIDTH = 100  # columns

HEAD = f"""\
# Commands

Made by `docs/write_commands.py`: what each command says with `--help`. Errors are one line on stderr.
{IN_WORDS}
"""


def page() -> str:
    """The page, Markdown."""
    return "\n".join([HEAD, *(_section(names) for names in commands())])


def commands() -> Iterator[tuple[str, ...]]:
    """Every command, as the words that name it."""
    top = get_command(app)
    assert isinstance(top, TyperGroup)
    for name, command in top.commands.items():
        if isinstance(command, TyperGroup):
            if command.invoke_without_command:
                yield (name,)
            yield from ((name, inner) for inner in command.commands)
        elif isinstance(command, TyperCommand):
            yield (name,)


def _section(names: tuple[str, ...]) -> str:
    result = CliRunner().invoke(
        app, [*names, "--help"], prog_name="outerstep", env={"COLUMNS": str(WIDTH)}, terminal_width=WIDTH
    )
    return f"## outerstep {' '.join(names)}\n\n```text\n{result.stdout.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
