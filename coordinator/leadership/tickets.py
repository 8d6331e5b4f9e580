"""How a standby and the leader know each other: HMAC-SHA256 with the secret that is in their database.

A forwarded request carries a ticket. The ticket is valid for one leader in one term, and carries the client's address.
If the standby can send the blob that the request asks for, the leader's answer has only the blob's digest and size,
with a proof for this ticket. The blob's name follows from the request's path and the digest, on both sides. So nothing
else than the delta or the checkpoint that was asked for can be sent, whoever answers.
"""

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from coordinator.store.blobs import RunNames, StoredBlob
from protocol.spec.sections import NAME_PATTERN

_NUMBER = "([0-9]{1,18})"
_RUN = f"/v1/runs/({NAME_PATTERN.strip('^$')})"
_DELTA = re.compile(f"{_RUN}/rounds/{_NUMBER}/fragments/{_NUMBER}/delta")
_CHECKPOINT = re.compile(f"{_RUN}/checkpoints/{_NUMBER}/fragments/{_NUMBER}")
_NOBODY = "-"  # in place of an unknown address

NameOf = Callable[[bytes], str]  # the name of a blob by its digest


@dataclass(frozen=True)
class Ticket:
    """What a standby says about one request that it forwards.

    leader  id of the coordinator that it is for, which led in the term `term`
    nonce   drawn for this request
    offers  True if the standby sends the blob that the leader names
    client  the client's address; None if unknown
    """

    secret: bytes = field(repr=False)
    leader: str
    term: int
    nonce: str
    offers: bool
    client: str | None

    @property
    def _text(self) -> str:
        return f"{self.leader} {self.term} {self.nonce} {int(self.offers)} {self.client or _NOBODY}"

    def header(self) -> str:
        """Return the ticket as a header's value."""
        return f"{_mac(self.secret, 'ticket', self._text)} {self._text}"

    @classmethod
    def read(cls, value: str, secret: bytes) -> Self | None:
        """Return the ticket in a header; None unless a coordinator with this secret has made it."""
        mac, _, text = value.partition(" ")
        if not _equal(mac, _mac(secret, "ticket", text)):
            return None
        leader, term, nonce, offers, client = text.split(" ", 4)
        return cls(secret, leader, int(term), nonce, offers == "1", None if client == _NOBODY else client)

    def named(self, stored: StoredBlob) -> str:
        """Return the header's value with which the leader leaves the blob to the standby."""
        found = f"{stored.digest.hex()} {stored.size or 0}"
        return f"{found} {self._proof(stored.name, found)}"

    def blob(self, value: str, path: str) -> StoredBlob | None:
        """Return the blob that the leader has `named` in answer to a GET of `path`; None if the leader has not made
        this header for this ticket."""
        found, _, proof = value.rpartition(" ")
        digest, _, size = found.partition(" ")
        name_of = blob_names(path) if self.offers else None
        if name_of is None or not re.fullmatch("[0-9a-f]{64}", digest):
            return None
        name = name_of(bytes.fromhex(digest))
        if not _equal(proof, self._proof(name, found)):
            return None
        return StoredBlob(name, bytes.fromhex(digest), int(size) or None)

    def _proof(self, name: str, found: str) -> str:
        return _mac(self.secret, "blob", f"{self._text}\n{name}\n{found}")


def blob_names(path: str) -> NameOf | None:
    """Return how the blob is named that a GET of this path asks for; None if it asks for no delta or checkpoint."""
    for pattern, kind in ((_DELTA, RunNames.delta), (_CHECKPOINT, RunNames.checkpoint)):
        if found := pattern.fullmatch(path):
            run, round_, fragment = found.groups()
            return partial(kind, RunNames(run), int(round_), int(fragment))
    return None


def _mac(secret: bytes, purpose: str, text: str) -> str:
    return hmac.new(secret, f"outerstep {purpose}\n{text}".encode(), hashlib.sha256).hexdigest()


def _equal(shown: str, expected: str) -> bool:
    return hmac.compare_digest(shown.encode(), expected.encode())
