"""A virtual environment per peer, as they cannot share one, from requirements/ in the user's cache; and running a
system's command, in a separate network namespace if possible."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parent / "requirements"
ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


class Unavailable(Exception):
    """A peer cannot be installed or run here; the message says why, in one line."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outerstep" / "peers"


def prepare(peer: str) -> Path:
    """Return the interpreter of the peer's environment. Creates it if it is missing or has other requirements.

    Raises `Unavailable` if that fails.
    """
    requirements = REQUIREMENTS / f"{peer}.txt"
    wanted = requirements.read_text()
    directory = cache() / f"{peer}-python{platform.python_version()}"
    python, installed = directory / "bin" / "python", directory / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)])
    installed.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"not installed: {last_line(done.stderr or done.stdout)}")


def last_line(text: str) -> str:
    """Return the last non-empty line, at most 200 characters of it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")[:200]


def namespace() -> list[str]:
    """Return a command prefix that runs it in a network namespace, where `lo` counts only its bytes; empty if
    impossible."""
    try:
        possible = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    return NAMESPACE if possible else []


def run(command: list[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Run the command and return its last line, which is JSON. Its other output goes to `log`; its process group is
    ended.

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
