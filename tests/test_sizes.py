"""The sizes in pyproject.toml, `[tool.outerstep.sizes]`, are not exceeded: whoever adds deletes first."""

import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("coordinator", "worker", "protocol", "outerstep", "migrations")


def lines(*paths: Path) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def python(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_nothing_is_larger_than_its_limit() -> None:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["outerstep"]["sizes"]
    modules = [path for path in python(*PRODUCT) if path.name != "__init__.py"]
    packages = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    longest = max(modules, key=lines)
    sizes = {
        "product": lines(*python(*PRODUCT)),
        "tests": lines(*python("tests")),
        "benchmarks": lines(*python("benchmarks")),
        "package": max(packages.values()),
        "module": lines(longest),
        "readme": lines(ROOT / "README.md"),
    }
    exceeded = [f"{what}: {size}, at most {limits[what]}" for what, size in sizes.items() if size > limits[what]]
    assert not exceeded, (exceeded, f"longest module: {longest}", packages.most_common(3))
    assert limits.keys() == sizes.keys()
