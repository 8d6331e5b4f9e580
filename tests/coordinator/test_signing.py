"""Signed requests to a real S3 server: what their holder can do, and what it cannot."""

import base64
import hashlib
import logging
import os
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from coordinator.store.blobs import SignedRequest, Uploaded
from harness.seaweedfs import SeaweedFS
from protocol.errors import OuterstepError

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
pytest.importorskip("botocore", reason="no signatures: pip install 'outerstep[remote]'")

from coordinator.store.direct_access import SignedAccess, open_direct
from outerstep.common.bucket_check import FOLDER
from outerstep.common.objects import Bucket, Objects

CONTENT = os.urandom(100_000)
SHA256 = hashlib.sha256(CONTENT).digest()
NAME = "runs/r/contributions/0/1.w ä.0123456789abcdef"


@pytest.fixture
def objects(store: SeaweedFS, request: pytest.FixtureRequest) -> Objects:
    found = Objects(store.url(f"signing/{request.node.name}"))
    found.create("first", b"")  # which creates the bucket
    return found


@pytest.fixture
def access(objects: Objects) -> SignedAccess:
    return SignedAccess(objects)


def put(request: SignedRequest, content: bytes = CONTENT, **changed: str | None) -> int:
    headers = {**request.headers, **{key.replace("_", "-"): value for key, value in changed.items()}}
    sent = {key: value for key, value in headers.items() if value is not None}
    return httpx.put(request.url, content=content, headers=sent).status_code


@pytest.mark.covers("security:signed-upload")
def test_an_upload_creates_its_object_once(objects: Objects, access: SignedAccess) -> None:
    request = access.upload(NAME, SHA256, 60)
    assert access.uploaded(NAME) is None
    assert put(request) == 200
    assert put(request) == 412
    assert put(access.upload(NAME, hashlib.sha256(b"x").digest(), 60), b"x") == 412
    assert objects.read(NAME, 0, len(CONTENT)) == CONTENT
    assert access.uploaded(NAME) == Uploaded(len(CONTENT), SHA256)
    assert access.beginning(NAME, 30) == CONTENT[:30]


@pytest.mark.covers("security:signed-upload")
def test_an_upload_accepts_no_other_bytes(objects: Objects, access: SignedAccess) -> None:
    request = access.upload(NAME, SHA256, 60)
    assert put(request, CONTENT[:-1] + b"?") == 400
    assert put(request, CONTENT[:-1]) == 400
    assert put(request, If_None_Match=None) == 403
    ten_zeros = base64.b64encode(hashlib.sha256(bytes(10)).digest()).decode()
    assert put(request, bytes(10), x_amz_checksum_sha256=ten_zeros) == 403
    assert objects.size(NAME) is None


@pytest.mark.covers("security:signed-upload")
def test_a_request_is_for_one_object_and_one_method(access: SignedAccess) -> None:
    request = access.upload(NAME, SHA256, 60)
    elsewhere = SignedRequest("PUT", request.url.replace("/0/1.", "/0/2."), request.headers)
    assert put(elsewhere) == 403
    assert httpx.get(request.url, headers=request.headers).status_code == 403
    assert httpx.delete(request.url, headers=request.headers).status_code == 403


def test_a_download_may_have_a_range(objects: Objects, access: SignedAccess) -> None:
    objects.create(NAME, CONTENT)
    url = access.download_url(NAME, 60)
    assert httpx.get(url).content == CONTENT
    answer = httpx.get(url, headers={"Range": "bytes=10-19"})
    assert (answer.status_code, answer.content) == (206, CONTENT[10:20])
    assert httpx.put(url, content=CONTENT).status_code == 403


@pytest.mark.covers("security:signed-upload")
def test_a_request_expires(objects: Objects, access: SignedAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime, timedelta

    from botocore import auth

    objects.create(NAME, CONTENT)
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(auth, "get_current_datetime", lambda remove_tzinfo=True: an_hour_ago.replace(tzinfo=None))
        late, in_time = access.download_url(NAME, 1800), access.download_url(NAME, 7200)
    assert httpx.get(late).status_code == 403
    assert httpx.get(in_time).status_code == 200


def test_with_a_public_address_downloads_are_not_signed(objects: Objects) -> None:
    access = SignedAccess(objects, "https://cdn.example.org/training/")
    assert access.download_url("runs/r/a b", 60) == "https://cdn.example.org/training/runs/r/a%20b"


def test_a_signature_is_not_shown(access: SignedAccess) -> None:
    request = access.upload(NAME, SHA256, 60)
    assert "Signature" in request.url
    assert "Signature" not in repr(request)


def test_a_store_that_binds_uploads_is_used_directly(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        access = open_direct(objects)
    assert access is not None
    assert access.origin in caplog.text
    assert list(objects.within(FOLDER)) == [], "the probe is removed"


@pytest.mark.parametrize("left_out", ["If-None-Match", "x-amz-checksum-sha256"])
def test_a_store_that_ignores_a_condition_is_not_used_directly(
    objects: Objects, left_out: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Like gateways that ignore what they do not know."""
    real = SignedAccess._signed  # noqa: SLF001 the one place where all are signed

    def signed(self: SignedAccess, method: str, path: str, expires_s: float, headers: dict[str, str]) -> SignedRequest:
        return real(self, method, path, expires_s, {key: headers[key] for key in headers if key != left_out})

    monkeypatch.setattr(SignedAccess, "_signed", signed)
    assert open_direct(objects) is None
    assert "only through the coordinator: it " in caplog.text


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix"])
def test_other_stores_have_no_bound_uploads(url: str) -> None:
    with pytest.raises(OuterstepError, match="bound"):
        SignedAccess(cast(Objects, SimpleNamespace(bucket=Bucket.of(url))))


def test_without_credentials_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(OuterstepError, match="AWS_ACCESS_KEY_ID"):
        SignedAccess(Objects("s3+https://store.example.org/bucket/prefix"))


@pytest.mark.parametrize(
    ("url", "begins"),
    [
        ("s3://bucket/a/b", "https://bucket.s3.eu-north-1.amazonaws.com/a/b/x?"),
        ("s3://bucket.with.dots/a", "https://s3.eu-north-1.amazonaws.com/bucket.with.dots/a/x?"),
        ("s3+https://store.example.org/bucket", "https://store.example.org/bucket/x?"),
    ],
)
def test_addresses(url: str, begins: str, store: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert SignedAccess(Objects(url)).download_url("x", 60).startswith(begins)
