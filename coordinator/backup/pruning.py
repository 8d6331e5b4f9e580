"""Which backups are kept, and the removal of the others with the blobs that nobody needs any more."""

from coordinator.backup.manifest import Manifest
from coordinator.backup.place import Damaged, Place


def superseded(numbers: list[int], keep: int) -> list[int]:
    """Return those of the backups `numbers` that are not among the newest `keep`."""
    return sorted(numbers, reverse=True)[keep:]


def prune(backups: Place, keep: int) -> list[int]:
    """Remove all but the newest `keep` backups; return their numbers. Within `locked`, once the newest is durable."""
    read, unread = _manifests(backups)
    removed = superseded(list(read), keep)
    for number in removed:
        backups.remove(number)
        del read[number]
    backups.remove_databases_but(list(read.values()), unread)
    if not unread:  # whoever cannot be read may need any blob: a later version's, or one for the operator to look at
        needed = {blob.digest for manifest in read.values() for blob in manifest.blobs}
        backups.remove_blobs([digest for digest in backups.digests() if digest not in needed])
    return removed


def _manifests(backups: Place) -> tuple[dict[int, Manifest], set[int]]:
    """Return the manifests that can be read, and the numbers of the others."""
    read: dict[int, Manifest] = {}
    unread: set[int] = set()
    for number in backups.numbers():
        try:
            read[number] = backups.manifest(number)
        except Damaged:
            unread.add(number)
    return read, unread
