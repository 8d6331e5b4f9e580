"""The commands `outerstep data prepare|show`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from outerstep.cli.asking import Answer, print_answer
from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.options import with_settings
from outerstep.cli.printing import Format, FormatOption, console, say
from outerstep.common.quantities import UNKNOWN, bytes_text, count_text, parse_count
from outerstep.display import facts, lines, table
from protocol.spec.sections import DataSpec
from protocol.text import printable_lines
from protocol.validation_errors import explain_all

_load = partial(import_extra, extra="worker")


@with_settings(DataSpec, ("column", "train_on", "sequence_length", "packing", "date", "on_error"))
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory or glob of text, JSON lines or .parquet files, of .txt or .jsonl with .gz or .zst, or "
            "hub:NAME[:CONFIG[:SPLIT]].",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", help="A directory with a tokenizer.json, a repository of the Hugging Face hub, or bytes."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the token set.")],
    holdout: Annotated[
        float, typer.Option("--holdout", min=0.0, max=0.99, help="Share of the documents to hold out.")
    ] = DataSpec.model_fields["holdout"].default,
    held_out: Annotated[
        str | None, typer.Option("--held-out", metavar="SOURCE", help="Hold out this whole source instead.")
    ] = None,
    row_format: Annotated[
        str, typer.Option("--data-format", help="text; chat for conversations; completion for prompts and completions.")
    ] = "text",
    shard_tokens: Annotated[
        str, typer.Option("--shard-tokens", metavar="COUNT", help="Tokens per shard; 64M are 128 MB as uint16.")
    ] = "67108864",
    output: FormatOption = Format.TABLE,
    *,
    given: dict[str, Any],
) -> None:
    """Tokenise text or conversations on all cores into a directory that data.source can name.

    The bytes are the same on every machine. After a kill, the same command starts again. Documents are held out by hash
    of their text (text files by hash of their name), so they are the same with every tokenizer.

    \b
    Example:
      outerstep data prepare 'c4/*.json.gz' --tokenizer mistralai/Mistral-7B-v0.1 --out /data/c4
    with this run.toml:
      data.source = "/data/c4"
    """
    command, per_shard = "outerstep data prepare", _shard_tokens(shard_tokens)
    preparing = _load("worker.data.tokens.preparing", command=command)
    tokenizers = _load("worker.data.tokens.tokenizer", command=command)
    data = _data_spec(
        {"source": source, "tokenizer": tokenizer, "format": row_format, "holdout": holdout}
        | {key: value for key, value in given.items() if value is not None}
    )
    recipe = preparing.recipe_of(data, tokenizers.load_tokenizer(tokenizer), held_out, per_shard)
    with _bar() as show_progress:
        index = preparing.prepare(recipe, out, report=show_progress)
    print_answer(Answer(_document(index, verified=False), lambda: lines(_summary(index, out, row_format))), output)
    if (note := _holdout_note(index, holdout if held_out is None else None)) is not None and output is Format.TABLE:
        say(f"note: {note}", err=True)


def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A token set.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every shard and check its digest.")] = False,
    sample: Annotated[
        int,
        typer.Option("--sample", metavar="N", min=0, max=1000, help="Print N conversations, with what is trained on."),
    ] = 0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show a token set, and check that its files exist and have the right size.

    With --sample, what is trained on is highlighted, or between » and « if the output is no terminal.

    \b
    Example:
      outerstep data show /data/c4 --verify
      outerstep data show /data/talk --sample 3
    """
    indexes = _load("worker.data.tokens.index", command="outerstep data show")
    index = indexes.complete_index(directory)
    if verify:
        files = _load("worker.data.tokens.token_files", command="outerstep data show")
        files.in_directory(index, index.shards, directory).verify()
    sampled = []
    if sample:
        sampled = _load("worker.data.tokens.samples", command="outerstep data show").samples(index, directory, sample)
    shown = {"samples": [asdict(each) for each in sampled]} if sample else {}

    def text() -> RenderableType:
        note = _holdout_note(index, None)
        notes = [] if note is None else [lines(["", f"note: {note}"])]
        return Group(facts(_facts(index, verify)), "", _shards_table(index), *notes, *map(_sample_text, sampled))

    print_answer(Answer(_document(index, verify) | shown, text), output)


def _sample_text(sample: Any) -> Text:
    """Return a conversation, with what is trained on highlighted."""
    where = f"{sample.shard}, sequence {sample.sequence}: {sample.tokens} tokens, {sample.trained} trained on"
    text, coloured = Text.assemble("\n", (printable_lines(where), "bold"), "\n"), console().is_terminal
    for part in sample.parts:
        if coloured:
            text.append(printable_lines(part.text), style="green" if part.trained else "dim")
        else:
            text.append(printable_lines(f"»{part.text}«" if part.trained else part.text))
    return text


def _data_spec(given: dict[str, Any]) -> DataSpec:
    """Return the [data] of a run for these options. Raises UsageError."""
    if given["format"] == "text" and "sequence_length" in given:
        raise UsageError("--sequence-length is for conversations: a token set of text can be read in any length")
    try:
        data = DataSpec.model_validate(given)
    except ValidationError as error:
        raise UsageError(explain_all(error.errors())) from error
    if unused := data.without_effect({"packing", "column", "date", "on_error"} & given.keys()):
        raise UsageError("; ".join(unused))
    return data


def _document(index: Any, verified: bool) -> dict[str, Any]:
    facts = {"digest": index.digest(), "bytes_per_token": index.bytes_per_token, "verified": verified}
    return {**facts, **index.model_dump()}


def _shard_tokens(text: str) -> int:
    try:
        count = parse_count(text)
    except ValueError as error:
        raise UsageError(f"--shard-tokens: {error}") from error
    if not 1024 <= count < 1 << 40:
        raise UsageError(f"--shard-tokens = {text}: give at least 1024; 64M is a good size")
    return count


@contextmanager
def _bar() -> Iterator[Callable[[Any], None]]:
    """Yield a function that updates a progress bar, on a terminal."""
    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=None)

        def show_progress(seen: Any) -> None:
            description = f"{count_text(seen.tokens)} tokens"
            progress.update(bar, completed=seen.done, total=seen.of, description=description)

        yield show_progress


def _summary(index: Any, out: Path, row_format: str) -> Iterator[str]:
    found = index.conversations
    tokens = [
        sum(shard.tokens if found is None else shard.trained for shard in shards)
        for shards in (index.training, index.held_out)
    ]
    yield f"{out}: {count_text(tokens[0])} tokens to train on, {count_text(tokens[1])} held out"
    if found is not None:
        conversations = sum(shard.documents for shard in index.shards)
        sequences = sum(shard.tokens for shard in index.shards) // index.row_tokens
        yield f"{conversations:,} conversations in {sequences:,} sequences of {found.sequence_length:,} tokens"
        yield from found.left_out()
        yield f'in the spec: data.format = "{row_format}", data.sequence_length = {found.sequence_length}'
    if not tokens[1]:
        yield "nothing is held out, so runs have no held-out loss: give --holdout or --held-out, and another --out"


def _holdout_note(index: Any, asked: float | None) -> str | None:
    """Return a sentence if another share is held out than was `asked` for; None: unknown."""
    files = _load("worker.data.sources.files", command="outerstep data")
    held_out, training = (sum(each.tokens for each in shards) for shards in (index.held_out, index.training))
    note: str | None = files.holdout_note(held_out, training, asked, _sum([each.documents for each in index.shards]))
    return note


def _facts(index: Any, verified: bool) -> Iterator[tuple[str, str]]:
    digest = "" if index.tokenizer_digest is None else f" (BLAKE3 {index.tokenizer_digest})"
    per_token = index.bytes_per_token
    yield "source", index.source
    yield "tokenizer", f"{index.tokenizer or UNKNOWN}{digest}"
    yield "vocabulary", f"{index.vocabulary:,} ids, {index.dtype}"
    if (found := index.conversations) is not None:
        length, packed = found.sequence_length, "several" if found.packing else "one"
        yield "sequences", f"of {length:,} tokens, with {packed} of the conversations each"
        yield "longest", f"{found.longest:,} tokens"
        yield "left out", "; ".join(found.left_out()) or "nothing"
        trained, tokens = (sum(getattr(shard, key) for shard in index.shards) for key in ("trained", "tokens"))
        yield "trained on", f"{trained / tokens:.1%} of the tokens ({found.train_on})"
    yield "end", UNKNOWN if index.end is None else f"{index.end} after each document"
    yield "bytes per token", UNKNOWN if per_token is None else f"{per_token:.3f}"
    yield "digest", index.digest()
    yield "files", "complete, digests verified" if verified else "complete, sizes checked; --verify checks digests"


def _shards_table(index: Any) -> Any:
    rows = []
    for name, shards in (("training", index.training), ("held out", index.held_out)):
        documents, size = (_sum([getattr(shard, key) for shard in shards]) for key in ("documents", "bytes"))
        tokens = sum(shard.tokens for shard in shards)
        rows.append((name, f"{len(shards)}", f"{tokens:,}", count_text(documents), bytes_text(size)))
    return table(["part", ">shards", ">tokens", ">documents", ">text"], rows)


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
