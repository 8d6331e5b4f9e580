"""The commands `outerstep coordinator` and `outerstep migrate`; those below the former are in `backup.py`."""

import errno
import os
import ssl
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.connection import LogFileOption, check_log
from outerstep.cli.faults import UsageError, import_extra, validated
from outerstep.cli.printing import say
from outerstep.common.connections import error_text, ssl_context
from outerstep.common.quantities import parse_seconds

FLAGS = {
    "data_dir": "--data",
    "database_url": "--database-url",
    "host": "--host",
    "port": "--port",
    "tls_certificate": "--tls-certificate",
    "tls_key": "--tls-key",
    "log_format": "--log-format",
    "log_level": "--log-level",
    "log_file": "--log-file",
    "backup_dir": "--backup",
    "backup_every_s": "--backup-every",
    "backup_keep": "--backup-keep",
    "notify_url": "--notify",
    "notify_format": "--notify-format",
}

app = typer.Typer()

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data", help="The data directory: contributions, deltas, checkpoints, the database. Made where missing."
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="The database, if not outerstep.db in the data directory: sqlite:////absolute/path or sqlite:///relative.",
    ),
]

NotifyOption = Annotated[
    str | None,
    typer.Option(
        "--notify",
        metavar="URL|@FILE",
        help="The webhook to notify, or a file that holds its URL. See docs/operating.md.",
    ),
]
NotifyFormatOption = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help="What that webhook expects: json, slack, discord or ntfy. Default: by its host."
    ),
]


@app.callback(invoke_without_command=True)
def coordinator(
    ctx: typer.Context,
    data: DataOption = None,
    database_url: DatabaseOption = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all, :: for all of IPv6 too.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any that is free.")] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM certificate chain, to serve HTTPS without a proxy."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM private key of the certificate.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error; logs go to stderr.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console, lines to read, or json, an object a line.")] = None,
    log_file: LogFileOption = None,
    backup: Annotated[
        str | None,
        typer.Option("--backup", metavar="DIR|URL", help="Back up to there, again and again. See also backup."),
    ] = None,
    backup_every: Annotated[
        str | None, typer.Option(metavar="TIME", help="From one such backup to the next: 30min, 12h. Default: 1h.")
    ] = None,
    backup_keep: Annotated[int | None, typer.Option(help="So many such backups stay. Default: 7.")] = None,
    notify: NotifyOption = None,
    notify_format: NotifyFormatOption = None,
) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C, or, with a command, do that.

    It applies the database migrations, goes on where it stopped, and prints its address and what to do next when it is
    ready. Its first start makes an admin token and writes it to admin.token in the data directory. Each option can also
    be set by an environment variable: OUTERSTEP_COORDINATOR_DATA_DIR, _DATABASE_URL, _HOST, _PORT, _TLS_CERTIFICATE,
    _TLS_KEY, _LOG_LEVEL, _LOG_FORMAT, _LOG_FILE, _BACKUP_DIR, _BACKUP_EVERY_S, _BACKUP_KEEP, _NOTIFY_URL,
    _NOTIFY_FORMAT.

    \b
    Example:
      outerstep coordinator --data ./data
      outerstep run create run.toml --token-file ./data/admin.token
    """
    given = {
        "data_dir": data,
        "database_url": database_url,
        "host": host,
        "port": port,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "log_level": log_level,
        "log_format": log_format,
        "log_file": log_file,
        "backup_dir": backup,
        "backup_every_s": _seconds(backup_every),
        "backup_keep": backup_keep,
        "notify_url": notify,
        "notify_format": notify_format,
    }
    if ctx.invoked_subcommand is not None:
        misplaced = [FLAGS[key] for key, value in given.items() if value is not None]
        if misplaced:
            raise UsageError(f"give {', '.join(misplaced)} after `coordinator {ctx.invoked_subcommand}`, not before it")
        return
    server = import_extra("coordinator.server", extra="coordinator", command="outerstep coordinator")
    os.umask(0o077)  # what it writes is for nobody else on this machine
    settings = settings_of(given)
    if settings.backup_dir is None and not (backup_every is None and backup_keep is None):
        raise UsageError("--backup-every and --backup-keep need --backup DIR|URL")
    if settings.notify_url is None and not (settings.notify_format is None and settings.notify_secret is None):
        raise UsageError("--notify-format and OUTERSTEP_COORDINATOR_NOTIFY_SECRET need --notify URL|@FILE")
    if settings.tls_key is not None and settings.tls_certificate is None:
        raise UsageError("--tls-key needs --tls-certificate")
    _check_certificate(settings.tls_certificate, settings.tls_key)
    database_url_of(settings)
    check_log("--log-file", settings.log_file)
    try:
        server.serve(settings)
    except OSError as error:  # a port that is taken, a host that is not ours, a directory that is none
        address = server.netloc(settings.host, settings.port)
        remedy = "; give another --port, or 0 for any that is free" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"cannot serve at {address} from {settings.data_dir}: {error_text(error)}{remedy}") from error


def notify_test(notify: NotifyOption = None, notify_format: NotifyFormatOption = None) -> None:
    """Send a test notification to the webhook, once, and show what it answers.

    Takes the coordinator's own settings, also from the environment; the coordinator need not run.

    \b
    Example:
      outerstep coordinator notify-test --notify @/etc/outerstep/webhook
    """
    sending = import_extra("coordinator.notifications.sending", extra="coordinator", command="outerstep coordinator")
    settings = settings_of({"notify_url": notify, "notify_format": notify_format})
    receiver = sending.webhook_of(settings.notify_url, settings.notify_format, settings.notify_secret)
    if receiver is None:
        raise UsageError("give --notify URL|@FILE, or OUTERSTEP_COORDINATOR_NOTIFY_URL in the environment")
    status = sending.send_test(receiver)
    signed = "signed" if receiver.secret else "not signed"
    say(f"{receiver.host} took it ({status}; {receiver.format}, {signed})")


def migrate(data: DataOption = None, database_url: DatabaseOption = None) -> None:
    """Bring a coordinator's database to the newest schema.

    A coordinator does this whenever it starts; the command is for doing it beforehand, with the coordinator stopped.

    \b
    Example:
      outerstep migrate --data ./data
    """
    database = import_extra("coordinator.store.database", extra="coordinator", command="outerstep migrate")
    os.umask(0o077)
    settings = settings_of({"data_dir": data, "database_url": database_url})
    url = database_url_of(settings)
    try:
        if settings.database_url is None:
            settings.data_dir.mkdir(parents=True, exist_ok=True)
        database.Database(url).close()
    except OSError as error:
        raise UsageError(f"cannot migrate {url!r}: {error_text(error)}") from error
    say(f"the database {url!r} is at the newest schema")


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"--backup-every: {text!r} is not a time such as 30min or 12h") from error


def settings_of(given: dict[str, Any]) -> Any:
    """Return the coordinator's Settings, from the options that were given, the environment, and the defaults."""
    settings = import_extra("coordinator.settings", extra="coordinator", command="outerstep coordinator")
    return validated(settings.Settings, given, FLAGS)


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise UsageError, before anything is begun, unless HTTPS can be served with them."""
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
            raise UsageError(
                f"--tls-certificate {certificate} has no private key in it: give --tls-key FILE"
            ) from error
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--tls-key {key} is the key of another certificate than {certificate}") from error
        raise UsageError(f"--tls-key {key} has no private key in PEM, or one that needs a passphrase") from error
    except OSError as error:
        raise UsageError(f"--tls-key: {error_text(error)}") from error


def database_url_of(settings: Any) -> Any:
    """Return the URL of the coordinator's database. Raises UsageError if there can be none."""
    database = import_extra("coordinator.store.database", extra="coordinator", command="outerstep coordinator")
    try:
        return database.url_of(settings.database_url, settings.data_dir)
    except ValueError as error:  # without its value, which may have a password in it
        raise UsageError(f"{FLAGS['database_url']}, or its variable: {error}") from error
