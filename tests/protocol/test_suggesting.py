"""Near misses."""

from protocol.suggesting import those_here


def test_the_nearest_names_come_first_and_a_few_of_many_are_shown() -> None:
    assert those_here("demo", [], "runs") == "there are no runs here yet"
    assert those_here("demo", ["a", "demo-2"], "runs") == "runs here: demo-2, a"
    many = [*(f"other-{index}" for index in range(7)), "dem"]
    assert those_here("demo", many, "runs") == "runs here: dem, other-0, other-1, other-2, other-3 and 3 more"
