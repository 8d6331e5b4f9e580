"""A token set is prepared: what is in it, what a killed or stopped process leaves, and every error."""

import builtins
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from protocol.spec.run import parse_spec
from tests.support.text import write_text
from tests.support.tokenizers import END, write_tokenizer
from tests.support.waiting import PATIENCE_S
from tests.worker.test_golden_token_sets import ROWS, TEXTS, write_hub, write_parquet
from worker.data.open_training_set import open_training_set
from worker.data.sources.rows import Rows
from worker.data.sources.source import Source, find_source
from worker.data.tokens.encoding import DocumentEncoding
from worker.data.tokens.index import UNFINISHED, Index, read_index
from worker.data.tokens.preparing import Progress, Recipe, prepare
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import DataError, Stopped

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return str(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(TEXTS)))
    return file


def recipe(
    source: Path | str, tokenizer: str, *, holdout: float = 0.1, shard_tokens: int = 700, task_bytes: int = 2000
) -> Recipe:
    """Small tasks and shards, so that there are many of both."""
    encoding = DocumentEncoding(load_tokenizer(tokenizer))
    return Recipe([find_source(str(source), Rows(holdout))], encoding, shard_tokens, task_bytes)


def ids(directory: Path, index: Index, *, held_out: bool = False) -> list[int]:
    shards = index.held_out if held_out else index.training
    return [each for shard in shards for each in np.fromfile(directory / shard.file, index.item).tolist()]


def documents(tokens: list[int], tokenizer: str) -> list[str]:
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(Path(tokenizer, "tokenizer.json")))
    text = fast.decode(tokens, skip_special_tokens=False)
    assert not text or text.endswith(END)
    return text.split(END)[:-1]


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_every_document_is_there_once_in_order_and_ended(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    index = prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1)
    training = documents(ids(tmp_path / "out", index), tokenizer)
    held_out = documents(ids(tmp_path / "out", index, held_out=True), tokenizer)
    assert sorted(training + held_out) == sorted(TEXTS)
    assert training == [text for text in TEXTS if text in set(training)]
    assert 5 <= len(held_out) <= 40
    assert [shard.tokens for shard in index.training[:-1]] == [700] * (len(index.training) - 1)
    assert sum(shard.documents or 0 for shard in index.training) == len(training)
    assert sum(shard.bytes or 0 for shard in index.training) == sum(len(text.encode()) for text in training)
    held_out_bytes, tokens = sum(len(text.encode()) for text in held_out), sum(each.tokens for each in index.held_out)
    assert index.bytes_per_token == held_out_bytes / tokens


def test_held_out_is_decided_by_the_text_alone(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    """Not by its place or its tokens: what is there twice is on one side, and another order changes nothing."""
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(reversed([*lines.read_text().splitlines(keepends=True)] * 2)))
    found: list[set[str]] = []
    for number, (source, by) in enumerate([(lines, tokenizer), (turned, tokenizer), (lines, "bytes")]):
        out = tmp_path / f"out-{number}"
        index = prepare(recipe(source, by), out, processes=1)
        if by == "bytes":
            assert index.end is None
            text = bytes(ids(out, index, held_out=True)).decode()
            assert all(each in text for each in found[0])
            assert len(text) == sum(len(each) for each in found[0])
        else:
            found.append(set(documents(ids(out, index, held_out=True), by)))
    assert found[0] == found[1]


KILLED = """
import os, signal, sys
from pathlib import Path
from worker.data.sources.rows import Rows
from worker.data.sources.source import find_source
from worker.data.tokens.encoding import DocumentEncoding
from worker.data.tokens.preparing import Recipe, prepare
from worker.data.tokens.tokenizer import load_tokenizer

def tell(how_far):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    (lines, tokenizer, out), left = sys.argv[1:], 3
    recipe = Recipe([find_source(lines, Rows(0.1))], DocumentEncoding(load_tokenizer(tokenizer)), 700, 2000)
    prepare(recipe, Path(out), processes=2, report=tell)
"""


@pytest.mark.system
@pytest.mark.covers("reliability:prepared-token-sets")
def test_killed_it_leaves_nobody_behind_and_starts_again(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    """By kill -9, with two processes; these waited for ever for tasks from one that was dead."""
    (tmp_path / "killed.py").write_text(KILLED)
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path / "killed.py"), str(lines), tokenizer, str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # Its pipes are shut.
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(out.glob("train-*.bin"))) > 1
    check_unfinished(out)
    few = recipe(lines, tokenizer, shard_tokens=5000)  # fewer shards than the killed one has left
    prepare(few, out, processes=1)
    prepare(few, tmp_path / "undisturbed", processes=1)
    assert content(out) == content(tmp_path / "undisturbed")


def check_unfinished(out: Path) -> None:
    """It was taken for text, and its shards for bytes of it."""
    spec = parse_spec(f'name = "r"\nmodel.preset = "tiny"\nsync.rounds = 1\ndata.source = "{out}"')
    with pytest.raises(DataError, match="out is not finished.*`outerstep data prepare`"):
        open_training_set(spec)


def test_killed_at_the_end_it_is_complete(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    index = prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1)
    whole = content(tmp_path / "out")
    (tmp_path / "out" / UNFINISHED).touch()
    assert prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1) == index
    assert content(tmp_path / "out") == whole


def test_text_files_are_held_out_like_bytes_and_long_ones_are_cut_between_lines(tokenizer: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", seed=1, files=8, words=900)
    index = prepare(recipe(text, tokenizer), tmp_path / "out", processes=1)
    training = documents(ids(tmp_path / "out", index), tokenizer)
    held_out = documents(ids(tmp_path / "out", index, held_out=True), tokenizer)
    files = [path.read_text() for path in sorted(text.iterdir())]
    assert sorted(training + held_out) == sorted(files)
    from worker.data.sources.files import held_out_names

    names = held_out_names([f"{number:02}.txt" for number in range(8)], 0.1)
    assert held_out == [(text / name).read_text() for name in sorted(names)]


def test_of_one_text_file_the_end_is_held_out(tokenizer: str, tmp_path: Path) -> None:
    words = "".join(f"line {number} of the text\n" for number in range(1000))
    (tmp_path / "one.txt").write_text(words)
    index = prepare(recipe(tmp_path / "one.txt", tokenizer, holdout=0.25), tmp_path / "out", processes=1)
    tokens = ids(tmp_path / "out", index), ids(tmp_path / "out", index, held_out=True)
    (held_out,) = documents(tokens[1], tokenizer)
    assert words.endswith(held_out)
    assert len(held_out) == pytest.approx(len(words) / 4, abs=40)
    assert documents(tokens[0] + tokens[1], tokenizer) == [words]
    assert [shard.documents for shard in index.held_out] == [0] * len(index.held_out)


def test_characters_are_never_cut(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 30 kB of characters of three bytes, in tasks of 2000 bytes and pieces of 1000."""
    monkeypatch.setattr("worker.data.sources.documents.PIECE_BYTES", 1000)
    monkeypatch.setattr("worker.data.sources.text.LINE_BYTES", 500)
    line = "a" + "字" * 10_000
    (tmp_path / "one.txt").write_text(line)
    index = prepare(recipe(tmp_path / "one.txt", tokenizer, holdout=0.0), tmp_path / "out", processes=1)
    assert documents(ids(tmp_path / "out", index), tokenizer) == [line]


def test_stopped_it_leaves_nothing(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    stop, out = threading.Event(), tmp_path / "out"

    def end(_: Progress) -> None:
        check_unfinished(out)
        stop.set()

    with pytest.raises(Stopped):
        prepare(recipe(lines, tokenizer), out, processes=1, report=end, stop=stop)
    assert content(out) == {}
    index = prepare(recipe(lines, tokenizer), out, processes=1, stop=threading.Event())
    assert read_index(out / "index.json") == index


def test_two_do_not_work_in_one_directory(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    """The command says so; a worker waits for the other one, and then has the set."""
    refused: list[str] = []

    def tell(_: Progress) -> None:
        if not refused:
            with pytest.raises(DataError, match="another process") as refusal:
                prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1)
            refused.append(str(refusal.value))
            stop = threading.Event()
            stop.set()
            with pytest.raises(Stopped, match="another process"):
                prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1, stop=stop)

    prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1, report=tell)
    assert refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"docs.jsonl, line 201: not valid JSON"),
        ('{"content": "x", "id": 1}', r"line 201: it has no 'text'; .* 'content', 'id'"),
        ('{"text": null}', "line 201: its 'text' is null, not text"),
        ('["text"]', "line 201: .*'text', found a list"),
        ('{"text": "\\ud800"}', "line 201: lone surrogate"),
        ("[" * 100_000, "line 201: not valid JSON"),  # deeper than Python goes
    ],
)
def test_a_line_that_has_no_text(lines: Path, tokenizer: str, tmp_path: Path, line: str, message: str) -> None:
    with lines.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        prepare(recipe(lines, tokenizer), tmp_path / "out", processes=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9 au lait\n", r"latin.txt is not UTF-8 .*data.tokenizer = \"bytes\""),
        ("empty.jsonl", b'{"text": ""}\n\n', "empty.jsonl has no text to train on"),
    ],
)
def test_a_file_without_text(tokenizer: str, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(recipe(tmp_path / name, tokenizer), tmp_path / "out", processes=1)


def test_a_directory_that_has_something_else(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("")
    with pytest.raises(DataError, match="out is not empty"):
        prepare(recipe(lines, tokenizer), out, processes=1)
    prepare(recipe(lines, tokenizer), tmp_path / "set", processes=1)
    with pytest.raises(DataError, match=r"another token set, .*docs.jsonl"):
        prepare(recipe(lines, tokenizer, holdout=0.2), tmp_path / "set", processes=1)


# --- compressed files -------------------------------------------------------------------------------------------------


PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_that_is_cut_short_or_damaged_is_told(
    lines: Path, tokenizer: str, tmp_path: Path, ending: str
) -> None:
    file = tmp_path / f"docs.jsonl.{ending}"
    file.write_bytes(PACK[ending](lines.read_bytes())[:-9])
    with pytest.raises(DataError, match=rf"docs.jsonl.{ending} was cut short"):
        prepare(recipe(file, tokenizer), tmp_path / "cut", processes=1)
    file.write_bytes(b"what is no such file at all")
    with pytest.raises(DataError, match=rf"docs.jsonl.{ending} is damaged"):
        prepare(recipe(file, tokenizer), tmp_path / "damaged", processes=1)
    file.write_bytes(PACK[ending](b'{"text": "a"}\n{"text": 1}\n'))
    with pytest.raises(DataError, match=rf"docs.jsonl.{ending}, line 2: its 'text' is int, not text"):
        prepare(recipe(file, tokenizer), tmp_path / "wrong", processes=1)


# --- parquet files and data sets of the hub, by pip's `outerstep[data]` --------------------------------------------


def texts(source: Source) -> list[list[str]]:
    return [[piece.text for piece in task.pieces()] for task in source.tasks(4000)]


def hub_of_rows(directory: Path) -> str:
    """A data set as `datasets` finds it in a directory, with a validation split."""
    write_hub(ROWS)(directory)
    (directory / "validation.jsonl").write_text(json.dumps({"text": "held out", "url": "x"}) + "\n")
    return f"hub:{directory}"


def test_a_dictionary_of_texts_is_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'outerstep[data]'")
    from pyarrow import parquet

    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert texts(find_source(str(tmp_path / "a.parquet"), Rows(0.0))) == [["a", "b", "a"]]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("content", ["x"], r"a.parquet: it has no 'text'; .* 'id', 'content'"),
        ("text", [1], "the column 'text' is int64, not text"),
        ("text", ["x", None], "a.parquet, row 1 of row group 0: its 'text' is null, not text"),
    ],
)
def test_parquet_without_text(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    write_parquet(tmp_path / "a.parquet", [{"id": number, column: value} for number, value in enumerate(values)])
    source = find_source(str(tmp_path / "a.parquet"), Rows(0.0))
    with pytest.raises(DataError, match=message):
        texts(source)


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'outerstep[data]'")
    (tmp_path / "a.parquet").write_bytes(b"PAR1, but no more")
    with pytest.raises(DataError, match="a.parquet is not a readable parquet file"):
        texts(find_source(str(tmp_path), Rows(0.0)))


def test_a_split_of_the_hub_is_held_out(tmp_path: Path) -> None:
    name = hub_of_rows(tmp_path / "hub")
    sources = [find_source(name, Rows(0.0)), find_source(f"{name}::validation", Rows(1.0))]
    index = prepare(Recipe(sources, DocumentEncoding(load_tokenizer("bytes"))), tmp_path / "out", processes=1)
    assert np.fromfile(tmp_path / "out" / "held-out-00000.bin", np.uint8).tobytes() == b"held out"
    assert sum(shard.documents or 0 for shard in index.training) == len(TEXTS)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'outerstep[data]'")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"hub:allenai/c4:en .*\(ConnectionError: Couldn't reach"):
        texts(find_source("hub:allenai/c4:en", Rows(0.0)))


def test_a_column_that_a_data_set_of_the_hub_has_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 0: it has no 'content'; .* 'text', 'url'"):
        texts(find_source(hub_of_rows(tmp_path / "hub"), Rows(0.0, column="content")))


@pytest.mark.parametrize(("source", "library"), [("hub:x", "datasets"), ("{}/a.parquet", "pyarrow")])
def test_without_the_extra_the_line_to_type_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, library: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    message = f"{library}, which is not installed; run: pip install 'outerstep.data.'"
    with pytest.raises(DataError, match=message):
        texts(find_source(source.format(tmp_path), Rows(0.0)))


@pytest.mark.parametrize("source", ["hub:", "hub:a:b:c:d"])
def test_a_name_that_is_none(source: str) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'outerstep[data]'")
    with pytest.raises(DataError, match="is not hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT"):
        texts(find_source(source, Rows(0.0)))
