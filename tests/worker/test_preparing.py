"""A token set is prepared: what is in it, what a killed or stopped process leaves, and every error."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from protocol.spec.run import parse_spec
from tests.support.text import write_text
from tests.support.tokenizers import END, write_tokenizer
from tests.support.waiting import PATIENCE_S
from worker.data.open_training_set import open_training_set
from worker.data.sources.rows import Rows
from worker.data.sources.source import find_source
from worker.data.tokens.encoding import DocumentEncoding
from worker.data.tokens.index import UNFINISHED, Index, read_index
from worker.data.tokens.preparing import Progress, Recipe, prepare
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import DataError, Stopped

ROOT = Path(__file__).parents[2]
TEXTS = [f"the worker {number} sends the delta\nand waits {'for nobody ' * (number % 7)}" for number in range(200)]


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


def test_text_that_is_not_utf_8(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait\n")
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 .*data.tokenizer = \"bytes\""):
        prepare(recipe(tmp_path / "latin.txt", tokenizer), tmp_path / "out", processes=1)


def test_a_directory_that_has_something_else(lines: Path, tokenizer: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("")
    with pytest.raises(DataError, match="out is not empty"):
        prepare(recipe(lines, tokenizer), out, processes=1)
    prepare(recipe(lines, tokenizer), tmp_path / "set", processes=1)
    with pytest.raises(DataError, match=r"another token set, .*docs.jsonl"):
        prepare(recipe(lines, tokenizer, holdout=0.2), tmp_path / "set", processes=1)


def test_no_text_at_all(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(DataError, match="empty.jsonl has no text to train on"):
        prepare(recipe(tmp_path / "empty.jsonl", tokenizer), tmp_path / "out", processes=1)


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
