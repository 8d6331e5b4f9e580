"""What is shipped beside the code says the truth: extras, pins, Dockerfiles, the compose file, the Makefile."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coordinator.settings import AggregatorSettings, Settings
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


def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "outerstep", *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


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


def test_a_coordinator_installs_without_torch_and_a_worker_without_a_web_server() -> None:
    coordinator = closure(BASE + EXTRAS["coordinator"] + EXTRAS["remote"])
    worker = closure(BASE + EXTRAS["worker"])
    assert not coordinator & {"torch", "transformers", "safetensors"}
    assert not worker & {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic"}


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


@pytest.mark.parametrize("part", ["coordinator", "worker"])
def test_an_image_says_its_version(part: str) -> None:
    from outerstep import __version__

    assert f'org.opencontainers.image.version="{__version__}"' in dockerfile(part)["LABEL"][0]


def test_the_workers_image_has_torch_from_the_index_that_the_build_names() -> None:
    instructions = dockerfile("worker")
    assert "TORCH_INDEX=" in instructions["ARG"], "PyPI's, unless it is named"
    (torch,) = (line for line in instructions["RUN"] if "TORCH_INDEX" in line)
    assert torch.count("-c /torch/constraints.txt") == torch.count("pip install") == 2


def test_the_coordinators_image() -> None:
    instructions = dockerfile("coordinator")
    assert instructions["VOLUME"] == ["/data"]
    assert instructions["EXPOSE"] == ["8470"]
    command = json.loads(instructions["CMD"][0])
    assert command == ["outerstep", "coordinator", "--host", "0.0.0.0", "--data", "/data"]
    offered = help_of("coordinator")
    assert all(option in offered for option in command if option.startswith("--"))
    probe = instructions["HEALTHCHECK"][0].partition("CMD ")[2]
    program = json.loads(probe)
    assert program[:2] == ["python", "-c"]
    compile(program[2], "HEALTHCHECK", "exec")
    assert "http://127.0.0.1:8470/healthz" in program[2]
    assert Settings.model_fields["port"].default == 8470


def test_the_compose_file_is_one() -> None:
    """... by the Compose Specification's own schema (Apache-2.0, github.com/compose-spec/compose-spec)."""
    schema = json.loads((ROOT / "tests" / "containers" / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema_rs.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []
    mistyped = compose()
    mistyped["services"]["coordinator"]["stop_grace"] = mistyped["services"]["coordinator"].pop("stop_grace_period")
    assert not validator.is_valid(mistyped)


@pytest.mark.system
def test_the_compose_file() -> None:
    document = compose()
    services = document["services"]
    for name, service in services.items():
        for mount in service.get("volumes", []):
            by_default = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount)
            source, _, target = by_default.removesuffix(":ro").rpartition(":")
            assert source in document["volumes"] or (ROOT / source).is_file(), f"{name}: {target}"
        if "build" in service:
            part = "worker" if "worker" in name else "coordinator"
            assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).name == f"Dockerfile.{part}"
        if service.get("command", [])[:2] == ["outerstep", "worker"]:
            offered = help_of("worker")
            assert all(option in offered for option in service["command"] if option.startswith("--"))
    always = {name for name, service in services.items() if "profiles" not in service}
    assert always == {"coordinator", "caddy", "tokens", "prometheus"}
    open_to_all = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(open_to_all) == {"caddy", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for port in open_to_all["prometheus"]), "it has no password"
    port = dockerfile("coordinator")["EXPOSE"][0]
    assert services["caddy"]["environment"]["OUTERSTEP_UPSTREAM"] == f"${{OUTERSTEP_UPSTREAM:-coordinator:{port}}}"
    scaled = {name for name, service in services.items() if "scale" in service.get("profiles", [])}
    assert scaled == {"coordinator-2", "aggregator", "database", "store"}
    other, first = services["coordinator-2"], services["coordinator"]
    assert {key for key in other if other[key] != first.get(key)} == {"profiles", "volumes"}
    for prefix, settings in (("OUTERSTEP_COORDINATOR_", Settings), ("OUTERSTEP_AGGREGATOR_", AggregatorSettings)):
        given = {variable for service in services.values() for variable in service.get("environment", {})}
        known = {f"{prefix}{name.upper()}" for name in settings.model_fields}
        assert {variable for variable in given if variable.startswith(prefix)} <= known

    worker, demo = services["worker"], services["demo-worker"]
    assert (worker["profiles"], demo["profiles"]) == (["worker"], ["demo"])
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "OUTERSTEP_TOKEN" in worker["environment"]
    assert "TORCH_INDEX" in demo["build"]["args"]
    assert "OUTERSTEP_TOKEN" in help_of("worker")


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


def test_the_build_context_holds_what_the_install_reads() -> None:
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    packages = [
        name.rstrip("*")
        for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
            "include"
        ]
    ]
    for needed in [
        *(f"{name}/**" for name in packages),
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "README.md",
        "LICENSE",
    ]:
        assert f"!{needed}" in kept
    assert "*" in kept


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
