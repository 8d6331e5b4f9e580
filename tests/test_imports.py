"""Who may import whom: packages in a fresh interpreter, with all their modules imported; packages and the layers inside
them by their source."""

import ast
import tomllib
from pathlib import Path

import pytest

from tests.support.python import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

WEB = ["fastapi", "starlette", "uvicorn"]
DATABASE = ["sqlalchemy", "alembic"]
TORCH = ["torch", "transformers", "safetensors"]

# What is imported (a package and all its modules) -> what must not have come along.
PACKAGES: dict[str, list[str]] = {
    "protocol": [*TORCH, *WEB, *DATABASE, "httpx", "coordinator", "worker", "outerstep", "migrations"],
    "coordinator": [*TORCH, "worker"],
    "worker": [*WEB, *DATABASE, "coordinator", "migrations"],
}
# The packages of the repository, and which of them each may import.
ALL_PARTS = ("protocol", "outerstep.common", "coordinator.settings", "coordinator", "worker", "outerstep")
PACKAGE_IMPORTS: dict[str, set[str]] = {
    "protocol": set(),
    "migrations": set(),
    "outerstep.common": {"protocol"},
    "coordinator.settings": {"protocol", "outerstep.common"},
    "coordinator": {"protocol", "migrations", "outerstep.common", "coordinator.settings"},
    "worker": {"protocol", "outerstep.common"},
    # Its commands also load the rest of the coordinator, by name.
    "outerstep": {"protocol", "outerstep.common", "coordinator.settings", "worker"},
    "harness": {*ALL_PARTS},
    "benchmarks": {*ALL_PARTS, "harness"},
    "docs": {*ALL_PARTS, "harness", "benchmarks"},
    "tests": {*ALL_PARTS, "migrations", "harness", "benchmarks", "docs"},
}

# The layers of a package, lowest first: a subpackage or module imports only from itself and from the layers before it.
LAYERS: dict[str, list[str]] = {
    "coordinator": [
        *("settings", "process", "notifications", "dashboard", "store", "quotas", "aggregation", "run", "trust"),
        *("rounds", "sync", "upkeep", "backup", "reporting", "service", "http", "api", "leadership", "server"),
    ],
    "worker": [
        *("errors", "ranks", "settings", "process", "memory", "accounts", "codecs", "models"),
        *("tuning", "state", "line", "link", "joining", "data", "rounds", "script", "allowing"),
        *("diloco", "export", "inner", "fit", "box", "starting", "train", "agent"),
    ],
}

IMPORT_ALL = """
import importlib, pkgutil
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(package.__path__, {name!r} + "."):
    importlib.import_module(module.name)
"""


def imported_by(code: str) -> set[str]:
    """Names in sys.modules of a new interpreter after `code`."""
    report = "\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = python("-c", code + report)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stderr.split())


@pytest.mark.system
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_and_all_its_modules(name: str) -> None:
    modules = imported_by(IMPORT_ALL.format(name=name))
    assert name in modules
    assert sorted(modules.intersection(PACKAGES[name])) == []


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
    modules = imported_by(code)
    assert sorted(modules.intersection([*TORCH, *WEB, *DATABASE])) == []
    ours = {each for each in modules if each.partition(".")[0] in ("coordinator", "worker")}
    settings = {"coordinator", "coordinator.settings", "worker", "worker.settings"}
    assert ours == settings, "the options of these commands are their settings"


def test_the_list_of_commands_is_quick() -> None:
    """`outerstep --help` took a second: it imported every command, and all that these need."""
    code = "from outerstep.cli import app; app(['--help'], standalone_mode=False)"
    modules = imported_by(code)
    slow = ["pydantic", "httpx", "numpy", "rich", "msgpack", "asyncio", "ssl", *TORCH, *WEB, *DATABASE]
    assert sorted(modules.intersection([*slow, "protocol.messages", "protocol.spec", "coordinator", "worker"])) == []
    assert [each for each in modules if each.startswith("outerstep.cli.")] == []


@pytest.mark.system
@pytest.mark.parametrize(
    "command",
    [
        ["worker", "http://127.0.0.1:1", "--run", "r", "--token-file", "missing"],
        ["worker", "http://127.0.0.1:1", "--run", "r"],
        ["doctor", "http://127.0.0.1:1", "--run", "r", "--token-file", "missing"],
        ["run", "export", "r", "--token", "t", "--out", "."],
        ["compare", "r", "--token-file", "missing"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_wrong_argument_is_reported_before_torch_is_imported(command: list[str]) -> None:
    """That takes many seconds."""
    code = f"""
import os, sys
os.environ.update(OUTERSTEP_TOKEN="t", OUTERSTEP_STEP_LOG="/missing/steps.jsonl")
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


@pytest.mark.system
def test_diloco_comes_lazily() -> None:
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


def graph_of(*packages: str) -> dict[str, set[str]]:
    """Each module of these packages, and those of them that it imports."""
    paths = {module_of(path): path for package in packages for path in (ROOT / package).rglob("*.py")}
    return {name: imports_of(path, set(paths)) - {name} for name, path in paths.items()}


def package_of(module: str) -> str:
    return next((each for each in PARTS_OF_PACKAGES if module.startswith(each)), module.partition(".")[0])


PARTS_OF_PACKAGES = [each for each in PACKAGE_IMPORTS if "." in each]


def layer_of(module: str) -> str:
    """The subpackage or module of a package: "run" of coordinator.run.decide, "" of the package itself."""
    return module.partition(".")[2].partition(".")[0]


def test_every_package_has_its_rule() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["files"]
    scripts = {"build", "examples"}  # nobody imports them
    top = {package for package in PACKAGE_IMPORTS if "." not in package}
    assert top == set(checked) == {path.parent.name for path in ROOT.glob("[a-z]*/*.py")} - scripts


def test_packages_import_only_what_is_below_them() -> None:
    graph = graph_of(*(package for package in PACKAGE_IMPORTS if "." not in package))
    wrong = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if package_of(other) not in {package_of(name), *PACKAGE_IMPORTS[package_of(name)]}
    }
    assert sorted(wrong) == []


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_only_from_lower_ones(package: str) -> None:
    layers, graph = LAYERS[package], graph_of(package)
    assert {layer_of(name) for name in graph} - {""} == set(layers)
    wrong = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if layer_of(name) and layer_of(other) and layers.index(layer_of(other)) > layers.index(layer_of(name))
    }
    assert sorted(wrong) == []


@pytest.mark.parametrize("package", [each for each in PACKAGE_IMPORTS if each not in ("tests", "outerstep.common")])
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    graph = graph_of(package)
    while leaves := {name for name, imports in graph.items() if not imports & graph.keys()}:
        graph = {name: imports for name, imports in graph.items() if name not in leaves}
    assert sorted(graph) == [], "these are in a circle, or import one"
