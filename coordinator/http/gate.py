"""How many connections there may be: in all, so that the store's own files keep room below the limit on open files, and
of one address.

Where there is no room in all, whoever has waited longest without a request to be answered makes room for the next. So
connections on which nothing is asked shut nobody out, however many they are.
"""

import resource
from collections import Counter
from ipaddress import ip_address, ip_network
from typing import Protocol

from coordinator.settings import Settings
from protocol.errors import OuterstepError

MOST = 4096
OWN_FILES = 256  # the database's, logs, threads, what is averaged
FILES_EACH = 2  # a connection may have a file that is received or sent


class Resting(Protocol):
    """A connection without a request to be answered."""

    def make_room(self) -> None:
        """Close it."""


class Gate:
    """The connections that are open. `proxies` are addresses that are not counted by address."""

    def __init__(self, most: int, per_address: int, proxies: str = "") -> None:
        self.most, self.per_address = most, min(per_address, max(1, most // 2))
        self._proxies = [ip_network(each.strip()) for each in proxies.split(",") if each.strip()]
        self.refused: Counter[str] = Counter()  # connections, by the problem
        self._open: Counter[str] = Counter()
        self._addresses: dict[Resting, str] = {}  # of those inside
        self._resting: dict[Resting, None] = {}  # those that have rested longest come first

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: Resting, address: str) -> str | None:
        """Let a connection in, resting; or return why it may not come in."""
        if self._open[address] >= self.per_address and not self._is_proxy(address):
            return f"{self.per_address} connections of {address} are open, as many as one address may have"
        if len(self._addresses) >= self.most:
            if not self._resting:
                return f"{self.most} connections are open, all with requests, as many as there may be"
            longest = next(iter(self._resting))
            self.leave(longest)
            longest.make_room()
        self._addresses[connection] = address
        self._open[address] += 1
        self._resting[connection] = None
        return None

    def leave(self, connection: Resting) -> None:
        """Note that a connection is closed. It may never have come in, or have made room."""
        address = self._addresses.pop(connection, None)
        self._resting.pop(connection, None)
        if address is not None:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    def work(self, connection: Resting) -> None:
        """Note that a connection has a request to be answered."""
        self._resting.pop(connection, None)

    def rest(self, connection: Resting) -> None:
        """Note that a connection has none any more."""
        if connection in self._addresses:
            self._resting[connection] = None

    def _is_proxy(self, address: str) -> bool:
        return bool(address) and any(ip_address(address) in network for network in self._proxies)


def gate_of(settings: Settings) -> Gate:
    """Return the gate of a server with these settings, below the limit on open files that holds now.

    Raises OuterstepError where that is too low for what the settings ask for.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = MOST if limit == resource.RLIM_INFINITY else max(1, (limit - OWN_FILES) // FILES_EACH)
    most = settings.max_connections or min(MOST, possible)
    if limit != resource.RLIM_INFINITY and most > possible:
        raise OuterstepError(
            f"OUTERSTEP_COORDINATOR_MAX_CONNECTIONS = {most} needs {most * FILES_EACH + OWN_FILES} open files, and "
            f"{limit} are allowed: raise the limit (ulimit -n, LimitNOFILE of systemd), or set {possible} at most"
        )
    return Gate(most, settings.max_connections_per_address, settings.proxies)
