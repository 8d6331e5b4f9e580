"""The log as JSON: one object a line, harmless to look at, and about what it is about."""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coordinator.process import FORMATS, about_request
from coordinator.server import banner


def record(message: str, *arguments: object, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    raised = None if error is None else (type(error), error, error.__traceback__)
    made = logging.getLogger("coordinator.x").makeRecord(
        "coordinator.x", logging.WARNING, __file__, 1, message, arguments, raised, extra=extra
    )
    made.created = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC).timestamp()
    return made


def written(*arguments: Any, **named: Any) -> dict[str, Any]:
    line = FORMATS["json"]().format(record(*arguments, **named))
    assert line.isprintable()
    found: dict[str, Any] = json.loads(line)
    return found


PLAIN = {"time": "2026-01-02T03:04:05.678+00:00", "level": "warning", "logger": "coordinator.x"}


def test_a_line_has_time_level_logger_and_message() -> None:
    assert written("%s of %d", "one", 2) == PLAIN | {"message": "one of 2"}


def test_what_others_wrote_is_harmless() -> None:
    hostile = "a\nb\x1b[2J\u202e\x7fü"
    assert written("%s", hostile)["message"] == hostile


@pytest.mark.parametrize(
    ("scope", "about"),
    [
        ({}, {}),
        ({"path_params": {"run": "r", "worker": "w"}}, {"run": "r", "worker": "w"}),
        ({"path_params": {"run": "r", "number": "7", "fragment": "0"}}, {"run": "r", "round": 7}),
        ({"path_params": {"run": "r", "number": "current"}}, {"run": "r"}),
    ],
)
def test_a_line_of_a_request_is_about_what_is_in_its_address(scope: dict[str, Any], about: dict[str, Any]) -> None:
    with about_request("id-1", scope):
        assert written("x") == PLAIN | {"message": "x", "request_id": "id-1"} | about
    assert written("x") == PLAIN | {"message": "x"}


def test_what_a_line_says_of_itself_goes_before() -> None:
    with about_request("id-1", {"path_params": {"run": "r", "worker": "who-asked", "number": "7"}}):
        line = written("x", run="other", worker=None, round=3)
    assert line == PLAIN | {"message": "x", "request_id": "id-1", "run": "other", "round": 3}


def test_an_exception_comes_along() -> None:
    try:
        raise ValueError("no \x1b[2J")
    except ValueError as error:
        line = written("failed", error=error)
    assert line["exception"].endswith("ValueError: no \x1b[2J")
    assert "Traceback" in line["exception"]


def test_lines_to_read_are_one_line_each() -> None:
    assert FORMATS["console"]().format(record("a\nb")).endswith("WARNING coordinator.x: a\\nb")


def test_a_coordinator_that_is_ready_says_where_everything_is(tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text("ost_x")
    first, *facts = banner("https://0.0.0.0:8470", tmp_path)
    assert first == "outerstep coordinator ready at https://0.0.0.0:8470"
    said = {line[:15].strip(): line[15:] for line in facts}
    assert said["data"] == str(tmp_path)
    assert said["dashboard"] == "https://127.0.0.1:8470/"
    assert said["admin token"] == str(tmp_path / "admin.token")
    assert said["next"].startswith("outerstep run create")
