"""Which versions can talk to each other: those that speak the same protocol.

Both sides identify themselves: requests by User-Agent and Outerstep-Protocol, responses by Outerstep-Version and
Outerstep-Protocol. Each rejects the other if the protocols differ, and says which side to upgrade. A client that sends
no protocol, such as a browser or curl, is not rejected.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from protocol import PROTOCOL_VERSION, __version__
from protocol.text import printable

VERSION_HEADER = "Outerstep-Version"
PROTOCOL_HEADER = "Outerstep-Protocol"
LENGTH_HEADER = "Outerstep-Length"  # of the payload that a redirect leads to

_AGENT = re.compile(r"outerstep/([0-9A-Za-z.+-]{1,32})(?: |$)")
_NUMBER = re.compile(r"[0-9]{1,9}")


class Version(NamedTuple):
    """The protocol and the software version that one side sent; None for what it did not send."""

    protocol: str | None
    software: str | None = None

    @property
    def number(self) -> float:
        """The protocol's number; infinite if it is not a number, since only a later protocol could be called so."""
        return int(self.protocol) if self.protocol and _NUMBER.fullmatch(self.protocol) else float("inf")

    def __str__(self) -> str:
        software = "" if self.software is None else f"Outerstep {self.software}, "
        return software + ("an unknown protocol" if self.protocol is None else f"protocol {self.protocol}")


OURS = Version(str(PROTOCOL_VERSION), __version__)
RESPONSE_HEADERS = {VERSION_HEADER: __version__, PROTOCOL_HEADER: str(PROTOCOL_VERSION)}


def request_headers(part: str) -> dict[str, str]:
    """Return the headers of every request from this `part` of Outerstep. They ask for uncompressed responses, because
    answers.py rejects compressed ones."""
    return {
        "User-Agent": f"outerstep/{__version__} ({part})",
        PROTOCOL_HEADER: str(PROTOCOL_VERSION),
        "Accept-Encoding": "identity",
    }


def client_version(headers: Mapping[str, str]) -> Version:
    """Return the version of the client that sent a request with these headers."""
    agent = _AGENT.match(headers.get("User-Agent", ""))
    return Version(_protocol_of(headers), agent and agent[1])


def coordinator_version(headers: Mapping[str, str]) -> Version:
    """Return the version of the coordinator that sent a response with these headers."""
    software = headers.get(VERSION_HEADER)
    return Version(_protocol_of(headers), None if software is None else printable(software)[:32])


def _protocol_of(headers: Mapping[str, str]) -> str | None:
    protocol = headers.get(PROTOCOL_HEADER)
    return None if protocol is None else printable(protocol.strip())[:32]


def incompatibility(client: Version, coordinator: Version) -> str | None:
    """Return why these two cannot talk to each other, and what to do; None if they can."""
    if client.protocol is None or coordinator.protocol is None or client.number == coordinator.number < float("inf"):
        return None
    if client.number < coordinator.number:
        remedy = f"upgrade this client{_to(coordinator)}"
    else:
        remedy = f"upgrade the coordinator{_to(client)}, or give this client the coordinator's version"
    return f"this client ({client}) and the coordinator ({coordinator}) do not speak the same protocol: {remedy}"


def different_builds(client: Version, coordinator: Version) -> str:
    """Return advice for two sides that speak the same protocol and still do not know each other's fields."""
    return f"the client is {client}, the coordinator {coordinator}: install the same build of Outerstep on both sides"


def _to(other: Version) -> str:
    return "" if other.software is None else f" to Outerstep {other.software}"
