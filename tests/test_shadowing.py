"""A user's own file beside his script that has the name of a package of ours: a real script, in a real directory."""

from pathlib import Path

import pytest

from protocol import __version__
from tests.support.python import python

TRAIN = "from outerstep import DiLoCo\nassert DiLoCo.__module__ == 'worker.diloco'\nprint('trained')\n"
OWN = "print('the user\\'s own file was run')\n"


@pytest.mark.parametrize("hiding", ["worker.py", "protocol.py", "worker"])
def test_a_file_or_directory_that_hides_a_package_is_told_by_name(tmp_path: Path, hiding: str) -> None:
    """It was run, and then said to be no package: `No module named 'worker.diloco'; 'worker' is not a package`."""
    (tmp_path / "my_training.py").write_text(TRAIN)
    path = tmp_path / hiding
    own = path if path.suffix else path / "__init__.py"
    own.parent.mkdir(exist_ok=True)
    own.write_text(OWN)
    done = python("my_training.py", directory=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    kind = "file" if path.suffix else "directory"
    said = f"\nImportError: {path} hides the package `{path.stem}` of Outerstep; rename the {kind}\n"
    assert done.stderr.endswith(said), done.stderr


def test_the_script_itself_may_be_the_file(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("print('once')\n" + TRAIN)
    done = python("worker.py", directory=tmp_path)
    assert (done.returncode, done.stdout) == (1, "once\n")
    assert f"{script} hides the package `worker` of Outerstep" in done.stderr


@pytest.mark.system
def test_what_a_script_does_not_need_is_not_in_its_way(tmp_path: Path) -> None:
    """A worker imports nothing of the coordinator; and a directory without __init__.py hides nothing."""
    (tmp_path / "my_training.py").write_text(TRAIN)
    (tmp_path / "coordinator.py").write_text(OWN)
    for name in ("worker", "protocol"):
        (tmp_path / name).mkdir()
    done = python("my_training.py", directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("worker", ["worker", "http://c", "--run", "r"]),
        ("worker", ["demo"]),
        ("coordinator", ["coordinator"]),
        ("worker", ["run", "export", "r", "--out", "model", "--token", "t"]),
    ],
)
def test_python_m_outerstep(tmp_path: Path, name: str, arguments: list[str]) -> None:
    hiding = tmp_path / f"{name}.py"
    hiding.write_text(OWN)
    done = python("-m", "outerstep", *arguments, directory=tmp_path)
    said = f"outerstep: {hiding} hides the package `{name}` of Outerstep; rename the file\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_python_m_outerstep_where_protocol_is_hidden(tmp_path: Path) -> None:
    hiding = tmp_path / "protocol.py"
    hiding.write_text(OWN)
    done = python("-m", "outerstep", "--help", directory=tmp_path)
    assert done.stdout == ""
    assert f"{hiding} hides the package `protocol` of Outerstep; rename the file" in done.stderr


def test_the_console_script_does_not_look_into_the_working_directory(tmp_path: Path) -> None:
    for name in ("worker", "protocol", "coordinator"):
        (tmp_path / f"{name}.py").write_text(OWN)
    scripts = tmp_path / "bin"
    scripts.mkdir()
    script = scripts / "outerstep"
    script.write_text("from outerstep.cli import main\nmain()\n")  # as installers write it
    done = python(str(script), "--version", directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n"), done.stderr
