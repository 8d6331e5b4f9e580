"""Who may import whom: between packages in a fresh interpreter, with everything below the package imported; between
packages, and between the rooms of a package, in their source."""

import ast
import os
import subprocess
import sys
import tomllib
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

# The packages of the house (".") and the rooms of a package, lowest first: a package or module in it, and those below
# that it may import from. The modules of a room import each other freely, in no circle.
ROOMS: dict[str, dict[str, set[str]]] = {
    ".": {
        "protocol": set(),
        "migrations": set(),
        "coordinator": {"protocol", "migrations"},
        "worker": {"protocol"},
        "outerstep": {"protocol", "worker"},  # and inside its commands the coordinator, by name
        "benchmarks": {"protocol", "coordinator", "worker", "outerstep"},
        "docs": {"protocol", "coordinator", "worker", "outerstep", "benchmarks"},
        "tests": {"protocol", "migrations", "coordinator", "worker", "outerstep", "benchmarks", "docs"},
    },
    "coordinator": {
        "settings": set(),
        "logs": set(),
        "sharing": set(),
        "store": set(),
        "callers": {"settings", "store"},
        "tuning": set(),
        "screening": set(),
        "runs": {"store", "tuning", "screening"},
        "workers": {"runs", "store", "screening"},
        "sync": {"runs", "store", "screening"},
        "settling": {"runs", "sync"},
        "upkeep": {"runs", "store", "sync"},
        "backup": {"store", "runs", "sync"},
        "round_reports": {"store", "runs", "sync", "workers"},
        "reports": {"store", "runs", "sync", "round_reports"},
        "notifications": {"logs", "store", "runs", "backup", "round_reports"},
        "service": {
            "settings",
            "logs",
            "callers",
            "sharing",
            "store",
            "tuning",
            "runs",
            "workers",
            "sync",
            "settling",
            "upkeep",
            "backup",
            "notifications",
        },
        "server_status": {"logs", "notifications", "service"},
        "http": {"settings", "logs", "store", "callers", "tuning", "runs", "service"},
        "metrics": {"store", "runs", "round_reports", "reports", "service", "http"},
        "api": {
            "callers",
            "runs",
            "workers",
            "sync",
            "round_reports",
            "reports",
            "service",
            "server_status",
            "http",
            "metrics",
        },
        "dashboard": set(),
        "app": {"service", "http", "metrics", "api", "dashboard"},
        "server": {"settings", "logs", "store", "tuning", "service", "http", "app"},
    },
    "worker": {
        "errors": set(),
        "files": set(),
        "ranks": {"errors"},
        "user_code": {"errors"},
        "settings": set(),
        "logs": set(),
        "signals": {"errors"},
        "accounts": {"ranks"},
        "codecs": set(),
        "models": {"errors", "user_code"},
        "tuning": {"codecs"},
        "state": {"errors", "files", "ranks", "accounts", "codecs", "tuning"},
        "privacy": {"ranks", "state"},
        "link": {"errors", "ranks", "signals", "accounts", "codecs", "tuning", "state"},
        "data": {"errors", "files", "tuning", "link"},
        "rounds": {"errors", "ranks", "accounts", "codecs", "tuning", "state", "privacy", "link"},
        "script": {"errors", "ranks", "settings", "data", "state"},
        "allowing": {"errors", "settings", "data"},
        "diloco": {
            *("errors", "ranks", "signals", "accounts", "data", "allowing", "state", "privacy", "link", "rounds"),
            "script",
        },
        "diloco_optimizer": {"diloco"},
        "export": {"errors", "data", "models", "link", "state", "allowing"},
        "initial": {"errors", "models", "link"},
        "inner": {"errors", "user_code", "data", "models"},
        "box": {"errors", "ranks", "settings", "accounts", "data", "models", "inner"},
        "starting": {"settings", "inner"},
        "train": {"accounts", "data", "rounds", "box"},
        "alone": {"errors", "accounts", "state", "box", "train"},
        "agent": {
            *("errors", "ranks", "settings", "logs", "signals", "accounts", "state", "link"),
            *("diloco", "initial", "inner", "box", "starting", "train", "alone", "allowing"),
        },
    },
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


def test_help_needs_neither_side() -> None:
    code = """
import sys
from outerstep.cli import main
for command in ([], ["coordinator"], ["worker"], ["doctor"], ["demo"], ["run"]):
    sys.argv = ["outerstep", *command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    else:
        raise AssertionError(command)
"""
    assert sorted(imported_by(code).intersection([*TORCH, *WEB, *DATABASE, "coordinator", "worker"])) == []


def test_the_list_of_commands_is_quick() -> None:
    """`outerstep --help` took a second: it imported every command, and all that these need."""
    code = "from outerstep.cli import app; app(['--help'], standalone_mode=False)"
    modules = imported_by(code)
    slow = ["pydantic", "httpx", "numpy", "rich", "msgpack", "asyncio", "ssl", *TORCH, *WEB, *DATABASE]
    assert sorted(modules.intersection([*slow, "protocol.messages", "protocol.spec", "coordinator", "worker"])) == []
    assert [each for each in modules if each.startswith("outerstep.cli.")] == []


@pytest.mark.parametrize(
    "command",
    [
        ["worker", "http://127.0.0.1:1", "--run", "r", "--token-file", "missing"],
        ["worker", "http://127.0.0.1:1", "--run", "r", "--token", "t", "--log", "/missing/steps.jsonl"],
        ["doctor", "http://127.0.0.1:1", "--run", "r", "--token-file", "missing"],
        ["run", "export", "r", "--token", "t", "--out", "."],
        ["run", "evaluate", "r", "--token-file", "missing"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_wrong_argument_is_reported_before_torch_is_imported(command: list[str]) -> None:
    """That takes many seconds."""
    code = f"""
import sys
from outerstep.cli import main
sys.argv = ["outerstep", *{command!r}]
try:
    main()
except SystemExit as end:
    assert end.code == 2, end.code
else:
    raise AssertionError
"""
    assert sorted(imported_by(code).intersection(TORCH)) == []


def test_diloco_comes_lazily() -> None:
    imported_by("from outerstep import DiLoCoOptimizer as D; assert D.__module__ == 'worker.diloco_optimizer'")
    modules = imported_by("from outerstep import DiLoCo; assert DiLoCo.__module__ == 'worker.diloco'")
    assert "torch" in modules
    assert not modules.intersection([*WEB, *DATABASE, "coordinator"])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Those of `modules` that the file imports, wherever in it: `from a import b` is of a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in within}
    return found & modules


def graph_of(house: str) -> dict[str, set[str]]:
    """Each module of a package, or of all packages, and those of them that it imports."""
    packages = ROOMS["."] if house == "." else [house]
    paths = {module_of(path): path for package in packages for path in (ROOT / package).rglob("*.py")}
    return {name: imports_of(path, set(paths)) - {name} for name, path in paths.items()}


def test_every_package_has_its_rule() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["files"]
    scripts = {"build", "examples"}  # nobody imports them
    assert set(ROOMS["."]) == set(checked) == {path.parent.name for path in ROOT.glob("[a-z]*/*.py")} - scripts


@pytest.mark.parametrize("house", ROOMS)
def test_rooms_import_only_what_is_below_them(house: str) -> None:
    rooms, graph = ROOMS[house], graph_of(house)
    room_of = {name: name.removeprefix(f"{house}.").partition(".")[0] for name in graph if name != house}
    assert set(rooms) == set(room_of.values()), "a room without its rule"
    order = list(rooms)
    for room, below in rooms.items():
        assert below <= set(order[: order.index(room)]), f"{room} may import what is not below it"
    used = {
        room: {room_of[each] for name in graph if room_of.get(name) == room for each in graph[name]} for room in rooms
    }
    assert {room: sorted(used[room] - {room} - rooms[room]) for room in rooms} == {room: [] for room in rooms}
    assert {room: sorted(rooms[room] - used[room]) for room in rooms} == {room: [] for room in rooms}, "not needed"


@pytest.mark.parametrize("package", [each for each in ROOMS["."] if each != "tests"])
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    graph = graph_of(package)
    while leaves := {name for name, imports in graph.items() if not imports & graph.keys()}:
        graph = {name: imports for name, imports in graph.items() if name not in leaves}
    assert sorted(graph) == [], "these are in a circle, or import one"
