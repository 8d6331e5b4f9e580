"""The manifest of a backup: what the backup contains, with the digest of each file. Pure.

A manifest is one line with the BLAKE3 digest of the rest, followed by a JSON object. So if a manifest can be decoded,
every byte of the backup can be verified.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from protocol.digest import digest

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Names as `RunNames` makes them. No part begins with a dot, so a name cannot point outside of `runs/`.
BlobName = Annotated[str, StringConstraints(pattern=r"^runs(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")]


class Frozen(BaseModel):
    """An immutable model that allows no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Content(Frozen):
    """The digest and size of some bytes."""

    digest: Digest
    size: int = Field(ge=0)  # bytes


class Blob(Content):
    """A blob, with its name in the coordinator's store."""

    name: BlobName


class RunSummary(Frozen):
    """A run and its progress."""

    name: str
    state: str
    round: int


class Manifest(Frozen):
    """A backup. `lost`: blobs that rows name, but that were missing or damaged in the coordinator's own store."""

    format: Literal[1] = 1
    number: int = Field(ge=1)
    made_at: float  # seconds since 1970
    version: str  # of the Outerstep that made it
    runs: list[RunSummary]
    database: Content
    blobs: list[Blob]
    lost: list[BlobName]

    @property
    def bytes(self) -> int:
        """Size of the database and of all blobs, including those that other backups share."""
        return self.database.size + sum({blob.digest: blob.size for blob in self.blobs}.values())


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as the content of a file."""
    body = manifest.model_dump_json(indent=1).encode() + b"\n"
    return digest(body).hex().encode() + b"\n" + body


def decode(content: bytes) -> Manifest:
    """Return the manifest that was encoded. Raises ValueError with the reason."""
    expected, _, body = content.partition(b"\n")
    if digest(body).hex().encode() != expected:
        raise ValueError("its manifest is not what was written")
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        raise ValueError("its manifest is of a later version of Outerstep; use that one") from error
