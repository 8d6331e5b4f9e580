"""Flower: FedAvg with a SuperLink and one SuperNode per worker, which run flower_app/app.py through `flwr run`.

SuperNodes poll for messages, and the server for replies, at Flower's own intervals, and each message starts a process.
All of this is part of a sync, as there is no other way to get the mean. The round before the first sync is the warm-up.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from benchmarks.peers import deltas

APP = Path(__file__).parent / "flower_app"
PROGRAMS = Path(sys.executable).parent
STARTUP_S = 60


def main() -> None:
    arguments = deltas.arguments(__doc__)
    workers, syncs = range(arguments.workers), arguments.rounds
    with tempfile.TemporaryDirectory(prefix="outerstep-flower-") as directory:
        exchange, address = Path(directory), f"127.0.0.1:{_free_port()}"
        (exchange / "config.toml").write_text(
            f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{address}"\ninsecure = true\n'
        )
        environment = os.environ | {
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "FLWR_HOME": directory,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        with contextlib.ExitStack() as stack:
            host, port = address.split(":")
            link = ["--disable-runtime-dependency-installation", "--host", host, "--port", port]
            superlink = stack.enter_context(_running(["flower-superlink", "--insecure", *link], environment))
            _await_health(superlink, address)
            for rank in workers:
                node = ["--superlink", address, "--port", str(_free_port()), "--node-config", f"rank={rank}"]
                stack.enter_context(_running(["flower-supernode", "--insecure", *node], environment))
            settings = f'exchange="{exchange}" workers={len(workers)} syncs={syncs} elements={arguments.params}'
            run = ["flwr", "run", str(APP), "bench", "--stream", "--run-config", settings]
            _await_files(
                stack.enter_context(_running(run, environment)), [exchange / f"{syncs}-{rank}.json" for rank in workers]
            )
        reports = [
            [json.loads((exchange / f"{round_}-{rank}.json").read_text()) for round_ in range(syncs + 1)]
            for rank in workers
        ]
    syncs_of = [[(a["sent"], b["received"]) for a, b in pairwise(rounds)] for rounds in reports]
    report = {
        "version": version("flwr"),
        "spans": [[(sent["s"], received["s"]) for sent, received in each] for each in syncs_of],
        "loopback_bytes": [
            max(received["lo"] for _, received in each) - min(sent["lo"] for sent, _ in each)
            for each in zip(*syncs_of, strict=True)
        ],
        "payload_bytes": reports[0][0]["payload_bytes"],
        "relative_error": max(rounds[-1]["relative_error"] for rounds in reports),
    }
    print(json.dumps(report))


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([PROGRAMS / command[0], *command[1:]], env=environment, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _await_health(process: "subprocess.Popen[bytes]", address: str) -> None:
    deadline = time.monotonic() + STARTUP_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"http://{address}/health", timeout=1).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the SuperLink did not answer within {STARTUP_S} s")


def _await_files(run: "subprocess.Popen[bytes]", files: list[Path]) -> None:
    """Wait for the workers' last reports; each file appears whole."""
    ended = False
    while not all(file.exists() for file in files):
        if ended:
            raise RuntimeError(f"the run ended without its last round: exit code {run.returncode}")
        time.sleep(0.1)
        ended = run.poll() is not None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
