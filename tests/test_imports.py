"""Who may import whom: each rule is checked in a fresh interpreter, with everything below the package imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WEB = ["fastapi", "starlette", "uvicorn"]
DATABASE = ["sqlalchemy", "alembic"]
TORCH = ["torch", "transformers", "safetensors"]

# What is imported (a package and all its modules, or a statement) -> what must not have come along.
PACKAGES: dict[str, list[str]] = {
    "protocol": [*TORCH, *WEB, *DATABASE, "httpx", "coordinator", "worker", "outerstep", "migrations"],
    "coordinator": [*TORCH, "worker"],
    "worker": [*WEB, *DATABASE, "coordinator", "migrations"],
}
STATEMENTS: dict[str, list[str]] = {
    "import outerstep": [*TORCH, *WEB, *DATABASE, "coordinator", "worker"],
    "import outerstep.cli": [*TORCH, *WEB, *DATABASE, "coordinator", "worker"],
    "from coordinator.app import create_app": TORCH,
}

IMPORT_ALL = """
import importlib, pkgutil
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(package.__path__, {name!r} + "."):
    importlib.import_module(module.name)
"""


def imported_by(code: str, *arguments: str) -> set[str]:
    """Names in sys.modules of a new interpreter after `code`."""
    report = "\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code + report, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stderr.split())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_and_all_its_modules(name: str) -> None:
    modules = imported_by(IMPORT_ALL.format(name=name))
    assert name in modules
    assert sorted(modules.intersection(PACKAGES[name])) == []


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement(statement: str) -> None:
    assert sorted(imported_by(statement).intersection(STATEMENTS[statement])) == []


@pytest.mark.parametrize("command", ["--help", "coordinator --help", "worker --help", "demo --help", "run --help"])
def test_help_needs_neither_side(command: str) -> None:
    code = f"""
import sys
from outerstep.cli import main
sys.argv = ["outerstep", *{command.split()!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert sorted(imported_by(code).intersection([*TORCH, *WEB, *DATABASE, "coordinator", "worker"])) == []


def test_diloco_comes_lazily() -> None:
    modules = imported_by("from outerstep import DiLoCo; assert DiLoCo.__module__ == 'worker.diloco'")
    assert "torch" in modules
    assert not modules.intersection([*WEB, *DATABASE, "coordinator"])
