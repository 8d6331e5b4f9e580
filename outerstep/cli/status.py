"""The command `outerstep coordinator status`."""

from collections.abc import Iterator
from itertools import islice

from outerstep.cli.connection import DEFAULT_URL, CaOption, TokenFileOption, TokenOption, UrlOption, operator_client
from outerstep.cli.printing import Format, FormatOption, console, print_json, say, time_text
from outerstep.common.quantities import bytes_text, duration_text, share_text
from outerstep.display import table
from protocol.messages import Finding, LoggedError, ServerStatus

SHOWN_ERRORS = 10


def status(
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Show how the coordinator is: what is wrong and what to do, disks, backups, database, clients, recent errors.

    Needs an operator's or an admin's token for all runs.

    \b
    Example:
      outerstep coordinator status --token-file ./data/admin.token
      outerstep coordinator status --format json
    """
    with operator_client(url, token, token_file, ca) as client:
        found = client.status()
    if output is Format.JSON:
        print_json(found)
        return
    for finding in found.findings:
        say(f"✗ {_about(finding)}: {finding.message}")
        say(f"  {finding.remedy}.")
    if not found.findings:
        say("✓ nothing is wrong")
    console().print(table(["", "~"], rows_of(found)))
    if found.errors:
        shown = list(islice(found.errors, SHOWN_ERRORS))
        console().print(table(["last logged", "level", ">times", "~message"], map(_error, shown)))


def rows_of(found: ServerStatus) -> Iterator[tuple[str, str]]:
    """Yield what is shown, as name and value."""
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
    yield "backup", _backup(found)
    yield "notifications", _notifications(found)
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
        return "not scheduled; start the coordinator with --backup DIR|URL"
    every = f"every {duration_text(backup.every_s)}"
    last = "none yet" if backup.last_at is None else f"the last one {_ago(found, backup.last_at)}"
    failed = "" if backup.failed_at is None else f", the last failure {_ago(found, backup.failed_at)}"
    return f"{every}, {last}{failed}"


def _notifications(found: ServerStatus) -> str:
    each = found.notifications
    if each is None:
        return "none; start the coordinator with --notify URL|@FILE"
    sent = "none sent yet" if each.sent_at is None else f"the last one sent {_ago(found, each.sent_at)}"
    waiting = f", {each.pending} waiting" if each.pending else ""
    dropped = f", {each.dropped} given up" if each.dropped else ""
    return f"{each.format} at {each.host}, {'signed' if each.signed else 'not signed'}, {sent}{waiting}{dropped}"


def _error(each: LoggedError) -> tuple[str, str, str, str]:
    return time_text(each.at), each.level, str(each.count), each.message
