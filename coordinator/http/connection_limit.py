"""How many connections may be open, in total and from one address. The total keeps the number of open files below the
process's limit.

When a limit is reached, the connection that has been idle longest, of all or of that address, is closed for the next
one. So idle connections keep no new one out, however many there are.
"""

import resource
from collections import Counter, defaultdict
from ipaddress import ip_address, ip_network
from typing import Protocol
from urllib.parse import urlsplit

from coordinator.settings import Settings
from coordinator.store.lease import Peers
from protocol.errors import OuterstepError

MAX_CONNECTIONS = 4096
OWN_FILES = 256  # for database, logs, threads, files that are being averaged
FILES_EACH = 2  # per connection: the socket, and a file that is being received or sent


class Closeable(Protocol):
    """A connection."""

    def close_idle(self) -> None:
        """Close it, to admit another one. Called only while no request is in progress on it."""


class ConnectionLimit:
    """The open connections. Those from `proxies`, and from coordinators that share the database, do not count towards
    the limit per address."""

    def __init__(self, limit: int, per_address: int, proxies: str = "") -> None:
        self.peers: Peers | None = None  # set once it is known that there may be others
        self.limit, self.per_address = limit, min(per_address, max(1, limit // 2))
        self._proxies = [ip_network(each.strip()) for each in proxies.split(",") if each.strip()]
        self.refused: Counter[str] = Counter()  # number of rejected connections, by the problem's slug
        self._open: Counter[str] = Counter()  # by address
        self._addresses: dict[Closeable, str] = {}
        self._idle: dict[Closeable, None] = {}  # longest idle first
        self._idle_of: defaultdict[str, dict[Closeable, None]] = defaultdict(dict)  # the same by address

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: Closeable, address: str) -> str | None:
        """Admit a connection, as idle. Return None, or the reason why it is not admitted."""
        full = self._open[address] >= self.per_address and not self._is_proxy(address)
        if full and not self._close_longest(self._idle_of.get(address)):
            return (
                f"{self.per_address} connections from {address}, the limit for one address, have requests in progress"
            )
        if len(self._addresses) >= self.limit and not self._close_longest(self._idle):
            return f"{self.limit} connections, the limit, have requests in progress"
        self._addresses[connection] = address
        self._open[address] += 1
        self.idle(connection)
        return None

    def _close_longest(self, idle: dict[Closeable, None] | None) -> bool:
        """Close the first of these connections; return False if there is none."""
        if not idle:
            return False
        longest = next(iter(idle))
        self.remove(longest)
        longest.close_idle()
        return True

    def remove(self, connection: Closeable) -> None:
        """Record that a connection is closed. It may never have been admitted, or already be removed."""
        self.busy(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    def busy(self, connection: Closeable) -> None:
        """Record that a connection has a request in progress."""
        if connection in self._idle:
            del self._idle[connection]
            address = self._addresses[connection]
            del self._idle_of[address][connection]
            if not self._idle_of[address]:
                del self._idle_of[address]

    def idle(self, connection: Closeable) -> None:
        """Record that a connection no longer has a request in progress."""
        if (address := self._addresses.get(connection)) is not None:
            self._idle[connection] = self._idle_of[address][connection] = None

    def _is_proxy(self, address: str) -> bool:
        if address and any(ip_address(address) in network for network in self._proxies):
            return True
        return self.peers is not None and any(urlsplit(peer.address).hostname == address for peer in self.peers.all)


def connection_limit(settings: Settings) -> ConnectionLimit:
    """Return the limit for a server with these settings, given the process's current limit on open files.

    Raises OuterstepError if that is too low for the settings.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, (files - OWN_FILES) // FILES_EACH)
    limit = settings.max_connections or min(MAX_CONNECTIONS, possible)
    if files != resource.RLIM_INFINITY and limit > possible:
        raise OuterstepError(
            f"OUTERSTEP_COORDINATOR_MAX_CONNECTIONS = {limit} needs {limit * FILES_EACH + OWN_FILES} open files, and "
            f"{files} are allowed: raise the limit (ulimit -n, LimitNOFILE of systemd), or set {possible} at most"
        )
    return ConnectionLimit(limit, settings.max_connections_per_address, settings.proxies)
