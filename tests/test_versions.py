"""Neighbouring versions: every answer says the coordinator's, and whoever speaks another protocol is refused in a sentence,
whichever side is the older one."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import sqlalchemy as sa

from coordinator.store import sqlite
from harness.coordinator import CoordinatorProcess, InThread, coordinator_thread
from harness.member import Member, spec_toml
from outerstep.common.exit_codes import Exit
from protocol import PROTOCOL_VERSION, __version__
from protocol.messages import JoinRequest, Scope
from protocol.versions import request_headers
from protocol.wire import MAGIC, PREFIX, VERSION
from tests.support.http_server import Handler, serving
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.waiting import PATIENCE_S
from tests.support.workers import WorkerProcess

LATER = ("9.9.0", PROTOCOL_VERSION + 1)
EARLIER = ("0.0.9", PROTOCOL_VERSION - 1)
OURS = f"Outerstep {__version__}, protocol {PROTOCOL_VERSION}"

AS_ANOTHER_VERSION = """#!/bin/sh
shift 2 # -m outerstep
exec "{python}" -c '
import sys, protocol
protocol.__version__, protocol.PROTOCOL_VERSION = "{version}", {protocol}
from outerstep.cli import main
sys.argv[0] = "outerstep"
main()' "$@"
"""


def another(directory: Path, version: str, protocol: int) -> Path:
    """What stands for the Python of an installation of another version: `… -m outerstep COMMAND`."""
    python = directory / f"python-of-{version}"
    python.write_text(AS_ANOTHER_VERSION.format(python=sys.executable, version=version, protocol=protocol))
    python.chmod(0o755)
    return python


@pytest.fixture
def running(tmp_path: Path):
    with coordinator_thread(tmp_path / "data", max_head_bytes=8192) as running:
        yield running


def outerstep(python: Path, *arguments: str, token: str = "t") -> "subprocess.CompletedProcess[str]":
    command = [str(python), "-m", "outerstep", *arguments]
    environment = {"OUTERSTEP_TOKEN": token, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def raw(running: InThread, request: bytes) -> HTTPResponse:
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        answer = HTTPResponse(connection)
        answer.begin()
        answer.read()
    return answer


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_kind_of_answer_says_the_version(running: InThread) -> None:
    running.create_run(spec_toml())
    with running.client() as http:
        answers = [
            http.get("/healthz"),
            http.head("/healthz"),
            http.get("/readyz"),
            http.get("/", headers={"Accept": "text/html"}),
            http.get("/docs"),
            http.get("/openapi.json"),
            http.get("/metrics"),
            http.get("/v1/runs/r"),
            http.get("/v1/runs", headers={"Authorization": "Bearer nobody"}),
            http.get("/nothing"),
            http.put("/v1/runs"),
            http.post("/v1/runs", content=b"name = 1"),
            http.post("/v1/runs", content=b"#" * (1 << 20)),
            http.get("/v1/runs", headers={"Outerstep-Protocol": "0"}),
        ]
        with http.stream("GET", "/v1/runs/r/events", headers={"Accept": "text/event-stream"}) as events:
            answers.append(events)
    statuses = {answer.status_code for answer in answers}
    assert {200, 401, 404, 405, 409, 413, 422} <= statuses
    heads: list[Any] = [answer.headers for answer in answers]
    for request in (b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\nHost: c\r\nX: " + b"x" * 10_000 + b"\r\n\r\n"):
        answer = raw(running, request)
        assert answer.status in (400, 431)
        heads.append(answer.headers)
    for head in heads:
        assert (head["Outerstep-Version"], head["Outerstep-Protocol"]) == (__version__, str(PROTOCOL_VERSION))


def test_health_says_it_to_everybody(running: InThread) -> None:
    asked = {"Outerstep-Protocol": "77"}
    told = httpx.get(f"{running.url}/healthz", headers=asked).json()
    assert told == {"status": "ok", "version": __version__, "protocol": PROTOCOL_VERSION}


# --- other protocols --------------------------------------------------------------------------------------------------


def test_a_join_of_another_protocol_is_refused_before_anything_is_looked_at(running: InThread) -> None:
    running.create_run(spec_toml())
    with running.client() as http:
        member = Member(http, "r", "w")
        http.headers.update({"Outerstep-Protocol": str(PROTOCOL_VERSION + 1), "User-Agent": "outerstep/9.9.0 (worker)"})
        refused = member.ask_to_join()
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:outerstep:problem:protocol-mismatch")
        assert "upgrade the coordinator to Outerstep 9.9.0" in refused.json()["detail"]
        http.headers["Authorization"] = "Bearer nobody"
        assert member.ask_to_join().status_code == 409
        del http.headers["Outerstep-Protocol"]  # who says nothing is not refused for that
        assert member.ask_to_join().status_code == 401
    with running.client() as http:
        assert http.get("/v1/runs/r/workers").json()["items"] == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        (LATER, "upgrade the coordinator to Outerstep 9.9.0, or give this client the coordinator's version"),
        (EARLIER, f"upgrade this client to Outerstep {__version__}"),
    ],
    ids=["later", "earlier"],
)
def test_clients_of_another_protocol_end_with_a_sentence(
    running: InThread, tmp_path: Path, other: tuple[str, int], remedy: str
) -> None:
    running.create_run(tiny_spec("r", write_text(tmp_path / "text", seed=1), seed=1, rounds=1, min_workers=1))
    python = another(tmp_path, *other)
    said = f"(Outerstep {other[0]}, protocol {other[1]}) and the coordinator ({OURS}) do not speak the same protocol: "
    shown = outerstep(python, "run", "ls", "--url", running.url, token=running.admin_token)
    assert (shown.returncode, shown.stderr) == (Exit.REFUSED, f"outerstep: this client {said}{remedy}\n")
    worker = WorkerProcess(running.url, "r", "w", running.token(Scope.WORKER), tmp_path / "w", python=python)
    worker.start()
    assert worker.wait() == Exit.REFUSED
    assert worker.log.read_text().splitlines()[-1].endswith(said + remedy)
    assert "Traceback" not in worker.log.read_text()


@pytest.mark.nightly
def test_a_coordinator_of_another_protocol_is_told_by_our_clients(tmp_path: Path) -> None:
    """The other way round: a worker that waits meets its upgraded coordinator, and says what is to be done."""
    coordinator = CoordinatorProcess(tmp_path / "data")
    running = coordinator.start()
    later = CoordinatorProcess(tmp_path / "data", python=another(tmp_path, *LATER))
    later.port = running.port
    try:
        text = write_text(tmp_path / "text", seed=1)
        running.create_run(tiny_spec("r", text, seed=1, rounds=1, min_workers=2))
        worker = WorkerProcess(running.url, "r", "w", running.token(Scope.WORKER), tmp_path / "w")
        worker.start()
        while not httpx.get(
            f"{running.url}/v1/runs/r/workers", headers={"Authorization": f"Bearer {running.admin_token}"}
        ).json()["items"]:
            assert worker.process is not None
            assert worker.process.poll() is None, worker.log.read_text()
        coordinator.stop()
        later.start()
        assert worker.wait() == Exit.REFUSED
        said = f"this client ({OURS}) and the coordinator (Outerstep 9.9.0, protocol {LATER[1]}) do not speak the same "
        assert said + "protocol: upgrade this client to Outerstep 9.9.0" in worker.log.read_text().splitlines()[-1]
        assert "Traceback" not in worker.log.read_text()
        found = outerstep(Path(sys.executable), "doctor", running.url, "--run", "r")
        assert "do not speak the same protocol" in found.stdout
        assert "upgrade this client to Outerstep 9.9.0" in found.stdout
    finally:
        coordinator.stop()
        later.stop()


# --- other builds of the same protocol ----------------------------------------------------------------------------------


def test_a_field_that_only_one_build_knows_is_named_with_both_versions(running: InThread) -> None:
    running.create_run(spec_toml())
    with running.client() as http:
        http.headers.update(request_headers("worker") | {"User-Agent": "outerstep/0.1.7 (worker)"})
        member = Member(http, "r", "w")
        path, request = member.path(), JoinRequest(tensors=member.tensors, data=member.data).model_dump(mode="json")
        refused = http.put(path, json=request | {"later": 1}).json()
        assert refused["type"] == "urn:outerstep:problem:invalid-message"
        assert "later: " in refused["detail"]
        assert "Outerstep 0.1.7" in refused["detail"]
        assert OURS in refused["detail"]
        member.join(running.token(Scope.WORKER))
        fields = msgpack.packb({"kind": "state", "later": 1})
        body = PREFIX.pack(MAGIC, VERSION, 0, len(fields)) + fields
        refused = member.put("/v1/runs/r/checkpoints/0/fragments/0", body).json()
        assert refused["type"] == "urn:outerstep:problem:invalid-payload"
        assert "header field state." in refused["detail"]
        assert "Outerstep 0.1.7" in refused["detail"]
        assert OURS in refused["detail"]
        http.headers["User-Agent"] = "curl/8.1"  # of a client of somebody else there is nothing to say
        assert OURS not in member.put("/v1/runs/r/checkpoints/0/fragments/0", body).json()["detail"]


# --- later words of the same protocol ---------------------------------------------------------------------------------


def forwarder(running: InThread, alter: Callable[[str, dict[str, Any]], None]) -> type[Handler]:
    """What stands for a coordinator of a later version: it passes everything on, and alters JSON answers."""

    class Forward(Handler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Transfer-Encoding"):
                raise AssertionError("uploads say their length")
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            answer = httpx.request(
                self.command, running.url + self.path, content=body, headers=headers, timeout=PATIENCE_S
            )
            content = answer.content
            if answer.headers.get("content-type") == "application/json":
                document = answer.json()
                alter(self.path, document)
                content = json.dumps(document).encode()
            self.send_response_only(answer.status_code)
            for name, value in answer.headers.items():
                if name not in ("content-length", "connection", "transfer-encoding", "content-encoding"):
                    self.send_header(name, value)
            if answer.status_code not in (204, 304):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = forward  # noqa: N815, http.server's names

    return Forward


@pytest.mark.system
def test_a_worker_passes_over_keys_and_directives_that_it_does_not_know(running: InThread, tmp_path: Path) -> None:
    def alter(path: str, document: dict[str, Any]) -> None:
        document["later"] = {"than": ["0.1"]}
        for inner in document.get("items", []):
            inner["later"] = 1
        if path.endswith("/lease"):
            document["directive"] = "hum"

    running.create_run(tiny_spec("r", write_text(tmp_path / "text", seed=1), seed=1, rounds=2, min_workers=1))
    with serving(forwarder(running, alter)) as url:
        worker = WorkerProcess(url, "r", "w", running.token(Scope.WORKER), tmp_path / "w")
        worker.start()
        assert worker.wait() == Exit.DONE, worker.log.read_text()
        shown = outerstep(Path(sys.executable), "run", "show", "r", "--url", url, token=running.admin_token)
        assert "finished" in shown.stdout, shown.stderr


# --- the data directory -----------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_data_directory_of_a_later_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data"):
        pass
    engine = sa.create_engine(sqlite.url_in(tmp_path / "data"))
    with engine.begin() as connection:
        known = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one()
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    before = (tmp_path / "data" / sqlite.FILE).read_bytes()
    refused = outerstep(Path(sys.executable), "coordinator", "--port", "0", "--data", str(tmp_path / "data"))
    assert refused.returncode == Exit.REFUSED, refused.stderr
    assert "has schema 9999, which Outerstep 0.1.0 does not know" in refused.stderr
    assert f"This one knows schemas up to {known} and has changed nothing" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "data" / sqlite.FILE).read_bytes() == before
