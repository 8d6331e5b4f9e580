"""The rows of the table on hostile workers of a real run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from benchmarks.robust.ascent import Plan
from benchmarks.robust.real import Backdoor, FreeRide, Outcome, Row, Size, play

_ATTACK = Plan(share=0.5)

ROWS = [
    *(Row(f"C = {share:g}", Plan(share=share)) for share in (0.3, 0.5, 0.7, 0.85, 0.9, 0.95)),
    Row("1.24 times as long", Plan(share=0.5, length=1.24)),
    Row("every second round", replace(_ATTACK, every=2)),
    Row("the first round", replace(_ATTACK, only=0)),
    Row("the last round", replace(_ATTACK, only=-1)),
    Row("2 of 6", _ATTACK, workers=6, hostile=2),
    Row("2 of 6, C = 0.85", Plan(share=0.85), workers=6, hostile=2),
    Row("ternary", _ATTACK, codec="ternary"),
    Row("2-bit", _ATTACK, codec="2bit"),
    Row("late", _ATTACK, late=True),
    Row('wait = "never"', _ATTACK, wait="never"),
    Row("with false accusations", _ATTACK, lies=True),
    Row("2 of 6, with false accusations", _ATTACK, lies=True, workers=6, hostile=2),
    Row("slow", replace(_ATTACK, rise=0.0)),
    Row("slow, C = 0.85", Plan(share=0.85, rise=0.0)),
    Row("masked", replace(_ATTACK, masked=True)),
    Row("masked, slow", replace(_ATTACK, masked=True, rise=0.0)),
    Row("ahead", replace(_ATTACK, harm=0.0, ahead=True)),
    Row("within 0.01", replace(_ATTACK, harm=0.01)),
    Row("mean", _ATTACK, rule="mean"),
    Row("clipped", _ATTACK, rule="clipped"),
    Row("free rider", FreeRide()),
    *(Row(f"backdoor in 1 of {every}", Backdoor(every)) for every in (2, 4, 8)),
    Row("honest: 4"),
    Row("honest: 6", workers=6, hostile=2),
]

SHORT = Size(rounds=3, inner_steps=3, evaluation_tokens=1024)


def complete(rows: Sequence[Row], size: Size, seed: int, guard: str, results: Path | None) -> dict[str, Outcome]:
    """Return the outcome of each row, and of the same run without its attackers. Append each to the lines of JSON in
    `results`, and take from there what is there already."""
    setting = {**asdict(size), "seed": seed, "guard": guard}
    outcomes: dict[str, Outcome] = {}
    wanted = {each.name: each for row in rows for each in (row, row.without_attackers())}
    for each in wanted.values():
        stored = _stored(results, setting).get(each.name)  # read each time: another process may have written it
        outcomes[each.name] = outcome = stored or play(each, size, seed, guard)
        if stored is None:
            line = json.dumps({"setting": setting, "outcome": asdict(outcome)})
            print(line, file=sys.stderr, flush=True)
            if results is not None:
                with results.open("a") as file:
                    file.write(line + "\n")
    return outcomes


def _stored(results: Path | None, setting: dict[str, object]) -> dict[str, Outcome]:
    """Return the outcomes by name that are in the file of results, for runs of this setting."""
    if results is None or not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["outcome"]["name"]: Outcome(**line["outcome"]) for line in lines if line["setting"] == setting}


def table_of(rows: Sequence[Row], outcomes: dict[str, Outcome]) -> Table:
    shown = Table(title="held-out loss, nats per token", title_justify="left")
    for name in ("attack", "ends", "loss", "absent", "above", "left out", "honest left out", "credit", "target", "s"):
        shown.add_column(name, justify="left" if name in ("attack", "ends", "left out") else "right")
    for row in rows:
        found, absent = outcomes[row.name], outcomes[row.without_attackers().name]
        above = None if found.loss is None or absent.loss is None else found.loss - absent.loss
        left_out = {worker: rounds for worker, rounds in found.left_out.items() if int(worker[1:]) < row.hostile}
        shown.add_row(
            row.name,
            f"{found.state} at {found.round}",
            _figure(found.loss),
            _figure(absent.loss),
            _figure(above, "+.4f"),
            "; ".join(f"{worker}: {', '.join(map(str, rounds))}" for worker, rounds in left_out.items()),
            str(found.honest_excluded(row.hostile)),
            _figure(found.credit, ".2f"),
            _figure(found.target, ".2f"),
            f"{found.seconds:.0f}",
        )
    return shown


def _figure(value: float | None, form: str = ".4f") -> str:
    return "–" if value is None else format(value, form)
