"""Text from others is escaped before terminals and logs get it; lists of existing names."""

import io
import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Problem
from protocol.text import (
    PrintableFormatter,
    check_printable,
    existing_names,
    printable,
    printable_json,
    printable_lines,
)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("θ and – and [red]", "θ and – and [red]"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("\x9b31m", "\\x9b31m"),  # the same in one byte
        ("a\r\nb\tc\x7f", "a\\r\\nb\\tc\\x7f"),
        ("safe\u202ecod.exe", "safe\\u202ecod.exe"),  # written from right to left
        ("a\u2028b\ud800", "a\\u2028b\\ud800"),
    ],
)
def test_what_cannot_be_printed_is_shown_as_what_it_is(written: str, shown: str) -> None:
    assert printable(written) == shown


def test_lines_stay_lines() -> None:
    assert printable_lines("a\x1b\n\nb\r") == "a\\x1b\n\nb\\r"


@pytest.mark.slow
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_json_means_the_same_and_can_be_printed(value: object) -> None:
    shown = printable_json(json.dumps(value, indent=2, ensure_ascii=False))
    assert all(line.isprintable() for line in shown.split("\n"))
    assert json.loads(shown) == value


def test_a_check_names_the_first_that_cannot_be_printed() -> None:
    assert check_printable("RTX 4090 – ok") == "RTX 4090 – ok"
    with pytest.raises(ValueError, match=r"\\x1b cannot be printed"):
        check_printable("a\x1b[31m\x07")


def test_a_log_line_is_one_line_and_a_traceback_stays_several() -> None:
    """A reason with an end of line could write a line of the log that nobody has logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    record = logging.LogRecord("x", logging.INFO, "x", 1, "refused: %s", ("no\nERROR forged \x1b[31m",), None)
    handler.handle(record)
    assert stream.getvalue() == "INFO refused: no\\nERROR forged \\x1b[31m\n"
    try:
        raise ValueError("red \x1b[31m")
    except ValueError:
        record = logging.LogRecord("x", logging.INFO, "x", 1, "failed", (), sys.exc_info())
    handler.handle(record)
    traceback = stream.getvalue().splitlines()[1:]
    assert traceback[:2] == ["INFO failed", "Traceback (most recent call last):"]
    assert traceback[-1] == "ValueError: red \\x1b[31m"


def test_the_detail_of_a_problem_is_read_in_one_line() -> None:
    document = Problem("not-found", "gone\n\x1b[31m").document()
    assert str(Problem.from_document(document)) == "not-found: gone\\n\\x1b[31m"


def test_the_nearest_names_come_first_and_a_few_of_many_are_shown() -> None:
    assert existing_names("demo", [], "runs") == "there are no runs here yet"
    assert existing_names("demo", ["a", "demo-2"], "runs") == "runs here: demo-2, a"
    many = [*(f"other-{index}" for index in range(7)), "dem"]
    assert existing_names("demo", many, "runs") == "runs here: dem, other-0, other-1, other-2, other-3 and 3 more"
