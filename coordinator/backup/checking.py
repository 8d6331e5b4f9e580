"""Whether backups are whole: every byte of them is read."""

from functools import partial

from coordinator.backup.manifest import Content, Manifest, Part, RunSummary
from coordinator.backup.place import Damaged, Place, is_whole


class BackupInfo(Part):
    """A backup as it is listed. `damage`: what is wrong with it; empty for a whole one. `lost`: blobs that the
    coordinator itself had lost when it was made."""

    number: int
    made_at: float | None  # seconds since 1970; with the next two unknown where the manifest cannot be read
    runs: list[RunSummary]
    bytes: int | None
    blobs: int
    lost: int
    damage: str


class Checker:
    """Tells of the backups of a place whether they are whole. Blobs that several share are read once."""

    def __init__(self, backups: Place) -> None:
        self._backups = backups
        self._whole: dict[str, bool] = {}

    def info(self, number: int) -> BackupInfo:
        """Return what there is to say of a backup."""
        try:
            manifest = self._backups.manifest(number)
        except Damaged as damage:
            return BackupInfo(number=number, made_at=None, runs=[], bytes=None, blobs=0, lost=0, damage=str(damage))
        return BackupInfo(
            number=number,
            made_at=manifest.made_at,
            runs=manifest.runs,
            bytes=manifest.bytes,
            blobs=len(manifest.blobs),
            lost=len(manifest.lost),
            damage=self._damage(manifest),
        )

    def infos(self) -> list[BackupInfo]:
        """Return what there is to say of all of them, newest first, but for those that are removed meanwhile."""
        found = [self.info(number) for number in self._backups.numbers()]
        there = set(self._backups.numbers())
        return [info for info in found if info.number in there]

    def _damage(self, manifest: Manifest) -> str:
        if not is_whole(partial(self._backups.open_database, manifest), manifest.database):
            return f"{self._backups.database_name(manifest)} is missing or damaged"
        spoilt = [blob for blob in manifest.blobs if not self._is_whole(blob)]
        if not spoilt:
            return ""
        more = f", and {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
        return f"{self._backups.blob_name(spoilt[0].digest)} is missing or damaged ({spoilt[0].name}){more}"

    def _is_whole(self, blob: Content) -> bool:
        if blob.digest not in self._whole:
            self._whole[blob.digest] = is_whole(partial(self._backups.open_blob, blob.digest), blob)
        return self._whole[blob.digest]
