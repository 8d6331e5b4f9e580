"""Opening a backup store by its location: a directory, or the URL of a prefix in a bucket."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from coordinator.backup import directory
from coordinator.backup.store import BackupStore
from protocol.errors import OuterstepError

SCHEMES = ("s3://", "gs://", "az://")

Location = Path | str  # a directory, or a URL


def parse_location(text: str) -> Location:
    """Return the location that `text` names. Raises ValueError for a URL with another scheme."""
    if "://" not in text:
        return Path(text)
    if not text.startswith(SCHEMES):
        raise ValueError(_wrong_scheme(text))
    return text


def open_store(location: Location, now: Callable[[], float] = time.time) -> BackupStore:
    """Return the store at a location, which need not exist yet. Raises OuterstepError if that needs a library that is
    not installed."""
    if isinstance(location, Path):
        return directory.BackupDirectory(location)
    store: BackupStore = _bucket(location).BackupBucket(location, now)
    return store


def open_existing(location: Location) -> BackupStore:
    """Return the store at a location. Raises OuterstepError if there are no backups."""
    if isinstance(location, Path):
        return directory.existing(location)
    store: BackupStore = _bucket(location).existing(location)
    return store


def check(location: Location, data_dir: Path) -> None:
    """Raise OuterstepError if backups of this data directory cannot be stored there, as far as this machine can
    determine."""
    if isinstance(location, Path):
        directory.check_apart(location, data_dir)
    else:
        open_store(location)


def _bucket(url: str) -> ModuleType:
    """Return the module for buckets. Raises OuterstepError if its optional dependency is missing."""
    if not url.startswith(SCHEMES):
        raise OuterstepError(_wrong_scheme(url))
    try:
        from coordinator.backup import bucket
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise OuterstepError(f"{url} needs obstore: pip install 'outerstep[coordinator,remote]'") from error
    return bucket


def _wrong_scheme(text: str) -> str:
    return f"{text}: backups go to a directory, or to a URL that begins with {', '.join(SCHEMES)}"
