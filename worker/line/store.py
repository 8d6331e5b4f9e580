"""Transfers between this worker and the coordinator's store, around the coordinator.

The coordinator signs each request. If the store cannot be reached from here, or refuses, payloads go through the
coordinator for a while. So the store can only make a transfer faster: what arrives is checked in the same way.
"""

import logging
import threading
from collections.abc import Callable, Mapping

import httpx

from outerstep.common.connections import keep_urls_out_of_logs
from protocol.errors import UnexpectedAnswer

log = logging.getLogger(__name__)

FAULTS = 3  # in a row
AVOIDED_S = 600.0


class StorePath:
    """Whether payloads go directly to the store and from it. Thread-safe. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._offered = False
        self._clock, self._lock = clock, threading.Lock()
        self._avoided_until = 0.0
        self._faults, self._has_worked = 0, False

    @property
    def usable(self) -> bool:
        return self._offered and self._clock() >= self._avoided_until

    def offer(self, offered: bool) -> None:
        """Note whether the coordinator says that its store can be used."""
        if offered:
            keep_urls_out_of_logs()
        self._offered = offered

    def worked(self, url: str) -> None:
        """Note a transfer."""
        with self._lock:
            first, self._has_worked, self._faults = not self._has_worked, True, 0
        if first:
            log.info("payloads go directly between this worker and %s", origin(url))

    def failed(self, reason: str) -> None:
        """Note that a request has failed. After FAULTS in a row the store is avoided for a while."""
        with self._lock:
            self._faults += 1
            if self._faults < FAULTS or not self.usable:
                return
        self.avoid(reason)

    def avoid(self, reason: str) -> None:
        """Let payloads go through the coordinator for the next AVOIDED_S seconds."""
        with self._lock:
            self._avoided_until, self._faults, self._has_worked = self._clock() + AVOIDED_S, 0, False
        log.warning("payloads go through the coordinator for the next %.0f min: %s", AVOIDED_S / 60, reason)


def origin(url: str) -> str:
    """Return the scheme and host of an address, without its signature."""
    parts = httpx.URL(url)
    return f"{parts.scheme}://{parts.netloc.decode()}"


def check_store_headers(headers: Mapping[str, str]) -> None:
    """Raise UnexpectedAnswer for headers that no upload to a store has, such as another service's credentials."""
    for name in headers:
        if name.lower() != "if-none-match" and not name.lower().startswith("x-amz-"):
            raise UnexpectedAnswer(f"the coordinator asks for the header {name[:100]!r} in an upload to its store")


def check_store_url(url: str, coordinator: httpx.URL) -> None:
    """Raise UnexpectedAnswer for an address of the store that a worker must not use: nothing is sent unencrypted if the
    connection to the coordinator is encrypted. It is parsed as the client that sends the request parses it."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"the coordinator names a store that has no valid address: {error}") from error
    allowed = ("https",) if coordinator.scheme == "https" else ("https", "http")
    if parts.scheme not in allowed or not parts.raw_host or parts.userinfo or (parts.port or 0) > 65_535:
        raise UnexpectedAnswer(f"the coordinator names the store {origin(url)[:200]}: it must be {allowed[0]}://HOST")
