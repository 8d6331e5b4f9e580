#!/usr/bin/env python3
"""Ask whether a hole is known in any version that constraints.txt pins, by pip-audit, in an environment of its own.

Exit code 0: asked, and none is known. 1: one is. 75: nobody could be asked, or they do not know: that is told, and is
never taken for an answer. So a package with known holes is asked about as well, whose holes have to be in the answer.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

PINS = Path(__file__).parents[1] / "constraints.txt"
PIP_AUDIT = "pip-audit==2.10.1"
KNOWN_HOLES = ("django", "1.2")  # dozens of them
SERVICES = ("pypi", "osv")
NONE_KNOWN, KNOWN, NOT_ASKED = 0, 1, os.EX_TEMPFAIL

Answer = tuple[int, list[str]]  # the exit code, and what is to be said


class NotAsked(Exception):
    """Nobody could be asked; the reason."""


def judge(report: dict[str, Any]) -> Answer:
    """Return what the JSON of pip-audit comes to."""
    packages = {each["name"].lower(): each for each in report["dependencies"]}
    name, version = KNOWN_HOLES
    if not packages.pop(name, {}).get("vulns"):
        return NOT_ASKED, [f"it knows of no hole in {name} {version}, so it knows of none at all"]
    holes = [
        f"{each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version'}"
        for each in packages.values()
        for hole in each.get("vulns", [])
    ]
    unknown = [f"{each['name']}: {each['skip_reason']}" for each in packages.values() if "skip_reason" in each]
    if holes:
        return KNOWN, [*holes, *unknown]
    if unknown:
        return NOT_ASKED, unknown
    return NONE_KNOWN, [f"no hole is known in {len(packages)} packages"]


def run(*command: str) -> str:
    """Return what a command prints. Raises NotAsked where it prints nothing and fails, with its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout.strip():
        raise NotAsked((done.stderr.strip().splitlines() or [f"{command[0]} ended with {done.returncode}"])[-1])
    return done.stdout


def installed(folder: Path) -> str:
    """Return the path of pip-audit, installed into `folder`."""
    venv.create(folder, with_pip=True)
    run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PIP_AUDIT)
    return str(folder / "bin" / "pip-audit")


def ask(pip_audit: str, pins: Path, service: str) -> Answer:
    """Ask one service about all pins, and about the package with known holes."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as asked:
        asked.write(f"{pins.read_text(encoding='utf-8')}\n{'=='.join(KNOWN_HOLES)}\n")
        asked.flush()
        options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")
        try:
            return judge(json.loads(run(pip_audit, "-r", asked.name, *options, "--vulnerability-service", service)))
        except NotAsked as error:
            return NOT_ASKED, [str(error)]


def audit(pip_audit: str, pins: Path) -> Answer:
    """Ask one service after the other, until one can tell."""
    said: list[str] = []
    for service in SERVICES:
        code, lines = ask(pip_audit, pins, service)
        if code != NOT_ASKED:
            return code, [f"{service}: {line}" for line in lines]
        more = [f"and {len(lines) - 3} more"] if len(lines) > 3 else []
        said += [f"{service}: {line}" for line in [*lines[:3], *more]]
    return NOT_ASKED, said


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            code, lines = audit(installed(Path(scratch)), PINS)
        except NotAsked as error:
            code, lines = NOT_ASKED, [str(error)]
    if code == NOT_ASKED:
        print("not audited: nobody could say whether a hole is known in what constraints.txt pins")
    print(*lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
