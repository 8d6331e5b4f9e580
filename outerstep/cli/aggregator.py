"""The command `outerstep aggregator`."""

import os
import signal
import threading
from typing import Any

from outerstep.cli.coordinator import database_url_of
from outerstep.cli.errors import UsageError, check_not_hidden, import_extra, validated
from outerstep.cli.options import check_log, with_settings
from outerstep.cli.printing import say
from outerstep.common.connections import error_text

check_not_hidden("coordinator")

from coordinator.settings import AggregatorSettings  # noqa: E402

OPTIONS = ("database", "blobs", "data_dir", "log_level", "log_file")


@with_settings(AggregatorSettings, OPTIONS)
def aggregator(*, given: dict[str, Any]) -> None:
    """Average contributions for several coordinators, until SIGTERM or Ctrl-C.

    The coordinators share a PostgreSQL database and a bucket. Start as many aggregators as you like, on any machines
    that reach both. Each option can also be set by an environment variable, and OUTERSTEP_AGGREGATOR_LOG_FORMAT only
    there; see docs/settings.md. The bucket's key is in the environment, as for a coordinator.

    \b
    Example:
      outerstep aggregator --database postgresql+psycopg://outerstep@db.internal/outerstep --data-dir ./aggregator
    """
    process = import_extra("coordinator.process", extra="coordinator", command="outerstep aggregator")
    os.umask(0o077)  # its files must not be readable by other users
    settings = validated(AggregatorSettings, given)
    url = _database_url(settings)
    check_log("--log-file", settings.log_file)
    aggregating = import_extra(
        "coordinator.aggregation.aggregator", extra="coordinator", command="outerstep aggregator"
    )
    process.start_logging(settings.log_level, settings.log_format, settings.log_file)
    process.allow_open_files()
    process.keep_freed_memory()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        aggregating.serve(url, settings.blobs, settings.data_dir, stopping, _print_ready)
    except OSError as error:
        raise UsageError(f"cannot use {settings.data_dir}: {error_text(error)}") from error


def _print_ready(bucket: str) -> None:
    say(f"outerstep aggregator ready, for the bucket {bucket}")


def _database_url(settings: AggregatorSettings) -> Any:
    """Return the URL of the database. Raises UsageError if it is not one of PostgreSQL."""
    database = import_extra("coordinator.store.database", extra="coordinator", command="outerstep aggregator")
    url = database_url_of(settings.database, settings.data_dir)
    if not database.is_shared(url):
        raise UsageError("--database: aggregators need PostgreSQL; a coordinator with SQLite averages by itself")
    return url
