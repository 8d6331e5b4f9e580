"""The training set: which files, which are held out, which sequences make up which work unit. The order is a pure function of
seed and number, in which a worker's units lie in few shards."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from protocol.spec.run import RunSpec, parse_spec
from tests.support.tokenizers import write_tokenizer
from tests.support.twister import shuffled
from worker.data.open_training_set import TextData, open_training_set
from worker.data.order import WINDOW_SHARDS, Order
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


# --- the order of a set of many shards -----------------------------------------------------------------------------


UNEVEN = [5, 0, 17, 8, 8, 1, 30, 2, 9, 11, 4, 0, 0, 6, 21, 3, 13, 7, 2, 40]


def taken(order: Order, units: range) -> list[tuple[int, int]]:
    """(shard, row) of every sequence of these units, in order."""
    return [
        (shard, row)
        for unit in units
        for shard, row in zip(*(part.tolist() for part in order.places(unit)), strict=True)
    ]


@pytest.mark.parametrize("batch", [1, 3, 8, 29])
def test_an_epoch_has_every_sequence_but_its_last_ones_once(batch: int) -> None:
    order = Order(UNEVEN, batch, seed=3)
    everything = {(shard, row) for shard, rows in enumerate(UNEVEN) for row in range(rows)}
    assert order.units_per_epoch == len(everything) // batch
    left_out = []
    for epoch in range(3):
        units = range(epoch * order.units_per_epoch, (epoch + 1) * order.units_per_epoch)
        rows = taken(order, units)
        assert len(rows) == len(set(rows)) == len(everything) // batch * batch
        assert set(rows) <= everything
        left_out.append(everything - set(rows))
    assert all(len(each) < batch for each in left_out)


def test_units_are_the_same_whoever_asks_for_which_first() -> None:
    forwards, backwards = Order(UNEVEN, 6, seed=1), Order(UNEVEN, 6, seed=1)
    units = range(3 * forwards.units_per_epoch)
    asked = {unit: taken(backwards, range(unit, unit + 1)) for unit in reversed(units)}
    assert [row for unit in units for row in asked[unit]] == taken(forwards, units)


def test_consecutive_units_lie_in_a_window_of_shards_and_are_mixed_within_it() -> None:
    """A worker whose units are 1/10 of an epoch of 80 shards needs 8 of them, or 16 where two windows meet."""
    order = Order([1000] * 80, 10, seed=5)
    for first in range(0, order.units_per_epoch, 250):
        units = range(first, min(first + 250, order.units_per_epoch))
        shards = {shard for shard, _ in taken(order, units)}
        assert len(shards) <= 2 * WINDOW_SHARDS
        assert shards <= {shard for unit in units for shard in order.shards(unit)}
    in_one_unit = {shard for shard, _ in taken(order, range(10, 14))}
    assert len(in_one_unit) == WINDOW_SHARDS


def test_a_unit_may_begin_in_one_window_and_end_in_another() -> None:
    order = Order([10] * 24, 32, seed=0)  # windows of 80 sequences: unit 2 has 16 of the first and 16 of the second
    places = order.places(2)
    assert len(set(order.shards(2))) == 2 * WINDOW_SHARDS
    first, second = (set(order.shards(unit)) for unit in (0, 4))
    assert set(places.shards[:16].tolist()) <= first
    assert set(places.shards[16:].tolist()) <= second


def test_the_memory_is_that_of_windows_not_of_the_set() -> None:
    """A set of 10^12 tokens in 20,000 shards: the order of one unit holds 20,000 numbers and a window's."""
    order = Order([50_000] * 20_000, 512, seed=0)
    order.places(order.units_per_epoch - 1)
    assert order.units_per_epoch == 10**9 // 512
    info = order._window.cache_info()  # noqa: SLF001 - what it keeps is what is promised
    assert (info.currsize, info.maxsize) == (1, 2)


def test_the_order_is_what_docs_wire_format_says() -> None:
    """With a Mersenne twister and nothing else of numpy."""
    tokens = [40, 8, 137, 65, 70, 9, 241, 17, 73, 89, 33, 3, 1, 50, 170, 25, 105, 57, 19, 321]  # three windows
    length, batch, seed = 8, 3, 21
    order = Order([(each - 1) // length for each in tokens], batch, seed)
    total = sum((each - 1) // length for each in tokens)
    assert order.units_per_epoch == total // batch
    for epoch in range(2):
        shards = shuffled(len(tokens), seed, epoch, 0)
        places: list[tuple[int, int]] = []
        for w, start in enumerate(range(0, len(shards), 8)):
            window = shards[start : start + 8]
            sequences = [(shard, row) for shard in window for row in range((tokens[shard] - 1) // length)]
            words = (seed, epoch, w) if w else (seed, epoch)
            places += [sequences[each] for each in shuffled(len(sequences), *words)]
        for unit in range(total // batch):
            found = order.places(epoch * (total // batch) + unit)
            expected = places[unit * batch : (unit + 1) * batch]
            assert list(zip(found.shards.tolist(), found.rows.tolist(), strict=True)) == expected
