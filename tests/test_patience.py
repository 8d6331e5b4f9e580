"""How busy the machine is decides no test: the kinds of code with which it did."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
BY_CHANCE = {
    r"\.(wait|join|get|acquire|communicate|result)\((timeout=)?([5-9]|\d{2,})(\.\d+)?\)": "PATIENCE_S",
    r"\btimeout=([5-9]|\d{2,})\b(?! \*)": "PATIENCE_S",
    r"\b(round_max_s|grace_min_s|grace_max_s) = 0\.\d": "a SettableClock for the coordinator",
    r"create_server\(.*, 0\)\) as (probe|free)": "harness.ports.free_port",
}
# A process that does not end at a signal is killed; images take as long as they take.
MAY = {"support/shell.py: self._process.wait(30)", "containers/engine.py", "containers/bases.py"}


def test_what_a_test_waits_for_is_no_duration_of_its_own() -> None:
    found = [
        f"{name}: {line.strip()}: use {instead}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__) and (name := str(path.relative_to(TESTS))) not in MAY
        for line in path.read_text().splitlines()
        for chance, instead in BY_CHANCE.items()
        if re.search(chance, line) and f"{name}: {line.strip()}" not in MAY
    ]
    assert found == []
