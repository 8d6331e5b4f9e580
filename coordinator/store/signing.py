"""Signed requests to a bucket: their holder may send them without credentials, until they expire.

The signature (AWS Signature Version 4 in the query) covers the method, the object and the headers. So an upload creates
exactly the announced bytes, and never replaces an object: `x-amz-checksum-sha256` and `If-None-Match: *` are signed.
`SignedAccess.probe` verifies that a store enforces both. Only stores with the interface of S3 do: what Google Cloud
Storage and Azure sign does not bind the bytes of an upload.
"""

import base64
import os
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from coordinator.store.blobs import SignedRequest
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Bucket

REGION = "us-east-1"  # what stores other than AWS expect if they have no regions


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
