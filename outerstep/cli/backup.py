"""The commands `outerstep coordinator backup|restore`."""

import os
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from outerstep.cli.asking import Answer, print_answer
from outerstep.cli.coordinator import Settings, database_url_of, existing_database, settings_of
from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.options import with_settings
from outerstep.cli.printing import Format, FormatOption, say, time_text
from outerstep.display import lines, table
from protocol.errors import OuterstepError

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|URL",
        help="The directory of backups, or the bucket that has the coordinator's files: s3://BUCKET/PREFIX, gs://, "
        "az://, s3+https://.",
        show_default=False,
    ),
]


@with_settings(Settings, ["data_dir", "database", "backup_keep"])
def backup(
    place: PlaceArgument,
    *,
    show: Annotated[
        bool, typer.Option("--list", help="Make none, and list the backups in a directory or a bucket, newest first.")
    ] = False,
    output: FormatOption = Format.TABLE,
    given: dict[str, Any],
) -> None:
    """Back up a coordinator to a directory, even while it runs; or list backups.

    Copies the database and the blobs that it needs, as of one moment. Blobs that the last backup has are linked, not
    copied again. Backups beyond the newest --backup-keep are deleted once the new one is durable. admin.token is not
    copied. A coordinator with --blobs URL makes backups in that bucket by itself; this command then makes one
    elsewhere.

    \b
    Example:
      outerstep coordinator backup /mnt/backups --data-dir ./data
      outerstep coordinator backup /mnt/backups --list
    """
    if show:
        _list(place, output)
        return
    if "://" in place:
        raise UsageError(
            f"{place} is no directory: back up to a directory and copy that with rclone, or start the coordinator with "
            "--blobs, then its backups are in that bucket (docs/deployment.md)"
        )
    directory = _module("backup.directory", "backup")
    os.umask(0o077)  # its files must not be readable by other users
    settings = settings_of(given)
    directory.check_apart(Path(place), settings.data_dir)
    url = existing_database(settings)
    source = directory.BackupSource(url, _module("store.opening", "backup").reader_of(settings.data_dir, url))
    manifest = directory.DirectoryBackups(Path(place)).make(source, settings.backup_keep)
    print_answer(Answer(manifest, lambda: f"made backup {manifest.number} in {place}: {_runs(manifest)}"), output)
    if manifest.lost:
        shown = ", ".join(manifest.lost[:3]) + (", …" if len(manifest.lost) > 3 else "")
        say(f"without {len(manifest.lost)} blobs that are lost or corrupt in {settings.data_dir}: {shown}", err=True)


def _list(place: str, output: Format) -> None:
    """Print the backups in a directory or a bucket, newest first. Raises OuterstepError if a manifest is damaged."""
    backups, found, damaged = _existing(place, "backup"), [], []
    for number in backups.numbers():
        try:
            found.append(backups.manifest(number))
        except _module("backup.contents", "backup").DamagedBackup as damage:
            damaged.append(f"backup {number}: {damage}")
    rows = [[str(each.number), time_text(each.made_at), _runs(each), str(len(each.lost))] for each in found]
    print_answer(Answer(found, lambda: table(["backup", "made at", "runs", "lost blobs"], rows)), output)
    if damaged:
        raise OuterstepError("; ".join(damaged))


def restore(
    place: PlaceArgument,
    data: Annotated[
        Path,
        typer.Option(
            "--data-dir", metavar="NEW", help="The new data directory: empty, or not existing yet.", show_default=False
        ),
    ],
    blobs: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="An unused bucket for the files of a backup in a directory. Default: in NEW. Those of a backup in a "
            "bucket stay there.",
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="An unused PostgreSQL database for the rows; the files must be in a bucket then. Default: in NEW.",
        ),
    ] = None,
    number: Annotated[
        int | None, typer.Option("--number", metavar="N", help="Which backup. Default: the newest intact one.")
    ] = None,
    new_admin_token: Annotated[
        bool, typer.Option("--new-admin-token", help="Also create a new admin token, in NEW/admin.token.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Restore a backup: into a new data directory, a bucket, or a PostgreSQL database.

    So it also moves a coordinator, to another machine or another kind of store: stop it, make a backup, restore that.
    Every byte is verified against its digest. Files in a bucket stay there and are only looked for. From then on that
    bucket belongs to the restored coordinator: the one that had it before can delete nothing there and make no more
    backups. If the command is interrupted, repeat it.

    Then start the coordinator with NEW and the same --blobs and --database, preferably at its old address, where the
    workers wait for it: they rejoin by themselves, and those that are ahead fetch the run's state. The tokens of that
    time are valid again. admin.token is not in a backup; if you lost it, use --new-admin-token.

    \b
    Example:
      outerstep coordinator restore /mnt/backups --data-dir ./data-2 --new-admin-token
      outerstep coordinator --data-dir ./data-2
      outerstep coordinator restore s3://bucket/outerstep --data-dir ./data-3
      outerstep coordinator --data-dir ./data-3 --blobs s3://bucket/outerstep
      outerstep coordinator restore /mnt/backups --data-dir ./data-4 --blobs s3://bucket/new \\
        --database postgresql+psycopg://me:secret@host/runs
    """
    restoring = _module("backup.restore", "restore")
    os.umask(0o077)
    in_bucket = "://" in place
    if in_bucket and blobs is not None:
        raise UsageError(
            f"--blobs: the files stay in {place}. To take them elsewhere, make a backup in a directory (outerstep "
            "coordinator backup DIR), and restore that"
        )
    database = None if database_url is None else _postgresql(database_url, data)
    if database is not None and not (in_bucket or blobs):
        raise UsageError("--database: with PostgreSQL, the files are in a bucket: give --blobs URL")
    found = _existing(place, "restore")
    if not in_bucket:
        _module("backup.directory", "restore").check_apart(Path(place), data)
    target = restoring.Target(data, blobs, database)
    manifest = restoring.restore(found, number, target, lambda text: say(text, err=True))
    token_file = restoring.new_admin_token(target) if new_admin_token else None
    made = [] if token_file is None else [f"created an admin token: {token_file}"]
    restored = f"restored backup {manifest.number} of {time_text(manifest.made_at)} into {data}: {_runs(manifest)}"
    document = {**dict(manifest), "admin_token_file": None if token_file is None else str(token_file)}
    print_answer(Answer(document, lambda: lines([restored, *made])), output)
    if manifest.lost:
        say(f"without {len(manifest.lost)} blobs that were lost before the backup was made", err=True)


def _postgresql(text: str, data: Path) -> Any:
    """Return the URL of a PostgreSQL database. Raises UsageError if it is none."""
    url = database_url_of(text, data / "none")
    if url.get_backend_name() != "postgresql":
        raise UsageError("--database: only a PostgreSQL database; one in the data directory needs no option")
    return url


def _runs(manifest: Any) -> str:
    return ", ".join(f"{run.name} at state {run.round}" for run in manifest.runs) or "no runs"


def _module(name: str, command: str) -> ModuleType:
    return import_extra(f"coordinator.{name}", extra="coordinator", command=f"outerstep coordinator {command}")


def _existing(place: str, command: str) -> Any:
    """Return the backups in a directory or a bucket. Raises OuterstepError if there are none."""
    if "://" not in place:
        return _module("backup.directory", command).existing(Path(place))
    return _module("backup.bucket", command).BucketBackups.of(_module("store.opening", command).objects_at(place))
