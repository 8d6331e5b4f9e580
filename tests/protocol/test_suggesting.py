"""Near misses."""

from protocol.text import existing_names


def test_the_nearest_names_come_first_and_a_few_of_many_are_shown() -> None:
    assert existing_names("demo", [], "runs") == "there are no runs here yet"
    assert existing_names("demo", ["a", "demo-2"], "runs") == "runs here: demo-2, a"
    many = [*(f"other-{index}" for index in range(7)), "dem"]
    assert existing_names("demo", many, "runs") == "runs here: dem, other-0, other-1, other-2, other-3 and 3 more"
