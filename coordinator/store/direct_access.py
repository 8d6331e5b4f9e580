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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from coordinator.store.blobs import SignedRequest, StoreOutage, Uploaded
from outerstep.common.connections import error_text, keep_urls_out_of_logs, ssl_context
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Bucket, Objects

TIMEOUT = httpx.Timeout(30.0, connect=10.0)
ATTEMPTS = 4
REGION = "us-east-1"  # what stores other than AWS expect if they have no regions
OWN_S = 60.0  # how long requests that the coordinator itself sends are valid

logger = logging.getLogger(__name__)


class Signer:
    """Signs requests for objects below a bucket's prefix. Thread-safe."""

    def __init__(self, bucket: "Bucket", credentials: Any, region: str, endpoint: str | None) -> None:
        """`credentials`: botocore's; `endpoint`: of another store than AWS."""
        self._credentials, self._region = credentials, region
        prefix = f"{bucket.prefix}/" if bucket.prefix else ""
        if endpoint is not None:
            self._base = f"{endpoint.rstrip('/')}/{bucket.name}/{prefix}"
        elif "." in bucket.name:  # AWS's certificate is for names without dots
            self._base = f"https://s3.{region}.amazonaws.com/{bucket.name}/{prefix}"
        else:
            self._base = f"https://{bucket.name}.s3.{region}.amazonaws.com/{prefix}"

    @classmethod
    def of(cls, bucket: "Bucket") -> Self:
        """Return the signer of a bucket, with the credentials of the environment. Raises OuterstepError with the reason
        if its requests cannot be signed."""
        if bucket.scheme != "s3":
            raise OuterstepError(f"{bucket.scheme}:// has no signed uploads that are bound to their bytes")
        try:
            from botocore.session import Session
        except ModuleNotFoundError as error:
            raise OuterstepError("it needs botocore: pip install 'outerstep[coordinator,remote]'") from error
        session = Session()
        credentials = session.get_credentials()
        if credentials is None:
            raise OuterstepError("there are no credentials to sign with: set AWS_ACCESS_KEY_ID and the secret")
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or REGION
        endpoint = bucket.endpoint or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        return cls(bucket, credentials, region, endpoint)

    @property
    def origin(self) -> str:
        """The scheme and host of every URL."""
        parts = urlsplit(self._base)
        return f"{parts.scheme}://{parts.netloc}"

    def upload(self, path: str, sha256: bytes, expires_s: float) -> SignedRequest:
        """Return a request that creates an object from the bytes with this SHA-256 digest, unless it exists."""
        headers = {"If-None-Match": "*", "x-amz-checksum-sha256": base64.b64encode(sha256).decode()}
        return self._signed("PUT", path, expires_s, headers)

    def download(self, path: str, expires_s: float) -> SignedRequest:
        """Return a request for an object's bytes; its holder may add a Range."""
        return self._signed("GET", path, expires_s, {})

    def inspection(self, path: str, expires_s: float) -> SignedRequest:
        """Return a request for an object's size and checksum."""
        return self._signed("HEAD", path, expires_s, {"x-amz-checksum-mode": "ENABLED"})

    def _signed(self, method: str, path: str, expires_s: float, headers: dict[str, str]) -> SignedRequest:
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method, self._base + quote(path), headers=dict(headers))
        auth = S3SigV4QueryAuth(
            self._credentials.get_frozen_credentials(), "s3", self._region, expires=max(1, int(expires_s))
        )
        auth.add_auth(request)
        return SignedRequest(method, request.url, headers)


class SignedAccess:
    """Signed access to the blobs of a bucket. `public_url`: where everybody can read the prefix of the bucket, such as
    the address of a content delivery network; None: downloads are signed, too. The methods are documented in
    `DirectAccess`."""

    def __init__(self, signer: Signer, http: httpx.Client, public_url: str | None = None) -> None:
        self._signer, self._http = signer, http
        self._public_url = None if public_url is None else public_url.rstrip("/")

    @property
    def origin(self) -> str:
        """The scheme and host that workers upload to."""
        return self._signer.origin

    def upload(self, name: str, sha256: bytes, expires_s: float) -> SignedRequest:
        return self._signer.upload(name, sha256, expires_s)

    def download_url(self, name: str, expires_s: float) -> str:
        if self._public_url is not None:
            return f"{self._public_url}/{quote(name)}"
        return self._signer.download(name, expires_s).url

    def uploaded(self, name: str) -> Uploaded | None:
        answer = self._ask(lambda: self._signer.inspection(name, OWN_S))
        if answer.status_code == 404:
            return None
        return Uploaded(_size(answer), _sha256(answer))

    def beginning(self, name: str, length: int) -> bytes:
        answer = self._ask(lambda: self._signer.download(name, OWN_S), {"Range": f"bytes=0-{length - 1}"}, length)
        if answer.status_code == 404:
            raise FileNotFoundError(name)
        return answer.content[:length]

    def _ask(
        self, sign: Callable[[], SignedRequest], headers: dict[str, str] | None = None, most_bytes: int = 0
    ) -> httpx.Response:
        """Send a request, and retry it after temporary faults. Return an answer with status 200, 206 or 404, with the
        first `most_bytes` bytes of its content. Raises StoreOutage."""
        retrying = Retrying(
            retry=retry_if_exception_type(StoreOutage),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(0.2, max=5),
            reraise=True,
        )
        return retrying(lambda: self._ask_once(sign(), headers or {}, most_bytes))

    def _ask_once(self, request: SignedRequest, headers: dict[str, str], most_bytes: int) -> httpx.Response:
        try:
            with self._http.stream(request.method, request.url, headers={**request.headers, **headers}) as answer:
                if answer.status_code not in (200, 206, 404):
                    raise StoreOutage(f"the store at {self.origin} answers {answer.status_code}")
                content = b""
                for piece in answer.iter_raw() if request.method == "GET" and answer.is_success else ():
                    content += piece
                    if len(content) >= most_bytes:
                        break
                return httpx.Response(answer.status_code, headers=_plain(answer.headers), content=content)
        except httpx.TransportError as error:
            raise StoreOutage(f"the store at {self.origin} cannot be reached: {error_text(error)}") from error

    def probe(self, objects: "Objects") -> str | None:
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
            if self.beginning(name, 16) != content[:16]:
                return "it does not answer signed requests for a range"
        except (httpx.TransportError, OSError) as error:
            return error_text(error)
        finally:
            try:
                objects.delete([name])
            except OuterstepError as error:
                logger.warning("%s could not be removed: %s", objects.name(name), error)
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
        access = SignedAccess(
            Signer.of(objects.bucket), httpx.Client(timeout=TIMEOUT, verify=ssl_context()), public_url
        )
        fault = access.probe(objects)
    except OuterstepError as error:
        fault = str(error)
    if fault is not None:
        return None, f"workers cannot transfer directly to {objects}, only through the coordinator: {fault}"
    return access, f"workers transfer directly to {access.origin}"


def _plain(headers: httpx.Headers) -> dict[str, str]:
    """Return the headers without those that describe how the body was transferred."""
    return {key: value for key, value in headers.items() if key not in ("content-encoding", "transfer-encoding")}


def _size(answer: httpx.Response) -> int:
    digits = answer.headers.get("content-length", "")
    if not digits.isdigit():
        raise StoreOutage("the store reports no size of an object")
    return int(digits)


def _sha256(answer: httpx.Response) -> bytes | None:
    try:
        return base64.b64decode(answer.headers.get("x-amz-checksum-sha256", ""), validate=True) or None
    except ValueError:
        return None
