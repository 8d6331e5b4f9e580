"""Token sets as a run opens them: prepared ones, .bin files, and sources that are prepared first; and damaged ones."""

import errno
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from protocol.spec.run import RunSpec, parse_spec
from tests.support.text import write_text
from tests.support.tokenizers import write_tokenizer
from worker.data.open_training_set import TextData, open_training_set
from worker.data.sources.rows import Rows
from worker.data.sources.source import find_source
from worker.data.tokens import bin_files
from worker.data.tokens.encoding import DocumentEncoding
from worker.data.tokens.index import Index, read_index
from worker.data.tokens.preparing import Recipe, prepare
from worker.data.tokens.tokenizer import load_tokenizer
from worker.data.training_set import TrainingSet
from worker.errors import DataError, Stopped

HEADER = 256  # int32


def spec(
    source: Path | str, tokenizer: str | None = None, *, length: int = 8, batch: int = 3, data: str = ""
) -> RunSpec:
    named = "" if tokenizer is None else f"tokenizer = {tokenizer!r}\n"
    return parse_spec(
        f'name = "r"\nmodel.preset = "tiny"\nsync.rounds = 1\ninner.batch_size = {batch}\n'
        f"[data]\nsource = {str(source)!r}\n{named}sequence_length = {length}\n{data}"
    )


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A token set of 10 shards of 500 tokens or fewer, and two held out."""
    text = write_text(tmp_path / "text", seed=3, files=10, words=600)
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer")))
    prepare(
        Recipe([find_source(str(text), Rows(0.2))], DocumentEncoding(tokenizer), 1000), tmp_path / "set", processes=1
    )
    return tmp_path / "set"


def rows(data: TrainingSet, epochs: int = 1) -> list[tuple[int, ...]]:
    return [tuple(row) for unit in range(epochs * data.units_per_epoch) for row in data.unit(unit).tolist()]


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let the index lie."""
    index = json.loads((directory / "index.json").read_text())
    edit(index)
    (directory / "index.json").write_text(json.dumps(index))


def test_an_epoch_is_every_sequence_of_every_shard_once(prepared: Path) -> None:
    data = open_training_set(spec(prepared))
    index = read_index(prepared / "index.json")
    assert len(index.training) > 8, "more than a window"
    wanted = []
    for shard in index.training:
        tokens = np.fromfile(prepared / shard.file, "<u2").tolist()
        wanted += [tuple(tokens[start : start + 9]) for start in range(0, len(tokens) - 8, 8)]
    found = rows(data)
    assert len(found) == len(wanted) // 3 * 3
    assert all(row in wanted for row in found)
    assert sorted(found) != sorted(rows(data, 2)[len(found) :]) or len(wanted) % 3 == 0
    assert data.unit(0).dtype == torch.int64
    assert data.vocabulary == index.vocabulary == 282
    assert data.held_out_tokens == sum(shard.tokens for shard in index.held_out)


def test_held_out_sequences_are_taken_evenly_from_all_shards(prepared: Path) -> None:
    data, index = open_training_set(spec(prepared)), read_index(prepared / "index.json")
    assert len(index.held_out) > 1
    every = [tuple(row) for batch in data.held_out_batches(10**6) for row in batch.tolist()]
    wanted = []
    for shard in index.held_out:
        tokens = np.fromfile(prepared / shard.file, "<u2").tolist()
        wanted += [tuple(tokens[start : start + 9]) for start in range(0, len(tokens) - 8, 8)]
    assert every == wanted
    some = [tuple(row) for batch in data.held_out_batches(80) for row in batch.tolist()]
    assert some == [wanted[number * len(wanted) // 10] for number in range(10)]


def test_a_document_of_a_token_set_ends_with_the_tokenizer_s_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.data.training_set._READ_TOKENS", 100)
    text = write_text(tmp_path / "text", seed=3, files=60, words=20)
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer")))
    prepare(
        Recipe([find_source(str(text), Rows(0.3))], DocumentEncoding(tokenizer), 1000), tmp_path / "set", processes=1
    )
    data = open_training_set(spec(tmp_path / "set"))
    end = json.loads((tmp_path / "set" / "index.json").read_text())["end"]
    documents = data.held_out_documents(10**9)
    assert documents is not None
    tokens = torch.cat(list(data.held_out_batches(10**9)))
    numbers = torch.cat(list(documents))
    steps = numbers[:, 1:] - numbers[:, :-1]
    assert torch.equal(steps == 1, tokens[:, 1:-1] == end)
    assert set(steps.unique().tolist()) == {0, 1}
    assert len(numbers.unique()) > 10


def test_the_summary_names_the_tokenizer(prepared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    summary = open_training_set(spec(prepared)).summary
    assert (summary.tokenizer, summary.tokenizer_digest) == (tokenizer.name, tokenizer.digest)
    assert summary == open_training_set(spec(prepared, str(tmp_path / "tokenizer"))).summary


def test_threads_read_what_one_reads(prepared: Path) -> None:
    alone, shared = open_training_set(spec(prepared)), open_training_set(spec(prepared))
    expected = rows(alone)
    found: dict[int, list[list[int]]] = {}

    def read(first: int) -> None:
        for unit in range(first, shared.units_per_epoch, 4):
            found[unit] = shared.unit(unit).tolist()

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tuple(row) for unit in sorted(found) for row in found[unit]] == expected


def test_text_is_prepared_once_per_machine(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, tokenizer = write_text(tmp_path / "text", seed=1), str(write_tokenizer(tmp_path / "tokenizer"))
    with caplog.at_level("INFO"):
        data = open_training_set(spec(text, tokenizer))
    assert f"the tokenizer {tokenizer} in {cache / 'outerstep' / 'data'}" in caplog.text
    assert 0.005 < data.held_out_tokens / (data.units_per_epoch * 24) < 0.5
    assert data.bytes_per_token is not None
    assert 1 < data.bytes_per_token < 10

    def fail(*_: object) -> None:
        raise AssertionError("it was tokenised again")

    monkeypatch.setattr("worker.data.tokens.preparing.tokenised", fail)
    caplog.clear()
    with caplog.at_level("INFO"):
        assert open_training_set(spec(text, tokenizer)).summary == data.summary
    assert caplog.text == ""
    (text / "00.txt").write_text("another text")
    with pytest.raises(AssertionError, match="tokenised again"):
        open_training_set(spec(text, tokenizer))


def test_a_vocabulary_is_refused_before_anything_is_prepared(prepared: Path, tmp_path: Path, cache: Path) -> None:
    class TooSmall(Exception):
        pass

    def check(vocabulary: int) -> None:
        assert vocabulary == 282
        raise TooSmall

    for source in (tmp_path / "text", prepared):
        with pytest.raises(TooSmall):
            open_training_set(spec(source, str(tmp_path / "tokenizer")), check=check)
    assert not cache.exists()


def test_text_as_bytes_is_not_prepared(tmp_path: Path, cache: Path) -> None:
    text = write_text(tmp_path / "text", seed=1)
    for tokenizer in (None, "bytes"):
        data = open_training_set(spec(text, tokenizer))
        assert isinstance(data, TextData)
        assert (data.vocabulary, data.bytes_per_token) == (256, 1.0)
    assert not cache.exists()


def test_a_stopped_worker_does_not_prepare_on(tmp_path: Path) -> None:
    text, tokenizer = write_text(tmp_path / "text", seed=1), str(write_tokenizer(tmp_path / "tokenizer"))
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped, match="training set"):
        open_training_set(spec(text, tokenizer), stop=stop)


# --- .bin files ---------------------------------------------------------------------------------------------------


def write_bin(path: Path, tokens: "np.ndarray[Any, Any]", magic: int | None = None) -> Path:
    """As nanoGPT does, or with llm.c's header."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        if magic is not None:
            header = np.zeros(HEADER, "<i4")
            header[:3] = magic, 1, len(tokens)
            file.write(header.tobytes())
        file.write(tokens.tobytes())
    return path


def numbers(first: int, count: int, dtype: str = "<u2") -> "np.ndarray[Any, Any]":
    return np.arange(first, first + count).astype(dtype)


def test_nanogpt_s_files(tmp_path: Path) -> None:
    write_bin(tmp_path / "d" / "train.bin", numbers(0, 1000))
    write_bin(tmp_path / "d" / "val.bin", numbers(1000, 300))
    data = open_training_set(spec(tmp_path / "d"))
    starts = {row[0] for row in rows(data)}
    assert starts < set(range(0, 992, 8))
    assert len(starts) == 123, "of 124 sequences, 41 units of three"
    assert data.vocabulary == 1300
    assert data.held_out_tokens == 300
    assert next(iter(data.held_out_batches(8))).tolist() == [list(range(1000, 1009))]
    assert data.bytes_per_token is None
    assert data.summary.tokenizer is None


@pytest.mark.parametrize(("magic", "dtype", "first"), [(20240520, "<u2", 0), (20240801, "<u4", 100_000)])
def test_llm_c_s_files(tmp_path: Path, magic: int, dtype: str, first: int) -> None:
    write_bin(tmp_path / "d" / "fineweb_train_000001.bin", numbers(first, 500, dtype), magic)
    write_bin(tmp_path / "d" / "fineweb_train_000002.bin", numbers(first + 500, 500, dtype), magic)
    write_bin(tmp_path / "d" / "fineweb_val_000000.bin", numbers(first, 100, dtype), magic)
    data = open_training_set(spec(tmp_path / "d"))
    starts = {row[0] - first for row in rows(data)}
    assert starts <= {*range(0, 496, 8), *range(500, 996, 8)}
    assert len(starts) == 123
    assert data.vocabulary == first + 1000
    assert data.held_out_tokens == 100


def test_a_large_file_is_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bin_files, "SHARD_TOKENS", 400)
    path = write_bin(tmp_path / "d" / "tokens.bin", numbers(0, 1000), 20240520)
    index = bin_files.index_of([("tokens.bin", path)], "d", 0.1, None)
    assert [(shard.offset, shard.tokens) for shard in index.training] == [(1024, 400), (1824, 400), (2624, 100)]
    assert [(shard.offset, shard.tokens) for shard in index.held_out] == [(2824, 100)]
    data = open_training_set(spec(tmp_path / "d", data="holdout = 0.1"))
    starts = {row[0] for row in rows(data)}
    assert starts <= {*range(0, 392, 8), *range(400, 792, 8), *range(800, 896, 8)}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (1024 + 100, "train.bin has 1124 bytes, .* 500 uint16 tokens .* 2024: it is cut short"),
        (1024 + 1002, "damaged"),
    ],
)
def test_a_file_that_is_cut(tmp_path: Path, size: int, message: str) -> None:
    path = write_bin(tmp_path / "d" / "train.bin", numbers(0, 500), 20240520)
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=message):
        open_training_set(spec(tmp_path / "d"))


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    write_bin(tmp_path / "d" / "a.bin", numbers(0, 500), 20240520)
    write_bin(tmp_path / "d" / "b.bin", numbers(0, 500, "<u4"), 20240801)
    with pytest.raises(DataError, match=r"ids of two dtypes: .*a.bin \(uint16\) and .*b.bin \(uint32\)"):
        open_training_set(spec(tmp_path / "d"))
    (tmp_path / "odd.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match="odd.bin has 3 bytes, .* uint16 ids"):
        open_training_set(spec(tmp_path / "odd.bin"))


WIDE = {
    "uint32": (numbers(0, 1000, "<u4"), r'its ids are uint32; set data.dtype = "uint32"$', ""),
    "a large vocabulary": (numbers(100_000, 30_000, "<u4"), r'its ids are uint32; set data.dtype = "uint32"$', ""),
    "int64": (numbers(0, 1000, "<i8"), "its ids are int64; .*numpy.fromfile", ""),
    "large int64": (numbers(100_000, 30_000, "<i8"), "its ids are int64; .*numpy.fromfile", ""),
    "int64 as uint32": (numbers(0, 1000, "<i8"), "its ids are int64", 'dtype = "uint32"'),
}


@pytest.mark.parametrize("case", WIDE)
def test_wider_ids_than_are_read_are_refused(tmp_path: Path, case: str) -> None:
    """Every other id was 0, and trained on."""
    tokens, message, data = WIDE[case]
    path = write_bin(tmp_path / "d" / "train.bin", tokens)
    with pytest.raises(DataError, match=f"train.bin is read as .* every other id is 0 or nearly: {message}") as no:
        open_training_set(spec(path, data=data))
    if "python -c" in str(no.value):
        exec(shlex.split(str(no.value).partition("python -c ")[2])[0])
        path = tmp_path / "d" / "train.uint32.bin"
    opened = open_training_set(spec(path, data='dtype = "uint32"'))
    assert opened.vocabulary == tokens.max() + 1
    assert {row[0] for row in rows(opened)} <= set(tokens[::8].tolist())


def test_ids_of_a_few_values_are_not_taken_for_wider_ones(tmp_path: Path) -> None:
    for vocabulary in (1, 4):
        tokens = numbers(0, 999) % vocabulary
        assert open_training_set(spec(write_bin(tmp_path / "d" / "train.bin", tokens))).vocabulary == vocabulary


def test_a_dtype_that_does_nothing(tmp_path: Path) -> None:
    header = write_bin(tmp_path / "d" / "train.bin", numbers(0, 500), 20240520)
    with pytest.raises(DataError, match="has uint16 ids by its header, but data.dtype is uint32"):
        open_training_set(spec(header, data='dtype = "uint32"'))
    for source in (write_text(tmp_path / "text", seed=1), "https://example.org/set"):
        with pytest.raises(DataError, match="data.dtype is for .bin files .* leave it out"):
            open_training_set(spec(source, data='dtype = "uint16"'))


def test_files_by_another_tokenizer(tmp_path: Path) -> None:
    write_bin(tmp_path / "d" / "train.bin", numbers(0, 500))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(DataError, match="the token id 499, .* data.tokenizer = .* 281"):
        open_training_set(spec(tmp_path / "d", tokenizer))
    write_bin(tmp_path / "d" / "train.bin", numbers(0, 200))
    assert open_training_set(spec(tmp_path / "d", tokenizer)).vocabulary == 282


# --- what is wrong with a token set -------------------------------------------------------------------------------


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"xx")


@pytest.mark.covers("reliability:damaged-shard")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            Path.unlink,
            "train-00003.bin is missing .No such file or directory.*index.json; fetch it again",
        ),
        (cut, "train-00003.bin has 100 bytes .* 2000 .*index.json: it is cut short; fetch it again"),
        (grow, "train-00003.bin has 2002 bytes .* 2000 .*index.json: it is too long"),
    ],
)
def test_a_damaged_shard_is_told_at_the_start(prepared: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(prepared / "train-00003.bin")
    with pytest.raises(DataError, match=message):
        open_training_set(spec(prepared))


@pytest.mark.covers("reliability:damaged-shard")
def test_an_altered_shard_is_told_when_it_is_used_first(prepared: Path) -> None:
    data = open_training_set(spec(prepared))
    content = bytearray((prepared / "train-00003.bin").read_bytes())
    content[77] ^= 1
    (prepared / "train-00003.bin").write_bytes(content)
    with pytest.raises(DataError, match="train-00003.bin was altered: the digest of its 1000 tokens is "):
        rows(data)


def test_a_shard_that_is_cut_while_it_is_trained_on(prepared: Path) -> None:
    """By a memory map, the process would end by SIGBUS, without a word."""
    data = open_training_set(spec(prepared))
    rows(data)
    cut(prepared / "train-00003.bin")
    with pytest.raises(DataError, match="train-00003.bin was cut short"):
        rows(data)


def test_a_disk_that_fails(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_training_set(spec(prepared))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(DataError, match=r"train-\d+.bin cannot be read at \d+: .*Input/output error"):
        data.unit(0)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda index: index.update(dtype="uint64"), "index.json is not the index of a token set: dtype = 'uint64'"),
        (lambda index: index.update(dtype="uint32"), "train-00000.bin has 2000 bytes .* 4000 .*: it is cut short"),
        (lambda index: index.update(dtype="uint8"), "dtype uint8 .* vocabulary of 282"),
        (lambda index: index.update(format=2), "format 2 needs conversations"),
        (lambda index: index.update(end=300), "end = 300 is not below vocabulary = 282"),
        (lambda index: index["training"][0].update(tokens=999), "train-00000.bin has 2000 bytes .* 1998"),
        (lambda index: index["training"][0].update(tokens=0), "training.0.tokens = 0: input should be greater than 0"),
        (
            lambda index: index["training"][0].update(file="../../etc/passwd"),
            "training.0.file .*not the name of a file",
        ),
        (lambda index: index["training"][0].update(file="/etc/passwd"), "training.0.file .*not the name of a file"),
        (lambda index: index["training"][0].update(file="a\0.bin"), "training.0.file .*not the name of a file"),
        (lambda index: index.update(training=[]), "has 0 training tokens, .* 3 sequences of 8"),
        (lambda index: index.pop("training"), "training: this key is missing"),
        (
            lambda index: index["held_out"][0].update(bytes=1 << 61),
            r"\d\S+e\+\d+ bytes of text per held-out token",
        ),
    ],
)
def test_an_index_that_lies(prepared: Path, lie: Callable[[dict[str, Any]], object], message: str) -> None:
    change(prepared, lie)
    with pytest.raises(DataError, match=message):
        open_training_set(spec(prepared))


def test_ids_that_the_index_does_not_know(prepared: Path) -> None:
    change(prepared, lambda index: index.update(vocabulary=200))
    data = open_training_set(spec(prepared))
    with pytest.raises(DataError, match=r"train-.*bin has the token id 2\d\d at token \d+, .* vocabulary .* 200"):
        rows(data)


def test_a_set_by_another_tokenizer(prepared: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", "another text altogether")
    with pytest.raises(DataError, match=r"the tokenizer '.*tokenizer' \(BLAKE3 .*data.tokenizer is '.*other'"):
        open_training_set(spec(prepared, str(other)))
    with pytest.raises(DataError, match="data.tokenizer is 'bytes'"):
        open_training_set(spec(prepared, "bytes"))


def test_too_few_tokens(prepared: Path) -> None:
    with pytest.raises(DataError, match="3 sequences of 5000 tokens .* 15001"):
        open_training_set(spec(prepared, length=5000))


# --- memory -------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from tests.worker.test_token_sets import spec
from worker.data.open_training_set import open_training_set

data = open_training_set(spec(sys.argv[1], length=1024, batch=64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for unit in (0, data.units_per_epoch // 2, data.units_per_epoch - 1):
    data.unit(unit)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, before, data.units_per_epoch)
"""


def sparse_set(directory: Path, shards: int) -> Path:
    """Shards of 16 M tokens of nothing, which take no room on the disk; their digest is computed once."""
    directory.mkdir()
    tokens, listed = 1 << 24, []
    digest = blake3(bytes(2 * tokens)).hexdigest()
    for number in range(shards):
        with (directory / f"train-{number:05}.bin").open("wb") as file:
            file.truncate(2 * tokens)
        listed.append({"file": f"train-{number:05}.bin", "tokens": tokens, "digest": digest})
    index: dict[str, Any] = {
        "dtype": "uint16",
        "vocabulary": 300,
        "tokenizer": None,
        "tokenizer_digest": None,
        "end": None,
    }
    index |= {"source": "nothing", "training": listed, "held_out": []}
    (directory / "index.json").write_text(Index.model_validate(index).text())
    return directory


@pytest.mark.system
def test_memory_does_not_grow_with_the_set(tmp_path: Path) -> None:
    """32 MB and 4 GB, units from all of it: what it takes beyond a process that has opened the set, in kB."""
    peaks = []
    for shards in (1, 128):
        directory = sparse_set(tmp_path / str(shards), shards)
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(directory)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        grown, opened, units = map(int, done.stdout.split())
        assert units == ((1 << 24) - 1) // 1024 * shards // 64
        peaks.append(grown + opened)
    assert peaks[1] - peaks[0] < 32_000, f"{peaks} kB"


def test_private_ids_that_nobody_knows_the_tokenizer_of_are_refused(tmp_path: Path) -> None:
    """They would be averaged with others of any tokenizer: with private data nothing else is compared."""
    source = tmp_path / "ids"
    source.mkdir()
    np.arange(1000, dtype="<u2").tofile(source / "train.bin")
    assert open_training_set(spec(source)).units_per_epoch
    with pytest.raises(DataError, match=f"{source}' .*data.private.* data.tokenizer"):
        open_training_set(spec(source, data="private = true"))
    words = str(write_tokenizer(tmp_path / "tokenizer"))
    few = load_tokenizer(words).vocabulary
    (np.arange(1000, dtype="<u2") % few).tofile(source / "train.bin")
    assert open_training_set(spec(source, words, data="private = true")).summary.tokenizer_digest is not None
