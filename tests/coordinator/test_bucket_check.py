"""What a coordinator asks of a bucket before it trusts it, and whose bucket it is."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.store import sqlite
from coordinator.store.blobs import Blobs
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.opening import store_at
from harness.seaweedfs import SeaweedFS
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.errors import OuterstepError

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
pytest.importorskip("moto", reason="no S3 server for tests: pip install 'moto[s3]' flask flask-cors")

from outerstep.common.bucket_check import BucketFinding, check_bucket
from outerstep.common.objects import Objects
from tests.support.s3_server import BUCKET, Request, S3Server

CHECKS = ["write", "create once", "read", "list", "clock", "remove"]
_numbers = itertools.count()


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{BUCKET}/prefix-{next(_numbers)}"


@contextmanager
def opening(data_dir: Path) -> Iterator[Callable[[str | None], Blobs]]:
    """Open a data directory and its database, for a function that opens the store at a URL; None: the directory."""
    with closing(DataDirectory(data_dir)) as data, closing(Database(sqlite.url_in(data_dir))) as database:
        yield lambda url: store_at(url, database)(data)


def findings(url: str, ahead_s: float = 0.0) -> list[BucketFinding]:
    return list(check_bucket(Objects(url), lambda: time.time() + ahead_s))


@pytest.mark.slow
def test_a_fit_bucket_passes_every_check_and_keeps_nothing_of_them(store: SeaweedFS) -> None:
    found = findings(store.url("fit"))
    assert [(each.name, each.fault) for each in found] == [(name, None) for name in CHECKS]
    assert list(Objects(store.url("fit")).within("check")) == []


@pytest.mark.slow
def test_a_store_that_replaces_objects_is_refused(s3: S3Server, url: str, tmp_path: Path) -> None:
    s3.deaf = True
    *_, last = findings(url)
    assert (last.name, last.passing) == ("create once", False)
    assert last.fault is not None
    assert "ignores If-None-Match" in last.fault
    assert list(Objects(url).within("check")) == [], "nothing is left"
    with opening(tmp_path) as open_at, pytest.raises(OuterstepError, match="ignores If-None-Match"):
        open_at(url)


@pytest.mark.parametrize(
    ("check", "method", "query", "action"),
    [
        ("write", "PUT", "", "write"),
        ("create once", "GET", "", "read"),
        ("list", "GET", "list-type", "list"),
        ("remove", "POST", "delete", "remove"),
    ],
)
def test_what_the_key_may_not_do_is_named(
    s3: S3Server, url: str, check: str, method: str, query: str, action: str
) -> None:
    def refuse(request: Request) -> tuple[int, str] | None:
        return (403, "AccessDenied") if request.method == method and query in request.query else None

    s3.fault = refuse
    *_, last = findings(url)
    assert last.name == check
    assert last.fault is not None
    assert f"may not {action} {url}" in last.fault
    assert "AWS_ACCESS_KEY_ID" in last.fault


def test_a_store_that_is_busy_may_be_fine_later(s3: S3Server, url: str) -> None:
    s3.fault = lambda request: (503, "SlowDown")
    (only,) = findings(url)
    assert only.passing


@pytest.mark.parametrize(("ahead_s", "word"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_wrong_clock_is_named(url: str, ahead_s: float, word: str) -> None:
    *_, last = findings(url, ahead_s)
    assert last.name == "clock"
    assert last.fault is not None
    assert f"clock is 1 h {word} the store's" in last.fault or f"{word} the store's" in last.fault
    assert list(Objects(url).within("check")) == [], "nothing is left"


# --- whose bucket it is -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bucket_belongs_to_one_data_directory(url: str, tmp_path: Path) -> None:
    """The start of a coordinator deletes the blobs that its database does not name."""
    for _ in range(2):  # at the first start and at later ones
        with opening(tmp_path / "a") as open_at:
            open_at(url)
    for _ in range(2):
        with (
            opening(tmp_path / "b") as open_at,
            pytest.raises(OuterstepError, match="belongs to the coordinator of another database"),
        ):
            open_at(url)
    with opening(tmp_path / "b") as open_at:
        assert isinstance(open_at(None), DirectoryBlobs)


def test_a_data_directory_does_not_start_without_its_bucket(url: str, tmp_path: Path) -> None:
    with opening(tmp_path) as open_at:
        open_at(url)
        with pytest.raises(OuterstepError, match=f"give --blobs {url}"):
            open_at(None)
        Objects(f"{url}-other").create_from("owner", b"another")
        with pytest.raises(OuterstepError, match="belongs to the coordinator of another database"):
            open_at(f"{url}-other")


def test_a_data_directory_that_has_blobs_gets_no_bucket(url: str, tmp_path: Path) -> None:
    with opening(tmp_path) as open_at:
        open_at(None).put("runs/r/checkpoints/0/0.0123456789abcdef", b"a state")
        with pytest.raises(OuterstepError, match="start without --blobs"):
            open_at(url)
    assert list(Objects(url).within("")) == []


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_doctor_checks_a_bucket(s3: S3Server, url: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "--blobs", url])
    assert done.exit_code == Exit.DONE, done.output
    assert f"outerstep coordinator --blobs {url}" in done.output
    assert "only through the coordinator" in done.output, "moto checks no signatures"
    s3.deaf = True
    done = CliRunner().invoke(app, ["doctor", "--blobs", url, "--format", "json"])
    assert done.exit_code == Exit.REFUSED
    document = json.loads(done.stdout)
    assert [each["name"] for each in document["findings"]] == CHECKS[:2]
    assert document["exit_code"] == Exit.REFUSED
    s3.fault = lambda request: (503, "SlowDown")
    assert CliRunner().invoke(app, ["doctor", "--blobs", url]).exit_code == Exit.RETRY


@pytest.mark.parametrize("given", [["https://example.org"], ["--run", "r"]])
def test_the_doctor_checks_a_bucket_or_a_box(given: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *given, "--blobs", "s3://b/p"])
    assert done.exit_code == Exit.USAGE
