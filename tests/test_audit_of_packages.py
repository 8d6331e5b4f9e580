"""`.ci/audit.py`: whether a hole is known in what is installed; that nobody could be asked is never taken for a no."""

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "audit.py"


def load() -> ModuleType:
    loader = SourceFileLoader("ci_audit", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


audit = load()
DJANGO = {"name": "Django", "version": "1.2", "vulns": [{"id": "PYSEC-2011-1", "fix_versions": ["1.2.4"]}]}
SOUND = {"name": "numpy", "version": "2.4.6", "vulns": []}
HOLE = {"name": "jinja2", "version": "2.4.1", "vulns": [{"id": "PYSEC-2014-8", "fix_versions": ["2.7.2"]}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("dependencies", "code", "said"),
    [
        ([SOUND, DJANGO], 0, "no hole is known in 1 packages"),
        ([SOUND, HOLE, DJANGO], 1, "jinja2 2.4.1: PYSEC-2014-8, mended in 2.7.2"),
        ([SOUND, HOLE, UNKNOWN, DJANGO], 1, "torch: Dependency not found"),
        ([SOUND, UNKNOWN, DJANGO], 75, "torch: Dependency not found"),
        ([SOUND], 75, "it knows of no hole in django 1.2"),
        ([SOUND, HOLE, DJANGO | {"vulns": []}], 75, "it knows of no hole in django 1.2"),
    ],
)
def test_an_answer_counts_where_known_holes_are_in_it(dependencies: list[dict[str, Any]], code: int, said: str) -> None:
    found, lines = audit.judge({"dependencies": dependencies})
    assert found == code
    assert said in "\n".join(lines)


def stand_in(folder: Path, script: str) -> str:
    """A pip-audit that does what a shell says; `$5` and so on are what it is asked."""
    path = folder / "pip-audit"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.covers("security:vulnerable-package")
def test_where_nobody_can_be_asked_it_says_so(tmp_path: Path) -> None:
    pip_audit = stand_in(tmp_path, "echo 'no way there' >&2; exit 1")
    code, lines = audit.audit(pip_audit, audit.PINS)
    assert code == 75
    assert lines == ["pypi: no way there", "osv: no way there"]


def test_the_second_service_is_asked_where_the_first_does_not_know(tmp_path: Path) -> None:
    knows, does_not = (json.dumps({"dependencies": each}) for each in ([SOUND, DJANGO], [SOUND]))
    pip_audit = stand_in(tmp_path, f"case \"$*\" in *osv) echo '{knows}';; *) echo '{does_not}';; esac; exit 1")
    assert audit.audit(pip_audit, audit.PINS) == (0, ["osv: no hole is known in 1 packages"])


def test_all_that_is_pinned_is_asked_about(tmp_path: Path) -> None:
    report = json.dumps({"dependencies": [SOUND, DJANGO]})
    pip_audit = stand_in(tmp_path, f"cp \"$2\" {tmp_path}/asked; echo '{report}'")
    audit.audit(pip_audit, audit.PINS)
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert audit.PINS.read_text(encoding="utf-8") in asked
    assert asked.rstrip().endswith("django==1.2")
