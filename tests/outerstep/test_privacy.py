"""`outerstep privacy` and `outerstep run privacy`: epsilon, against what other means say of it."""

import json
import math
import re
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.cli.run.advice import advice
from outerstep.common.exit_codes import Exit
from outerstep.privacy import epsilon, noise_multiplier
from protocol.spec.run import parse_spec
from protocol.spec.sections import PrivacySpec
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread

PRIVACY = "[privacy]\nclip_norm = 0.5\nnoise_multiplier = {noise}\n"
SPEC = 'name = "hushed"\nmodel.preset = "tiny"\ndata = {{ private = true, holdout = 0.0 }}\nsync.rounds = {rounds}\n'


def outerstep(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="outerstep")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def spec_file(directory: Path, rounds: int, noise: float) -> str:
    path = directory / "run.toml"
    path.write_text(SPEC.format(rounds=rounds) + PRIVACY.format(noise=noise))
    return str(path)


def spec(noise: float, delta: float = 1e-6) -> PrivacySpec:
    return PrivacySpec(clip_norm=0.5, noise_multiplier=noise, delta=delta)


# --- the accountant -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "contributions"), [(1.0, 1), (0.5, 1), (4.0, 16), (5.0, 100), (3.0, 0.25)])
def test_epsilon_is_that_of_one_gaussian_mechanism(noise: float, contributions: float) -> None:
    """Balle, Wang 2018, theorem 8: δ = Φ(μ/2 − ε/μ) − e^ε · Φ(−μ/2 − ε/μ), with μ = √k / z."""
    found, mu = epsilon(spec(noise), contributions), math.sqrt(contributions) / noise

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    assert phi(mu / 2 - found / mu) - math.exp(found) * phi(-mu / 2 - found / mu) == pytest.approx(1e-6, rel=1e-5)


@pytest.mark.parametrize(("noise", "contributions"), [(2.0, 10), (5.0, 100)])
def test_an_accountant_that_composes_round_by_round_bounds_it_closely(noise: float, contributions: int) -> None:
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    for _ in range(contributions):
        accountant.compose(dp_accounting.GaussianDpEvent(noise))
    bound = accountant.get_epsilon(1e-6)
    assert bound / 1.15 < epsilon(spec(noise), contributions) <= bound


def test_the_ends_of_epsilon() -> None:
    assert epsilon(spec(0.0), 1) == math.inf
    assert epsilon(spec(0.0), 0) == epsilon(spec(1.0), 0) == 0.0
    assert epsilon(spec(1e6), 1) == 0.0, "within delta"


def test_the_noise_for_an_epsilon_gives_that_epsilon() -> None:
    needed = noise_multiplier(spec(1.0), 100, 8.0)
    assert epsilon(spec(needed), 100) == pytest.approx(8.0)


# --- before a run -------------------------------------------------------------------------------------------------


def test_a_spec_is_told_its_epsilon_by_rounds(tmp_path: Path) -> None:
    code, table, _ = outerstep("privacy", spec_file(tmp_path, 30, 2.0))
    assert code == 0
    rows = [line.split() for line in table.splitlines() if re.match(r" *\d", line)]
    assert rows == [[str(rounds), f"{epsilon(spec(2.0), rounds):.3g}"] for rounds in (1, 2, 5, 10, 20, 30)]
    needed = [noise_multiplier(spec(2.0), 30, wanted) for wanted in (1.0, 8.0)]
    assert f"a noise_multiplier of {needed[0]:.3g} for epsilon 1, {needed[1]:.3g} for epsilon 8." in table
    code, document, _ = outerstep("privacy", spec_file(tmp_path, 1, 0.0), "--format", "json")
    assert (code, json.loads(document)["rounds"]) == (0, [{"rounds": 1, "epsilon": None}])
    assert "unbounded" in outerstep("privacy", spec_file(tmp_path, 1, 0.0))[1]


def test_a_spec_without_the_section_has_no_epsilon(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SPEC.format(rounds=3))
    code, _, errors = outerstep("privacy", str(path))
    assert code == Exit.USAGE
    assert f"{path} has no [privacy]: nothing is clipped, no noise is added" in errors


def test_without_the_accountant_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "outerstep.privacy")
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    code, _, errors = outerstep("privacy", spec_file(tmp_path, 3, 1.0))
    assert code == Exit.USAGE
    assert "`outerstep privacy` needs dp_accounting, which is not installed" in errors
    assert "pip install 'outerstep[privacy]'" in errors


def test_what_protects_nothing_is_noted() -> None:
    sound = SPEC.format(rounds=100) + PRIVACY.format(noise=1.0)
    assert advice(parse_spec(sound)) == []
    (shared,) = advice(parse_spec(sound.replace("private = true", "private = false")))
    assert shared.startswith("data.private is false")
    (silent,) = advice(parse_spec(SPEC.format(rounds=100) + PRIVACY.format(noise=0.0)))
    assert silent.startswith("privacy.noise_multiplier = 0 only clips")


# --- a run --------------------------------------------------------------------------------------------------------


def test_each_worker_of_a_run_is_told_with_its_epsilon(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3, min_workers=2) + PRIVACY.format(noise=2.0), tmp_path)
        run.workers(["a", "b"])
        arguments = ["run", "privacy", "toy", "--url", coordinator.url, "--token", coordinator.admin_token]
        code, table, _ = outerstep(*arguments)
        _, document, _ = outerstep(*arguments, "--format", "json")
    assert code == 0
    assert [line.split() for line in table.splitlines() if line.startswith(("a", "b"))] == [
        [name, "3", f"{epsilon(spec(2.0), 3):.3g}"] for name in "ab"
    ]
    assert json.loads(document)["workers"] == [
        {"worker": name, "contributions": 3, "epsilon": epsilon(spec(2.0), 3)} for name in "ab"
    ]
