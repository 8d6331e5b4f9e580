"""Tokenizers: bytes, a directory with a tokenizer.json, or a repository of the Hugging Face hub that contains one.

They are read with `tokenizers` only. Every tokenizer that transformers can load in its fast form has a tokenizer.json,
which determines the ids of a text completely. So its digest and the end-of-document id are what workers have to agree
on. A "<|endoftext|>" in a text is tokenised as text, never as the special token.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.text import decoded
from worker.errors import DataError

IN_BYTES = "bytes"
BYTES = 256  # the vocabulary of text that is read as bytes
FILE = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a directory with others
_SPECIAL_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # they name the special tokens
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Ids = npt.NDArray[np.uint32]  # from a tokenizer
Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]  # in shards


@dataclass(frozen=True)
class Tokenizer:
    """The description of a tokenizer, which can be sent to other processes; `encoder` loads it.

    Ids are below `vocabulary`. `end` is the id after each document. `begin` and `pad` are the ids of its bos_token and
    pad_token; None if it has none. For bytes, `digest`, `end` and `file` are None too.
    """

    name: str
    vocabulary: int
    digest: str | None = None
    end: int | None = None
    file: Path | None = None
    begin: int | None = None
    pad: int | None = None

    def encoder(self) -> Callable[[Sequence[str]], list[Ids]]:
        """Return a function that tokenises several texts at once, without adding special tokens."""
        if self.file is None:
            return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        fast = self.fast()

        def encode(texts: Sequence[str]) -> list[Ids]:
            try:
                found = fast.encode_batch_fast(texts, add_special_tokens=False)
            except Exception as error:  # tokenizers raises Exception itself
                raise DataError(
                    f"{self.file} cannot tokenise this text: {error}; fix it, or name another tokenizer"
                ) from error
            return [np.array(each.ids, np.uint32) for each in found]

        return encode

    def fast(self) -> Any:
        """Return a new `tokenizers.Tokenizer` without truncation and padding, which takes special tokens as text.
        Raises DataError for bytes, and if its file cannot be read."""
        if self.file is None:
            raise DataError(f'data.tokenizer = "{self.name}" has no {FILE}; name a tokenizer')
        return _fast(self.file.read_bytes(), self.file)

    def save(self, directory: Path) -> None:
        """Copy its files into `directory`, from which `load_tokenizer` can load it, and its chat templates. Does
        nothing for bytes."""
        if self.file is None:
            return
        directory.mkdir(exist_ok=True)
        root = self.file.parent
        for path in (root / FILE, *(root / name for name in _SPECIAL_FILES), *template_files(root)):
            if path.is_file():
                copy = directory / path.relative_to(root)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def template_files(directory: Path) -> list[Path]:
    """Return the files with chat templates in a tokenizer's directory, the default one first."""
    return [*directory.glob(TEMPLATE), *sorted((directory / TEMPLATES).glob("*.jinja"))]


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`. Raises DataError if it cannot be loaded or has no end-of-document token."""
    if name == IN_BYTES:
        return Tokenizer(IN_BYTES, BYTES)
    directory = Path(name).expanduser()
    if not directory.is_dir():
        if directory.exists() or not _HUB_ID.fullmatch(name):
            raise DataError(
                f"data.tokenizer = {name!r} is neither a directory on this machine nor the id of a hub repository"
            )
        directory = _download(name)
    file = directory / FILE
    if not file.is_file():
        raise DataError(
            f"data.tokenizer = {name!r}: {directory} has no {FILE}; write one there with "
            "transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    content = file.read_bytes()
    fast = _fast(content, file)
    vocabulary = max(fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    begin, pad = (_special(directory, fast, token) for token in ("bos_token", "pad_token"))
    end = _end(directory, fast, name)
    return Tokenizer(name, vocabulary, _digest(content), end, file, begin, pad)


def _fast(content: bytes, file: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Fast
    except ModuleNotFoundError as error:
        raise DataError(
            f"{file} needs tokenizers, which is not installed; run: pip install 'outerstep[worker]'"
        ) from error
    try:
        fast = Fast.from_str(decoded(content))
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"{file} cannot be read by the tokenizers library: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True  # as text
    return fast


def _digest(content: bytes) -> str:
    """Return the BLAKE3 of the file as canonical JSON, without the truncation and padding it was saved with."""
    document = json.loads(content)
    kept = {key: value for key, value in document.items() if key not in ("truncation", "padding")}
    return blake3(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _end(directory: Path, fast: Any, name: str) -> int:
    """Return the id that ends a document: the eos_token's."""
    if (found := _special(directory, fast, "eos_token")) is not None:
        return found
    special = [str(each) for each in fast.get_added_tokens_decoder().values() if each.special]
    raise DataError(
        f"data.tokenizer = {name!r} does not define which token ends a document; name it in "
        f'{directory / _SPECIAL_FILES[0]}, as {{"eos_token": "…"}}'
        + (f"; its special tokens are {', '.join(special)}" if special else "")
    )


def _special(directory: Path, fast: Any, key: str) -> int | None:
    """Return the id of the special token that the tokenizer's files name as `key`; None if they name none."""
    if (text := special_tokens(directory).get(key)) is None:
        return None
    if (found := fast.token_to_id(text)) is None:
        raise DataError(
            f"{directory / _SPECIAL_FILES[0]} or {_SPECIAL_FILES[1]} names the {key} {text!r}, which "
            f"{directory / FILE} does not contain; name one of its tokens, or train it with that special token"
        )
    return int(found)


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of the special tokens that the tokenizer's files name, by key: bos_token, eos_token etc."""
    named: dict[str, str] = {}
    for file in reversed(_SPECIAL_FILES):
        for key, token in read_json(directory / file).items():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
    return named


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no such file. Raises DataError."""
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _download(name: str) -> Path:
    """Return the directory with the tokenizer's files, downloaded from the hub unless they are in its local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        file = Path(hf_hub_download(name, FILE))
        for each in (*_SPECIAL_FILES, TEMPLATE, f"{TEMPLATES}/tool_use.jinja"):
            try:
                hf_hub_download(name, each)
            except EntryNotFoundError:
                continue  # one special file suffices; `_end` raises if there is none
    except Exception as error:  # from the hub, from the HTTP client of its version, from the disk
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.tokenizer = {name!r} cannot be fetched from the hub ({type(error).__name__}: {reason}); name a "
            f"directory with its {FILE} and {_SPECIAL_FILES[0]}, or fetch it while the hub can be reached (private "
            "repositories need HF_TOKEN)"
        ) from error
    return file.parent
