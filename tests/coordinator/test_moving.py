"""Moving the blobs of a stopped coordinator between its data directory and buckets."""

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.backup.moving import DIRECTORY, JOURNAL, move
from coordinator.service import Coordinator
from coordinator.settings import Settings
from harness.coordinator import InThread, coordinator_thread
from harness.seaweedfs import SeaweedFS
from harness.stores import names, read
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, enlist, info, play_round
from tests.coordinator.test_backup import caught_up
from tests.coordinator.test_bucket_backups import at_rest, damages
from tests.coordinator.test_removing import leave

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")

from outerstep.common.objects import Objects

pytestmark = pytest.mark.in_directory

_numbers = itertools.count()


@pytest.fixture
def url(store: SeaweedFS) -> str:
    return store.url(f"moving/{next(_numbers)}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory in which a run of two workers has played two rounds and begun a third."""
    with coordinator_thread(tmp_path / "data") as running:
        members = crew(running, "r", ["a", "b"], rounds=20, min_workers=2, checkpoints="every_rounds = 1\nkeep = 20")
        for round_ in range(2):
            play_round(members, round_)
            at_rest(running, "r", round_ + 1)
        for member in members:
            member.assignment(2)
        members[0].take_part(2)
        for member in members:
            leave(member)
    return tmp_path / "data"


def contents(running: InThread) -> dict[str, bytes]:
    live = running.live("r")
    found = (name for kind in ("contributions", "deltas", "checkpoints") for name in names(live, kind))
    return {name: read(live.blobs, name) for name in found}


def in_bucket(url: str) -> set[str]:
    return {name for name, _ in Objects(url).within("") if not name.startswith("database/")}


def blobs_in(data_dir: Path) -> set[str]:
    found = {path.relative_to(data_dir).as_posix() for path in (data_dir / "runs").rglob("*") if path.is_file()}
    return {name for name in found if "/state/" not in name}


@pytest.mark.covers("reliability:moved-blobs")
def test_to_a_bucket_to_another_one_and_back_and_the_run_goes_on_in_each(url: str, data: Path) -> None:
    with coordinator_thread(data) as running:
        before = contents(running)
    assert sum("/contributions/" in name for name in before) == 2, "those that are in no delta yet"
    round_ = 2
    for target, old in ((url, None), (f"{url}-other", url), (DIRECTORY, f"{url}-other")):
        moved = move(data, target)
        assert moved.blobs == moved.of_blobs >= len(before)
        assert moved.bytes == moved.of_bytes > 0
        assert not (data / JOURNAL).exists()
        if old is None:
            assert blobs_in(data) == set()
        else:
            assert list(Objects(old).within("")) == []
        with coordinator_thread(data, blobs=None if target == DIRECTORY else target) as running:
            assert before.items() <= contents(running).items()
            before = {name: content for name, content in before.items() if "/contributions/" not in name}
            members = [caught_up(enlist(running, "r", name)) for name in ("a", "b")]
            play_round(members, round_)
            for member in members:
                leave(member)
            round_ += 1
            at_rest(running, "r", round_)
            assert info(running, "r")["round"] == round_
        if target != DIRECTORY:
            assert set(damages(target).values()) == {""}
    assert blobs_in(data) >= set(before)


class Stopped(Exception):
    """What ends a move in the middle, as a kill does."""


@pytest.mark.covers("reliability:moved-blobs")
@pytest.mark.parametrize("back", [False, True], ids=["to a bucket", "back"])
def test_an_interrupted_move_leaves_the_old_place_whole_and_copies_nothing_twice(
    url: str, data: Path, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if back:
        move(data, url)
    target, old = (DIRECTORY, url) if back else (url, None)
    with coordinator_thread(data, blobs=old) as running:
        before = contents(running)
    seen = 0

    def stop(progress: object) -> None:
        nonlocal seen
        seen += 1
        if seen in (1, 4):
            raise Stopped

    for _ in range(2):
        with pytest.raises(Stopped):
            move(data, target, stop)
        with pytest.raises(OuterstepError, match=r"a move from .* has begun: repeat that command"):
            move(data, f"{url}-another")
    with coordinator_thread(data, blobs=old) as running:
        assert contents(running) == before, "the coordinator may go on where it was"
    from coordinator.backup import moving

    copied: list[str] = []
    real = moving.copy_verified

    def counted(*given: Any) -> None:
        copied.append(given[-1])
        real(*given)

    monkeypatch.setattr(moving, "copy_verified", counted)
    moved = move(data, target)
    assert len(copied) == moved.blobs - 3, "three were verified before"
    with coordinator_thread(data, blobs=None if back else url) as running:
        assert contents(running) == before


def test_a_blob_that_was_lost_in_the_new_place_meanwhile_is_copied_again(url: str, data: Path) -> None:
    """Such as by a lifecycle rule. It was taken for verified, and then deleted in the old place."""
    with coordinator_thread(data) as running:
        before = contents(running)
    seen = 0

    def stop(progress: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise Stopped

    with pytest.raises(Stopped):
        move(data, url, stop)
    Objects(url).delete([name for name in in_bucket(url) if name.startswith("runs/")][:2])
    move(data, url)
    with coordinator_thread(data, blobs=url) as running:
        assert contents(running) == before


def test_a_store_that_fails_in_the_middle_is_named_and_nothing_is_lost(
    url: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OuterstepError("the store is away")

    before = blobs_in(data)
    with monkeypatch.context() as broken:
        broken.setattr(Objects, "open", away)
        with pytest.raises(OuterstepError, match=f"the store is away; what {data} contained before is unchanged"):
            move(data, url)
    assert blobs_in(data) == before
    move(data, url)
    assert blobs_in(data) == set()


@pytest.mark.parametrize("slash", ["", "/"])
def test_another_bucket_that_has_none_of_the_blobs_is_refused(url: str, data: Path, slash: str) -> None:
    move(data, url + slash)
    refusal = re.escape(f"are in {url}, and {url}-empty has none: give --blobs {url}, or move")
    with pytest.raises(OuterstepError, match=refusal):
        Coordinator(Settings(data_dir=data, blobs=f"{url}-empty"))
    assert in_bucket(f"{url}-empty") == set()
    with pytest.raises(OuterstepError, match="are in .* already"):
        move(data, f"{url}/")
    with coordinator_thread(data, blobs=f"{url}/") as running:
        assert contents(running)


def test_killed_after_the_switch_it_deletes_the_rest(url: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator.backup import moving

    with coordinator_thread(data) as running:
        before = contents(running)

    def killed(*_: object) -> None:
        raise Stopped

    with monkeypatch.context() as broken:
        broken.setattr(moving, "_delete_old", killed)
        with pytest.raises(Stopped):
            move(data, url)
    with coordinator_thread(data, blobs=url) as running:
        assert contents(running) == before
    assert blobs_in(data)
    move(data, url)
    assert blobs_in(data) == set()
    with coordinator_thread(data, blobs=url) as running:
        assert contents(running) == before


def other_bytes(objects: Objects, name: str) -> None:
    found = objects.get(name)
    assert found is not None
    objects.delete([name])
    objects.create_from(name, bytes(len(found[0])))


def test_what_a_broken_store_has_changed_is_not_taken_for_the_blob(
    url: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coordinator.store import object_blobs

    real = object_blobs.ObjectBlobs.put

    def spoils(self: object, name: str, source: object) -> bool:
        created = real(self, name, source)  # type: ignore[arg-type]
        other_bytes(Objects(url), name)
        return created

    with monkeypatch.context() as broken:
        broken.setattr(object_blobs.ObjectBlobs, "put", spoils)
        with pytest.raises(OuterstepError, match="has other bytes in the new place"):
            move(data, url)
    assert blobs_in(data)
    move(data, url)
    assert set(damages_of(data, url)) == set()


def damages_of(data: Path, url: str) -> list[str]:
    """Return the blobs whose bytes are not those that their names say."""
    from protocol.digest import digest

    with coordinator_thread(data, blobs=url) as running:
        return [name for name, content in contents(running).items() if digest(content).hex()[:16] not in name]


def spoil(data: Path) -> None:
    path = data / min(name for name in blobs_in(data) if "/deltas/" in name)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_blob_that_is_damaged_is_named_and_not_moved(url: str, data: Path) -> None:
    spoil(data)
    with pytest.raises(OuterstepError, match=r"runs/r/deltas/\S+ is damaged: start the coordinator"):
        move(data, url)
    assert blobs_in(data)


def while_it_runs(data: Path, url: str) -> None:
    with coordinator_thread(data):
        move(data, url)


def to_where_they_are(data: Path, url: str) -> None:
    move(data, DIRECTORY)


def to_the_bucket_of_another(data: Path, url: str) -> None:
    Coordinator(Settings(data_dir=data.parent / "another", blobs=url)).close()
    move(data, url)


def of_no_data_directory(data: Path, url: str) -> None:
    os.mkdir(data.parent / "empty")
    move(data.parent / "empty", url)


def to_a_path(data: Path, url: str) -> None:
    move(data, "/mnt/elsewhere")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (while_it_runs, "is in use by another coordinator; stop it"),
        (to_where_they_are, "are in directory already"),
        (to_the_bucket_of_another, "belongs to another coordinator: give another prefix"),
        (of_no_data_directory, "is not a coordinator's data directory"),
        (to_a_path, "/mnt/elsewhere is not the URL of a bucket"),
    ],
)
def test_what_is_refused_changes_nothing(url: str, data: Path, act: Callable[[Path, str], None], said: str) -> None:
    before = blobs_in(data)
    with pytest.raises(OuterstepError, match=said):
        act(data, url)
    assert blobs_in(data) == before
    assert not (data / JOURNAL).exists()
