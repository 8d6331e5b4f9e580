"""The index of a token set: index.json, which says what its shards are and have to be.

A shard is a file of little-endian token ids and nothing else, which is the .bin format of nanoGPT; `offset` is where
they begin in it, so that a file with a header, or a part of a large file, is a shard as it is. docs/wire-format.md has
the format.
"""

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from protocol.messages import HexDigest
from protocol.validation_errors import explain_all
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError

FILE = "index.json"
PROGRESS = "progress.json"  # of a set that is not finished
DTYPES = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}  # and the vocabulary that each has room for

DtypeName = Literal["uint8", "uint16", "uint32"]
Item = np.dtype[np.uint8] | np.dtype[np.uint16] | np.dtype[np.uint32]

_BYTES_PER_TOKEN = 1 << 20  # at most; a word that a tokenizer does not know may be one token, however long

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Shard(_Part):
    """A shard: `tokens` ids in `file`, from byte `offset` on, and the BLAKE3 of their bytes.

    `documents` begin in it, and `bytes` are those of the pieces of text that do; null if nobody knows.
    """

    file: str
    offset: _Count = 0
    tokens: Annotated[int, Field(gt=0, lt=1 << 62)]
    digest: HexDigest
    documents: _Count | None = None
    bytes: _Count | None = None

    @field_validator("file")
    @classmethod
    def _below_the_index(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name or not file.isprintable():
            raise ValueError("this is not the name of a file below the index")
        return file


class Index(_Part):
    """A token set: how its ids are to be read, and its shards in order."""

    format: Literal[1] = 1
    dtype: DtypeName
    vocabulary: Annotated[int, Field(gt=0, le=1 << 32)]  # ids are below this
    tokenizer: str | None  # by whatever name it had where the set was made; None if nobody knows
    tokenizer_digest: HexDigest | None
    end: _Count | None  # the id after each document; None if they are put end to end
    source: str
    made_from: HexDigest | None = None  # of everything that the set was made from, so that it is not made again
    training: Annotated[list[Shard], FailFast()]
    held_out: Annotated[list[Shard], FailFast()]

    @model_validator(mode="after")
    def _room_for_every_id(self) -> "Index":
        if self.vocabulary > DTYPES[self.dtype]:
            raise ValueError(f"dtype {self.dtype} has no room for a vocabulary of {self.vocabulary}")
        if self.end is not None and self.end >= self.vocabulary:
            raise ValueError(f"end = {self.end} is not below vocabulary = {self.vocabulary}")
        if (self.bytes_per_token or 0) > _BYTES_PER_TOKEN:
            raise ValueError(f"no token stands for {self.bytes_per_token:.3g} bytes of text, as those held out would")
        return self

    @property
    def item(self) -> Item:
        """The dtype of an id in a shard."""
        return item_of(self.dtype)

    @property
    def shards(self) -> list[Shard]:
        """All shards, those held out last."""
        return [*self.training, *self.held_out]

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token of the held-out part; None if nobody knows, or nothing is held out."""
        told = [(shard.bytes, shard.tokens) for shard in self.held_out if shard.bytes is not None]
        if len(told) < len(self.held_out) or not told:
            return None
        return sum(size for size, _ in told) / sum(tokens for _, tokens in told)

    def digest(self) -> str:
        """Return the digest of the set: of what its shards hold, whatever they and the tokenizer are called here."""
        fields = {"format", "dtype", "vocabulary", "tokenizer_digest", "end", "training", "held_out"}
        names = {"__all__": {"file", "offset"}}
        content = self.model_dump(include=fields, exclude={"training": names, "held_out": names})
        return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def text(self) -> str:
        """Return the index as it is written."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"


def item_of(dtype: DtypeName) -> Item:
    """Return the dtype of an id in a shard, little-endian whatever the machine."""
    return np.dtype(dtype).newbyteorder("<")


def dtype_for(vocabulary: int) -> DtypeName:
    """Return the smallest dtype that has room for the vocabulary."""
    return "uint8" if vocabulary <= DTYPES["uint8"] else "uint16" if vocabulary <= DTYPES["uint16"] else "uint32"


def is_token_set(directory: Path) -> bool:
    """Return True if the directory has a token set, in whatever state: its index (text may have an index.json too), or
    the beginning of one, whose shards are not to be taken for text."""
    file, progress = directory / FILE, directory / PROGRESS
    if progress.is_file() and b'"made_from"' in progress.read_bytes():
        return True
    return file.is_file() and (any(directory.glob("*.bin")) or b'"tokenizer_digest"' in file.read_bytes())


def read_index(file: Path) -> Index:
    """Return the index in `file`. Raises DataError if it cannot be read or contradicts itself."""
    try:
        return parse_index(file.read_bytes(), str(file))
    except FileNotFoundError as error:
        directory, begun = file.parent, (file.parent / PROGRESS).exists()
        if not directory.is_dir():
            raise DataError(f"there is no directory {directory}; `outerstep data prepare` makes token sets") from error
        what = "is not finished: `outerstep data prepare` goes on with it" if begun else "is no token set"
        raise DataError(f"{directory} {what} (it has no {file.name})") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def parse_index(content: bytes, name: str) -> Index:
    """Return the index that is in the file of that name. Raises DataError if it contradicts itself."""
    try:
        return Index.model_validate_json(content)
    except ValidationError as error:
        faults = explain_all(error.errors(), most=3)
        raise DataError(f"{name} is not the index of a token set: {faults}; prepare the set again") from error


def check_sizes(shards: Iterable[Shard], item: Item, directory: Path) -> None:
    """Raise DataError unless every file of these shards is there and as long as the index says."""
    wanted: dict[str, int] = {}
    for shard in shards:
        end = shard.offset + shard.tokens * item.itemsize
        wanted[shard.file] = max(wanted.get(shard.file, 0), end)
    for name, size in wanted.items():
        file = directory / name
        try:
            found = file.stat().st_size
        except OSError as error:
            raise DataError(f"{file} is missing ({error.strerror}), which {directory / FILE} names; {AGAIN}") from error
        if found != size:
            what = "cut short" if found < size else "longer than it was"
            raise DataError(f"{file} has {found} bytes, {directory / FILE} says {size}: it is {what}; {AGAIN}")


AGAIN = "fetch it again, or prepare the set again"


def check_tokenizer(index: Index, tokenizer: Tokenizer, where: str) -> None:
    """Raise DataError unless the set was made by `tokenizer`, as far as anybody knows."""
    if index.tokenizer is None:
        if tokenizer.vocabulary < index.vocabulary:
            raise DataError(
                f"{where} has token ids up to {index.vocabulary - 1}, data.tokenizer = {tokenizer.name!r} has them "
                f"up to {tokenizer.vocabulary - 1}: it was made by another tokenizer; name that one"
            )
    elif (index.tokenizer_digest, index.end) != (tokenizer.digest, tokenizer.end):
        raise DataError(
            f"{where} was made by the tokenizer {described(index.tokenizer, index.tokenizer_digest)}, data.tokenizer "
            f"is {described(tokenizer.name, tokenizer.digest)}; name that one, or none, or prepare the set again"
        )


def described(name: str, digest: str | None) -> str:
    """Return a tokenizer's name with the beginning of its digest, as people compare them."""
    return f"{name!r}" if digest is None else f"{name!r} (BLAKE3 {digest[:16]}…)"


def total(shards: Iterable[Shard]) -> int:
    """Return the tokens of all shards."""
    return sum(shard.tokens for shard in shards)
