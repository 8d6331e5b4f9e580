"""The training set: which files, which are held out, which sequences make up which work unit."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from protocol.spec.run import RunSpec, parse_spec
from tests.support.tokenizers import write_tokenizer
from worker.data.open_training_set import TextData, open_training_set
from worker.errors import DataError


def spec(source: str, *, length: int = 8, batch: int = 3, holdout: float = 0.3, seed: int = 0) -> RunSpec:
    return parse_spec(f"""
name = "r"
seed = {seed}
[model]
preset = "tiny"
[data]
source = {source!r}
sequence_length = {length}
holdout = {holdout}
[inner]
batch_size = {batch}
[sync]
wait = "always"
rounds = 1
""")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """20 files of 50 bytes of their own, some of them deep."""
    directory = tmp_path / "text"
    for index in range(20):
        path = directory / ("deep/er" if index % 2 else ".") / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([index + 65]) * 50)
    return directory


def test_every_file_is_trained_on_or_held_out(text: Path) -> None:
    data = TextData(spec(str(text)))
    training, held_out = set(data.training.tolist()), set(data.held_out.tolist())
    assert training | held_out == set(range(65, 85))
    assert not training & held_out
    assert 1 <= len(held_out) <= 12


def test_the_split_is_by_name_alone(text: Path, tmp_path: Path) -> None:
    """The same files elsewhere, with other times and contents of the same length, are split alike."""
    before = TextData(spec(str(text)))
    text.rename(tmp_path / "moved")
    after = TextData(spec(str(tmp_path / "moved")))
    assert before.summary == after.summary
    assert np.array_equal(before.held_out, after.held_out)


def test_the_summary_tells_contents_and_names_apart(text: Path) -> None:
    digests = {TextData(spec(str(text))).summary.digest}
    (text / "00.txt").write_bytes(b"!" * 50)
    digests.add(TextData(spec(str(text))).summary.digest)
    (text / "00.txt").rename(text / "000.txt")
    digests.add(TextData(spec(str(text))).summary.digest)
    assert len(digests) == 3


def test_hidden_files_are_not_text(text: Path) -> None:
    before = TextData(spec(str(text))).summary
    (text / ".git").mkdir()
    (text / ".git" / "config").write_text("x")
    (text / ".hidden").write_text("x")
    assert TextData(spec(str(text))).summary == before


def test_a_unit_is_sequences_with_their_targets(tmp_path: Path) -> None:
    """Sequence i is the bytes [8 i, 8 i + 8], of which the first is 8; the last byte is its last target."""
    (tmp_path / "one.txt").write_bytes(bytes(range(8, 208)))
    data = TextData(spec(str(tmp_path), holdout=0.0))
    unit = data.unit(0)
    assert unit.dtype == torch.int64
    assert unit.shape == (3, 9)
    for row in unit.tolist():
        assert row[0] % 8 == 0
        assert row == list(range(row[0], row[0] + 9))


def test_one_file_is_held_out_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(8, 208)))
    data = TextData(spec(str(tmp_path), holdout=0.25))
    assert data.held_out.tolist() == list(range(158, 208))


def test_something_is_held_out_of_a_few_files(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index + 65]) * 100)
    data = TextData(spec(str(tmp_path), holdout=0.0001))
    assert len(data.held_out) == 100
    assert len(TextData(spec(str(tmp_path), holdout=0.0)).held_out) == 0


@pytest.mark.parametrize("tokenizer", [None, "tokenizer"])
@pytest.mark.parametrize(("large", "noted"), [("b.txt", "99.0% of the tokens"), ("a.txt", "1.0% of the tokens")])
def test_a_share_that_is_far_from_the_one_asked_for_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, large: str, noted: str, tokenizer: str | None
) -> None:
    """Of two files, b.txt is held out, however large it is."""
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "text" / name).write_text("x." * (9900 if name == large else 100))
    named = None if tokenizer is None else str(write_tokenizer(tmp_path / tokenizer))
    found = spec(str(tmp_path / "text"), holdout=0.05)
    found = found.model_copy(update={"data": found.data.model_copy(update={"tokenizer": named})})
    open_training_set(found)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"{noted} are held out, not 5.0%" in warning


def test_a_share_near_the_one_asked_for_is_not_noted(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_training_set(spec(str(text), holdout=0.2))
    (text.parent / "one.txt").write_text("x" * 999)
    open_training_set(spec(str(text.parent / "one.txt"), holdout=0.2))
    open_training_set(spec(str(text.parent / "one.txt"), holdout=0.0))
    assert "are held out" not in caplog.text


def test_held_out_batches_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"x" * 200)
    data = TextData(spec(str(tmp_path), holdout=0.5))
    assert [tuple(batch.shape) for batch in data.held_out_batches(32)] == [(3, 9), (1, 9)]
    assert sum(len(batch) for batch in data.held_out_batches(10**6)) == 12
    assert sum(len(batch) for batch in data.held_out_batches(1)) == 1


def test_the_standard_library_is_enough_text() -> None:
    data = TextData(spec("python-stdlib", length=64, batch=8, holdout=0.05))
    assert len(data.training) > 5_000_000
    assert 0.005 < len(data.held_out) / len(data.training) < 0.3
    assert b"def " in data.training[:100_000].tobytes()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/nowhere", "no files"),
        ("{}/*.none", "no files"),
        ("{}", "3 sequences of 8 bytes .* 25"),
    ],
)
def test_what_cannot_be_trained_on(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "tiny.txt").write_bytes(b"too small")
    with pytest.raises(DataError, match=message):
        TextData(spec(source.format(tmp_path)))


BINARY = {
    "compressed by gzip; unpack": gzip.compress(b"a line of text\n" * 99),
    "compressed by zstd; unpack": zstandard.compress(b"a line of text\n" * 99),
    "a zip archive; unpack": b"PK\x03\x04rest",
    "parquet; .* .parquet": b"PAR1rest",
    "a PNG image; .*DIR/": b"\x89PNG\r\n\x1a\nrest",
    "a JPEG image; .*DIR/": b"\xff\xd8\xff\xe0rest",
    "binary: .*NUL byte": b"text\0" + b"x" * 99,
}


@pytest.mark.parametrize(("told", "content"), BINARY.items(), ids=[told.partition(";")[0] for told in BINARY])
def test_a_file_that_is_text_by_its_name_alone_is_refused(text: Path, told: str, content: bytes) -> None:
    """Its bytes were trained on as text, beside those of the others."""
    (text / "deep" / "notes.txt").write_bytes(content)
    with pytest.raises(DataError, match=f"deep/notes.txt is not text but {told}"):
        TextData(spec(str(text)))


def test_text_of_any_language_and_age_is_text(text: Path) -> None:
    for index, encoding in enumerate(("utf-8", "latin-1", "utf-8-sig")):
        (text / f"more{index}.txt").write_bytes("Größe, naïveté\x1b[0m\f\x7f".encode(encoding))
    TextData(spec(str(text)))


def test_the_documents_of_held_out_text_are_its_files(text: Path) -> None:
    """Each of them has a byte of its own."""
    data = TextData(spec(str(text)))
    batches, documents = data.held_out_batches(10**9), data.held_out_documents(10**9)
    assert documents is not None
    targets = torch.cat([batch[:, 1:] for batch in batches]).flatten().tolist()
    numbers = torch.cat(list(documents)).flatten().tolist()
    assert len(set(zip(targets, numbers, strict=True))) == len(set(targets)) == len(set(numbers)) > 1


def test_the_end_of_one_file_has_no_documents(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(97, 123)) * 20)
    assert TextData(spec(str(tmp_path / "one.txt"))).held_out_documents(10**9) is None
