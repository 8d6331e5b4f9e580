"""The command `outerstep aggregator`."""

import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.coordinator import LogLevelOption, database_url_of
from outerstep.cli.errors import UsageError, from_options, import_extra
from outerstep.cli.options import LogFileOption, check_log
from outerstep.cli.printing import say
from outerstep.common.connections import error_text


def aggregator(
    ctx: typer.Context,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The coordinators' PostgreSQL database: postgresql+psycopg://USER:PASSWORD@HOST/NAME.",
        ),
    ] = None,
    blobs: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The coordinators' bucket, if its address is another one here: s3+https://HOST/…"
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data", help="A directory for this aggregator's cache. Default: outerstep-aggregator."),
    ] = None,
    log_level: LogLevelOption = None,
    log_file: LogFileOption = None,
) -> None:
    """Average contributions for several coordinators, until SIGTERM or Ctrl-C.

    The coordinators share a PostgreSQL database and a bucket. Start as many aggregators as you like, on any machines
    that reach both. Each option can also be set by an environment variable, and OUTERSTEP_AGGREGATOR_LOG_FORMAT only
    there; see docs/settings.md. The bucket's key is in the environment, as for a coordinator.

    \b
    Example:
      outerstep aggregator --database postgresql+psycopg://outerstep@db.internal/outerstep --data ./aggregator
    """
    process = import_extra("coordinator.process", extra="coordinator", command="outerstep aggregator")
    os.umask(0o077)  # its files must not be readable by other users
    settings = _settings(ctx)
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


def _settings(ctx: typer.Context) -> Any:
    settings = import_extra("coordinator.settings", extra="coordinator", command="outerstep aggregator")
    if ctx.params["database"] is None and "OUTERSTEP_AGGREGATOR_DATABASE" not in os.environ:
        raise UsageError("give the coordinators' database: --database postgresql+psycopg://USER:PASSWORD@HOST/NAME")
    return from_options(ctx, settings.AggregatorSettings)


def _database_url(settings: Any) -> Any:
    """Return the URL of the database. Raises UsageError if it is not one of PostgreSQL."""
    database = import_extra("coordinator.store.database", extra="coordinator", command="outerstep aggregator")
    url = database_url_of(settings.database, settings.data_dir)
    if not database.is_shared(url):
        raise UsageError("--database: aggregators need PostgreSQL; a coordinator with SQLite averages by itself")
    return url
