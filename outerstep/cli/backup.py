"""The commands `outerstep coordinator backup|backups|restore|move`."""

import os
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from outerstep.cli.coordinator import DatabaseOption, database_url_of, existing_database, settings_of
from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.printing import Format, FormatOption, console, print_json, say, time_text
from outerstep.common.quantities import bytes_text
from outerstep.display import table
from protocol.errors import OuterstepError

SHOWN_EVERY_S = 5.0

DirectoryArgument = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="The directory of backups.", show_default=False)
]
BlobsOption = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        metavar="URL",
        help="Or the bucket that has the coordinator's blobs: s3://BUCKET/PREFIX, gs://, az://, s3+https://.",
        show_default=False,
    ),
]


def backup(
    to: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory of backups, best on another disk.", show_default=False)
    ],
    data: Annotated[Path | None, typer.Option("--data", help="The coordinator's data directory.")] = None,
    database_url: DatabaseOption = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Number of backups to keep, the newest ones. Default: 7.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Back up a coordinator to a directory, even while it runs.

    Copies the database and the blobs that it needs, as of one moment. Blobs that an earlier backup already has are not
    copied again. Backups beyond the newest --keep are deleted once the new one is durable. admin.token is not copied.
    A coordinator with --blobs URL makes backups in that bucket by itself; this command then makes one elsewhere.

    \b
    Example:
      outerstep coordinator backup /mnt/backups --data ./data
    """
    if "://" in to:
        raise UsageError(
            f"{to} is no directory: back up to a directory and copy that with rclone, or start the coordinator with "
            "--blobs, then its backups are in that bucket (docs/deployment.md)"
        )
    creating, directories = _module("create", "backup"), _module("directory", "backup")
    opening = import_extra("coordinator.store.opening", extra="coordinator", command="outerstep coordinator backup")
    os.umask(0o077)  # its files must not be readable by other users
    settings = settings_of({"data_dir": data, "database": database_url, "backup_keep": keep})
    directories.check_apart(Path(to), settings.data_dir)
    url = existing_database(settings)
    source = creating.BackupSource(url, opening.reader_of(settings.data_dir, url))
    created = creating.create(source, store := directories.BackupDirectory(Path(to)), settings.backup_keep)
    manifest = created.manifest
    if output is Format.JSON:
        print_json(
            {
                **_summary(manifest),
                "copied_blobs": created.copied_blobs,
                "copied_bytes": created.copied_bytes,
                "removed": sorted(created.removed),
            }
        )
    else:
        new = f"{created.copied_blobs} new of {len(manifest.blobs)} blobs, {bytes_text(created.copied_bytes)}"
        say(f"made backup {manifest.number} in {store}: {new}")
        if created.removed:
            say(f"removed {_numbered(created.removed)}; --keep {settings.backup_keep}")
    if manifest.lost:
        shown = ", ".join(manifest.lost[:3]) + (", …" if len(manifest.lost) > 3 else "")
        say(f"without {len(manifest.lost)} blobs that are lost or corrupt in {settings.data_dir}: {shown}", err=True)


def backups(place: DirectoryArgument = None, blobs: BlobsOption = None, output: FormatOption = Format.TABLE) -> None:
    """List backups, newest first, and verify them.

    In a directory every byte is read. In a bucket every database is read, and the blobs that it needs must be there in
    their size. Exits with code 3 if a backup is damaged.

    \b
    Example:
      outerstep coordinator backups /mnt/backups
      outerstep coordinator backups --blobs s3://bucket/outerstep
    """
    infos = _module("restore", "backups").BackupChecker(_existing(place, blobs, "backups")).infos()
    if output is Format.JSON:
        print_json(infos)
    else:
        console().print(table(["backup", "made at", "runs", "bytes", "blobs", "state"], [_row(info) for info in infos]))
    damaged = [info for info in infos if info.damage]
    if damaged:
        damage = "; ".join(f"backup {info.number}: {info.damage}" for info in damaged)
        remedy = "restore another one; if you delete a damaged blob, the next backup copies it again"
        raise OuterstepError(f"{damage}. Do not rely on it: {remedy}")


def restore(
    data: Annotated[
        Path,
        typer.Option(
            "--data", metavar="NEW", help="The new data directory: empty, or not existing yet.", show_default=False
        ),
    ],
    place: DirectoryArgument = None,
    blobs: BlobsOption = None,
    number: Annotated[
        int | None, typer.Option("--backup", metavar="N", help="Which backup. Default: the newest intact one.")
    ] = None,
    new_admin_token: Annotated[
        bool, typer.Option("--new-admin-token", help="Also create a new admin token, in NEW/admin.token.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Restore a backup into a new data directory.

    Every byte is verified against its digest. Blobs in a bucket stay there and are only looked for. From then on that
    bucket belongs to NEW: the coordinator that had it before can delete nothing there and make no more backups.

    Then start the coordinator with NEW, preferably at its old address, where the workers wait for it: they rejoin by
    themselves, and those that are ahead fetch the run's state. The tokens of that time are valid again. admin.token is
    not in a backup; if you lost it, use --new-admin-token.

    \b
    Example:
      outerstep coordinator restore /mnt/backups --data ./data-2 --new-admin-token
      outerstep coordinator --data ./data-2
      outerstep coordinator restore --blobs s3://bucket/outerstep --data ./data-3
      outerstep coordinator --data ./data-3 --blobs s3://bucket/outerstep
    """
    restoring = _module("restore", "restore")
    os.umask(0o077)
    found = _existing(place, blobs, "restore")
    if place is not None:
        _module("directory", "restore").check_apart(place, data)
    manifest = restoring.restore(found, number, data, lambda text: say(text, err=True))
    token_file = restoring.new_admin_token(data) if new_admin_token else None
    if output is Format.JSON:
        print_json({**_summary(manifest), "admin_token_file": None if token_file is None else str(token_file)})
    else:
        runs = ", ".join(f"{run.name} at state {run.round}" for run in manifest.runs) or "no runs"
        say(f"restored backup {manifest.number} of {time_text(manifest.made_at)} into {data}: {runs}")
        if token_file is not None:
            say(f"created an admin token: {token_file}")
    if manifest.lost:
        say(f"without {len(manifest.lost)} blobs that were lost before the backup was made", err=True)


def move(
    to: Annotated[
        str,
        typer.Argument(
            metavar="URL|directory|sqlite",
            help="Of the files: a bucket's URL as for --blobs, or the word directory. Of the database: a PostgreSQL "
            "URL as for --database, or the word sqlite.",
            show_default=False,
        ),
    ],
    data: Annotated[Path | None, typer.Option("--data", help="The coordinator's data directory.")] = None,
    database_url: DatabaseOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Move the files of a stopped coordinator to a bucket or back, or its database to PostgreSQL or back.

    Files are contributions, deltas and checkpoints. They are copied, read back and compared by digest. Then the data
    directory names the new place, and the old files are deleted. If the command is interrupted, repeat it: it continues
    with the files that were not verified yet.

    A database can be moved once the files are in a bucket. Its rows are copied, read back and compared. Then the bucket
    belongs to the new database, and a coordinator on the old one does not start any more. From PostgreSQL, give
    --database with its URL.

    \b
    Example:
      outerstep coordinator move s3://bucket/outerstep --data ./data
      outerstep coordinator --data ./data --blobs s3://bucket/outerstep
      outerstep coordinator move directory --data ./data
      outerstep coordinator move postgresql+psycopg://me:secret@host/runs --data ./data
      outerstep coordinator move sqlite --data ./data --database postgresql+psycopg://me:secret@host/runs
    """
    os.umask(0o077)
    settings = settings_of({"data_dir": data, "database": database_url})
    if to == "sqlite" or to.startswith("postgresql"):
        _move_database(to, settings, output)
        return
    if settings.database is not None and settings.database.startswith("postgresql"):
        raise UsageError("the files of a PostgreSQL database are in a bucket and stay there; copy them with rclone")
    moving = _module("moving", "move")
    shown_at = time.monotonic()

    def progress(now: Any) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= SHOWN_EVERY_S:
            shown_at = time.monotonic()
            done = f"{bytes_text(now.bytes)} of {bytes_text(now.of_bytes)}"
            say(f"{now.blobs} of {now.of_blobs} files, {done}", err=True)

    moved = moving.move(settings.data_dir, to, progress)
    if output is Format.JSON:
        print_json({"blobs": moved.blobs, "bytes": moved.bytes, "place": to})
        return
    start = f"outerstep coordinator --data {settings.data_dir}" + ("" if to == "directory" else f" --blobs {to}")
    say(f"moved {moved.blobs} files, {bytes_text(moved.bytes)}, to {to}. Start the coordinator with: {start}")


def _move_database(to: str, settings: Any, output: Format) -> None:
    moving = _module("moving_database", "move")
    if to == "sqlite":
        if settings.database is None:
            raise UsageError("--database: give the URL of the PostgreSQL database that is to be moved")
        rows, option = moving.to_sqlite(settings.data_dir, database_url_of(settings)), ""
    else:
        if settings.database is not None:
            raise UsageError("--database: only the database in the data directory can be moved to PostgreSQL")
        url = database_url_of(settings.model_copy(update={"database": to, "data_dir": settings.data_dir / "none"}))
        rows, option = moving.to_postgresql(settings.data_dir, url), " --database with the new URL"
    if output is Format.JSON:
        print_json({"rows": rows, "place": to.partition(":")[0]})
        return
    say(
        f"moved the database, {rows} rows. Start the coordinator with --data {settings.data_dir}, the same --blobs"
        f"{option}"
    )


def _summary(manifest: Any) -> dict[str, Any]:
    runs = [{"name": run.name, "round": run.round} for run in manifest.runs]
    counts = {"blobs": len(manifest.blobs), "lost": manifest.lost}
    return {"number": manifest.number, "made_at": manifest.made_at, "runs": runs, **counts}


def _row(info: Any) -> list[str]:
    runs = ", ".join(f"{run.name} {run.round}" for run in info.runs)
    made_at = "?" if info.made_at is None else time_text(info.made_at)
    size = "?" if info.bytes is None else bytes_text(info.bytes)
    return [str(info.number), made_at, runs, size, str(info.blobs), "damaged" if info.damage else "intact"]


def _numbered(numbers: list[int]) -> str:
    return f"backup{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


def _module(name: str, command: str) -> ModuleType:
    return import_extra(f"coordinator.backup.{name}", extra="coordinator", command=f"outerstep coordinator {command}")


def _existing(place: Path | None, blobs: str | None, command: str) -> Any:
    """Return the backups in a directory or a bucket. Raises UsageError unless one of them is given, and OuterstepError
    if there are none."""
    if (place is None) == (blobs is None):
        raise UsageError(f"outerstep coordinator {command}: give the directory of backups, or --blobs URL")
    if place is not None:
        return _module("directory", command).existing(place)
    opening = import_extra("coordinator.store.opening", extra="coordinator", command=f"outerstep coordinator {command}")
    return _module("bucket", command).StoredBackups.of(opening.objects_at(blobs))
