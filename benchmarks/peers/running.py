"""Run a system's command, in a network namespace of its own if possible, and read its last line, which is JSON."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Unavailable, last_line

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def namespace() -> list[str]:
    """Return the prefix of a command by which `lo` counts its bytes alone; empty if that is impossible."""
    try:
        possible = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    return NAMESPACE if possible else []


def run(command: list[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Run the command and return its last line. Its other output goes to `log`; its process group has ended then.

    Raises `Unavailable` if it fails, or takes longer than `limit_s`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"not done after {limit_s:.0f} s; see {log}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise Unavailable(f"failed: {last_line(log.read_text())}; see {log}")
    report: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return report
