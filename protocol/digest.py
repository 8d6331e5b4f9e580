"""BLAKE3 digests of payloads and of outer states.

A *payload digest* is the BLAKE3 of the whole payload; in hexadecimal it is also the payload's ETag.

A *state digest* is equal if two replicas hold the same fragment bit for bit: the BLAKE3 of the 64 bytes
BLAKE3(θ) ‖ BLAKE3(u), where θ and the outer momentum u are little-endian fp32. They are hashed separately, so that both
can be fed chunk by chunk in one pass over memory.
"""

import base64
import binascii
from collections.abc import Iterable

from blake3 import blake3

DIGEST_BYTES = 32

# For a numpy array, pass its `.data`.
Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> bytes:
    """Return the BLAKE3 of `data`, 32 bytes."""
    return blake3(_as_bytes(data)).digest()


def _as_bytes(data: Buffer) -> Buffer:
    """Return `data` as a buffer of bytes, the only kind that blake3 accepts; an array's items are floats."""
    return data.cast("B") if isinstance(data, memoryview) else data


class StateHash:
    """The hash of one fragment's state, fed chunk by chunk."""

    def __init__(self) -> None:
        self._theta = blake3()
        self._momentum = blake3()

    def update(self, theta: Buffer, momentum: Buffer) -> None:
        self._theta.update(_as_bytes(theta))
        self._momentum.update(_as_bytes(momentum))

    def digest(self) -> bytes:
        return blake3(self._theta.digest() + self._momentum.digest()).digest()


def model_digest(fragment_digests: Iterable[bytes]) -> bytes:
    """Return the digest of a whole outer state: BLAKE3 of its fragments' state digests, in order."""
    return blake3(b"".join(fragment_digests)).digest()


def content_digest(value: bytes) -> str:
    """Return `value` as a Content-Digest or Repr-Digest header (RFC 9530, with `blake3` as the algorithm)."""
    return f"blake3=:{base64.b64encode(value).decode()}:"


def parse_content_digest(header: str) -> bytes | None:
    """Return the BLAKE3 digest in a Content-Digest or Repr-Digest header; None if it names other algorithms only.

    Raises ValueError for a blake3 member that is not 32 base64-coded bytes.
    """
    for member in header.split(","):
        name, _, value = member.strip().partition("=")
        if name != "blake3":
            continue
        try:
            decoded = base64.b64decode(value.strip(":"), validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error
        if len(decoded) != DIGEST_BYTES:
            raise ValueError(f"{len(decoded)} bytes, BLAKE3 has {DIGEST_BYTES}")
        return decoded
    return None
