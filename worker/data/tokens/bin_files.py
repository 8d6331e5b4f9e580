"""Token files of nanoGPT and llm.c: token sets without an index, which is made in memory.

nanoGPT's files contain only ids, uint16 unless `data.dtype` says uint32. llm.c's begin with a header of 256 int32: the
first is 20240520 for uint16 ids (GPT-2) or 20240801 for uint32 ids (Llama 3), the third the number of tokens. Files
with the word val in their names are held out; if there are none, the end of the last file is.

Wider ids that are read as narrower ones would be trained on with a 0, or the same small number, at every other place.
No text has that, so such a file is rejected.

A large file becomes several shards, which bounds the size of the order of one shard's sequences.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
from blake3 import blake3

from worker.data.sources.files import NamedFiles, changed, python_command
from worker.data.tokens.index import DtypeName, Index, Shard, item_of
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError

SHARD_TOKENS = 1 << 26
HEADER_BYTES = 1024
MAGICS: dict[int, DtypeName] = {20240520: "uint16", 20240801: "uint32"}
HEADERLESS: DtypeName = "uint16"
LARGEST_VOCABULARY = 1 << 20  # of ids that are noticed when they are read as narrower ones
_HELD_OUT = re.compile(r"(^|[^a-z])val(id|idation)?([^a-z]|$)")
_CHUNK_BYTES = 1 << 20
_LEAST_IDS = 16  # by which wider ids are noticed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _File:
    name: str
    path: Path
    dtype: DtypeName
    offset: int
    tokens: int


def index_of(
    files: NamedFiles, source: str, holdout: float, tokenizer: Tokenizer | None, dtype: DtypeName | None = None
) -> Index:
    """Return the index of token files. Reads all of them once, for their digests and the largest id. `dtype`: of files
    without a header; None: uint16.

    Without a tokenizer, the vocabulary is the largest id plus one. Raises DataError.
    """
    described = [_describe(name, path, dtype) for name, path in files]
    dtypes = {each.dtype: each for each in described}
    if len(dtypes) > 1:
        names = " and ".join(f"{each.path} ({dtype})" for dtype, each in sorted(dtypes.items()))
        raise DataError(f"data.source = {source!r} has ids of two dtypes: {names}; select files of one with a glob")
    size = sum(path.stat().st_size for _, path in files)
    log.info("reading %s once to compute its digest: %.1f GB", source, size / 1e9)
    held_out = held_out_files(files)
    (found,) = dtypes
    parts: tuple[list[Shard], list[Shard]] = ([], [])
    largest = 0
    last = None if held_out else described[-1]
    for each in described:
        border = each.tokens - int(each.tokens * holdout) if each is last else each.tokens
        for first, end in ((0, border), (border, each.tokens)):  # no shard is of both
            for start in range(first, end, SHARD_TOKENS):
                stop = min(start + SHARD_TOKENS, end)
                digest, most = _read(each, start, stop)
                largest = max(largest, most)
                offset = each.offset + start * item_of(found).itemsize
                shard = Shard(file=each.name, offset=offset, tokens=stop - start, digest=digest)
                parts[each.name in held_out or start >= border].append(shard)
    if tokenizer is not None and largest >= tokenizer.vocabulary:
        raise DataError(
            f"data.source = {source!r} contains the token id {largest}, but the ids of data.tokenizer = "
            f"{tokenizer.name!r} end at {tokenizer.vocabulary - 1}: the files were made with another tokenizer, or are "
            f"not {found}"
        )
    return Index(
        dtype=found,
        vocabulary=largest + 1 if tokenizer is None else tokenizer.vocabulary,
        tokenizer=None if tokenizer is None else tokenizer.name,
        tokenizer_digest=None if tokenizer is None else tokenizer.digest,
        end=None if tokenizer is None else tokenizer.end,
        source=source,
        training=parts[0],
        held_out=parts[1],
    )


def held_out_files(files: NamedFiles) -> set[str]:
    """Return the files that are held out by their names."""
    return {name for name, _ in files if _HELD_OUT.search(PurePath(name).name.lower())}


def _describe(name: str, path: Path, given: DtypeName | None) -> _File:
    """Return the contents of a file. Raises DataError if its header and its size disagree, or its header and the
    `given` dtype, or if its ids are wider than that."""
    size = path.stat().st_size
    with path.open("rb") as file:
        beginning = file.read(_CHUNK_BYTES)
    head = np.frombuffer(beginning, "<i4", count=min(3, size // 4))
    if len(head) == 3 and int(head[0]) in MAGICS:
        dtype, tokens = MAGICS[int(head[0])], int(head[2])
        wanted = HEADER_BYTES + tokens * item_of(dtype).itemsize
        if size != wanted:
            raise DataError(
                f"{path} has {size} bytes, but the {tokens} {dtype} tokens in its header need {wanted}: it is cut "
                "short or damaged; fetch or make it again"
            )
        if given not in (None, dtype):
            raise DataError(f"{path} has {dtype} ids by its header, but data.dtype is {given}; leave data.dtype out")
        return _File(name, path, dtype, HEADER_BYTES, tokens)
    dtype = given or HEADERLESS
    if size % item_of(dtype).itemsize:
        raise DataError(f"{path} has {size} bytes, not a whole number of {dtype} ids; make it again")
    _check_width(path, beginning, dtype)
    return _File(name, path, dtype, 0, size // item_of(dtype).itemsize)


def _check_width(path: Path, content: bytes, dtype: DtypeName) -> None:
    """Raise DataError if the ids at the beginning of a file are wider than `dtype`."""
    if not _is_wider(content, item_of(dtype).itemsize):
        return
    wider, remedy = "uint32", 'set data.dtype = "uint32"'
    if _is_wider(content, 4):
        read, write = str(path), str(path.with_suffix(".uint32.bin"))
        code = f"import numpy; numpy.fromfile({read!r}, 'int64').astype('uint32').tofile({write!r})"
        wider, remedy = "int64", f"{remedy} and name a file of such ids: {python_command(code)}"
    raise DataError(f"{path} is read as {dtype}, but every other id is 0 or nearly: its ids are {wider}; {remedy}")


def _is_wider(content: bytes, size: int) -> bool:
    """Return True if ids of `size` bytes are the halves of wider ones: every other id would be 0 or, for a vocabulary
    above that of `size` bytes, a small number."""
    ids = np.frombuffer(content, f"<u{size}", count=len(content) // (2 * size) * 2)
    if len(ids) < _LEAST_IDS:
        return False
    low, high = int(ids[::2].max()), int(ids[1::2].max())
    return low > 0 and high <= (LARGEST_VOCABULARY >> 8 * size) * (low >= 1 << 12)


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
