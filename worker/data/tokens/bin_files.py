"""Token files of nanoGPT and llm.c: token sets without an index, which is made in memory.

nanoGPT's files contain only ids, uint16. llm.c's begin with a header of 256 int32: the first is 20240520 for uint16 ids
(GPT-2) or 20240801 for uint32 ids (Llama 3), the third the number of tokens. Files with the word val in their names
are held out; if there are none, the end of the last file is.

A large file becomes several shards, which bounds the size of the order of one shard's sequences.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
from blake3 import blake3

from worker.data.sources.files import NamedFiles, changed
from worker.data.tokens.index import DtypeName, Index, Shard, item_of
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError

SHARD_TOKENS = 1 << 26
HEADER_BYTES = 1024
MAGICS: dict[int, DtypeName] = {20240520: "uint16", 20240801: "uint32"}
HEADERLESS: DtypeName = "uint16"
_HELD_OUT = re.compile(r"(^|[^a-z])val(id|idation)?([^a-z]|$)")
_CHUNK_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _File:
    name: str
    path: Path
    dtype: DtypeName
    offset: int
    tokens: int


def index_of(files: NamedFiles, source: str, holdout: float, tokenizer: Tokenizer | None) -> Index:
    """Return the index of token files. Reads all of them once, for their digests and the largest id.

    Without a tokenizer, the vocabulary is the largest id plus one. Raises DataError.
    """
    described = [_describe(name, path) for name, path in files]
    dtypes = {each.dtype: each for each in described}
    if len(dtypes) > 1:
        names = " and ".join(f"{each.path} ({dtype})" for dtype, each in sorted(dtypes.items()))
        raise DataError(f"data.source = {source!r} has ids of two dtypes: {names}; select files of one with a glob")
    size = sum(path.stat().st_size for _, path in files)
    log.info("reading %s once to compute its digest: %.1f GB", source, size / 1e9)
    held_out = {each.name for each in described if _HELD_OUT.search(PurePath(each.name).name.lower())}
    (dtype,) = dtypes
    parts: tuple[list[Shard], list[Shard]] = ([], [])
    largest = 0
    last = None if held_out else described[-1]
    for each in described:
        border = each.tokens - int(each.tokens * holdout) if each is last else each.tokens
        for start, stop in _cuts(each.tokens, border):
            digest, most = _read(each, start, stop)
            largest = max(largest, most)
            offset = each.offset + start * item_of(dtype).itemsize
            shard = Shard(file=each.name, offset=offset, tokens=stop - start, digest=digest)
            parts[each.name in held_out or start >= border].append(shard)
    if tokenizer is not None and largest >= tokenizer.vocabulary:
        raise DataError(
            f"data.source = {source!r} contains the token id {largest}, but the ids of data.tokenizer = "
            f"{tokenizer.name!r} end at {tokenizer.vocabulary - 1}: the files were made with another tokenizer, or are "
            f"not {dtype}"
        )
    return Index(
        dtype=dtype,
        vocabulary=largest + 1 if tokenizer is None else tokenizer.vocabulary,
        tokenizer=None if tokenizer is None else tokenizer.name,
        tokenizer_digest=None if tokenizer is None else tokenizer.digest,
        end=None if tokenizer is None else tokenizer.end,
        source=source,
        training=parts[0],
        held_out=parts[1],
    )


def _describe(name: str, path: Path) -> _File:
    """Return the contents of a file. Raises DataError if its header and its size disagree."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = np.frombuffer(file.read(HEADER_BYTES), "<i4", count=min(3, size // 4))
    if len(head) == 3 and int(head[0]) in MAGICS:
        dtype, tokens = MAGICS[int(head[0])], int(head[2])
        wanted = HEADER_BYTES + tokens * item_of(dtype).itemsize
        if size != wanted:
            raise DataError(
                f"{path} has {size} bytes, but the {tokens} {dtype} tokens in its header need {wanted}: it is cut "
                "short or damaged; fetch or make it again"
            )
        return _File(name, path, dtype, HEADER_BYTES, tokens)
    itemsize = item_of(HEADERLESS).itemsize
    if size % itemsize:
        raise DataError(f"{path} has {size} bytes, not a whole number of {HEADERLESS} ids; make it again")
    return _File(name, path, HEADERLESS, 0, size // itemsize)


def _cuts(tokens: int, border: int) -> Iterator[tuple[int, int]]:
    """Yield the shards of a file, [start, stop). None crosses the border between training and held-out tokens."""
    for first, end in ((0, border), (border, tokens)):
        for start in range(first, end, SHARD_TOKENS):
            yield start, min(start + SHARD_TOKENS, end)


def _read(each: _File, start: int, stop: int) -> tuple[str, int]:
    """Return digest and largest id of the tokens [start, stop) of a file."""
    item, hasher, largest = item_of(each.dtype), blake3(), 0
    left = (stop - start) * item.itemsize
    with each.path.open("rb") as file:
        file.seek(each.offset + start * item.itemsize)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            hasher.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, item).max()))
            left -= len(chunk)
    if left:
        raise changed(each.path)
    return hasher.hexdigest(), largest
