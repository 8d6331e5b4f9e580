"""The index of a token set, index.json, which lists its shards.

A shard consists of little-endian token ids and nothing else: the .bin format of nanoGPT. Its `offset` is where they
begin in the file, so a file with a header, or a part of a large file, can be a shard without being rewritten. A set of
conversations (format 2) has ids with marks, in sequences of fixed length. docs/wire-format.md describes both formats.
"""

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from protocol.messages import HexDigest
from protocol.validation_errors import explain_all
from worker.data.tokens.answers import TrainOn
from worker.data.tokens.marks import IDS
from worker.errors import DataError

FILE = "index.json"
UNFINISHED = ".unfinished-token-set"  # a file in the directory of a set that is being prepared
DTYPES = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}  # the largest vocabulary of each

DtypeName = Literal["uint8", "uint16", "uint32"]
Item = np.dtype[np.uint8] | np.dtype[np.uint16] | np.dtype[np.uint32]

AGAIN = "fetch it again, or prepare the set again"
_BYTES_PER_TOKEN = 1 << 20  # upper limit; a word that a tokenizer does not know may be one token, however long
_FAULTS = 5  # rows that are skipped, and shown

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Shard(_Strict):
    """A shard: `tokens` ids in `file`, beginning at byte `offset`, and the BLAKE3 of their bytes.

    `documents` and `bytes` (of text) count the documents and pieces of text that begin in it; None if unknown.
    `trained` counts the tokens that are trained on, in a set of conversations; None in any other.
    """

    file: str
    offset: _Count = 0
    tokens: Annotated[int, Field(gt=0, lt=1 << 62)]
    digest: HexDigest
    documents: _Count | None = None
    bytes: _Count | None = None
    trained: _Count | None = None

    @field_validator("file")
    @classmethod
    def _below_the_index(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name or not file.isprintable():
            raise ValueError("not the name of a file in the directory of the index or below")
        return file


class LeftOut(_Strict):
    """What a set of conversations leaves out.

    truncated   conversations that are too long for a sequence
    dropped     conversations without anything to train on, by reason
    longest     tokens of the longest conversation before it was truncated
    ignored     answers that are not trained on, by reason
    skipped     rows that are no conversation, or that the chat template rejects
    faults      what is wrong with the first of them, by file and line
    split       conversations that became several, each an answer's own
    repeated    tokens that these repeat
    """

    truncated: _Count = 0
    dropped: dict[str, _Count] = Field(default_factory=dict)
    longest: _Count = 0
    ignored: dict[str, _Count] = Field(default_factory=dict)
    skipped: _Count = 0
    faults: tuple[str, ...] = ()
    split: _Count = 0
    repeated: _Count = 0

    def __add__(self, other: "LeftOut") -> "LeftOut":
        added = {key: getattr(self, key) + getattr(other, key) for key in ("truncated", "skipped", "split", "repeated")}
        return LeftOut(
            dropped=_sum(self.dropped, other.dropped),
            longest=max(self.longest, other.longest),
            ignored=_sum(self.ignored, other.ignored),
            faults=(*self.faults, *other.faults)[:_FAULTS],
            **added,
        )


def _sum(counts: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(counts) + Counter(others)).items()))


class Conversations(LeftOut):
    """A set of conversations, in sequences of `sequence_length` tokens and the one after them. `packing`: a sequence
    may have several."""

    sequence_length: Annotated[int, Field(gt=0, le=1 << 24)]
    train_on: TrainOn
    packing: bool

    def left_out(self) -> list[str]:
        """Return what was left out, and what was repeated, a sentence each."""
        sentences = [f"{count:,} conversations were dropped: {reason}" for reason, count in self.dropped.items()]
        sentences += [f"{count:,} answers are not trained on: {reason}" for reason, count in self.ignored.items()]
        if self.skipped:
            more = "" if self.skipped <= len(self.faults) else f"; and {self.skipped - len(self.faults):,} more"
            sentences.append(f"{self.skipped:,} rows were skipped: {'; '.join(self.faults)}{more}")
        if self.split:
            sentences.append(
                f"{self.split:,} conversations are there once for each answer, since the chat template renders earlier "
                f"answers differently: these repeat {self.repeated:,} tokens"
            )
        if self.truncated:
            sentences.append(
                f"{self.truncated:,} conversations were truncated to {self.sequence_length + 1:,} tokens; the longest "
                f"has {self.longest:,}"
            )
        return sentences


class Index(_Strict):
    """A token set: how to read its ids, and its shards in order. Of format 2 if it has `conversations`."""

    format: Literal[1, 2] = 1
    dtype: DtypeName
    vocabulary: Annotated[int, Field(gt=0, le=1 << 32)]  # ids are below this
    tokenizer: str | None  # its name on the machine where the set was made; None if unknown
    tokenizer_digest: HexDigest | None
    end: _Count | None  # the id after each document; None if there is no such id
    source: str
    made_from: HexDigest | None = None  # the digest of its `Recipe`, by which a set is found instead of made again
    training: Annotated[list[Shard], FailFast()]
    held_out: Annotated[list[Shard], FailFast()]
    conversations: Conversations | None = None

    @model_validator(mode="after")
    def _format_fits(self) -> "Index":
        conversations = self.conversations
        if (self.format == 2) != (conversations is not None):
            raise ValueError(f"format {self.format} {'needs' if self.format == 2 else 'has no'} conversations")
        if conversations is None:
            if any(shard.trained is not None for shard in self.shards):
                raise ValueError("a shard of format 1 has no trained")
            return self
        if self.dtype != "uint32" or self.vocabulary > IDS:
            raise ValueError(f"format 2 has ids below {IDS} in uint32")
        for shard in self.shards:
            if shard.tokens % self.row_tokens:
                raise ValueError(
                    f"{shard.file} has {shard.tokens} tokens, no multiple of the {self.row_tokens} of a sequence"
                )
            if not 0 < (shard.trained or 0) <= shard.tokens:
                raise ValueError(f"{shard.file} trains on {shard.trained} of {shard.tokens} tokens")
        return self

    @model_validator(mode="after")
    def _room_for_every_id(self) -> "Index":
        if self.vocabulary > DTYPES[self.dtype]:
            raise ValueError(f"dtype {self.dtype} is too small for a vocabulary of {self.vocabulary}")
        if self.end is not None and self.end >= self.vocabulary:
            raise ValueError(f"end = {self.end} is not below vocabulary = {self.vocabulary}")
        if (self.bytes_per_token or 0) > _BYTES_PER_TOKEN:
            raise ValueError(f"{self.bytes_per_token:.3g} bytes of text per held-out token are not plausible")
        return self

    @property
    def item(self) -> Item:
        """The dtype of an id in a shard."""
        return item_of(self.dtype)

    @property
    def shards(self) -> list[Shard]:
        """All shards, the held-out ones last."""
        return [*self.training, *self.held_out]

    @property
    def row_tokens(self) -> int:
        """Tokens of one sequence of a set of conversations; the set must be one."""
        assert self.conversations is not None
        return self.conversations.sequence_length + 1

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token of the held-out part; None if unknown, if nothing is held out, or for a set of
        conversations, whose loss is that of a part of the text."""
        if self.conversations is not None:
            return None
        known = [(shard.bytes, shard.tokens) for shard in self.held_out if shard.bytes is not None]
        if len(known) < len(self.held_out) or not known:
            return None
        return sum(size for size, _ in known) / sum(tokens for _, tokens in known)

    def digest(self) -> str:
        """Return the digest of the set: of its shards' contents, whatever their files and the tokenizer are called."""
        fields = {"format", "dtype", "vocabulary", "tokenizer_digest", "end", "training", "held_out"}
        names = {"__all__": {"file", "offset"} | ({"trained"} if self.format == 1 else set())}
        content = self.model_dump(include=fields, exclude={"training": names, "held_out": names})
        if self.conversations is not None:
            content["sequence_length"] = self.conversations.sequence_length
        return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def text(self) -> str:
        """Return the content of index.json."""
        shards = {"__all__": {"trained"}}
        only_format_2: Any = {"conversations": True, "training": shards, "held_out": shards}
        document = self.model_dump(exclude=only_format_2 if self.format == 1 else None)
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def item_of(dtype: DtypeName) -> Item:
    """Return the dtype of an id in a shard, little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def dtype_for(vocabulary: int) -> DtypeName:
    """Return the smallest dtype for the vocabulary."""
    return "uint8" if vocabulary <= DTYPES["uint8"] else "uint16" if vocabulary <= DTYPES["uint16"] else "uint32"


def is_token_set(directory: Path) -> bool:
    """Return True if the directory contains a token set, finished or not. A directory of text may contain an index.json
    too, and the shards of an unfinished set must not be read as text."""
    file = directory / FILE
    if (directory / UNFINISHED).is_file():
        return True
    return file.is_file() and (any(directory.glob("*.bin")) or b'"tokenizer_digest"' in file.read_bytes())


def read_index(file: Path) -> Index:
    """Return the index in `file`. Raises DataError if it cannot be read or is not consistent."""
    try:
        return parse_index(file.read_bytes(), str(file))
    except FileNotFoundError as error:
        directory, begun = file.parent, (file.parent / UNFINISHED).exists()
        if not directory.is_dir():
            raise DataError(f"no directory {directory}; make a token set with `outerstep data prepare`") from error
        what = "is not finished; run `outerstep data prepare` again" if begun else "is not a token set"
        raise DataError(f"{directory} {what} (it has no {file.name})") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def parse_index(content: bytes, name: str) -> Index:
    """Parse the content of the index file called `name`. Raises DataError if it is not consistent."""
    try:
        return Index.model_validate_json(content)
    except ValidationError as error:
        faults = explain_all(error.errors(), most=3)
        raise DataError(f"{name} is not the index of a token set: {faults}; prepare the set again") from error


def complete_index(directory: Path) -> Index:
    """Return the index of the token set in `directory`. Raises DataError also unless every file of it exists and has
    the size that the index implies."""
    index = read_index(directory / FILE)
    wanted: dict[str, int] = {}
    for shard in index.shards:
        end = shard.offset + shard.tokens * index.item.itemsize
        wanted[shard.file] = max(wanted.get(shard.file, 0), end)
    for name, size in wanted.items():
        file = directory / name
        try:
            found = file.stat().st_size
        except OSError as error:
            raise DataError(
                f"{file} is missing ({error.strerror}), but listed in {directory / FILE}; {AGAIN}"
            ) from error
        if found != size:
            what = "cut short" if found < size else "too long"
            raise DataError(
                f"{file} has {found} bytes instead of the {size} in {directory / FILE}: it is {what}; {AGAIN}"
            )
    return index


def described(name: str, digest: str | None) -> str:
    """Return a tokenizer's name and the beginning of its digest, for messages."""
    return f"{name!r}" if digest is None else f"{name!r} (BLAKE3 {digest[:16]}…)"
