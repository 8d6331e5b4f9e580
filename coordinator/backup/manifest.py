"""The manifest of a backup: what is in it, with the digest of each file. Pure.

A manifest is a line with the BLAKE3 digest of the rest, and the rest, a JSON object. So who holds one that decodes can
tell of each byte of the backup whether it is right.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from protocol.digest import digest

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# What `RunNames` gives: no part begins with a dot, so a name leads nowhere but below `runs/`.
BlobName = Annotated[str, StringConstraints(pattern=r"^runs(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")]


class Part(BaseModel):
    """Of a manifest, or of a listing: immutable, and without a key that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Content(Part):
    """Bytes, by their BLAKE3 digest."""

    digest: Digest
    size: int = Field(ge=0)  # bytes


class Blob(Content):
    """A blob, under its name in the coordinator's store."""

    name: BlobName


class RunSummary(Part):
    """How far a run had come."""

    name: str
    state: str
    round: int


class Manifest(Part):
    """A backup. `lost`: blobs that rows name and that the coordinator itself did not have any more, or not whole."""

    format: Literal[1] = 1
    number: int = Field(ge=1)
    made_at: float  # seconds since 1970
    version: str  # of Outerstep, that made it
    runs: list[RunSummary]
    database: Content
    blobs: list[Blob]
    lost: list[BlobName]

    @property
    def bytes(self) -> int:
        """The bytes of all that is in it, whether other backups share them or not."""
        return self.database.size + sum({blob.digest: blob.size for blob in self.blobs}.values())


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as a file's content."""
    body = manifest.model_dump_json(indent=1).encode() + b"\n"
    return digest(body).hex().encode() + b"\n" + body


def decode(content: bytes) -> Manifest:
    """Return what `encode` was given. Raises ValueError, with what is wrong."""
    told, _, body = content.partition(b"\n")
    if digest(body).hex().encode() != told:
        raise ValueError("its manifest is not what was written")
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        raise ValueError("its manifest is of a later version of Outerstep; use that one") from error
