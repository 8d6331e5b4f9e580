"""`outerstep coordinator` and its commands `status`, `notify-test` and `rotate-secret`."""

import errno
import os
import ssl
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType

from outerstep.cli.asking import Answer, print_answer
from outerstep.cli.errors import UsageError, check_not_hidden, flag_of, import_extra, validated
from outerstep.cli.options import Connection, check_log, with_connection, with_settings
from outerstep.cli.printing import Format, FormatOption, say, time_text
from outerstep.common.connections import error_text, ssl_context
from outerstep.common.exit_codes import Exit
from outerstep.common.quantities import bytes_text, counted, duration_text, share_text
from outerstep.display import facts, lines, table
from protocol.messages import Finding, LoggedError, NotifiedInfo, ServerStatus

check_not_hidden("coordinator")

from coordinator.settings import Settings as Settings  # noqa: E402

SHOWN_ERRORS = 10

# The other settings are environment variables.
OPTIONS = (
    "data_dir",
    "database",
    "blobs",
    "advertise_url",
    "host",
    "port",
    "tls_certificate",
    "tls_key",
    "log_level",
    "log_file",
    "backup_dir",
    "notify_url",
)


@with_settings(Settings, OPTIONS)
def coordinator(ctx: typer.Context, *, given: dict[str, Any]) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C, or one of its commands.

    It applies the database migrations, continues where it stopped, and prints its address and the next steps when it is
    ready. Its first start creates an admin token in admin.token in the data directory. Each option can also be set by
    an environment variable, and some settings only there, such as OUTERSTEP_COORDINATOR_LOG_FORMAT=json; see
    docs/settings.md.

    \b
    Example:
      outerstep coordinator --data-dir ./data
      outerstep run create run.toml --token-file ./data/admin.token
    """
    if ctx.invoked_subcommand is not None:
        misplaced = [flag_of(name) for name, value in given.items() if value is not None]
        if misplaced:
            raise UsageError(f"give {', '.join(misplaced)} after `coordinator {ctx.invoked_subcommand}`, not before it")
        return
    server = import_extra("coordinator.server", extra="coordinator", command="outerstep coordinator")
    os.umask(0o077)  # its files must not be readable by other users
    settings = settings_of(given)
    _check_used(settings, given)
    _receivers(settings)
    _check_certificate(settings.tls_certificate, settings.tls_key)
    database_url_of(settings.database, settings.data_dir)
    check_log("--log-file", settings.log_file)
    try:
        server.serve(settings)
    except OSError as error:  # a used port, a foreign address, or no directory
        address = server.netloc(settings.host, settings.port)
        remedy = "; give another --port, or 0 for any free port" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"cannot serve at {address} from {settings.data_dir}: {error_text(error)}{remedy}") from error


def _check_used(settings: Settings, given: dict[str, Any]) -> None:
    """Raise UsageError if a setting was given that has no effect without another one."""
    for key, needed in (
        ("backup_keep", {"--backup-dir DIR": settings.backup_dir}),
        ("backup_every_s", {"--backup-dir DIR": settings.backup_dir, "--blobs URL": settings.blobs}),
        ("notify_secret", {"--notify-url URL|@FILE": settings.notify_url}),
        ("blobs_public_url", {"--blobs URL": settings.blobs}),
        ("tls_key", {"--tls-certificate": settings.tls_certificate}),
    ):
        if key in settings.model_fields_set and not any(needed.values()):
            name = flag_of(key) if given.get(key) is not None else f"OUTERSTEP_COORDINATOR_{key.upper()}"
            raise UsageError(f"{name} needs {' or '.join(needed)}")


@with_settings(Settings, ["notify_url"])
def notify_test(*, given: dict[str, Any]) -> None:
    """Send a test notification to each receiver, and show which ones accept it.

    Uses the coordinator's settings, also from the environment; the coordinator need not run.

    \b
    Example:
      outerstep coordinator notify-test --notify-url @/etc/outerstep/notify
    """
    notification = import_extra(
        "coordinator.notifications.notification", extra="coordinator", command="outerstep coordinator"
    )
    receivers = _receivers(settings_of(given))
    if not receivers:
        raise UsageError("give --notify-url URL|@FILE, or OUTERSTEP_COORDINATOR_NOTIFY_URL in the environment")
    now, faults = time.time(), []
    test = notification.Notification("test", now, "This is a test: this coordinator's notifications arrive here.")
    for each in receivers:
        try:
            each.send(test, now)
        except notification.DeliveryError as error:
            faults.append(error)
            say(f"✗ {error}")
        else:
            say(f"✓ {each.name} accepted it, {'signed' if each.secret else 'not signed'}")
    if faults:
        raise notification.DeliveryError(f"{len(faults)} of {counted(len(receivers), 'receiver')} did not accept it")


def _receivers(settings: Settings) -> Any:
    """Return what the settings notify. Raises OuterstepError if Apprise is needed and not installed."""
    sending = import_extra("coordinator.notifications.sending", extra="coordinator", command="outerstep coordinator")
    return sending.receivers_of(settings)


@with_settings(Settings, ["data_dir", "database"])
def rotate_secret(*, given: dict[str, Any]) -> None:
    """Replace the secret by which the coordinators of one database know each other.

    Do this if a stranger may have read the database or a backup: the secret's holder can pose as a coordinator to the
    others, and compute contributions that evade screening. Tokens stay valid. Coordinators and aggregators keep
    running; the leader begins a new term with the new secret within seconds. With SQLite, stop the coordinator first.

    \b
    Example:
      outerstep coordinator rotate-secret --database postgresql+psycopg://me:secret@host/runs
    """
    lease = import_extra("coordinator.store.lease", extra="coordinator", command="outerstep coordinator")
    os.umask(0o077)
    url = existing_database(settings_of(given))
    lease.rotate_secret(url, time.time)
    say(f"the coordinators of {url!r} have a new secret")


def settings_of(given: dict[str, Any]) -> Settings:
    """Return the settings, from the command line, the environment and the defaults. Raises UsageError."""
    return validated(Settings, given)


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise UsageError if HTTPS cannot be served with these files."""
    if certificate is None:
        return
    try:
        ssl_context(certificate)
    except ValueError as error:
        raise UsageError(f"--tls-certificate: {error}") from error
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if key is None:
            raise UsageError(f"--tls-certificate {certificate} contains no private key: give --tls-key FILE") from error
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--tls-key {key} does not belong to the certificate {certificate}") from error
        raise UsageError(f"--tls-key {key} contains no PEM private key, or one that needs a passphrase") from error
    except OSError as error:
        raise UsageError(f"--tls-key: {error_text(error)}") from error


def database_url_of(database: str | None, data_dir: Path) -> Any:
    """Return the URL of the coordinator's database. Raises UsageError if it is invalid."""
    databases = import_extra("coordinator.store.database", extra="coordinator", command="outerstep coordinator")
    try:
        return databases.url_of(database, data_dir)
    except ValueError as error:  # without its value, which may contain a password
        raise UsageError(f"--database, or its variable: {error}") from error


def existing_database(settings: Settings) -> Any:
    """Return the URL of the coordinator's database. Raises UsageError if there is none."""
    database = import_extra("coordinator.store.database", extra="coordinator", command="outerstep coordinator")
    url = database_url_of(settings.database, settings.data_dir)
    if not database.exists(url):
        if not settings.data_dir.is_dir():
            raise UsageError(f"the directory {settings.data_dir} does not exist: give --data-dir")
        raise UsageError(
            f"{settings.data_dir} has no database, so it is not a coordinator's data directory: give another "
            "--data-dir, or --database if the database is elsewhere"
        )
    return url


@with_connection
def status(
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Show the coordinator's health: what is wrong and how to fix it, disks, backups, database, clients, recent errors.

    Needs an operator or admin token for all runs. Exit codes, for cron: 0 nothing is wrong, 4 something is, 75 the
    coordinator cannot be reached or no coordinator leads.

    \b
    Example:
      outerstep coordinator status --token-file ./data/admin.token
      outerstep coordinator status --format json
    """
    with connection.open() as client:
        found = client.status()
    print_answer(Answer(found, lambda: _status(found)), output)
    if found.findings:
        raise typer.Exit(Exit.WRONG)


def _status(found: ServerStatus) -> RenderableType:
    parts: list[RenderableType] = [
        lines(line for each in found.findings for line in (f"✗ {_about(each)}: {each.message}", f"  {each.remedy}."))
    ]
    if not found.findings:
        parts = [lines(["✓ nothing is wrong"])]
    parts.append(facts(_facts(found)))
    if found.errors:
        shown = map(_error, islice(found.errors, SHOWN_ERRORS))
        parts.append(table(["last logged", "level", ">times", "~message"], shown))
    if found.coordinators:
        whose = "These errors are" if found.errors else "There are no recent errors"
        parts.append(lines([f"{whose} of the coordinator that leads; each of the others has its own log."]))
    return Group(*parts)


def _facts(found: ServerStatus) -> Iterator[tuple[str, str]]:
    """Yield the table's rows as name and value."""
    up_s = max(0.0, found.now - found.started_at)
    yield "version", f"{found.version}, protocol {found.protocol}, up for {duration_text(up_s)}"
    for disk in found.disks:
        free = share_text(disk.free_bytes / disk.size_bytes) if disk.size_bytes else ""
        size = f"{bytes_text(disk.free_bytes)} of {bytes_text(disk.size_bytes)} free ({free})"
        yield f"disk: {', '.join(disk.places)}", size
    database = found.database
    if database.answer_s is not None:
        answers = f"{bytes_text(database.size_bytes)}, answers in {1000 * database.answer_s:.1f} ms"
        yield "database", f"{database.backend}, schema {database.schema_revision}, {answers}"
    else:
        yield "database", f"{database.backend}: {database.fault}"
    for each in found.coordinators:
        state = "leads" if each.leads else "standby"
        trouble = f"; the store: {each.store_fault}" if each.store_fault else ""
        yield (
            f"coordinator {each.address}",
            f"{state}, {each.version}, seen {duration_text(each.silent_s)} ago{trouble}",
        )
    for aggregator in found.aggregators:
        seen = f"{aggregator.version}, seen {duration_text(aggregator.silent_s)} ago"
        yield f"aggregator {aggregator.host}", seen
    if found.aggregators:
        yield "waiting for aggregators", counted(found.tasks_waiting, "task")
    yield "backup", _backup(found)
    for receiver in found.notifications:
        yield f"notifications: {receiver.name}", _notified(found, receiver)
    if not found.notifications:
        yield "notifications", "none; start the coordinator with --notify-url URL|@FILE"
    clients = found.clients
    yield "clients", f"{clients.workers} workers, {clients.connections} connections, {clients.streams} event streams"


def _about(finding: Finding) -> str:
    about = finding.about.replace("-", " ")
    return about if finding.run is None else f"{finding.run}: {about}"


def _ago(found: ServerStatus, at: float) -> str:
    return f"{duration_text(max(0.0, found.now - at))} ago"


def _backup(found: ServerStatus) -> str:
    backup = found.backup
    if backup is None:
        return "not scheduled; start the coordinator with --backup-dir DIR"
    every = f"every {duration_text(backup.every_s)}"
    last = "none yet" if backup.last_at is None else f"last one {_ago(found, backup.last_at)}"
    failed = "" if backup.failed_at is None else f", last failure {_ago(found, backup.failed_at)}"
    return f"{every}, {last}{failed}"


def _notified(found: ServerStatus, each: NotifiedInfo) -> str:
    sent = "none sent yet" if each.sent_at is None else f"last one sent {_ago(found, each.sent_at)}"
    failed = f", {each.failed} failed" if each.failed else ""
    return f"{'signed' if each.signed else 'not signed'}, {sent}{failed}"


def _error(each: LoggedError) -> tuple[str, str, str, str]:
    return time_text(each.at), each.level, str(each.count), each.message
