"""The way around the coordinator: workers upload to the bucket and download from it themselves.

The coordinator signs each request, and asks the store what has arrived: size and checksum of an object, and its first
bytes. The signature (AWS Signature Version 4 in the query) covers the method, the object and the headers. So an upload
creates exactly the announced bytes, and never replaces an object: `x-amz-checksum-sha256` and `If-None-Match: *` are
signed. `open_direct` probes whether a store enforces both. Only stores with the interface of S3 do: what Google Cloud
Storage and Azure sign does not bind the bytes of an upload.
"""

import base64
import hashlib
import logging
import os
import secrets
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from coordinator.store.blobs import OwnedBucket, SignedRequest, StoreOutage, Uploaded
from outerstep.common.connections import error_text, keep_urls_out_of_logs, ssl_context
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Objects

TIMEOUT = httpx.Timeout(30.0, connect=10.0)
ATTEMPTS = 4
REGION = "us-east-1"  # what stores other than AWS expect if they have no regions
OWN_S = 60.0  # how long requests that the coordinator itself sends are valid

outages = OwnedBucket.outages
logger = logging.getLogger(__name__)


class SignedAccess:
    """Signed access to the blobs of a bucket. `public_url`: where everybody can read the prefix of the bucket, such as
    the address of a content delivery network; None: downloads are signed, too. The other methods are documented in
    `DirectAccess`. Thread-safe."""

    def __init__(self, objects: "Objects", public_url: str | None = None) -> None:
        """Use the credentials of the environment. Raises OuterstepError with the reason if requests to the bucket
        cannot be signed."""
        bucket = objects.bucket
        if bucket.scheme != "s3":
            raise OuterstepError(f"{bucket.scheme}:// has no signed uploads that are bound to their bytes")
        try:
            from botocore.session import Session
        except ModuleNotFoundError as error:
            raise OuterstepError("it needs botocore: pip install 'outerstep[coordinator,remote]'") from error
        session = Session()
        self._credentials = session.get_credentials()
        if self._credentials is None:
            raise OuterstepError("there are no credentials to sign with: set AWS_ACCESS_KEY_ID and the secret")
        self._region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or REGION
        endpoint = bucket.endpoint or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        prefix = f"{bucket.prefix}/" if bucket.prefix else ""
        if endpoint is not None:
            self._base = f"{endpoint.rstrip('/')}/{bucket.name}/{prefix}"
        elif "." in bucket.name:  # AWS's certificate is for names without dots
            self._base = f"https://s3.{self._region}.amazonaws.com/{bucket.name}/{prefix}"
        else:
            self._base = f"https://{bucket.name}.s3.{self._region}.amazonaws.com/{prefix}"
        self._objects, self._http = objects, httpx.Client(timeout=TIMEOUT, verify=ssl_context())
        self._public_url = None if public_url is None else public_url.rstrip("/")

    @property
    def origin(self) -> str:
        """The scheme and host that workers upload to."""
        parts = urlsplit(self._base)
        return f"{parts.scheme}://{parts.netloc}"

    def upload(self, name: str, sha256: bytes, expires_s: float) -> SignedRequest:
        headers = {"If-None-Match": "*", "x-amz-checksum-sha256": base64.b64encode(sha256).decode()}
        return self._signed("PUT", name, expires_s, headers)

    def download_url(self, name: str, expires_s: float) -> str:
        if self._public_url is not None:
            return f"{self._public_url}/{quote(name)}"
        return self._signed("GET", name, expires_s, {}).url

    def _signed(self, method: str, name: str, expires_s: float, headers: dict[str, str]) -> SignedRequest:
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method, self._base + quote(name), headers=dict(headers))
        auth = S3SigV4QueryAuth(
            self._credentials.get_frozen_credentials(), "s3", self._region, expires=max(1, int(expires_s))
        )
        auth.add_auth(request)
        return SignedRequest(method, request.url, headers)

    def uploaded(self, name: str) -> Uploaded | None:
        retrying = Retrying(
            retry=retry_if_exception_type(StoreOutage),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(0.2, max=5),
            reraise=True,
        )
        return retrying(self._uploaded, name)

    def _uploaded(self, name: str) -> Uploaded | None:
        request = self._signed("HEAD", name, OWN_S, {"x-amz-checksum-mode": "ENABLED"})  # obstore has no checksums
        try:
            answer = self._http.head(request.url, headers=request.headers)
        except httpx.TransportError as error:
            raise StoreOutage(f"the store at {self.origin} cannot be reached: {error_text(error)}") from error
        if answer.status_code == 404:
            return None
        size = answer.headers.get("content-length", "")
        if answer.status_code != 200 or not size.isdigit():
            raise StoreOutage(f"the store at {self.origin} answers {answer.status_code} without the size of an object")
        try:
            sha256 = base64.b64decode(answer.headers.get("x-amz-checksum-sha256", ""), validate=True)
        except ValueError:
            sha256 = b""
        return Uploaded(int(size), sha256 or None)

    @outages()
    def beginning(self, name: str, length: int) -> bytes:
        return self._objects.read(name, 0, length)

    def probe(self) -> str | None:
        """Return why workers must not upload directly, None if they may: a signed upload must create exactly the signed
        bytes, once, and only with the signed headers; and the store must report the checksum."""
        from outerstep.common.bucket_check import FOLDER

        name, content = f"{FOLDER}/{secrets.token_hex(8)}", secrets.token_bytes(64)
        sha256 = hashlib.sha256(content).digest()
        try:
            for what, expected, answer in self._trials(name, content, sha256):
                if answer.status_code not in expected:
                    return f"it answers {answer.status_code} to {what}"
            found = self.uploaded(name)
            if found != Uploaded(len(content), sha256):
                return "it does not report the SHA-256 of an object that was uploaded with one"
        except (httpx.TransportError, OSError) as error:
            return error_text(error)
        finally:
            try:
                self._objects.delete([name])
            except OuterstepError as error:
                logger.warning("%s could not be removed: %s", self._objects.name(name), error)
        return None

    def _trials(self, name: str, content: bytes, sha256: bytes) -> "list[tuple[str, tuple[int, ...], httpx.Response]]":
        signed = self.upload(name, sha256, OWN_S)
        unconditional = {key: value for key, value in signed.headers.items() if key != "If-None-Match"}
        other = bytes(len(content))
        return [
            ("an upload of other bytes than were signed", (400, 403), self._put(signed, other, signed.headers)),
            ("an upload without a signed header", (400, 403), self._put(signed, content, unconditional)),
            ("a signed upload", (200, 201, 204), self._put(signed, content, signed.headers)),
            ("a second upload of the same object", (409, 412), self._put(signed, content, signed.headers)),
        ]

    def _put(self, request: SignedRequest, content: bytes, headers: dict[str, str]) -> httpx.Response:
        return self._http.put(request.url, content=content, headers=headers)


def open_direct(objects: "Objects", public_url: str | None = None) -> SignedAccess | None:
    """Return direct access to a bucket. None if its store does not allow it, which is logged: then all transfers go
    through the coordinator."""
    access, said = probed(objects, public_url)
    logger.log(logging.WARNING if access is None else logging.INFO, "%s", said)
    return access


def probed(objects: "Objects", public_url: str | None = None) -> tuple[SignedAccess | None, str]:
    """Return direct access to a bucket, None if its store does not allow it, and a sentence about it."""
    keep_urls_out_of_logs()
    try:
        access = SignedAccess(objects, public_url)
        fault = access.probe()
    except OuterstepError as error:
        fault = str(error)
    if fault is not None:
        return None, f"workers cannot transfer directly to {objects}, only through the coordinator: {fault}"
    return access, f"workers transfer directly to {access.origin}"
