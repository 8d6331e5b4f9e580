"""The log: for people, or one JSON object a line; and what each line of it is about.

A line that is written while a request is answered is about that request: its id, and the run, the worker and the round
in its address. Whoever logs something may say it himself, by `extra`.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from protocol.printable import PrintableFormatter, printable_json

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SAID = ("run", "worker", "round")  # what `extra` may say; with a run, what of the others it does not say is not known

_request: ContextVar[tuple[str, Mapping[str, Any]] | None] = ContextVar("request", default=None)


@contextmanager
def about_request(request_id: str, scope: Mapping[str, Any]) -> Iterator[None]:
    """Let what is logged within the block, on threads that it waits for too, be about this request. `scope`: where its
    route, once it is found, leaves the values in its address."""
    before = _request.set((request_id, scope))
    try:
        yield
    finally:
        _request.reset(before)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger and message; where there are any also request_id, run,
    worker, round and exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return printable_json(json.dumps(line, ensure_ascii=False, default=str))


def _about(record: logging.LogRecord) -> dict[str, Any]:
    request_id, scope = _request.get() or (None, {})
    told = vars(record) if hasattr(record, "run") else _in_address(scope)
    found = {"request_id": request_id} | {name: told.get(name) for name in SAID}
    return {name: value for name, value in found.items() if value is not None}


def _in_address(scope: Mapping[str, Any]) -> dict[str, Any]:
    values = scope.get("path_params", {})
    number = str(values.get("number", ""))  # of a round or of its state; or a word for one
    return {**values, "round": int(number) if number.isascii() and number.isdigit() else None}


FORMATS: dict[str, Callable[[], logging.Formatter]] = {
    "console": lambda: PrintableFormatter(LINE),
    "json": JsonFormatter,
}
