"""The server process: uvicorn around the application, until SIGTERM or SIGINT."""

import gc
import logging
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from coordinator.api.app import create_app
from coordinator.api.metrics.server import PeersCollector
from coordinator.http.connection_limit import ConnectionLimit, connection_limit
from coordinator.http.connections import Connection
from coordinator.leadership.forwarding import LeadOrForward
from coordinator.leadership.sharing import shared_application
from coordinator.process import allow_open_files, keep_freed_memory, start_logging
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.blobs import OpenStore
from coordinator.store.database import at_start, is_shared, url_of
from outerstep.common.connections import KEPT_OPEN_S, congestion_text, probe_when_idle, set_congestion_control
from protocol import __version__
from protocol.compiled import COMPILED, KERNELS
from protocol.errors import OuterstepError
from protocol.text import printable
from protocol.versions import RESPONSE_HEADERS

GRACE_S = 10
SHARED_GRACE_S = 3  # another coordinator takes over, so that a client that is cut off can continue at once
ADMIN_TOKEN = "admin.token"  # in the data directory

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A uvicorn server that prints its address when it is ready, and ends the long polls when it shuts down.

    `terms` is None if the coordinator has a database of its own, and then `service` is the coordinator.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        settings: Settings,
        address: str,
        connections: ConnectionLimit,
        service: Coordinator | None,
        shared: LeadOrForward | None,
    ) -> None:
        super().__init__(config)
        self.settings, self.connections, self.shared = settings, connections, shared
        self._service, self._address = service, address
        self.settled = False  # True once it leads, or knows the leader
        self.failure: OuterstepError | None = None  # why it has stopped at its start

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator. Raises RuntimeError if another process leads."""
        found = self._service if self.shared is None else self.shared.terms.coordinator
        if found is None:
            raise RuntimeError("another coordinator leads")
        return found

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.shared is not None:
            try:
                await self.shared.terms.settled()
            except OuterstepError as error:
                self.failure, self.should_exit = error, True
                await self.shutdown(sockets)
                return
        if self.started:
            self.settled = True
            role = "" if self.shared is None else self.shared.terms.role
            # Printed in one write, because a reader that waits for the first line may stop reading after it.
            print("\n".join(banner(self._address, self.settings.data_dir, role)), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.shared is not None:
            self.shared.stop_waiting()
        elif self._service is not None:
            self._service.waiters.close()
        await super().shutdown(sockets)


def make_server(
    settings: Settings,
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    store: OpenStore | None = None,
) -> tuple[Server, socket.socket]:
    """Return a server and its bound socket. Raises OSError if the address is in use, and OuterstepError if the data
    directory is in use."""
    connections = connection_limit(settings)
    url = url_of(settings.database, settings.data_dir)
    if settings.advertise_url is not None and not is_shared(url):
        raise OuterstepError(
            "--advertise-url is for coordinators that share a PostgreSQL database (--database): leave it out with "
            "SQLite"
        )
    listening = _listen(settings.host, settings.port)
    probe_when_idle(listening)
    logger.info("TCP's congestion control: %s", congestion_text(set_congestion_control(listening)))
    scheme = "https" if settings.tls_certificate else "http"
    host, port = listening.getsockname()[:2]
    address = f"{scheme}://{netloc(host, port)}"
    service = shared = None
    try:
        if is_shared(url):
            shared = shared_application(
                *(settings, url, connections, _reachable(settings, address), clock, store),
                partial(create_app, connections=connections),
                PeersCollector,
            )
        else:
            service = Coordinator(settings, clock=clock, now=now, store=store)
    except BaseException as error:
        listening.close()
        if isinstance(error, Exception) and (raised := at_start(error)) is not error:
            raise raised from error
        raise
    protocol: Any = partial(Connection, limit=connections, settings=settings, tls=_tls(settings))
    config = uvicorn.Config(
        shared if service is None else create_app(service, connections),  # type: ignore[arg-type]
        http=protocol,
        ws="none",
        forwarded_allow_ips=settings.proxies,
        log_config=None,
        access_log=False,
        headers=list(RESPONSE_HEADERS.items()),
        timeout_graceful_shutdown=GRACE_S if shared is None else SHARED_GRACE_S,
        timeout_keep_alive=int(KEPT_OPEN_S) + 60,  # a worker closes first: it knows when it has a request to send
    )
    return Server(config, settings, address, connections, service, shared), listening


def _reachable(settings: Settings, address: str) -> str:
    """Return the address of this coordinator for others."""
    if settings.advertise_url is not None:
        return settings.advertise_url
    parts = urlsplit(address)
    if not ip_address(parts.hostname or "").is_unspecified:
        return address
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise OuterstepError(
            f"this machine's own address is unknown ({error}): give the one where other coordinators reach it, "
            "--advertise-url http://HOST:PORT"
        ) from error
    return f"{parts.scheme}://{netloc(own, parts.port or 0)}"


def banner(address: str, data_dir: Path, role: str = "") -> list[str]:
    """Return the lines that a ready coordinator prints: its address, and what the operator needs next. `role`: whether
    it leads, if there are several coordinators."""
    here = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    token = data_dir.absolute() / ADMIN_TOKEN
    admin = f" --token-file {shlex.quote(str(token))}" if token.exists() else ""
    facts = {
        **({"role": role} if role else {}),
        "version": __version__,
        "data": str(data_dir.absolute()),
        "dashboard": f"{here}/",
        "admin token": str(token) if admin else "not stored here; pass it by --token-file or OUTERSTEP_TOKEN",
        "next": f"outerstep run create run.toml --url {here}{admin}",
    }
    return [
        f"outerstep coordinator ready at {address}",
        *(f"  {name:<13}{printable(fact)}" for name, fact in facts.items()),
    ]


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context; None if HTTPS is not served."""
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    return context


def _listen(host: str, port: int) -> socket.socket:
    """Bind the address. A host name resolves to its IPv4 address if it has one; `::` also accepts IPv4 if the system
    supports that."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] is not socket.AF_INET)
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)


def netloc(host: str, port: int) -> str:
    """Return HOST:PORT for a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shorten_pauses() -> None:
    """Keep the event loop responsive (heartbeats) while threads compute and the garbage collector runs.

    A thread releases the interpreter lock after 1 ms instead of 5, because the event loop needs it several times per
    response. A full garbage collection stops the whole process, for 0.2 s with a thousand workers. So the collector
    skips all objects that exist now, which will not be freed anyway, and runs a tenth as often; only reference cycles
    need it.
    """
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 10)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Prints the `banner` on stdout when it is ready."""
    start_logging(settings.log_level, settings.log_format, settings.log_file)
    logger.log(logging.INFO if COMPILED else logging.WARNING, "kernels %s", KERNELS)
    allow_open_files()
    server, listening = make_server(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again after shutdown; a requested stop must not look like a failure.
        signal.signal(number, lambda *_: None)
    shorten_pauses()
    keep_freed_memory()
    server.run(sockets=[listening])
    if server.failure is not None:
        raise server.failure
