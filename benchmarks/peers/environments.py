"""A virtual environment per peer, as they cannot share one: made from requirements/, in the user's cache."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


class Unavailable(Exception):
    """A peer cannot be installed or run here; the message says why, in one line."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outerstep" / "peers"


def prepare(peer: str) -> Path:
    """Return the interpreter of the peer's environment, which is made if it is missing or has other requirements.

    Raises `Unavailable` if it cannot be made.
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
    """Return the last line that is not empty, at most 200 characters of it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")[:200]
