"""The server: uvicorn around the application, until SIGTERM or SIGINT."""

import gc
import logging
import resource
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from coordinator.app import create_app
from coordinator.http.connections import Connection
from coordinator.http.gate import Gate, gate_of
from coordinator.logs import FORMATS
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.blobs import Store
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.tuning.heap import keep_freed_memory
from outerstep.common import tracing
from outerstep.common.connections import set_congestion_control
from protocol import __version__
from protocol.compiled import COMPILED, KERNELS
from protocol.text import printable
from protocol.versions import RESPONSE_HEADERS

GRACE_S = 10
ADMIN_TOKEN = "admin.token"  # in the data directory

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A server that prints its address when it is ready, and makes long polls answer when it shuts down."""

    def __init__(self, config: uvicorn.Config, coordinator: Coordinator, gate: Gate, address: str) -> None:
        super().__init__(config)
        self.coordinator, self.gate = coordinator, gate
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # In one write: whoever waits for the first line may read no further.
            print("\n".join(banner(self._address, self.coordinator.settings.data_dir)), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.coordinator.waiters.close()
        await super().shutdown(sockets)


def make_server(
    settings: Settings,
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    store: Store = DirectoryBlobs,
) -> tuple[Server, socket.socket]:
    """Return a server and its bound socket. OSError if the address is taken, OuterstepError if the directory is."""
    gate = gate_of(settings)
    listening = _listen(settings.host, settings.port)
    logger.info("TCP's congestion control: %s", set_congestion_control(listening))
    try:
        coordinator = Coordinator(settings, clock=clock, now=now, store=store)
    except BaseException:
        listening.close()
        raise
    protocol: Any = partial(Connection, gate=gate, settings=settings, tls=_tls(settings))
    config = uvicorn.Config(
        create_app(coordinator, gate),
        http=protocol,
        ws="none",
        forwarded_allow_ips=settings.proxies,
        log_config=None,
        access_log=False,
        headers=list(RESPONSE_HEADERS.items()),
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
    )
    scheme = "https" if settings.tls_certificate else "http"
    host, port = listening.getsockname()[:2]
    return Server(config, coordinator, gate, f"{scheme}://{netloc(host, port)}"), listening


def banner(address: str, data_dir: Path) -> list[str]:
    """Return what a ready coordinator prints: its address, and what somebody who has just started it needs."""
    here = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    token = data_dir.absolute() / ADMIN_TOKEN
    admin = f" --token-file {shlex.quote(str(token))}" if token.exists() else ""
    facts = {
        "version": __version__,
        "data": str(data_dir.absolute()),
        "dashboard": f"{here}/",
        "admin token": str(token) if admin else "not kept here; --token-file or OUTERSTEP_TOKEN has it",
        "next": f"outerstep run create run.toml --url {here}{admin}",
    }
    return [
        f"outerstep coordinator ready at {address}",
        *(f"  {name:<13}{printable(fact)}" for name, fact in facts.items()),
    ]


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """Return what HTTPS is served with; None: it is not."""
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    return context


def _listen(host: str, port: int) -> socket.socket:
    """Bind the address. A host name means its IPv4 address if it has one; `::` accepts IPv4 too if the system can."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] is not socket.AF_INET)
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)


def netloc(host: str, port: int) -> str:
    """Return host and port as a URL has them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def allow_open_files() -> None:
    """Raise the limit on open files as far as the system allows: every transfer is a socket, and while a fragment is
    averaged the file of every contributor is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS says "unlimited", and then refuses it
        logger.warning("no more than %d files can be open at once: %s", soft, error)


def shorten_pauses() -> None:
    """Let heartbeats be answered soon while threads compute and the garbage collector runs.

    A thread gives up the interpreter lock after 1 ms instead of 5: the event loop needs it several times per answer. A
    full garbage collection stops everything, for 0.2 s with a thousand workers: so it leaves out all that exists now,
    which stays anyway, and runs a tenth as often. Little depends on it, as only cycles of objects need it to be freed.
    """
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 10)


def _log(settings: Settings) -> None:
    """Log to stderr, and to a file if there is to be one."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if settings.log_file is not None:
        handlers.append(logging.FileHandler(settings.log_file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(FORMATS[settings.log_format]())
    logging.basicConfig(level=settings.log_level.upper(), handlers=handlers, force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # each of its migrations is a line otherwise


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. When ready, prints one line with the address on stdout."""
    _log(settings)
    logger.log(logging.INFO if COMPILED else logging.WARNING, "kernels %s", KERNELS)
    allow_open_files()
    tracing.start("outerstep-coordinator")
    server, listening = make_server(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it is done; being asked to stop and having stopped is no failure.
        signal.signal(number, lambda *_: None)
    shorten_pauses()
    keep_freed_memory()
    server.run(sockets=[listening])
    tracing.stop()
