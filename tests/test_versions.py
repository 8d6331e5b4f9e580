"""Neighbouring versions: every answer says the coordinator's, and whoever speaks another protocol is refused in a sentence,
whichever side is the older one."""

import json
import socket
import subprocess
import sys
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from harness.coordinator import CoordinatorProcess, InThread, coordinator_thread
from harness.member import Member, spec_toml
from outerstep.common.exit_codes import Exit
from protocol import PROTOCOL_VERSION, __version__
from protocol.messages import JoinRequest, Scope
from protocol.versions import request_headers
from protocol.wire import MAGIC, PREFIX, VERSION
from tests.outerstep.conftest import outerstep as command
from tests.support.cases import in_the_night
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.workers import WorkerProcess, worker_settings
from worker.agent import run_worker

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
        in_the_night(EARLIER, f"upgrade this client to Outerstep {__version__}"),
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
    assert (shown.returncode, shown.stderr.endswith(f"{said}{remedy}\n")) == (Exit.REFUSED, True), shown.stderr
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
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/r/workers").json()["items"] != [])
        coordinator.stop()
        later.start()
        assert worker.wait() == Exit.REFUSED
        last = worker.log.read_text().splitlines()[-1]
        assert "do not speak the same protocol: upgrade this client to Outerstep 9.9.0" in last
        assert "Traceback" not in worker.log.read_text()
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


@pytest.mark.slow
def test_a_worker_passes_over_keys_and_directives_that_it_does_not_know(
    running: InThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator of a later version sends them."""
    handle = httpx.HTTPTransport.handle_request

    def handle_later(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        answer = handle(transport, request)
        if answer.headers.get("content-type") != "application/json":
            return answer
        document = json.loads(answer.read()) | {"later": {"than": ["0.1"]}}
        for inner in document.get("items", []):
            inner["later"] = 1
        if request.url.path.endswith("/lease"):
            document["directive"] = "hum"
        answer.headers.pop("content-length", None)
        return httpx.Response(answer.status_code, headers=answer.headers, json=document)

    running.create_run(tiny_spec("r", write_text(tmp_path / "text", seed=1), seed=1, rounds=2, min_workers=1))
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle_later)
    assert run_worker(worker_settings(running, "r", tmp_path / "w")) == Exit.DONE
    code, out, err = command("run", "show", "r", OUTERSTEP_URL=running.url, OUTERSTEP_TOKEN=running.admin_token)
    assert (code, "finished" in out) == (0, True), err
