"""The coordinators that share a database, as this one has last seen them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

FRESH_S = 3.0  # a coordinator that was seen within this time is there; it reports every second
SILENT_S = 10.0  # one that was not seen for longer is reported


@dataclass(frozen=True)
class Peer:
    """A coordinator. `silent_s`: since it was seen, by the database's clock. `store_fault`: why it cannot use the
    blobs; empty if it can."""

    id: str
    address: str
    version: str
    silent_s: float
    store_fault: str


@dataclass
class Peers:
    """All of them, this one included. The election keeps it up to date; any thread may read it.

    own             the id of this one
    leader          the id of the one that leads; None if none does
    term            the fencing token, which counts takeovers
    superseded      writes of this process that failed because another coordinator led
    store_answer_s  how long the store took to answer the last probe; None if it did not
    """

    own: str
    leader: str | None = None
    term: int = 0
    superseded: int = 0
    store_answer_s: float | None = None
    all: list[Peer] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.leader == self.own

    def troubles(self) -> Iterator[str]:
        """Yield what is wrong with the others, and with this one's way to the store."""
        for peer in self.all:
            name = f"the coordinator at {peer.address}"
            if peer.silent_s > SILENT_S:
                yield f"{name} has not been heard of for {peer.silent_s:.0f} s"
            elif peer.store_fault:
                yield f"{name} cannot use the store: {peer.store_fault}"
