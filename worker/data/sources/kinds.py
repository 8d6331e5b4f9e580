"""The kind of a file: by the end of its name, and by a look at its content.

Every file that is not recognised by its name is text. So a file whose content is something else would be trained on
without anybody noticing: a compressed file, an image, or JSON lines with all their keys. Such a file is rejected.
"""

import codecs
import json
from pathlib import Path, PurePath

from outerstep.common.connections import error_text
from protocol.text import UTF_16, is_utf_16
from worker.data.sources.contents import beginning
from worker.data.sources.files import NamedFiles, python_command
from worker.errors import DataError

TEXT, JSONL, PARQUET, BIN, ARCHIVE, HUB = "text", "JSON lines", "parquet", "tokens", "compressed files", "hub"
COMPRESSED_TEXT, COMPRESSED_JSONL = "compressed text", "compressed JSON lines"
JSON, ARRAY, CSV, TSV = "JSON", "a JSON array", "CSV", "TSV"

_KINDS = {".parquet": PARQUET, ".bin": BIN, ".json": JSON, ".csv": CSV, ".tsv": TSV}
_KINDS |= dict.fromkeys((".jsonl", ".jsonlines", ".ndjson"), JSONL)
_KINDS |= dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), ARCHIVE)
for _ending in (".gz", ".zst"):  # C4's files are .json.gz
    _KINDS |= {f".txt{_ending}": COMPRESSED_TEXT}
    _KINDS |= dict.fromkeys(
        (f"{each}{_ending}" for each in (".json", ".jsonl", ".jsonlines", ".ndjson")), COMPRESSED_JSONL
    )

# How `datasets` reads what is not read here.
_LOADERS = {
    ARRAY: "'json', data_files={!r}",
    CSV: "'csv', data_files={!r}, keep_default_na=False",
    TSV: "'csv', data_files={!r}, keep_default_na=False, sep='\\t'",
}

_HEAD_BYTES, _JSON_BYTES = 8000, 1 << 20
_LINES = 3  # text is taken for JSON lines if so many are objects, or all if it has fewer

_UNPACK = "unpack it, or rename it to end in .txt or .jsonl followed by .gz or .zst"
_ALONE = "select the text files only, as in DIR/*.txt"
_BEGINNINGS: dict[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xfd7zXZ\x00": ("compressed by xz", "unpack it"),
    **{b"BZh%d1AY&SY" % level: ("compressed by bzip2", "unpack it") for level in range(1, 10)},
    b"PAR1": ("parquet", "rename it to end in .parquet"),
    b"\x89PNG\r\n": ("a PNG image", _ALONE),
    b"\xff\xd8\xff": ("a JPEG image", _ALONE),
    b"GIF87a": ("a GIF image", _ALONE),
    b"GIF89a": ("a GIF image", _ALONE),
    b"%PDF-": ("a PDF document", _ALONE),
}
_BINARY = ("binary: it contains a NUL byte", _ALONE)


def kind_of_files(source: str, files: NamedFiles) -> str:
    """Return the kind of the files of `source`. Raises DataError if they have several kinds, if theirs cannot be read,
    or if the content of a file contradicts its name."""
    try:
        kinds = {_kind(source, name, path): (name, path) for name, path in files}
    except OSError as error:
        raise DataError(f"data.source = {source!r}: {error_text(error)}") from error
    if len(kinds) > 1:
        mixed = ", ".join(f"{kind} ({name})" for kind, (name, _) in sorted(kinds.items()))
        raise DataError(
            f"data.source = {source!r} has files of several kinds: {mixed}; select one kind, as in DIR/*.jsonl or "
            "DIR/*.txt"
        )
    ((kind, (name, path)),) = kinds.items()
    if kind in _LOADERS:
        raise _not_text(source, name, kind, f"write it as JSON lines and name these: {_rewritten(kind, path)}")
    if kind == JSON:
        raise _not_text(source, name, kind, f"{_ALONE}, or write one object per line and rename it to end in .jsonl")
    if kind == ARCHIVE:
        raise _not_text(source, name, kind, "only .jsonl and .txt followed by .gz or .zst can be read compressed")
    return kind


def _rewritten(kind: str, path: Path) -> str:
    """Return the command that writes a table as JSON lines beside it."""
    load, lines = _LOADERS[kind].format(str(path)), path.with_suffix(".jsonl")
    if lines == path:
        lines = path.with_suffix(".rows.jsonl")
    code = f"from datasets import load_dataset; load_dataset({load}, split='train').to_json({str(lines)!r})"
    return f"pip install 'outerstep[data]' && {python_command(code)}"


def named_kind(file: str) -> str:
    """Return the kind of a file by the end of its name."""
    suffixes = [suffix.lower() for suffix in PurePath(file).suffixes[-2:]] or [""]
    return _KINDS.get("".join(suffixes)) or _KINDS.get(suffixes[-1], TEXT)


def first_with_crlf(files: NamedFiles) -> str | None:
    """Return the name of the first of these text files in whose beginning a line ends with CRLF; None if none has."""
    return next((name for name, path in files if b"\r\n" in beginning(path, _HEAD_BYTES)), None)


def _kind(source: str, name: str, path: Path) -> str:
    kind = named_kind(name)
    if kind not in (TEXT, COMPRESSED_TEXT, JSON, JSONL, COMPRESSED_JSONL):
        return kind
    head = beginning(path, _HEAD_BYTES)
    if is_utf_16(head):
        raise DataError(f"data.source = {source!r}: {name} is {UTF_16}")
    begins_json = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    found = _json_kind(beginning(path, _JSON_BYTES), kind) if begins_json else None
    if kind in (JSONL, COMPRESSED_JSONL):
        return found or kind
    for start, (what, remedy) in _BEGINNINGS.items():
        if head.startswith(start):
            raise _not_text(source, name, what, remedy)
    if b"\0" in head:
        raise _not_text(source, name, *_BINARY)
    if kind == JSON:
        return found or (JSON if head.strip() else JSONL)
    if found is not None:
        ending = ".json" if found == ARRAY else ".jsonl"
        raise _not_text(
            source, name, found, f"rename it to end in {ending}{PurePath(name).suffix if kind != TEXT else ''}"
        )
    return kind


def _json_kind(head: bytes, kind: str) -> str | None:
    """Return whether a file of this `kind` by its name, which begins with { or [, has JSON lines or a JSON array. None
    if it has what its name says, or any other JSON."""
    text = head.decode("utf-8-sig", "replace").lstrip()
    if text.startswith("["):
        return ARRAY if kind == JSON or _object(text[1:].lstrip()) else None
    if kind in (JSONL, COMPRESSED_JSONL):
        return None
    complete = len(head) < _JSON_BYTES
    lines = [line for line in text.split("\n")[: None if complete else -1] if line.strip()]
    if not lines:  # the first line is longer than the head
        return JSONL if kind == JSON else None
    wanted = lines[: 1 if kind == JSON else _LINES]
    return JSONL if all(_object(line, whole=True) for line in wanted) else None


def _object(text: str, *, whole: bool = False) -> bool:
    """Return True if the text begins with a JSON object that is not empty, or is `whole` one."""
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool(found) and not (whole and text[end:].strip())


def _not_text(source: str, name: str, what: str, remedy: str) -> DataError:
    return DataError(f"data.source = {source!r}: {name} is not text but {what}; {remedy}")
