"""Files that are named as text and are none: compressed, an image, binary. Trained on as text, nobody would notice."""

from pathlib import Path

from worker.data.sources.files import Named
from worker.errors import DataError

_HEAD_BYTES = 8000  # as far as git looks for a NUL

_UNPACK = "unpack it, or give .txt or .jsonl with .gz or .zst, by these names"
_ALONE = "name the text files alone, as DIR/*.txt"
_BEGINNINGS: dict[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xfd7zXZ\x00": ("compressed by xz", "unpack it"),
    **{b"BZh%d1AY&SY" % level: ("compressed by bzip2", "unpack it") for level in range(1, 10)},
    b"PAR1": ("parquet", "let its name end with .parquet"),
    b"\x89PNG\r\n": ("a PNG image", _ALONE),
    b"\xff\xd8\xff": ("a JPEG image", _ALONE),
    b"GIF87a": ("a GIF image", _ALONE),
    b"GIF89a": ("a GIF image", _ALONE),
    b"%PDF-": ("a PDF document", _ALONE),
}
_BINARY = ("binary: there is a NUL byte in it", _ALONE)


def check_text(source: str, files: Named) -> None:
    """Raise DataError for a file that begins as no text does, and OSError."""
    for name, path in files:
        found = _found(path)
        if found is not None:
            what, remedy = found
            raise DataError(f"data.source = {source!r}: {name} is not text but {what}; {remedy}")


def _found(path: Path) -> tuple[str, str] | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for beginning, found in _BEGINNINGS.items():
        if head.startswith(beginning):
            return found
    return _BINARY if b"\0" in head else None
