"""An S3 server over a real socket: moto's, and before and after each request what a test says."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import boto3
import httpx
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

BUCKET = "backups"
KEY, SECRET = "test-key", "test-secret"


class Request(NamedTuple):
    """A request: for example ("PUT", "p/blobs/12ab…", "partNumber=1…", 8388608)."""

    method: str
    path: str  # within the bucket
    query: str
    size: int

    @property
    def changes(self) -> bool:
        """Whether it changes what is in the bucket."""
        return self.method in ("PUT", "POST", "DELETE")


Fault = Callable[[Request], tuple[int, str] | None]  # the status and the code of an error


class S3Server:
    """`asked` has every request. `fault` says what becomes of one: None, it is answered; or it has no effect and the
    answer is this error. `after` says the same once a request has had its effect, and before the client hears of it.
    `deaf`: it heeds no `If-None-Match`, as older stores do."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Request] = []
        self.undisturbed()

    def undisturbed(self) -> None:
        """Answer everything from now on."""
        self.fault: Fault = lambda request: None
        self.after: Fault = lambda request: None
        self.deaf = False

    def environment(self) -> dict[str, str]:
        """The variables by which it is found."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Another client than the product's, to look at what is there and to spoil it."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def keys(self, prefix: str) -> set[str]:
        """The names of the objects below `prefix`, a name that ends with `/`."""
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return {each["Key"].removeprefix(prefix) for each in found}

    def read(self, key: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def write(self, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=key, Body=content)


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Say nothing: `asked` has it."""


def refusal(status: int, code: str) -> Response:
    body = f"<Error><Code>{code}</Code><Message>as the test says</Message></Error>"
    return Response(body, status, content_type="application/xml")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serve one bucket, which is empty: what moto has is the process's, so there is one server at a time."""
    moto = DomainDispatcherApplication(create_backend_app)
    server: S3Server

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").lstrip("/")
        size = int(environ.get("CONTENT_LENGTH") or 0)
        request = Request(environ["REQUEST_METHOD"], path, environ["QUERY_STRING"], size)
        server.asked.append(request)
        if (fault := server.fault(request)) is not None:
            environ["wsgi.input"].read(size)
            return refusal(*fault)(environ, start_response)
        if server.deaf:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        answer = Response.from_app(moto, environ, buffered=True)
        if (fault := server.after(request)) is not None:
            answer = refusal(*fault)
        return answer(environ, start_response)

    listening = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    server = S3Server(f"http://127.0.0.1:{listening.server_port}")
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        httpx.post(f"{server.url}/moto-api/reset").raise_for_status()
        server.client().create_bucket(Bucket=BUCKET)
        server.asked.clear()
        yield server
    finally:
        listening.shutdown()
        thread.join()
