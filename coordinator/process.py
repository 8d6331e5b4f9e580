"""What coordinators and aggregators have in common as processes: the log, open files, and how memory is kept.

The log is text, or one JSON object per line with the request, run, worker and round that the line is about. A line that
is logged during a request gets the request's id, and the run, worker and round in its path. Any logging call can set
run, worker and round itself with `extra`.
"""

import ctypes
import json
import logging
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol.text import PrintableFormatter, printable, printable_json

logger = logging.getLogger(__name__)

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
RECENT = 50  # different warnings and errors to keep
MAX_CHARACTERS = 1000  # per message
_HIDDEN = "…"
_SECRETS = [
    (re.compile(r"\b(ostj?_|whsec_)[A-Za-z0-9+/=_-]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}"), rf"\1 {_HIDDEN}"),
    (re.compile(r"://[^/\s@]+@"), f"://{_HIDDEN}@"),
    (re.compile(r"(?i)\b([a-z_-]*(?:token|secret|password|signature|credential|key))=[^&\s]+"), rf"\1={_HIDDEN}"),
]
SUBJECT = ("run", "worker", "round")  # keys of `extra`; the path is ignored if `extra` has a run

_request: ContextVar[tuple[str, Mapping[str, Any]] | None] = ContextVar("request", default=None)


@contextmanager
def about_request(request_id: str, scope: Mapping[str, Any]) -> Iterator[None]:
    """Attribute the lines logged within the block to this request, also those of threads that the block waits for.
    `scope` has the path's parameters once the route is found."""
    before = _request.set((request_id, scope))
    try:
        yield
    finally:
        _request.reset(before)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message; also request_id, run, worker, round and
    exception, where the record has them."""

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
    subject = vars(record) if hasattr(record, "run") else _in_path(scope)
    found = {"request_id": request_id} | {name: subject.get(name) for name in SUBJECT}
    return {name: value for name, value in found.items() if value is not None}


def _in_path(scope: Mapping[str, Any]) -> dict[str, Any]:
    values = scope.get("path_params", {})
    number = str(values.get("number", ""))  # a round or a checkpoint; it may be a word, such as "latest"
    return {**values, "round": int(number) if number.isascii() and number.isdigit() else None}


FORMATS: dict[str, Callable[[], logging.Formatter]] = {
    "console": lambda: PrintableFormatter(LINE),
    "json": JsonFormatter,
}


def scrubbed(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` without anything that looks like a secret, and without `secrets`."""
    for secret in sorted((each for each in secrets if len(each) >= 4), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


@dataclass(frozen=True)
class LoggedError:
    """A warning or an error. `at`: when it was last logged, in seconds since 1970. `count`: how often since the
    start."""

    at: float
    level: str
    logger: str
    message: str
    count: int


class RecentErrors(logging.Handler):
    """Keeps the last RECENT different warnings and errors, without secrets. Records of the same logging statement count
    as the same error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: dict[tuple[str, int, str], LoggedError] = {}

    @property
    def newest_first(self) -> list[LoggedError]:
        with _held(self):
            return list(reversed(self._kept.values()))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep what is logged within the block. A block within another one changes nothing."""
        root = logging.getLogger()
        if self in root.handlers:
            yield
            return
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        shown = printable(scrubbed(message[: 4 * MAX_CHARACTERS]))[:MAX_CHARACTERS]
        key = record.pathname, record.lineno, record.levelname
        earlier = self._kept.pop(key, None)
        count = 1 if earlier is None else earlier.count + 1
        self._kept[key] = LoggedError(record.created, record.levelname.lower(), record.name, shown, count)
        if len(self._kept) > RECENT:
            del self._kept[next(iter(self._kept))]


@contextmanager
def _held(handler: logging.Handler) -> Iterator[None]:
    handler.acquire()
    try:
        yield
    finally:
        handler.release()


def start_logging(level: str, format_: str, file: Path | None) -> None:
    """Log to stderr, and to `file` if there is one."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(FORMATS[format_]())
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    for talkative in ("alembic", "httpx"):  # a line per migration, and per forwarded request
        logging.getLogger(talkative).setLevel(logging.WARNING)


def allow_open_files() -> None:
    """Raise the limit on open files as far as the system allows. Every transfer needs a socket, and averaging a
    fragment keeps every contributor's file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS reports "unlimited" and then rejects it
        logger.warning("cannot raise the limit on open files above %d: %s", soft, error)


# Options of glibc's mallopt (malloc.h).
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
ARENAS = 2
LARGEST_KEPT = 32 << 20  # the most that glibc allows; larger blocks are returned to the system
NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Make the C library keep the memory that this process frees, for the next thread that allocates.

    By default glibc returns large blocks to the system when they are freed, and maps new ones for the next chunk or
    fragment. Mapping costs several times as much as writing to the memory, because each page is cleared by a page
    fault. With these options, threads also share two heaps instead of eight per core, so a thread can use memory that
    another has freed. Other C libraries have no such options.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(ARENA_MAX, ARENAS)
        set_option(MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(TRIM_THRESHOLD, NEVER)
        set_option(TOP_PAD, LARGEST_KEPT)
