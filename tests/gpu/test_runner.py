"""`make gpu` itself: what it says where there is no GPU, and which parts it leaves out the next time."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import NEEDED, NO_GPU, PARTS, PYTEST, ROOT, passed_parts, run

HERE = {"code": "1", "torch": "2", "gpu": "a"}


def started(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would run everything")
def test_without_a_gpu_it_says_so_and_is_no_success() -> None:
    code, said = started()
    assert code == NO_GPU
    assert "there is no GPU here that torch" in said


def test_a_folder_without_wheels_is_told(tmp_path: Path) -> None:
    assert started("--wheels", str(tmp_path)) == (NO_GPU, f"GPU_WHEELS: there are no wheels in {tmp_path}\n")


def test_what_has_passed_is_not_run_again_for_the_same_code_torch_and_gpu(tmp_path: Path) -> None:
    results = tmp_path / "build" / "gpu.jsonl"
    assert passed_parts(results, HERE) == set()
    assert run("speaks", ["-c", "print('a'); print('b')"], 60, results, HERE)
    assert not run("fails", ["-c", "raise SystemExit(4)"], 60, results, HERE)
    assert passed_parts(results, HERE) == {"speaks"}
    assert passed_parts(results, {**HERE, "code": "2"}) == set()
    assert [json.loads(line)["last"] for line in results.read_text().splitlines()] == ["b", ""]


def test_a_part_that_hangs_is_killed_and_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("hangs", ["-c", "input_ = __import__('threading').Event().wait()"], 0.5, tmp_path / "r", HERE)
    assert "hangs: FAILED: it was killed after 0.5 s" in capsys.readouterr().out


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
