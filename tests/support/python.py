"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments: object, directory: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments in `directory`; it finds this project wherever that is."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
