"""Golden digests: a token set has the same bytes with every version, or a run would reject workers of another one.

The sources are small and of every kind. They are cut into many tasks and shards, since a set depends on where these
end. It depends on no epoch and no seed: `token-sets.json` in docs/vectors has the order of a set's sequences.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from protocol.spec.run import parse_spec
from protocol.spec.sections import DataSpec
from tests.support.conversations import conversation
from tests.support.tokenizers import write_chat_tokenizer, write_tokenizer
from worker.data.open_training_set import open_training_set
from worker.data.tokens.preparing import prepare, recipe_of
from worker.data.tokens.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [f"the worker {number} sends the delta\nand waits {'for nobody ' * (number % 7)}" for number in range(200)]
ROWS = [{"text": text, "url": "https://example.org"} for text in TEXTS]
CHAT = [{"messages": conversation(number, number % 3 + 1)} for number in range(120)]
COMPLETIONS = [{"prompt": f"who is {n}?", "completion": " a worker" * (n % 5 + 1)} for n in range(120)]
# Lines of all lengths, one of them too long for a piece, and characters of several bytes.
ONE_TEXT = ("\n".join(TEXTS) + "wörter " * 30_000 + "\n".join(TEXTS)).encode()
TASK_BYTES, SHARD_TOKENS = 3000, 900


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


LINES = lines_of(ROWS)


def in_members(compress: Callable[[bytes], bytes]) -> bytes:
    """The lines compressed as two files, one after the other, which is one file too."""
    half = len(LINES) // 2
    return compress(LINES[:half]) + compress(LINES[half:])


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'outerstep[data]'")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=90)


def write_texts(directory: Path) -> None:
    directory.mkdir()
    for number in range(8):
        (directory / f"{number}.txt").write_text("\n".join(TEXTS[number * 25 : number * 25 + 25]))


def compressed_texts(ending: str, compress: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        write_texts(directory)
        for path in sorted(directory.iterdir()):
            path.with_name(f"{path.name}.{ending}").write_bytes(compress(path.read_bytes()))
            path.unlink()

    return write


def write_hub(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    """Return a function that writes a data set as `datasets` finds it in a directory, in two files."""

    def write(directory: Path) -> None:
        pytest.importorskip("datasets", reason="datasets is not installed: pip install 'outerstep[data]'")
        directory.mkdir()
        for number, part in enumerate((rows[:70], rows[70:])):
            (directory / f"train-{number}.jsonl").write_bytes(lines_of(part))

    return write


# The digests by tokenizer of what has the same documents in the same order.
OF_ONE_TEXT = {
    "words": "e9841a3d1889fa308a2b2ec94e68686559a8f75ff3d4552f0e0b007256008347",
    "bytes": "add82cc6f146a06371699483f669e00e45e05fd6d1ce5e5b153d54ce2daca8f0",
}
OF_TEXTS = {
    "words": "e85c9d06583ff4da7d444efa7734bfb37c4819a196f2dbab6ee7bf02f07e9102",
    "bytes": "fd4509c6f8a1dd36c5711b55f5780101edb2b4fa07b324be44c3e306acc71afb",
}
OF_ROWS = {
    "words": "ecac8a50cea7b061006bc4bc2b6d9df4302d9f07d77545f34ea2f285f86fa56c",
    "bytes": "c2d479e4c7a674cff6a8f296dbf74d08aa6931319d883de9a4a8cd5f796f6ec1",
}
OF_CHAT = {"chat": "59bfda4ba449dc440a565eb4f54745908301aa11994688f6e639dc81cc2e80ea"}


@dataclass(frozen=True)
class Golden:
    """A source: what writes it, the digests by tokenizer, the other keys of its [data], and a glob below its path."""

    write: Callable[[Path], object]
    digests: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)
    glob: str = ""


def rows(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


GOLDEN = {
    "one.txt": Golden(rows(ONE_TEXT), OF_ONE_TEXT),
    "one.txt.gz": Golden(rows(gzip.compress(ONE_TEXT)), OF_ONE_TEXT),
    "text": Golden(write_texts, OF_TEXTS),
    "text-gz": Golden(compressed_texts("gz", gzip.compress), OF_TEXTS),
    "text-zst": Golden(compressed_texts("zst", zstandard.compress), OF_TEXTS, glob="/*.txt.zst"),
    "some": Golden(
        write_texts, {"words": "9c93d241d287468c2ab95cc4df042176d635c64d41fe66934dc33187dea414f5"}, glob="/[1-6].txt"
    ),
    "a.jsonl": Golden(rows(LINES), OF_ROWS),
    "a.ndjson": Golden(rows(LINES), OF_ROWS),
    "a.jsonlines": Golden(rows(LINES), OF_ROWS),
    "a.json": Golden(rows(LINES), OF_ROWS),
    "a.jsonl.gz": Golden(rows(in_members(gzip.compress)), OF_ROWS),
    "a.jsonlines.gz": Golden(rows(gzip.compress(LINES)), OF_ROWS),
    "a.json.zst": Golden(rows(in_members(zstandard.compress)), OF_ROWS),
    "a.parquet": Golden(lambda path: write_parquet(path, ROWS), OF_ROWS),
    "hub": Golden(write_hub(ROWS), OF_ROWS),
    "whole.jsonl": Golden(
        rows(LINES),
        {"words": "50d922f8736eace649b6726e4818e5092c393d2c5b89be1f8a10bf9f518a15d4"},
        {"holdout": 0.0},
    ),
    "column.jsonl": Golden(
        rows(LINES),
        {"words": "a6141f3cb76cf4d0e76bf5002d5b9143a9d3e299d4b2473ba75d99d960b577b9"},
        {"column": "url"},
    ),
    "chat.jsonl": Golden(rows(lines_of(CHAT)), OF_CHAT, {"format": "chat"}),
    "chat.jsonl.gz": Golden(rows(gzip.compress(lines_of(CHAT))), OF_CHAT, {"format": "chat"}),
    "chat.parquet": Golden(
        lambda path: write_parquet(path, CHAT),  # in other tasks, so others are packed together
        {"chat": "90d2cb7b34ebb328494711bb8cb80625cebd2ea1892a2a7d9c550a85ffd11c0a"},
        {"format": "chat"},
    ),
    "chat-hub": Golden(
        write_hub(CHAT),
        {"chat": "d43a6b5d3b78789c81fd430a78dc367c175efb1516ded2613b5df51b6e946567"},
        {"format": "chat"},
    ),
    "alone.jsonl": Golden(
        rows(lines_of(CHAT)),
        {"chat": "811a70ef22d2e547d9f14239cd63ccd98b0d3ec4eba4311c234262ef82ad38cf"},
        {"format": "chat", "packing": False, "train_on": "all"},
    ),
    "completion.jsonl": Golden(
        rows(lines_of(COMPLETIONS)),
        {"chat": "65e38e868cd3f7a4ba1c58259b76559ad5e5a391faed41fc4f1335652580db94"},
        {"format": "completion"},
    ),
}
TOKENIZERS: dict[str, Callable[[Path], Path]] = {"words": write_tokenizer, "chat": write_chat_tokenizer}


def prepared(name: str, tokenizer: str, root: Path, processes: int) -> str:
    """Return the digest of a source's token set."""
    golden, source, named = GOLDEN[name], root / name, "bytes"
    golden.write(source)
    if tokenizer != "bytes":
        named = str(TOKENIZERS[tokenizer](root / "tokenizer"))
    where = f"hub:{source}" if "hub" in name else f"{source}{golden.glob}"
    data: dict[str, Any] = {"source": where, "tokenizer": named, "holdout": 0.1, **golden.data}
    if "format" in data:
        data |= {"sequence_length": 64, "date": "2026-01-01"}
    recipe = recipe_of(DataSpec.model_validate(data), load_tokenizer(named), shard_tokens=SHARD_TOKENS)
    return prepare(replace(recipe, task_bytes=TASK_BYTES), root / "set", processes=processes).digest()


@pytest.mark.parametrize(("name", "tokenizer"), [(name, each) for name in GOLDEN for each in GOLDEN[name].digests])
def test_the_tokens_of_a_source_never_change(tmp_path: Path, name: str, tokenizer: str) -> None:
    assert prepared(name, tokenizer, tmp_path, 1) == GOLDEN[name].digests[tokenizer]


@pytest.mark.covers("reliability:prepared-token-sets")
@pytest.mark.parametrize("name", ["one.txt", "a.jsonl.gz", "a.parquet", "hub", "chat.jsonl"])
def test_processes_change_nothing(tmp_path: Path, name: str) -> None:
    tokenizer, digest = next(iter(GOLDEN[name].digests.items()))
    assert prepared(name, tokenizer, tmp_path, 2) == digest


def test_text_as_bytes_in_memory_never_changes(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    run = 'name = "r"\nmodel.preset = "tiny"\nsync.rounds = 1\ninner.batch_size = 2\ndata.sequence_length = 8\n'
    data = open_training_set(parse_spec(f"{run}data.source = {str(tmp_path / 'text')!r}"))
    assert data.summary.digest == "eefe8aa1745cf0221b49a0997cf4da6e4ad1d14d69997b021eee128755c16a79"
