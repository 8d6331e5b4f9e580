"""What continuous integration runs, with a `make` that only prints what the real one would have."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git to clone with")

CLOSING = "========== {} in 9.00s =========="
SKIPPED = "SKIPPED [1] tests/test_lines.py:3: no slow lines: not root"


def command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clean clone of this project, as far as `.ci/run` looks at it."""
    folder = tmp_path / "repository"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    command(folder / ".ci" / "audit.py", 'echo "${AUDITED:-no hole is known}"; exit "${AUDIT:-0}"')
    for arguments in (["init"], ["add", "."], ["commit", "--message", "One"]):
        git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", *arguments]
        subprocess.run(git, cwd=folder, check=True, capture_output=True)
    return folder


def ran(repository: Path, make: str, **more: str) -> tuple[int, list[str]]:
    """Exit code and what was said, where packages cannot be installed; with `more` in the environment."""
    commands = repository.parent / "bin"
    commands.mkdir()
    command(commands / "make", make)
    command(commands / "apt-get", "exit 100")
    command(commands / "python-without-headers", "exit 1")
    environment = {
        **os.environ,
        **more,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": str(commands / "python-without-headers"),
    }
    done = subprocess.run([".ci/run"], cwd=repository, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_its_last_line_is_that_of_pytest_and_before_it_stands_what_was_skipped(repository: Path) -> None:
    closing = CLOSING.format("3 passed, 1 skipped")
    code, lines = ran(repository, f"echo '{SKIPPED}'; echo '{closing}'; echo 'Success: no issues found'")
    assert code == 0
    assert lines[-3:] == ["skipped on this machine:", SKIPPED, closing]
    (not_installed,) = (line for line in lines if line.startswith("not installed: "))
    assert "python3-dev" in not_installed


def test_it_fails_where_make_does(repository: Path) -> None:
    closing = CLOSING.format("1 failed, 3 passed")
    code, lines = ran(repository, f"echo '{closing}'; exit 2")
    assert code == 2
    assert lines[-4:-1] == ["make check failed with exit code 2, see above", "skipped on this machine:", "nothing"]
    assert lines[-1] == closing


def test_of_two_runs_of_pytest_the_one_that_failed_is_last(repository: Path) -> None:
    failed, passed = CLOSING.format("1 failed, 3 passed"), CLOSING.format("9 passed")
    _, lines = ran(repository, f"echo '{failed}'; echo '{passed}'; exit 2")
    assert lines[-2:] == [passed, failed]


@pytest.mark.parametrize(
    ("make", "audit", "code", "said"),
    [
        ("echo 'make: no rule'; exit 2", "0", 2, ""),
        ("exit 0", "1", 1, "jinja2 2.4.1: PYSEC-1"),
        ("exit 0", "75", 0, "not audited: no way there"),
    ],
    ids=["no tests", "a hole that is known", "nobody can be asked about holes"],
)
def test_it_fails_where_something_is_wrong_and_says_so(
    repository: Path, make: str, audit: str, code: int, said: str
) -> None:
    found, lines = ran(repository, make, AUDIT=audit, AUDITED=said)
    assert (found, said == "" or said in lines) == (code, True)
