"""Which seeds a commit is tested with."""

from pathlib import Path

from tests.simulation.seeds import FIXED, head, of_commit


def test_a_commit_has_seeds_of_its_own_and_always_the_same() -> None:
    one, other = of_commit("00000a" + 34 * "f"), of_commit("a0000a" + 34 * "f")
    assert list(one) == list(range(1010, 1030))
    assert not set(one) & set(other)
    assert not set(FIXED) & set(one)


def test_without_git_the_seeds_are_fixed(tmp_path: Path) -> None:
    assert head(tmp_path) is None
    assert of_commit(None) == range(50, 70)
