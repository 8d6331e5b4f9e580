"""A real coordinator with uvicorn on a free port, SQLite and files in a directory: in a thread or in a process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import psutil
import uvicorn.server
from sqlalchemy import make_url

from coordinator.run.live_run import LiveRun
from coordinator.server import Server, make_server
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import OpenStore
from coordinator.store.database import Database
from harness import stores
from harness.aggregator import aggregator_thread
from harness.patience import PATIENCE_S
from harness.ports import free_port
from protocol.messages import Scope, TokenRequest

MANY_NAMES = 10_000


@dataclass
class Running:
    """A running coordinator: its address, and tokens for it."""

    url: str
    admin_token: str
    data_dir: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, token: str | None = None) -> httpx.Client:
        """Return an HTTP client of this coordinator, with the admin token unless `token` is given."""
        headers = {"Authorization": f"Bearer {token or self.admin_token}"}
        # Without TLS, reading certificates would waste 30 ms. Proxies in the environment are ignored.
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, verify=False, trust_env=False)

    def create_run(self, spec: str) -> None:
        with self.client() as client:
            client.post("/v1/runs", content=spec.encode()).raise_for_status()

    def token(self, scope: Scope, **fields: Any) -> str:
        """Return a new token with these `fields` of TokenRequest. A worker token without fields is always the same one,
        for many names, so that a restarted worker can use its name again."""
        if scope is Scope.WORKER and not fields:
            return self.worker_token
        with self.client() as client:
            request = TokenRequest(scope=scope, **fields).model_dump(mode="json")
            reply = client.post("/v1/tokens", json=request).raise_for_status()
        return str(reply.json()["token"])

    @cached_property
    def worker_token(self) -> str:
        return self.token(Scope.WORKER, names=MANY_NAMES)


class SettableClock:
    """A clock that only a test moves."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class InThread(Running):
    """A coordinator in a thread of this process; its internals are accessible."""

    server: Server
    loop: asyncio.AbstractEventLoop  # its event loop

    @property
    def coordinator(self) -> Coordinator:
        return self.server.coordinator

    def live(self, run: str) -> LiveRun:
        return self.coordinator.run(run)

    def await_state(self, run: str, round_: int) -> None:
        """Wait until the coordinator's own state is at `round_`, a due checkpoint is saved, and retention has deleted
        what it does not keep."""
        live = self.live(run)
        with live.lock:
            in_time = [live.outer.await_round(p, round_, timeout_s=PATIENCE_S) for p in range(len(live.outer.states))]
            reached = all(in_time) and all(each.round == round_ for each in live.outer.states)
        if not reached:
            raise TimeoutError(f"the coordinator did not reach state {round_}: {live.outer.states}")
        give_up_at = time.monotonic() + PATIENCE_S
        while live.outer.any_job_running:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the jobs of the run {run} do not finish")
            time.sleep(0.005)


class _Impatient:
    """asyncio for uvicorn, which polls every 0.1 s whether to stop, and whether connections are closed: tests start and
    stop a thousand servers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 10)


setattr(uvicorn.server, "asyncio", _Impatient())  # noqa: B010, a module has no such attribute for mypy


@cache
def _schema() -> bytes:
    """Return a database at the newest schema. Copying it is faster than migrating a new one."""
    with TemporaryDirectory(prefix="outerstep-") as directory:
        Database(sqlite.url_in(Path(directory))).close()
        return (Path(directory) / sqlite.FILE).read_bytes()


@contextmanager
def coordinator_thread(
    data_dir: Path,
    port: int = 0,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    store: OpenStore | None = None,
    token_in: Path | None = None,
    **settings: Any,
) -> Iterator[InThread]:
    """Run a coordinator in a thread. With `pytest --standby`, the address is that of a standby in front of it; with
    `pytest --aggregator`, it has an aggregator. `store`: None for that of the settings, or the one that pytest's
    options name. `token_in`: the data directory that has the admin token, None for its own."""
    if stores.database == "postgresql":
        url = stores.database_of(data_dir).render_as_string(hide_password=False)
        settings.setdefault("database", url)
    port = port or free_port()
    complete = Settings(data_dir=data_dir, port=0 if stores.standby else port, **settings)
    if complete.database is None and not (data_dir / sqlite.FILE).exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / sqlite.FILE).write_bytes(_schema())
    if store is None and not complete.blobs:
        store = stores.store
    with ExitStack() as stack:
        url, server, loop = stack.enter_context(_served(complete, clock, now, store))
        token = ((token_in or data_dir) / "admin.token").read_text().strip()
        if stores.standby:
            behind = complete.model_copy(
                update={"data_dir": data_dir.with_name(f"{data_dir.name}-standby"), "port": port}
            )
            url, standby, _ = stack.enter_context(
                _served(behind, clock, now, lambda _: stores.store(server.coordinator.data))
            )
            assert standby.shared is not None
            assert standby.shared.terms.leader
        if stores.aggregator and store is not None:
            database, folder = make_url(str(complete.database)), data_dir.with_name(f"{data_dir.name}-aggregator")
            blobs = store(server.coordinator.data)
            stack.enter_context(aggregator_thread("aggregator", database, blobs, folder))
            delegation = server.coordinator.delegation
            while delegation is not None and not delegation.is_possible:
                time.sleep(0.005)
        yield InThread(url, token, data_dir, server, loop)


@contextmanager
def _served(
    settings: Settings, clock: Callable[[], float], now: Callable[[], float], store: OpenStore | None
) -> Iterator[tuple[str, Server, asyncio.AbstractEventLoop]]:
    server, listening = make_server(settings, clock=clock, now=now, store=store)
    runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())
    thread = threading.Thread(target=runner.run, args=(server.serve(sockets=[listening]),))
    thread.start()
    try:
        scheme = "http" if settings.tls_certificate is None else "https"
        url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        # The socket is bound; this waits until the server answers, and leads or knows the leader.
        while server.shared is not None and not server.settled and thread.is_alive():
            time.sleep(0.005)
        httpx.get(f"{url}/readyz", timeout=PATIENCE_S, verify=False).raise_for_status()
        yield url, server, runner.get_loop()
    finally:
        server.should_exit = True
        thread.join()
        runner.close()


class Certificate(NamedTuple):
    """PEM files."""

    file: Path
    key: Path


def make_certificate(directory: Path, *, host: str = "IP:127.0.0.1", days: int = 1) -> Certificate:
    """Create a self-signed certificate with openssl, for `host` (IP:… or DNS:…), in a new `directory`. With negative
    `days` it has expired."""
    directory.mkdir()
    made = Certificate(directory / "certificate.pem", directory / "key.pem")
    request, extensions = directory / "request", directory / "extensions"
    extensions.write_text(f"subjectAltName={host}")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-new", *kind, "-keyout", str(made.key), "-out", str(request), "-subj", "/CN=coordinator")
    signed = ["-signkey", str(made.key), "-days", str(days), "-extfile", str(extensions)]
    _openssl("x509", "-req", "-in", str(request), *signed, "-out", str(made.file))
    return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass
class InProcess(Running):
    """A coordinator in a separate process; its memory and CPU time can be read from any process."""

    pid: int

    def memory(self, field: str) -> int:
        """Return a size in bytes from /proc/PID/status: VmRSS, or its peak VmHWM."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


class CoordinatorProcess:
    """A coordinator process that can be killed and started again on the same port. `start` returns when it is ready.

    It logs to a file beside `data_dir`; with `quiet` only warnings, to stderr. `blobs`: the URL of its bucket.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        host: str = "127.0.0.1",
        certificate: Certificate | None = None,
        python: Path = Path(sys.executable),
        quiet: bool = False,
        blobs: str | None = None,
    ) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self._data_dir = data_dir
        self._log = None if quiet else data_dir.parent / f"{data_dir.name}.log"
        self._command = [str(python), "-m", "outerstep", "coordinator", "--data-dir", str(data_dir), "--host", host]
        if certificate is not None:
            self._command += ["--tls-certificate", str(certificate.file), "--tls-key", str(certificate.key)]
        self._command += ["--log-level", "warning"] if quiet else []
        self._command += ["--blobs", blobs] if blobs else []

    def start(self) -> InProcess:
        with self._log.open("a") if self._log else nullcontext() as log:
            command = [*self._command, "--port", str(self.port)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # blocks until it is ready or has ended
        if "ready at" not in line:
            raise RuntimeError(f"the coordinator did not start: see {self._log or 'above'}")
        token = (self._data_dir / "admin.token").read_text().strip()
        running = InProcess(line.split()[-1], token, self._data_dir, self.process.pid)
        self.port = running.port
        return running

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None:
            os.kill(self.process.pid, how)
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


@contextmanager
def coordinator_process(host: str = "127.0.0.1", certificate: Certificate | None = None) -> Iterator[InProcess]:
    """A coordinator process with a temporary directory; it logs only warnings."""
    with TemporaryDirectory(prefix="outerstep-") as directory:
        coordinator = CoordinatorProcess(Path(directory), host=host, certificate=certificate, quiet=True)
        try:
            yield coordinator.start()
        finally:
            coordinator.stop()
