"""A test of many cases says which of them failed."""

import pytest

from tests.support.cases import case


def test_what_fails_names_its_case() -> None:
    with pytest.raises(AssertionError) as failed, case("int8", 7):
        raise AssertionError("not the same")
    assert failed.value.__notes__ == ["in the case 'int8', 7"]


def test_what_is_not_refused_names_its_case() -> None:
    with pytest.raises(pytest.fail.Exception) as failed, case(2), pytest.raises(ValueError, match="literal"):
        int("2")
    assert failed.value.__notes__ == ["in the case 2"]
