"""Tokenizers: what is told of one, and what is said of one that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.support.tokenizers import END, write_tokenizer
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import DataError


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.digest, tokenizer.end) == (256, None, None)
    (ids,) = tokenizer.encoder()(["aé"])
    assert ids.tolist() == list("aé".encode())


def test_a_directory(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    assert tokenizer.end == 0
    ids = tokenizer.encoder()(["the worker waits", ""])
    assert len(ids[0]) < len("the worker waits")
    assert ids[1].tolist() == []
    assert max(ids[0]) < tokenizer.vocabulary <= 300


def test_a_text_cannot_end_its_document(tmp_path: Path) -> None:
    """Read as the special token, the name of it in a text would be the end of a document."""
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    (ids,) = tokenizer.encoder()([f"a {END} b"])
    assert tokenizer.end not in ids


def test_the_digest_is_of_what_decides_the_ids(tmp_path: Path) -> None:
    before = load_tokenizer(str(write_tokenizer(tmp_path / "a")))
    file = tmp_path / "a" / "tokenizer.json"
    document = json.loads(file.read_text())
    canonical = {key: document[key] for key in document.keys() - {"truncation", "padding"}}
    assert before.digest == blake3(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(document, indent=7))
    after = load_tokenizer(str(tmp_path / "a"))
    assert after.digest == before.digest
    assert len(after.encoder()(["never cut at two ids"])[0]) > 2
    other = load_tokenizer(str(write_tokenizer(tmp_path / "b", "quite another text")))
    assert other.digest != before.digest


def test_the_end_may_be_named_as_transformers_names_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, end=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END, "lstrip": False}}))
    assert load_tokenizer(str(tmp_path)).end == 0


def test_a_copy_is_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "a")))
    tokenizer.save(tmp_path / "copy")
    copy = load_tokenizer(str(tmp_path / "copy"))
    assert (copy.digest, copy.end, copy.vocabulary) == (tokenizer.digest, tokenizer.end, tokenizer.vocabulary)


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no end": (
        lambda directory: write_tokenizer(directory, end=None),
        r'tokenizer_config.json, as {"eos_token": "…"}; its special tokens are <',
    ),
    "an end that is no token": (
        lambda directory: write_tokenizer(directory, end="</s>"),
        "tokenizer_config.json or .* names the eos_token '</s>', which .* does not contain",
    ),
    "nothing": (lambda directory: None, "has no tokenizer.json; write one"),
    "damaged": (
        lambda directory: (directory / "tokenizer.json").write_text("{}"),
        "cannot be read by the tokenizers library",
    ),
}


@pytest.mark.parametrize(("write", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_directory_without_a_usable_one(tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_text_that_it_has_no_ids_for(tmp_path: Path) -> None:
    """Some tokenizers name an id for what they do not know, and do not have it."""
    Tokenizer(WordLevel({END: 0, "worker": 1}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    encode = load_tokenizer(str(tmp_path)).encoder()
    assert encode(["worker"])[0].tolist() == [1]
    with pytest.raises(DataError, match="tokenizer.json cannot tokenise this text"):
        encode(["nobody"])


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(DataError, match="'/no/where' is neither a directory"):
        load_tokenizer("/no/where")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(DataError, match=r"'some/one' cannot be fetched .*\(ConnectionError: .*name a directory"):
        load_tokenizer("some/one")


def test_a_repository_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files come into the hub's own cache; those of them that it lacks are not missed."""
    from huggingface_hub.errors import EntryNotFoundError

    directory = write_tokenizer(tmp_path)

    def fetch(repository: str, name: str) -> str:
        assert repository == "some/one"
        if not (directory / name).exists():
            raise EntryNotFoundError("404")
        return str(directory / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert load_tokenizer("some/one").digest == load_tokenizer(str(directory)).digest
