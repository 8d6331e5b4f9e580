"""What the files of a source are taken for: by their names, their content, and the links to them."""

import gzip
import json
import os
import shlex
from pathlib import Path

import pytest

from protocol.spec.sections import DataSpec
from tests.support.tokenizers import write_tokenizer
from tests.worker.test_golden_token_sets import ROWS, TEXTS, write_texts
from tests.worker.test_token_sets import spec
from worker.data.open_training_set import TextData, open_training_set
from worker.data.sources.files import source_files
from worker.data.sources.rows import Rows
from worker.data.sources.source import find_source
from worker.data.tokens.preparing import prepare, recipe_of
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import DataError

LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = "text,url\n" + "".join(f'"{text}",https://example.org\n' for text in TEXTS)


def digest_of(source: object, tokenizer: str, out: Path) -> str:
    """The digest of the token set that `outerstep data prepare` makes."""
    data = DataSpec(source=str(source), tokenizer=tokenizer, holdout=0.1)
    return prepare(recipe_of(data, load_tokenizer(tokenizer)), out, processes=1).digest()


# --- what is not what it seems ------------------------------------------------------------------------------------

UTF_16 = "UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`"

REFUSED = {
    "array.json": (json.dumps(ROWS).encode(), "array.json is not text but a JSON array; .*load_dataset"),
    "pretty.json": (json.dumps(ROWS, indent=1).encode(), "pretty.json is not text but a JSON array; .*load_dataset"),
    "array.jsonl": (json.dumps(ROWS, indent=1).encode(), "array.jsonl is not text but a JSON array; .*load_dataset"),
    "array.json.gz": (
        gzip.compress(json.dumps(ROWS).encode()),
        "array.json.gz is not text but a JSON array; .*load_dataset",
    ),
    "array.txt.gz": (
        gzip.compress(json.dumps(ROWS).encode()),
        "array.txt.gz is not text but a JSON array; rename it to end in .json.gz",
    ),
    "one.json": (json.dumps({"data": ROWS}, indent=1).encode(), "one.json is not text but JSON; .*DIR/"),
    "a.csv": (TABLE.encode(), "a.csv is not text but CSV; .*load_dataset"),
    "a.tsv": (TABLE.encode(), "a.tsv is not text but TSV; .*load_dataset"),
    "lines.txt": (LINES.encode(), "lines.txt is not text but JSON lines; rename it to end in .jsonl"),
    "marked.txt": (b"\xef\xbb\xbf" + LINES.encode(), "marked.txt is not text but JSON lines; rename"),
    "a.log": (LINES.encode(), "a.log is not text but JSON lines; rename it to end in .jsonl"),
    "long.txt": (
        json.dumps({"text": "word " * 20_000}).encode() + b"\n",
        "long.txt is not text but JSON lines; rename it to end in .jsonl",
    ),
    "lines.txt.gz": (
        gzip.compress(LINES.encode()),
        "lines.txt.gz is not text but JSON lines; rename it to end in .jsonl.gz",
    ),
    "array.txt": (json.dumps(ROWS, indent=1).encode(), "array.txt is not text but a JSON array; rename it"),
    "packed.tar.gz": (b"", "packed.tar.gz is not text but compressed files"),
    "wide.txt": ("many words\n".encode("utf-16") * 99, f"wide.txt is {UTF_16}"),
    "wide.json": (LINES.encode("utf-16"), f"wide.json is {UTF_16}"),
    "wide.jsonl": (LINES.encode("utf-16"), f"wide.jsonl is {UTF_16}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_would_be_trained_on_with_its_keys_is_refused(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        find_source(str(tmp_path / name), Rows(0.1))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_info.json", json.dumps({"features": {"text": "string"}}, indent=1)),
        ("state.json", json.dumps({"_data_files": []})),
        ("index.json", '{"pages": []}'),  # no token set
        ("a.csv", TABLE),
    ],
)
def test_what_describes_a_set_is_no_text_of_it(tmp_path: Path, name: str, content: str) -> None:
    write_texts(tmp_path / "text")
    (tmp_path / "text" / name).write_text(content)
    with pytest.raises(DataError, match=rf"files of several kinds: .*{name}\), text \(.*DIR/\*.txt"):
        open_training_set(spec(tmp_path / "text"))


@pytest.mark.parametrize(
    "content",
    [
        '{"a": 1} is an object of JSON, and this is a sentence.\n' * 9,
        "{}\n" * 99,
        "[1] As Knuth writes, \n" * 9,
        "[x] done\n{ todo }\n" * 9,
        '{"a": 1}\nThis is how an object looks.\n' * 9,
        "{ not JSON }\n" * 99,
        "[" * 9999,
    ],
)
def test_text_that_begins_with_a_bracket_is_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert isinstance(open_training_set(spec(tmp_path / "a.txt")), TextData)


@pytest.mark.parametrize("name", ["array.json", "array.json.gz", "a.csv", "a.tsv"])
def test_the_remedy_for_a_table_makes_the_same_set(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'outerstep[data]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "it's here" / name
    source.parent.mkdir()
    texts = {"array.json": json.dumps(ROWS), "a.csv": TABLE, "a.tsv": TABLE.replace(",", "\t")}
    if name.endswith(".gz"):
        source.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    else:
        source.write_text(texts[name])
    with pytest.raises(DataError) as refused:
        open_training_set(spec(source))
    *_, command = str(refused.value).partition("python -c ")
    (code,) = shlex.split(command)
    exec(code)
    (tmp_path / "lines.jsonl").write_text(LINES)
    wanted = digest_of(tmp_path / "lines.jsonl", "bytes", tmp_path / "wanted")
    assert digest_of(source.with_suffix(".jsonl"), "bytes", tmp_path / "set") == wanted


def test_the_first_file_with_crlf_is_reported(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    assert open_training_set(spec(tmp_path / "text")).summary.crlf is None
    for name in ("3.txt", "5.txt"):
        file = tmp_path / "text" / name
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    summary = open_training_set(spec(tmp_path / "text")).summary
    assert summary.crlf == "3.txt"
    assert summary.of_private_data().model_dump() == {"units": summary.units}, "nothing of the text is sent"


# --- links --------------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A directory with a file, a linked file and a linked directory, whose files link back in loops."""
    directory, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    directory.mkdir()
    for path in (directory / "a.txt", elsewhere / "b.txt", elsewhere / "deep" / "c.txt"):
        path.write_text(path.name)
    (directory / "linked.txt").symlink_to(elsewhere / "b.txt")
    (directory / "folder").symlink_to(elsewhere)
    for number in range(3):
        (elsewhere / "deep" / f"up{number}").symlink_to(elsewhere)
        (elsewhere / f"around{number}").symlink_to(directory)
    return directory


def names(source: object) -> list[str]:
    return [name for name, _ in source_files(str(source))]


def test_links_are_followed_and_loops_are_not(linked: Path) -> None:
    """Three links to the same directory in it would be 3^40 files, until a path is too long."""
    everything = ["a.txt", "folder/b.txt", "folder/deep/c.txt", "linked.txt"]
    assert names(linked) == names(f"{linked}/**/*.txt") == names(f"{linked}/**") == everything
    assert names(f"{linked}/*") == names(f"{linked}/*.txt") == ["a.txt", "linked.txt"]
    assert names(f"{linked}/fold*/*.txt") == ["folder/b.txt"]
    assert names(f"{linked}/folder/*.txt") == ["b.txt"]
    assert names(f"{linked}/**/deep/*") == ["folder/deep/c.txt"]
    assert names(linked / "linked.txt") == ["linked.txt"]


def test_a_directory_of_one_link(linked: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "here").symlink_to(linked)
    assert len(names(tmp_path / "one")) == 4


@pytest.mark.parametrize("pattern", ["", "/*", "/*.txt", "/**/*.txt", "/gone.txt"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("text")
    (tmp_path / "text" / "gone.txt").symlink_to(tmp_path / "missing")
    with pytest.raises(DataError, match="gone.txt is a link to .*missing, which does not exist"):
        source_files(f"{tmp_path}/text{pattern}")
    (tmp_path / "text" / "gone.txt").rename(tmp_path / "text" / ".#gone.txt")  # as an editor locks a file
    assert pattern == "/gone.txt" or names(f"{tmp_path}/text{pattern}") == ["a.txt"]


# --- text that changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_changed_text_of_the_same_size_and_time_is_prepared_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As `cp -p` and `rsync -t` leave it. The worker trained on the old text."""
    write_texts(tmp_path / "text")
    tokenizer, file = str(write_tokenizer(tmp_path / "tokenizer")), tmp_path / "text" / "3.txt"
    before, time = open_training_set(spec(tmp_path / "text", tokenizer)).summary, file.stat().st_mtime_ns
    assert open_training_set(spec(tmp_path / "text", tokenizer)).summary == before
    assert len(list((tmp_path / "cache" / "outerstep" / "data").iterdir())) == 1, "it is prepared once"
    new = file if how == "in place" else tmp_path / "new"
    new.write_text(file.read_text().replace("worker", "banana"))
    os.utime(new, ns=(time, time))
    new.rename(file)
    assert open_training_set(spec(tmp_path / "text", tokenizer)).summary.digest != before.digest
