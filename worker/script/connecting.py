"""A script's way into a run: what it leaves out is as `outerstep worker` has it."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from outerstep.common.reaching import CA_VARIABLE
from protocol.text import PrintableFormatter
from protocol.validation_errors import explain_all
from worker.settings import WorkerSettings

_LOGGERS = ("worker", "protocol", "outerstep")  # the packages that run in a script's process

URL_VARIABLE, TOKEN_VARIABLE = "OUTERSTEP_URL", "OUTERSTEP_TOKEN"


def membership_of(
    run: str,
    url: str | None,
    token: str | None,
    name: str | None,
    environment: Mapping[str, str] | None = None,
    **line: Any,
) -> WorkerSettings:
    """Return who is to join what over which `line`, as far as it is not given from the environment. Raises ValueError,
    which says what is missing or wrong."""
    environment = os.environ if environment is None else environment
    given: dict[str, Any] = {"run": run, **line}
    if name is not None:
        given["name"] = name
    given["ca"] = environment.get(CA_VARIABLE) or None
    for key, value, variable in (("url", url, URL_VARIABLE), ("token", token, TOKEN_VARIABLE)):
        given[key] = environment.get(variable, "").strip() if value is None else value
        if not given[key]:
            raise ValueError(f"{key} is missing: give {key}=…, or set {variable} in the environment")
    try:
        return WorkerSettings(**given)
    except ValidationError as error:
        raise ValueError(explain_all(error.errors())) from error


@contextmanager
def told_on_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Log on stderr what Outerstep logs, from `level` on, each line with time and level, unless the script has set up
    logging itself: why it waits, above all."""
    loggers = [each for each in map(logging.getLogger, _LOGGERS) if not each.hasHandlers()]
    handler, before = logging.StreamHandler(), [each.level for each in loggers]
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    for each in loggers:
        each.addHandler(handler)
        each.setLevel(level)
    try:
        yield
    finally:
        for each, was in zip(loggers, before, strict=True):
            each.removeHandler(handler)
            each.setLevel(was)
