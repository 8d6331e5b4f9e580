"""`outerstep data prepare` and `show`, as they are typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outerstep.cli import app
from tests.support.conversations import write_conversations
from tests.support.text import write_text
from tests.support.tokenizers import write_chat_tokenizer, write_tokenizer

Command = Callable[..., Result]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr("worker.data.tokens.preparing.cores", lambda: 1)
    return lambda *arguments: CliRunner().invoke(app, ["data", *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text", seed=2, files=20, words=300)


def test_a_set_is_prepared_and_shown(command: Command, text: Path, tmp_path: Path) -> None:
    tokenizer, out = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "out"
    done = command("prepare", text, "--tokenizer", tokenizer, "--out", out, "--holdout", 0.2, "--shard-tokens", "2k")
    assert done.exit_code == 0, done.stderr
    assert f"{out}: " in done.stdout
    assert "tokens to train on" in done.stdout
    again = command("prepare", text, "--tokenizer", tokenizer, "--out", out, "--holdout", 0.2, "--shard-tokens", "2k")
    assert again.stdout == done.stdout

    shown = command("show", out)
    assert shown.exit_code == 0
    assert "282 ids, uint16" in shown.stdout
    assert "0 after each document" in shown.stdout
    assert "sizes checked; --verify checks digests" in shown.stdout
    facts = json.loads(command("show", out, "--format", "json", "--verify").stdout)
    assert facts["verified"] is True
    assert sum(shard["documents"] for shard in facts["training"] + facts["held_out"]) == 20
    assert facts["tokenizer"] == str(tokenizer)
    assert f"{facts['bytes_per_token']:.3f}" in shown.stdout
    assert facts["digest"] in shown.stdout

    (out / "train-00000.bin").write_bytes(bytes(4000))
    assert command("show", out).exit_code == 0
    altered = command("show", out, "--verify")
    assert altered.exit_code == 3
    assert "train-00000.bin was altered" in altered.stderr


def test_a_source_that_is_held_out(command: Command, text: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"body": "held out"}\n')
    (tmp_path / "train.jsonl").write_text('{"body": "trained on"}\n' * 9)
    arguments = (tmp_path / "train.jsonl", "--held-out", tmp_path / "test.jsonl", "--column", "body")
    done = command("prepare", *arguments, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out" / "held-out-00000.bin").read_bytes() == b"held out"
    assert (tmp_path / "out" / "train-00000.bin").read_bytes() == b"trained on" * 9


def test_nothing_held_out_is_told(command: Command, text: Path, tmp_path: Path) -> None:
    done = command("prepare", text, "--tokenizer", "bytes", "--out", tmp_path / "out", "--holdout", 0)
    assert "no held-out loss: give --holdout or --held-out" in done.stdout


def test_a_share_that_was_not_asked_for_is_noted(command: Command, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name, length in (("a.txt", 700), ("b.txt", 69_000)):
        (tmp_path / "text" / name).write_text("x" * length)
    done = command("prepare", tmp_path / "text", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert "note: 99.0% of the tokens are held out, not 5.0%" in done.stderr
    assert "held out, more than are trained on" in command("show", tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["prepare", "{}/none", "--tokenizer", "bytes", "--out", "{}/o"], 3, "matches no files"),
        (["prepare", "{}/text", "--tokenizer", "{}/none", "--out", "{}/o"], 3, "is neither a directory"),
        (["prepare", "{}/text", "--tokenizer", "bytes", "--out", "{}/o", "--shard-tokens", "x"], 2, "-tokens: 'x'"),
        (["prepare", "{}/text", "--tokenizer", "bytes", "--out", "{}/o", "--shard-tokens", "9"], 2, "at least 1024"),
        (["prepare", "{}/text", "--tokenizer", "bytes", "--out", "{}/text"], 3, "text is not empty"),
        (["show", "{}/text"], 3, "text is not a token set (it has no index.json)"),
        (["show", "{}/none"], 3, "no directory "),
    ],
)
def test_what_cannot_be_done(
    command: Command, text: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    done = command(*(argument.format(tmp_path) for argument in arguments))
    assert done.exit_code == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_conversations_are_prepared_and_shown(command: Command, tmp_path: Path) -> None:
    talk, tokenizer = write_conversations(tmp_path / "talk.jsonl"), write_chat_tokenizer(tmp_path / "tokenizer")
    prepare = ("prepare", talk, "--tokenizer", tokenizer, "--out", tmp_path / "set", "--data-format", "chat")
    done = command(*prepare, "--sequence-length", 100)
    assert done.exit_code == 0, done.stderr
    assert "conversations in " in done.stdout
    assert "were truncated to 101 tokens" in done.stdout
    assert 'data.format = "chat", data.sequence_length = 100' in done.stdout

    shown = command("show", tmp_path / "set", "--sample", 3)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.count("trained on\n") == 3
    assert "»the delta<|im_end|>«" in shown.stdout
    assert "% of the tokens (assistant)" in shown.stdout
    facts = json.loads(command("show", tmp_path / "set", "--sample", 2, "--format", "json").stdout)
    assert len(facts["samples"]) == 2
    for each in facts["samples"]:
        assert each["parts"][0]["text"].startswith("<|im_start|>user\nworker ")
        assert {part["text"].startswith("the delta") for part in each["parts"] if part["trained"]} == {True}
    everything = json.loads(command("show", tmp_path / "set", "--sample", 1000, "--format", "json").stdout)
    assert len(everything["samples"]) == sum(shard["tokens"] for shard in facts["training"]) // 101


def test_a_row_that_cannot_be_used_is_shown_or_is_an_error(command: Command, tmp_path: Path) -> None:
    talk, tokenizer = write_conversations(tmp_path / "talk.jsonl", 20), write_chat_tokenizer(tmp_path / "tokenizer")
    talk.write_text(talk.read_text() + '{"messages": 3}\n')
    prepare = ("prepare", talk, "--tokenizer", tokenizer, "--data-format", "chat", "--date", "2024-02-29")
    done = command(*prepare, "--out", tmp_path / "set")
    assert done.exit_code == 0, done.stderr
    assert "1 rows were skipped: " in done.stdout
    assert f'{talk}, line 21: its "messages" is int' in " ".join(done.stdout.split())
    done = command(*prepare, "--out", tmp_path / "none", "--on-error", "stop")
    assert done.exit_code == 3
    assert "line 21: " in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--on-error", "skip", "--data-format", "text", "--date", "2024-02-29"], 2, "data.date does nothing"),
        (["--data-format", "chat", "--date", "yesterday"], 2, "date = 'yesterday': input should be a valid date"),
        (["--data-format", "poem"], 2, "format"),
        (["--data-format", "chat", "--train-on", "completion"], 2, 'does not exist for format = "chat"'),
        (["--no-packing"], 2, 'data.packing does nothing with format = "text"'),
        (["--data-format", "chat", "--column", "talk"], 2, 'data.column does nothing with format = "chat"'),
        (["--sequence-length", "9"], 2, "--sequence-length is for conversations"),
        (["--data-format", "completion"], 3, 'talk.jsonl, line 1: the format "completion" needs'),
    ],
)
def test_conversations_that_cannot_be_prepared(
    command: Command, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    talk, tokenizer = write_conversations(tmp_path / "talk.jsonl"), write_chat_tokenizer(tmp_path / "tokenizer")
    done = command("prepare", talk, "--tokenizer", tokenizer, "--out", tmp_path / "set", *arguments)
    assert done.exit_code == code
    assert said in done.stderr


def test_text_has_no_conversations_to_show(command: Command, text: Path, tmp_path: Path) -> None:
    command("prepare", text, "--tokenizer", "bytes", "--out", tmp_path / "set")
    shown = command("show", tmp_path / "set", "--sample", 1)
    assert shown.exit_code == 3
    assert "is a token set of text" in shown.stderr
