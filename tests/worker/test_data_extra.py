"""Parquet files and data sets of the hub, by pip's `outerstep[data]`; and what is said without it."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker.data.sources.rows import Rows
from worker.data.sources.source import Source, find_source
from worker.data.tokens.encoding import DocumentEncoding
from worker.data.tokens.preparing import Recipe, prepare
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import DataError

TEXTS = [f"document {number} of {'many ' * (number % 9)}" for number in range(3000)]


def texts(source: Source, *, task_bytes: int = 4000) -> list[list[str]]:
    return [[piece.text for piece in task.pieces()] for task in source.tasks(task_bytes)]


def write_parquet(path: Path, texts: list[Any], column: str = "text", groups: int = 700) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'outerstep[data]'")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, row_group_size=groups)
    return path


def write_hub(directory: Path) -> str:
    """A data set as `datasets` finds it in a directory, in two files."""
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'outerstep[data]'")
    directory.mkdir()
    for number, part in enumerate((TEXTS[:1000], TEXTS[1000:])):
        lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in part)
        (directory / f"train-{number}.jsonl").write_text(lines)
    (directory / "validation.jsonl").write_text(json.dumps({"text": "held out", "url": "x"}) + "\n")
    return f"hub:{directory}"


def test_a_dictionary_of_texts_is_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'outerstep[data]'")
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array(["a", "b", "a"]).dictionary_encode())
    assert texts(find_source(str(path), Rows(0.0))) == [["a", "b", "a"]]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("content", ["x"], r"a.parquet: it has no 'text'; .* 'id', 'content'"),
        ("text", [1], "the column 'text' is int64, not text"),
        ("text", ["x", None], "a.parquet, row 1 of row group 0: its 'text' is null, not text"),
    ],
)
def test_parquet_without_text(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    source = find_source(str(write_parquet(tmp_path / "a.parquet", values, column)), Rows(0.0))
    with pytest.raises(DataError, match=message):
        texts(source)


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'outerstep[data]'")
    (tmp_path / "a.parquet").write_bytes(b"PAR1, but no more")
    with pytest.raises(DataError, match="a.parquet is not a readable parquet file"):
        texts(find_source(str(tmp_path), Rows(0.0)))


def test_a_split_of_the_hub_is_held_out(tmp_path: Path) -> None:
    name = write_hub(tmp_path / "hub")
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
        texts(find_source(write_hub(tmp_path / "hub"), Rows(0.0, column="content")))


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
