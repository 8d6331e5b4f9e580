"""The simulator can fail: it finds every bug that `mutants.py` plants, within the first 500 seeds."""

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, planted
from tests.simulation.simulation import simulate

pytestmark = pytest.mark.nightly

SEEDS = range(500)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
@pytest.mark.timeout(900)
def test_the_simulation_finds_a_planted_bug(mutant: Mutant) -> None:
    others = [seed for seed in SEEDS if seed != mutant.seed]
    with planted(mutant):
        for seed in (mutant.seed, *others):
            failure = simulate(seed).failure
            if failure is not None:
                break
    assert failure is not None, f"no seed finds a coordinator or worker that {mutant.what}"
    assert failure.startswith(mutant.breaks), failure
