"""What a process that cannot start reports: a supervisor starts it again after an outage, and only then."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url

from coordinator.aggregation.aggregator import serve
from coordinator.server import make_server
from coordinator.settings import Settings
from coordinator.store.database import Database
from harness.ports import free_port
from harness.postgres import PostgreSQL
from outerstep.cli.errors import exit_code
from outerstep.common.exit_codes import Exit
from protocol.errors import OuterstepError
from tests.support.s3_server import BUCKET, S3Server


def ends_with(start: Callable[[], object]) -> tuple[Exit, str]:
    """The exit code of a process, and what it prints."""
    with pytest.raises(OuterstepError) as failed:
        start()
    return exit_code(failed.value), str(failed.value)


def start_coordinator(data_dir: Path, database: URL | None, blobs: str) -> None:
    url = None if database is None else database.render_as_string(hide_password=False)
    make_server(Settings(data_dir=data_dir, port=0, database=url, blobs=blobs))


def start_aggregator(data_dir: Path, database: URL) -> None:
    serve(database, None, data_dir, threading.Event(), pytest.fail)


@pytest.mark.parametrize("start", ["coordinator", "aggregator", "database"])
def test_a_database_that_does_not_answer_is_worth_another_start(tmp_path: Path, s3: S3Server, start: str) -> None:
    url = make_url(f"postgresql+psycopg://a:b@127.0.0.1:{free_port()}/c")
    starts: dict[str, Callable[[], object]] = {
        "coordinator": lambda: start_coordinator(tmp_path, url, f"s3://{BUCKET}/start"),
        "aggregator": lambda: start_aggregator(tmp_path, url),
        "database": lambda: Database(url),
    }
    code, message = ends_with(starts[start])
    assert code == Exit.RETRY
    assert "Connection refused" in message


def test_what_no_start_can_change_is_refused(tmp_path: Path, postgres: PostgreSQL) -> None:
    right = make_url(postgres.url())
    for wrong in (right.set(password="another"), right.set(database="none"), right.set(username="nobody")):
        assert ends_with(partial(start_aggregator, tmp_path, wrong))[0] == Exit.REFUSED


def test_an_aggregator_that_comes_before_the_coordinators_is_worth_another_start(
    tmp_path: Path, postgres: PostgreSQL
) -> None:
    url = make_url(postgres.create(f"early{abs(hash(tmp_path))}"))
    code, message = ends_with(lambda: start_aggregator(tmp_path, url))
    assert (code, "start one first" in message) == (Exit.RETRY, True)
    Database(url).close()
    code, message = ends_with(lambda: start_aggregator(tmp_path, url))
    assert (code, "no bucket yet" in message) == (Exit.RETRY, True)
    postgres.drop(str(url.database))


@pytest.mark.parametrize("shared", [False, True], ids=["sqlite", "postgresql"])
def test_a_bucket_that_does_not_answer_is_worth_another_start(
    tmp_path: Path, s3: S3Server, postgres: PostgreSQL, shared: bool
) -> None:
    url = make_url(postgres.url()) if shared else None
    s3.fault = lambda request: (503, "SlowDown")
    code, message = ends_with(lambda: start_coordinator(tmp_path, url, f"s3://{BUCKET}/start"))
    assert (code, "503" in message) == (Exit.RETRY, True)
    s3.fault = lambda request: (403, "AccessDenied")
    assert ends_with(lambda: start_coordinator(tmp_path, url, f"s3://{BUCKET}/start"))[0] == Exit.REFUSED
