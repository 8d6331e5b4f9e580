"""A real coordinator: uvicorn on a free port, SQLite and files in a directory; in a thread or in a process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.harness import stores
from coordinator.runs.live_run import LiveRun
from coordinator.server import Server, make_server
from coordinator.service import Coordinator
from coordinator.settings import Settings
from protocol.messages import Scope, TokenRequest


@dataclass
class Running:
    """A coordinator that serves: its address and the tokens to talk to it."""

    url: str
    admin_token: str
    data_dir: Path

    def client(self, token: str | None = None) -> httpx.Client:
        """An HTTP client of this coordinator, with the admin token unless another is given."""
        headers = {"Authorization": f"Bearer {token or self.admin_token}"}
        # No TLS here, so do not spend 30 ms on reading certificates.
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, verify=False)

    def create_run(self, spec: str) -> None:
        with self.client() as client:
            client.post("/v1/runs", content=spec.encode()).raise_for_status()

    def token(self, scope: Scope) -> str:
        with self.client() as client:
            reply = client.post("/v1/tokens", json=TokenRequest(scope=scope).model_dump()).raise_for_status()
        return str(reply.json()["token"])


class SettableClock:
    """A monotonic clock that moves when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class InThread(Running):
    """... in a thread of this process, whose innards can be looked at."""

    coordinator: Coordinator
    server: Server
    loop: asyncio.AbstractEventLoop  # that it serves on

    def live(self, run: str) -> LiveRun:
        return self.coordinator.run(run)

    def await_state(self, run: str, round_: int) -> None:
        """Return when the coordinator itself has stepped to state `round_`, checkpoint included."""
        live = self.live(run)
        with live.lock:
            in_time = [live.outer.await_round(p, round_, timeout_s=30) for p in range(len(live.outer.states))]
            reached = all(in_time) and all(each.round == round_ for each in live.outer.states)
        if not reached:
            raise TimeoutError(f"the coordinator did not reach state {round_}: {live.outer.states}")


@contextmanager
def coordinator_thread(
    data_dir: Path, port: int = 0, clock: Callable[[], float] = time.monotonic
) -> Iterator[InThread]:
    server, listening = make_server(Settings(data_dir=data_dir, port=port), clock=clock, store=stores.store)
    runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())
    thread = threading.Thread(target=runner.run, args=(server.serve(sockets=[listening]),))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        # The socket is bound: this waits until it serves.
        httpx.get(f"{url}/readyz", timeout=30, verify=False).raise_for_status()
        token = (data_dir / "admin.token").read_text().strip()
        yield InThread(url, token, data_dir, server.coordinator, server, runner.get_loop())
    finally:
        server.should_exit = True
        thread.join()
        runner.close()


class CoordinatorProcess:
    """... as a process of its own, to be killed. `start` returns when it serves; the port stays the same."""

    def __init__(self, data_dir: Path, *, host: str = "127.0.0.1", python: Path = Path(sys.executable)) -> None:
        self.data_dir, self.host = data_dir, host
        self.port = 0
        self._python = str(python)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Running:
        command = [self._python, "-m", "outerstep", "coordinator", "--data", str(self.data_dir)]
        log = (self.data_dir.parent / f"{self.data_dir.name}.log").open("a")
        self.process = subprocess.Popen(
            [*command, "--host", self.host, "--port", str(self.port)], stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # blocks until it is ready, or ends at its death
        if "ready at" not in line:
            raise RuntimeError(f"the coordinator did not start: see {log.name}")
        url = line.split()[-1]
        self.port = int(url.rsplit(":", 1)[1])
        return Running(url, (self.data_dir / "admin.token").read_text().strip(), self.data_dir)

    def kill(self) -> None:
        """kill -9."""
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
