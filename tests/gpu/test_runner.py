"""`make gpu` itself: what it says where there is no GPU, and which parts it leaves out the next time."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires

import pytest

from tests.gpu.__main__ import NEEDED, PARTS, PYTEST, ROOT


def _distribution(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ (]", requirement)[0].lower()


@pytest.mark.system
def test_no_part_needs_what_only_developers_have() -> None:
    """Each is collected with its own configuration, without those packages."""
    developers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    theirs = [each for one in NEEDED.values() for each in requires(one) or [] if "extra ==" not in each]
    names = {*map(_distribution, developers)} - {*NEEDED.values(), *map(_distribution, theirs)}
    modules = [each for each, of in packages_distributions().items() if {one.lower() for one in of} <= names]
    assert "psycopg" in modules
    files = sorted({word for _, words in PARTS.values() for word in words if word.endswith(".py")})
    code = (
        "import sys, pytest\n"
        f"sys.modules.update(dict.fromkeys({sorted(modules)!r}))\n"
        f"sys.exit(pytest.main({[*PYTEST[2:], '--collect-only', *files]!r}))"
    )
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_are_checked_before_the_first_part_needs_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["coordinator"], *extras["worker"]]
    names = {re.split(r"[<>=; ]", each)[0] for each in wanted}
    assert names - set(NEEDED.values()) == {"plotly", "uvloop"}, "only the dashboard and `outerstep coordinator` do"
