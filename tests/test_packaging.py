"""What is shipped beside the code says the truth: extras, pins, Dockerfiles, the compose file, the Makefile."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coordinator.settings import Settings
from outerstep.cli.demo import NEEDED
from outerstep.tracking import TRACKERS
from tests.support.distributions import BASE, EXTRAS, PROJECT, ROOT, closure

PINS = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
}


def dockerfile(part: str) -> dict[str, list[str]]:
    """Instruction -> its arguments, in order; continued lines joined."""
    text = (ROOT / f"Dockerfile.{part}").read_text(encoding="utf-8").replace("\\\n", " ")
    instructions: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.strip().partition(" ")
            instructions.setdefault(name, []).append(" ".join(rest.split()))
    return instructions


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return loaded


# The other extras are of single commands; whoever wants one has it newly resolved beside the pins.
PINNED = ("coordinator", "worker", "dev")


@pytest.mark.covers("security:vulnerable-package")
@pytest.mark.parametrize("part", PINNED)
def test_everything_that_is_installed_is_pinned(part: str) -> None:
    brought = closure(BASE + EXTRAS[part])
    from_torch = {name for name in brought if name.startswith(("nvidia-", "cuda-", "triton"))} | {"setuptools"}
    assert sorted(brought - from_torch - set(PINS)) == []


def test_the_pins_satisfy_the_project() -> None:
    for text in [*BASE, *(text for part in PINNED for text in EXTRAS[part])]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), text


def test_no_pin_is_left_over() -> None:
    needed = closure(BASE + [text for part in PINNED for text in EXTRAS[part]])
    assert sorted(set(PINS) - needed) == []


@pytest.mark.covers("security:container-takeover")
@pytest.mark.parametrize(
    ("part", "extras"), [("coordinator", "coordinator,notify,postgresql,remote"), ("worker", "worker,data,remote")]
)
def test_an_image_holds_its_own_extras_only(part: str, extras: str) -> None:
    instructions = dockerfile(part)
    assert instructions["FROM"] == ["python:3.11 AS build", "python:3.11-slim"]  # the kernels need a compiler
    (install,) = (line for line in instructions["RUN"] if "/wheel/*.whl" in line)
    assert re.findall(r"\.whl\)\[(.*?)\]", install) == [extras]
    assert "-c /wheel/constraints.txt" in install
    assert (ROOT / "constraints.txt").is_file()
    assert len(instructions["USER"]) == 1
    assert instructions["USER"][0] not in ("root", "0")
    assert (
        f"useradd --uid 10001 {'--no-create-home' if part == 'coordinator' else '--create-home'} outerstep" in install
    )


def test_the_compose_file_is_one() -> None:
    """... by the Compose Specification's own schema (Apache-2.0, github.com/compose-spec/compose-spec)."""
    schema = json.loads((ROOT / "tests" / "containers" / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema_rs.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []


@pytest.mark.parametrize("service", ["tokens", "demo-run"])
@pytest.mark.parametrize("given", [{}, {"OUTERSTEP_COORDINATOR_ADMIN_TOKEN": ""}], ids=["unset", "empty"])
def test_a_service_without_an_admin_token_says_what_to_set(service: str, given: dict[str, str]) -> None:
    """... since the other coordinator may have led first, and have it."""
    shell, options, script = compose()["services"][service]["command"]
    environment = {"PATH": os.environ["PATH"], **given}
    done = subprocess.run(
        [shell, options, script.replace("$$", "$")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "OUTERSTEP_COORDINATOR_ADMIN_TOKEN: is not set" in done.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="apt install openssl")
def test_the_settings_of_several_coordinators(tmp_path: Path) -> None:
    """... as docs/scaling.md writes them to the file .env: the compose file reads each, and they are valid."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^cat > \.env <<END\n.*?^END\n", text, re.DOTALL | re.MULTILINE)
    subprocess.run(["sh", "-euc", command], cwd=tmp_path, check=True)
    given = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    read = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
    read |= {variable for service in compose()["services"].values() for variable in service.get("environment", {})}
    assert given.keys() - read == {"COMPOSE_PROFILES"}
    assert (ROOT / "deploy" / "compose" / given["OUTERSTEP_PROMETHEUS"]).is_file()
    prefix = "OUTERSTEP_COORDINATOR_"
    ours: dict[str, Any] = {
        name.removeprefix(prefix).lower(): value for name, value in given.items() if name.startswith(prefix)
    }
    settings = Settings(data_dir=tmp_path, **ours)
    assert settings.admin_token is not None, "without it, `tokens` finds none where the other coordinator led first"


def test_the_makefile_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.10.2; else exit 1; fi\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Outerstep needs Python 3.11 or newer" in done.stderr
    assert "is Python 3.10.2" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_hints_name_extras_that_can_be_installed() -> None:
    """Installed as it is, pip finds the extras of `outerstep[…]` in it, and asks no index for outerstep itself."""
    hint = re.compile(r"outerstep\[([\w,-]+)\]|\bextra=\"([\w-]+)\"")
    named: set[str] = {tracker.extra for tracker in TRACKERS.values() if tracker.extra} | set(NEEDED.values())
    for package in ("protocol", "coordinator", "worker", "outerstep", "docs", "examples", "README.md"):
        for path in [ROOT / package] if package.endswith(".md") else (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".md") and path.name != "log.md":
                for several, one in hint.findall(path.read_text(encoding="utf-8")):
                    named |= set(several.split(",")) if several else {one}
    named -= {"extra", "allow", "forbid", "ignore"}  # a placeholder, and pydantic's own
    assert {"worker", "coordinator", "data", "peft", "remote"} <= named
    assert named <= set(EXTRAS)


def test_the_version_is_said_once() -> None:
    from outerstep import __version__

    assert PROJECT["dynamic"] == ["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in changelog


def test_all_that_is_installed_is_looked_at_by_bandit() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (looked_at,) = re.findall(r"/bandit .* --recursive (.*)$", makefile, re.MULTILINE)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = [name.rstrip("*") for name in pyproject["tool"]["setuptools"]["packages"]["find"]["include"]]
    assert set(packages) | {"setup.py"} == set(looked_at.split())
