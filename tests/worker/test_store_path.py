"""Workers that transfer directly to a real S3 server and from it, and what they do if they cannot."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from coordinator.store.blobs import SignedRequest
from coordinator.store.direct_access import SignedAccess
from coordinator.store.tables import ContributionRow
from harness.ports import free_port
from harness.seaweedfs import SeaweedFS
from protocol.errors import UnexpectedAnswer
from tests.support.http_server import Handler, serving
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.line.store import AVOIDED_S, FAULTS, StorePath, check_store_headers, check_store_url

pytestmark = pytest.mark.slow

_numbers = itertools.count()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The digest that the run ends with if everything goes through the coordinator."""
    tmp_path = tmp_path_factory.mktemp("through")
    with coordinator_thread(tmp_path / "data") as coordinator:
        run = Toy(coordinator, toy.spec(min_workers=2, checkpoints="every_rounds = 1"), tmp_path)
        run.workers(["a", "b"])
        return run.final().state_digest


Train = Callable[..., tuple[str | None, list[bool]]]


@pytest.fixture
def train(store: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with a bucket for the payloads. Returns the run's final digest, and of each contribution whether it went to
    the store directly. Requests of `method` that workers send to the store go to `elsewhere`, if that is given."""
    pytest.importorskip("botocore", reason="no signatures: pip install 'outerstep[remote]'")

    def train(method: str = "", elsewhere: str = "") -> tuple[str | None, list[bool]]:
        real = SignedAccess._signed  # noqa: SLF001 the one place where all are signed

        def signed(self: SignedAccess, method_: str, path: str, *arguments: Any) -> SignedRequest:
            request = real(self, method_, path, *arguments)
            if method_ != method or path.startswith("check/"):  # the coordinator's own
                return request
            return SignedRequest(request.method, request.url.replace(self.origin, elsewhere), request.headers)

        with coordinator_thread(tmp_path / "data", blobs=store.url(f"path-{next(_numbers)}")) as coordinator:
            monkeypatch.setattr(SignedAccess, "_signed", signed)
            run = Toy(coordinator, toy.spec(min_workers=2, checkpoints="every_rounds = 1"), tmp_path)
            assert run.info().direct
            run.workers(["a", "b"])
            digest = run.final().state_digest
            assert run.told("a").direct is not None
            with coordinator.coordinator.database.read() as session:
                rows = session.scalars(select(ContributionRow)).all()
        return digest, [row.sha256 is not None for row in rows]

    return train


def test_everything_goes_directly_and_ends_in_the_same_bits(
    train: Train, store: SeaweedFS, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        digest, directly = train()
    assert digest == expected
    assert directly == [True] * len(directly)
    assert caplog.text.count("payloads go directly between this worker and") == 2
    assert "Signature" not in caplog.text
    assert next(iter(store.environment.values())) not in caplog.text


@pytest.mark.parametrize("method", ["PUT", "GET"])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://{closed}", "the store at http://{closed}"),
        # Such as a store without TLS beside a coordinator with it.
        ("ftp://store.example.org", "the coordinator names the store ftp://store.example.org"),
    ],
    ids=["unreachable", "not used by workers"],
)
def test_a_store_that_a_worker_cannot_use_is_avoided(
    train: Train, expected: str | None, method: str, address: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    closed = f"127.0.0.1:{free_port()}"
    digest, directly = train(method, address.format(closed=closed))
    assert digest == expected
    if method == "PUT":
        assert not any(directly)
    assert f"payloads go through the coordinator for the next 10 min: {reason.format(closed=closed)}" in caplog.text


@pytest.mark.covers("reliability:store-faults")
@pytest.mark.parametrize("status", [503, 403])
def test_a_store_that_refuses_is_avoided(
    train: Train, expected: str | None, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(Handler):
        def do_PUT(self) -> None:  # noqa: N802
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(status)

    with serving(Refuses) as url:
        digest, directly = train("PUT", url)
    assert digest == expected
    assert not any(directly)
    assert f"answers {status} to an upload" in caplog.text


def test_other_bytes_than_published_are_not_used(
    train: Train, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Lies(Handler):
        def do_GET(self) -> None:  # noqa: N802
            first, last = (int(each) for each in self.headers["Range"].removeprefix("bytes=").split("-"))
            place = {"Content-Range": f"bytes {first}-{last}/{last + 1}"}
            self.answer(206, bytes(last - first + 1), place)

    with serving(Lies) as url:
        digest, _ = train("GET", url)
    assert digest == expected
    assert "has sent other bytes than published" in caplog.text


def test_after_a_few_faults_the_store_is_avoided_for_a_while() -> None:
    now = 0.0
    path = StorePath(lambda: now)
    assert not path.usable
    path.offer(True)
    for _ in range(FAULTS - 1):
        path.failed("no answer")
    path.worked("https://store.example.org/x?Signature=1")
    for _ in range(FAULTS - 1):
        path.failed("no answer")
    assert path.usable, "only faults in a row count"
    path.failed("no answer")
    assert not path.usable
    now = AVOIDED_S
    assert path.usable


@pytest.mark.covers("security:store-address")
@pytest.mark.parametrize(
    "url",
    [
        "http://store.example.org/x",
        "ftp://store.example.org/x",
        "file:///etc/passwd",
        "https://user@store.example.org/x",
        "https://:password@store.example.org/x",
        "https://store.example.org\\@localhost/x",
        "https://store.example.org:99999/x",
        "https://store.example.org:x/x",
        "https://store.example.org\x7f/x",
        "https://[::1/x",
        "https://store\u2100/x",
        " https://store.example.org/x",
        "/x",
        "",
    ],
)
def test_addresses_that_a_worker_does_not_use(url: str) -> None:
    with pytest.raises(UnexpectedAnswer, match="store"):
        check_store_url(url, httpx.URL("https://coordinator.example.org"))
    check_store_url("https://store.example.org/x", httpx.URL("https://coordinator.example.org"))
    check_store_url("http://localhost:8333/x", httpx.URL("http://localhost:8470"))


@pytest.mark.covers("security:store-address")
@pytest.mark.parametrize("name", ["Authorization", "Metadata-Flavor", "Host", "Cookie"])
def test_headers_that_a_worker_does_not_send_to_a_store(name: str) -> None:
    with pytest.raises(UnexpectedAnswer, match=name):
        check_store_headers({"If-None-Match": "*", name: "x"})
    check_store_headers({"If-None-Match": "*", "x-amz-checksum-sha256": "x"})
