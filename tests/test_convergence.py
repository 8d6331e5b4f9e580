"""The convergence benchmark: rows are runs, existing results are not run again, and the page shows the results."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.convergence.__main__ import main
from benchmarks.convergence.completion import KINDS, completion, held_out
from benchmarks.convergence.results import RESULTS, Result, append, read, spec_digest
from benchmarks.convergence.rows import (
    BATCH,
    GROUPS,
    LENGTH,
    ONE_WORKER,
    QUICK,
    QUICK_STEPS,
    ROWS,
    STEPS,
    SYNCHRONOUS,
    WORKERS,
)
from benchmarks.convergence.table import HEADINGS, cells_of
from benchmarks.frontier import measuring as frontier
from benchmarks.frontier.__main__ import main as frontier_main
from docs import write_convergence
from protocol.spec.run import parse_spec
from worker.models.building import build_model

CPU = torch.device("cpu")


def found(name: str, loss: float, *, seed: int = 0, moved: int = 1_000_000) -> Result:
    spec = spec_digest(ROWS[name], steps=QUICK_STEPS, seed=seed)
    curve = [(0, 5.5), (QUICK_STEPS, loss)]
    return Result(name, seed, QUICK_STEPS, spec, loss, curve, moved, moved, 0.25, {"code": 2.0}, True, 1.0)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_run_of_as_many_inner_steps_and_tokens_as_the_others(name: str) -> None:
    row = ROWS[name]
    for steps in (QUICK_STEPS, STEPS):
        if steps % min(row.keys.get("sync.inner_steps", 1), steps):
            assert (name, steps) == ("Muon, H 75, 2bit", QUICK_STEPS)
            with pytest.raises(ValueError, match="200 steps are no whole rounds of 75"):
                row.spec(steps, 3)
            continue
        spec = parse_spec(row.spec(steps, 3))
        assert spec.seed == 3
        assert spec.total_inner_steps == steps
        assert spec.unit_tokens * row.processes == row.workers * BATCH * LENGTH
        assert spec.members.min_workers == row.processes
        if name == "no communication":
            assert spec.sync.rounds == 1, "whatever its length"


def test_the_defaults_are_a_spec_that_says_nothing_of_optimizers_and_codecs() -> None:
    said, given = (parse_spec(ROWS[name].spec(STEPS, 0)).model_dump() for name in ("DiLoCo", "the defaults"))
    assert {key for key in said["inner"] if said["inner"][key] != given["inner"][key]} == {"optimizer", "learning_rate"}
    assert given["sync"]["upload_codec"] == "int8"
    assert (given["outer"]["momentum"], said["outer"]["momentum"]) == (0.6, 0.8)
    assert {**given, "inner": said["inner"], "sync": said["sync"], "outer": said["outer"]} == said


def test_perplexity_is_compared_seed_by_seed() -> None:
    same, best = SYNCHRONOUS[8e-3], SYNCHRONOUS[16e-3]
    results = [
        *(found(ONE_WORKER[8e-3], loss, seed=seed) for seed, loss in enumerate((1.5, 1.6))),
        *(found(same, loss, seed=seed) for seed, loss in enumerate((1.3, 1.4))),
        *(found(best, loss, seed=seed) for seed, loss in enumerate((1.2, 1.3))),
        found("DiLoCo", 1.4, seed=1),
    ]
    rows = {cells[0]: dict(zip(HEADINGS, cells, strict=True)) for cells in cells_of(results)}
    assert rows["DiLoCo"]["same rate"] == "+0.0%"
    assert rows["DiLoCo"]["gap closed"] == "100%"
    assert rows["DiLoCo"]["best rate"] == f"{math.expm1(0.1):+.1%}"
    assert rows[same]["best rate"] == f"{math.expm1(0.1):+.1%}"
    assert rows[same]["MB up"] == "–"
    # 2·(7/8)·4 bytes of 139,584 parameters at each step, up and down
    assert rows["DiLoCo"]["bytes"] == f"1/{2 * 7 * 139_584 * QUICK_STEPS / 2_000_000:,.0f}"


def test_what_was_found_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.jsonl"
    for name in QUICK:
        append(path, found(name, 1.5))
    before = path.read_bytes()
    assert main(["--quick", "--json", "--results", str(path)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["row"] for each in report["results"]] == QUICK
    assert path.read_bytes() == before
    assert next(asdict(each) for each in read(path))["loss"] == 1.5


def test_a_row_that_changed_is_run_again() -> None:
    row = ROWS["DiLoCo"]
    assert len({spec_digest(row, steps=STEPS, seed=0), spec_digest(row, steps=STEPS, seed=1)}) == 2
    assert spec_digest(row, steps=STEPS, seed=0) != spec_digest(ROWS["H 20"], steps=STEPS, seed=0)


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (main, ["--quick", "--steps", "500"], "--quick has 200 inner steps: leave out --steps"),
        (main, ["--steps", "0"], "--steps 0: it must be at least 1"),
        (main, ["--only", "DiLoCo", "H 500", "--steps", "1200"], "H 500: 1200 steps are no whole rounds"),
        pytest.param(
            *(frontier_main, ["--device", "cuda"], "finds no GPU here"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    command: Callable[[Sequence[str]], int], arguments: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit):
        command([*arguments, "--results", str(results)])
    assert said in capsys.readouterr().err
    assert not results.exists()


@pytest.mark.slow
def test_completion_knows_what_it_reads() -> None:
    """Every byte costs an untrained model about 8 bits."""
    torch.set_num_threads(1)  # several are much slower on busy cores
    spec = parse_spec(ROWS["DiLoCo"].spec(STEPS, 0))
    text, kinds = held_out(spec)
    assert len(text) == len(kinds)
    assert set(np.unique(kinds)) == set(range(len(KINDS)))
    blank = bytes(text[kinds == KINDS.index("space")])
    assert not blank.strip()
    comments = bytes(text[kinds == KINDS.index("comments")])
    assert comments.startswith(b"#")
    assert b"\n" not in comments
    some = completion(build_model(spec, CPU), text[:4096], kinds[:4096], LENGTH)
    assert some.lines == 0
    assert all(7 < bits < 10 for bits in some.by_kind.values())


def test_the_page_is_what_was_found_and_all_rows_are_on_it() -> None:
    assert {name for names, _ in GROUPS.values() for name in names} == set(ROWS)
    results = read(RESULTS)
    page = write_convergence.page(results, frontier.read(frontier.RESULTS))
    assert write_convergence.PAGE.read_text() == page
    assert all(each.identical for each in results)
    assert WORKERS == 8
