"""`make gpu` itself."""

import re
import tomllib
from importlib.metadata import packages_distributions, requires

import pytest

from tests.gpu.__main__ import PARTS, PYTEST, ROOT, needed
from tests.support.python import python


def _distribution(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ (]", requirement)[0].lower()


@pytest.mark.nightly
def test_no_part_needs_what_only_developers_have() -> None:
    """Each is collected with its own configuration, without those packages."""
    developers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    theirs = [each for one in needed() for each in requires(one) or [] if "extra ==" not in each]
    names = {*map(_distribution, developers)} - {*needed(), *map(_distribution, theirs)}
    modules = [each for each, of in packages_distributions().items() if {one.lower() for one in of} <= names]
    assert "psycopg" in modules
    files = sorted({word for _, words in PARTS.values() for word in words if word.endswith(".py")})
    code = (
        "import sys, pytest\n"
        f"sys.modules.update(dict.fromkeys({sorted(modules)!r}))\n"
        f"sys.exit(pytest.main({[*PYTEST[2:], '--collect-only', *files]!r}))"
    )
    done = python("-c", code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
