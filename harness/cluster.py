"""Several coordinators and aggregators that share a PostgreSQL database and a bucket, in processes.

The coordinators are behind a load balancer.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from sqlalchemy import make_url

from harness.coordinator import InProcess, Running
from harness.patience import PATIENCE_S
from harness.ports import free_port
from harness.postgres import PostgreSQL, postgresql
from harness.seaweedfs import SeaweedFS, seaweedfs
from harness.tunnel import Tunnel, accept_each, tunnel

BUFFER = 1 << 16
CHECK_S = 0.5


class LoadBalancer:
    """Passes TCP connections on to the ports in `backends`, in turn. It leaves out those that do not answer at /readyz,
    and closes their connections, as health checks of real ones do."""

    def __init__(self) -> None:
        self.backends: list[int] = []
        self._connections: dict[int, set[socket.socket]] = {}
        self._unhealthy: set[int] = set()
        self._closed = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self._turns = count()
        threading.Thread(target=accept_each, args=(self._listening, self._serve), daemon=True).start()
        threading.Thread(target=self._check, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._listening.close()

    def _check(self) -> None:
        while not self._closed.wait(CHECK_S):
            for port in list(self.backends):
                try:
                    httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=1).raise_for_status()
                    self._unhealthy.discard(port)
                except httpx.HTTPError:
                    self._unhealthy.add(port)
                    for each in list(self._connections.get(port, ())):
                        with suppress(OSError):
                            each.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        backends = [port for port in self.backends if port not in self._unhealthy] or list(self.backends)
        for _ in backends:
            port = backends[next(self._turns) % len(backends)]
            with suppress(OSError):
                server = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
        else:
            client.close()
            return
        server.settimeout(None)
        mine = {client, server}
        self._connections.setdefault(port, set()).update(mine)
        back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
        back.start()
        _pass_on(client, server)
        back.join()
        self._connections[port] -= mine
        client.close()
        server.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(BUFFER):
            target.sendall(data)
    for each, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            each.shutdown(how)


# The command line, with a time of day that is ahead of the real one by the seconds in a file.
_MAIN = """
import pathlib, sys, time
ahead, real = pathlib.Path(sys.argv.pop(1)), time.time
time.time = lambda: real() + float(ahead.read_text())
from outerstep.cli import main
sys.argv[0] = "outerstep"
sys.exit(main())
"""


class Process:
    """A process of a cluster, and its lines to the database and the bucket."""

    def __init__(
        self,
        name: str,
        folder: Path,
        command: list[str],
        environment: dict[str, str],
        to_database: Tunnel,
        to_bucket: Tunnel,
    ) -> None:
        self.to_database, self.to_bucket = to_database, to_bucket
        self.name, self.data_dir = name, folder / name
        self.log = folder / f"{name}.log"
        self._command = [*command, "--data-dir", str(self.data_dir)]
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it is not waited for."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self._environment}
            )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it with SIGTERM."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait()
            self.process = None


class Node(Process):
    """A coordinator."""

    def __init__(self, name: str, folder: Path, command: list[str], *others: Any) -> None:
        self.port = free_port()
        self._ahead = folder / f"{name}.ahead"
        self.set_clock(0)
        super().__init__(name, folder, [*command, "--port", str(self.port)], *others)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def await_ready(self) -> str:
        """Wait until it is ready. Return its status: "ready" if it leads, otherwise "standby"."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the coordinator {self.name} has ended: {self.log.read_text()[-3000:]}")
            with suppress(httpx.TransportError):
                reply = httpx.get(f"{self.url}/readyz", timeout=5)
                if reply.is_success:
                    return str(reply.json()["status"])
            time.sleep(0.02)
        raise TimeoutError(f"the coordinator {self.name} is not ready: {self.log.read_text()[-3000:]}")

    def set_clock(self, ahead_s: float) -> None:
        """Let its time of day be ahead of the real one."""
        self._ahead.write_text(str(ahead_s))


class Cluster:
    """A database, a bucket, a load balancer, and coordinators that are added with `add`."""

    def __init__(self, folder: Path, database: PostgreSQL, bucket: SeaweedFS) -> None:
        self.folder, self.database, self.bucket = folder, database, bucket
        self.database_url, self.blobs = database.url(), bucket.url("cluster")
        self.balancer = LoadBalancer()
        self.nodes: list[Node] = []
        self.aggregators: list[Process] = []
        self._lines = ExitStack()

    def add(self, *settings: str, lines: bool = True) -> Node:
        """Start another coordinator, with `settings` as options. It is not waited for. `lines`: its connections go
        through tunnels."""
        name = f"coordinator-{len(self.nodes)}"
        command = [sys.executable, "-c", _MAIN, str(self.folder / f"{name}.ahead"), "coordinator", *settings]
        node = Node(name, self.folder, *self._reaching(command, "OUTERSTEP_COORDINATOR_DATABASE", lines))
        self.nodes.append(node)
        node.start()
        self.balancer.backends.append(node.port)
        return node

    def add_aggregator(self) -> Process:
        """Start another aggregator. It is not waited for. Its connections go through tunnels."""
        command = [sys.executable, "-m", "outerstep", "aggregator"]
        name = f"aggregator-{len(self.aggregators)}"
        aggregator = Process(name, self.folder, *self._reaching(command, "OUTERSTEP_AGGREGATOR_DATABASE", True))
        self.aggregators.append(aggregator)
        aggregator.start()
        return aggregator

    def _reaching(
        self, command: list[str], variable: str, lines: bool
    ) -> tuple[list[str], dict[str, str], Tunnel, Tunnel]:
        """Return the command and environment of a process, and its own lines to the database and the bucket, which it
        uses if `lines`."""
        to_database, to_bucket = (self._lines.enter_context(tunnel(each.port)) for each in (self.database, self.bucket))
        database, blobs = self.database_url, self.blobs
        if lines:
            database = make_url(database).set(port=to_database.port).render_as_string(hide_password=False)
            blobs = blobs.replace(f":{self.bucket.port}/", f":{to_bucket.port}/")
        environment = {variable: database, **self.bucket.environment}
        return [*command, "--blobs", blobs], environment, to_database, to_bucket

    def only(self) -> InProcess:
        """The only coordinator, without the load balancer."""
        (node,) = self.nodes
        assert node.process is not None
        return InProcess(node.url, self.running.admin_token, node.data_dir, node.process.pid)

    def leader(self) -> Node:
        """Wait until a coordinator leads, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for node in self.nodes:
                with suppress(httpx.TransportError):
                    if node.process is not None:
                        reply = httpx.get(f"{node.url}/readyz", timeout=1)
                        if reply.is_success and reply.json()["status"] == "ready":
                            return node
            time.sleep(0.02)
        raise TimeoutError("no coordinator leads")

    @property
    def running(self) -> Running:
        """The cluster at the load balancer's address, with the admin token of its first leader."""
        (token,) = (each.read_text().strip() for each in self.folder.glob("*/admin.token"))
        return Running(f"http://127.0.0.1:{self.balancer.port}", token, self.folder)

    def start(self) -> Running:
        """Return `running`; the coordinators have started already."""
        return self.running

    def stop(self) -> None:
        """Stop every process with SIGTERM."""
        for each in (*self.nodes, *self.aggregators):
            each.stop()

    def close(self) -> None:
        for each in (*self.nodes, *self.aggregators):
            each.kill()
        self._lines.close()
        self.balancer.close()


@contextmanager
def cluster(coordinators: int = 2, *, lines: bool = True) -> Iterator[Cluster]:
    """A cluster with this many coordinators. The first one leads. `lines`: their connections go through tunnels."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="outerstep-cluster-")))
        database, bucket = stack.enter_context(postgresql()), stack.enter_context(seaweedfs())
        made = Cluster(folder, database, bucket)
        stack.callback(made.close)
        for _ in range(coordinators):
            made.add(lines=lines).await_ready()
        yield made
