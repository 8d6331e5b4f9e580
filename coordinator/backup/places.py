"""What backups go to, by how it was named: a directory, or the URL of a prefix of a bucket."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from coordinator.backup import directory
from coordinator.backup.place import Place
from protocol.errors import OuterstepError

STORES = ("s3://", "gs://", "az://")

Address = Path | str  # a directory, or a URL


def address_of(text: str) -> Address:
    """Return the address that `text` is. Raises ValueError for a URL of another kind."""
    if "://" not in text:
        return Path(text)
    if not text.startswith(STORES):
        raise ValueError(_another(text))
    return text


def place_of(address: Address, now: Callable[[], float] = time.time) -> Place:
    """Return the place of backups. Raises OuterstepError if what it needs is not there."""
    if isinstance(address, Path):
        return directory.BackupDirectory(address)
    place: Place = _bucket(address).BackupBucket(address, now)
    return place


def existing(address: Address) -> Place:
    """Return the place of backups. Raises OuterstepError if there is none."""
    if isinstance(address, Path):
        return directory.existing(address)
    place: Place = _bucket(address).existing(address)
    return place


def check(address: Address, data_dir: Path) -> None:
    """Raise OuterstepError unless backups of this data directory can go there, as far as that is seen from here."""
    if isinstance(address, Path):
        directory.check_apart(address, data_dir)
    else:
        place_of(address)


def _bucket(url: str) -> ModuleType:
    """Return the module for buckets, which needs what not every coordinator has. Raises OuterstepError."""
    if not url.startswith(STORES):
        raise OuterstepError(_another(url))
    try:
        from coordinator.backup import bucket
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise OuterstepError(f"{url} needs obstore: pip install 'outerstep[coordinator,remote]'") from error
    return bucket


def _another(url: str) -> str:
    return f"{url}: backups go to a directory, or to a URL that begins with {', '.join(STORES)}"
