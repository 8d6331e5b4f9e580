"""Which versions talk with each other: those that speak the same protocol.

Both sides say what they are, requests by User-Agent and Outerstep-Protocol, answers by Outerstep-Version and
Outerstep-Protocol. Each refuses the other where the protocol is another one, and says which of them is to be changed.
Who says nothing of a protocol, such as a browser or curl, is not refused.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from protocol import PROTOCOL_VERSION, __version__
from protocol.printable import printable

VERSION_HEADER = "Outerstep-Version"
PROTOCOL_HEADER = "Outerstep-Protocol"

_AGENT = re.compile(r"outerstep/([0-9A-Za-z.+-]{1,32})(?: |$)")
_NUMBER = re.compile(r"[0-9]{1,9}")


class Said(NamedTuple):
    """What one side says of itself."""

    protocol: str | None  # None: nothing
    version: str | None = None

    @property
    def number(self) -> float:
        """The protocol's; infinite if it is none, as only later ones could be called otherwise."""
        return int(self.protocol) if self.protocol and _NUMBER.fullmatch(self.protocol) else float("inf")

    def __str__(self) -> str:
        software = "" if self.version is None else f"Outerstep {self.version}, "
        return software + ("an unknown protocol" if self.protocol is None else f"protocol {self.protocol}")


OURS = Said(str(PROTOCOL_VERSION), __version__)
OF_ANSWERS = {VERSION_HEADER: __version__, PROTOCOL_HEADER: str(PROTOCOL_VERSION)}


def of_requests(part: str) -> dict[str, str]:
    """Return the headers of all requests of a client, which is this `part` of Outerstep. No answer is to be compressed:
    answers.py refuses those that are."""
    return {
        "User-Agent": f"outerstep/{__version__} ({part})",
        PROTOCOL_HEADER: str(PROTOCOL_VERSION),
        "Accept-Encoding": "identity",
    }


def said_by_client(headers: Mapping[str, str]) -> Said:
    """Return what a request says of who sent it."""
    agent = _AGENT.match(headers.get("User-Agent", ""))
    return Said(_protocol_of(headers), agent and agent[1])


def said_by_coordinator(headers: Mapping[str, str]) -> Said:
    """Return what an answer says of who gave it."""
    version = headers.get(VERSION_HEADER)
    return Said(_protocol_of(headers), None if version is None else printable(version)[:32])


def _protocol_of(headers: Mapping[str, str]) -> str | None:
    told = headers.get(PROTOCOL_HEADER)
    return None if told is None else printable(told.strip())[:32]


def why_not(client: Said, coordinator: Said) -> str | None:
    """Return why these two cannot talk with each other, and what to do; None if they can."""
    if client.protocol is None or coordinator.protocol is None or client.number == coordinator.number < float("inf"):
        return None
    if client.number < coordinator.number:
        remedy = f"upgrade this client{_to(coordinator)}"
    else:
        remedy = f"upgrade the coordinator{_to(client)}, or give this client the coordinator's version"
    return f"this client ({client}) and the coordinator ({coordinator}) do not speak the same protocol: {remedy}"


def both_named(client: Said, coordinator: Said) -> str:
    """Return a sentence for two sides that speak one protocol and still do not know each other's fields."""
    return f"the client is {client}, the coordinator {coordinator}: give both sides the same build of Outerstep"


def _to(other: Said) -> str:
    return "" if other.version is None else f" to Outerstep {other.version}"
