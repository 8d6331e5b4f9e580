"""The command `outerstep doctor`, with the options of `outerstep worker`."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep.cli.errors import UsageError, flag_of, import_extra
from outerstep.cli.options import TokenFileOption, with_settings
from outerstep.cli.printing import Format, FormatOption, print_json, say, say_lines
from outerstep.cli.worker import OPTIONS, UrlArgument, settings_of, start_on_gpus
from outerstep.common.exit_codes import Exit
from protocol.text import printable
from worker.settings import WorkerSettings

BlobsOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Check this bucket instead, as `outerstep coordinator --blobs` does."),
]


@with_settings(WorkerSettings, OPTIONS)
def doctor(
    *,
    url: UrlArgument = None,
    token_file: TokenFileOption = None,
    given: dict[str, Any],
    blobs: BlobsOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check whether this machine can train a run as a worker, and say what to fix.

    Takes the same options as `outerstep worker` and goes through the same start: the address, the token, the run, the
    state directory, the model, the data, and a few inner steps on the device. It measures the network connection, and
    estimates how long a sync takes. It does not join the run.

    With --blobs alone, it checks a bucket for a coordinator instead: that it can be reached, written, read, listed, and
    that it never replaces an object.

    \b
    Example:
      OUTERSTEP_TOKEN=… outerstep doctor https://coordinator.example.org --run my-run
      outerstep doctor --blobs s3://my-bucket/outerstep
    """
    if blobs is not None:
        if url is not None or given["run"] is not None:
            raise UsageError("--blobs checks a bucket for a coordinator: give neither URL nor --run")
        _examine_bucket(blobs, output)
    settings = settings_of(url, token_file, given)
    start_on_gpus(settings)
    module = import_extra("outerstep.doctor.examine", extra="worker", command="outerstep doctor")
    conclude = import_extra("outerstep.doctor.findings", extra="worker", command="outerstep doctor").conclude
    if (rank := int(os.environ.get("RANK", "0"))) > 0:
        raise typer.Exit(_beside(module.examine(settings, _Silent()), rank))
    found = module.examine(settings, _Silent() if output is Format.JSON else _Lines())
    command = worker_command(url, token_file, given)
    code, lines = conclude(found, command)
    if output is Format.JSON:
        findings = [asdict(each) for each in found]
        print_json({"exit_code": code, "verdict": lines[0], "command": command, "findings": findings})
    else:
        say_lines("\n" + "\n  ".join(map(printable, lines)))
    raise typer.Exit(code)


def _beside(found: list[Any], rank: int) -> Exit:
    """Show what ended the steps of another process than the first, which may not hear of it. Return its exit code."""
    faults = [each for each in found if each.name == "step" and each.state == "wrong"]
    for each in faults:
        say(f"process {rank}: {each.name} {each.state} {each.said}", err=True)
    return Exit.REFUSED if faults else Exit.DONE


def _examine_bucket(url: str, output: Format) -> None:
    """Check a bucket, show the findings, and exit."""
    checks = import_extra("outerstep.common.bucket_check", extra="remote", command="outerstep doctor --blobs")
    objects, findings = checks.Objects(url), []
    for finding in _findings(checks, objects):
        findings.append(finding)
        if output is not Format.JSON:
            say(f"{finding.name:<12} {'wrong' if finding.fault else 'fine':<8} {finding.fault or finding.said}")
    last = findings[-1]
    code = Exit.DONE if last.fault is None else Exit.RETRY if last.passing else Exit.REFUSED
    if output is Format.JSON:
        print_json({"exit_code": code, "findings": [asdict(each) for each in findings]})
    elif code is Exit.DONE:
        say(f"ready: start the coordinator with: outerstep coordinator --blobs {shlex.quote(url)}")
    raise typer.Exit(code)


def _findings(checks: Any, objects: Any) -> Iterator[Any]:
    """Yield what is checked of a bucket, and last whether workers can transfer directly, which they need not."""
    for finding in checks.check_bucket(objects):
        yield finding
        if finding.fault is not None:
            return
    direct = import_extra("coordinator.store.direct_access", extra="remote", command="outerstep doctor --blobs")
    yield checks.BucketFinding("direct", direct.probed(objects)[1])


def worker_command(url: str | None, token_file: Path | None, given: dict[str, Any]) -> str:
    """Return the command that starts the worker with these options."""
    words = ["outerstep", "worker", *([] if url is None else [url])]
    for name, value in (given | {"token_file": token_file}).items():
        for each in value if isinstance(value, list) else [] if value in (None, False) else [value]:
            words += [flag_of(name)] if each is True else [flag_of(name), str(each)]
    return shlex.join(words)


class _Silent:
    """Shows nothing, for JSON output."""

    def begin(self, name: str) -> None:
        pass

    def found(self, finding: Any) -> None:
        pass


class _Lines:
    """Shows a line for each finding, with its name before the check starts, so that slow checks are visible."""

    def __init__(self) -> None:
        self._begun = ""

    def begin(self, name: str) -> None:
        say(f"{name:<12}", end=False)
        self._begun = name

    def found(self, finding: Any) -> None:
        if self._begun != finding.name:
            say(f"{finding.name:<12}", end=False)
        say(f" {finding.state:<8} {finding.said}")
        self._begun = ""
