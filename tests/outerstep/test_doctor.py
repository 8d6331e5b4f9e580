"""`outerstep doctor`: a real coordinator and a run of text, and a story for each thing that may be wrong."""

import inspect
import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from email.utils import formatdate
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
import pytest
import torch
from blake3 import blake3
from typer.testing import CliRunner

from harness.coordinator import InThread, coordinator_thread
from outerstep.cli import app
from outerstep.cli.doctor import worker_command
from outerstep.cli.worker import worker
from outerstep.common.exit_codes import Exit
from outerstep.doctor import coordinator, examine, machine, network, training, trial
from outerstep.doctor.examination import Examination, Finding, OutOfTime, State, _within, conclude, fine, wrong
from outerstep.doctor.training import Model
from outerstep.doctor.trial import TrialSteps, take_steps, take_steps_apart
from protocol import PROTOCOL_VERSION
from protocol.fragments import Layout
from protocol.messages import JoinReply, JoinRequest, RunChange, RunDetail, Scope, WorkerChange
from protocol.spec.model import ModelSpec
from protocol.spec.run import RunSpec, parse_spec
from tests.support.http_server import Handler, serving
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.workers import worker_settings
from worker.accounts.machine import host_free_bytes
from worker.agent import run_worker
from worker.data.open_training_set import open_training_set
from worker.errors import Stopped
from worker.link.client import open_http
from worker.memory import IN_USE, disk_bytes
from worker.models.building import build_model
from worker.settings import BoxSettings, WorkerSettings
from worker.state.parameters import tensor_specs
from worker.state.state_dir import MemberTokens, StateDir, WorkerToken

CPU = torch.device("cpu")
CHECKS = ["versions", "kernels", "host", "connection", "TLS", "coordinator", "clock", "token", "run", "name", "state"]
CHECKS += ["device", "allowed", "data", "model", "memory", "disk", "step", "step", "tcp", "line"]


@pytest.fixture(autouse=True)
def _time_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check is given up because the machine is busy."""
    for name in ("HOST_S", "ANSWER_S", "DATA_S", "LINE_S"):
        monkeypatch.setattr(examine, name, PATIENCE_S)


class Told:
    """Keeps what is told of an examination."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.findings: list[Finding] = []

    def begin(self, name: str) -> None:
        self.names.append(name)

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chapters(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with coordinator_thread(tmp_path_factory.mktemp("coordinator") / "data") as running:
        yield running


@pytest.fixture
def run(running: InThread, text: Path, request: pytest.FixtureRequest) -> str:
    """A run of this test's own."""
    name = f"run-{blake3(request.node.name.encode()).hexdigest(8)}"
    running.create_run(tiny_spec(name, text, seed=0, rounds=3, min_workers=1))
    return name


def here(spec: RunSpec, settings: BoxSettings, processes: int, stop: threading.Event) -> TrialSteps:
    """The steps in this process, as another one takes seconds to begin; each of half a second, however long it took."""
    assert processes == 1
    return take_steps(spec, settings, CPU, stop=stop, clock=ticking(0.5))


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that is so much later whenever it is looked at."""
    times = itertools.count()
    return lambda: next(times) * seconds


def examined(settings: WorkerSettings, processes: int = 1, **changes: Any) -> list[Finding]:
    told, usual = Told(), {"take_steps": here, "monotonic": ticking(0.001)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "TOLERATED_S", PATIENCE_S)  # an answer may be as old when it arrives
        found = examine.examine(settings, processes, told, **usual | changes)
    assert told.findings == found
    assert all(finding.name in told.names or finding.name == "kernels" for finding in found)
    return found


def of(found: list[Finding], name: str) -> Finding:
    """What was found of this name, the worst of it."""
    order = [State.WRONG, State.WARNING, State.SKIPPED, State.FINE]
    return min((each for each in found if each.name == name), key=lambda each: order.index(each.state))


def unsound(found: list[Finding]) -> dict[str, State]:
    return {each.name: each.state for each in found if each.state is not State.FINE}


def code(found: list[Finding]) -> Exit:
    return conclude(found, "outerstep worker").code


def join(running: InThread, run: str, name: str, text: Path, **changes: Any) -> JoinReply:
    """A worker of the run, with the model and the data that the spec says."""
    with running.client() as http:
        spec = RunDetail.model_validate(http.get(f"/v1/runs/{run}").json()).spec
        tensors = tensor_specs(build_model(spec, CPU))
        summary = open_training_set(spec.with_source(str(text))).summary
        request = JoinRequest(**{"tensors": tensors, "data": summary, **changes})
        http.headers["Authorization"] = f"Bearer {running.token(Scope.WORKER)}"
        reply = http.put(f"/v1/runs/{run}/workers/{name}", json=request.model_dump(mode="json"))
    return JoinReply.model_validate(reply.raise_for_status().json())


# --- a box that is fine -------------------------------------------------------------------------------------------


def test_a_box_that_is_ready(running: InThread, run: str, tmp_path: Path) -> None:
    """Nothing is left of the examination: no worker in the run, no state directory, no file."""
    files = sorted(running.data_dir.rglob("*"))
    found = examined(worker_settings(running, run, tmp_path / "state"))
    assert [each.name for each in found] == CHECKS
    assert unsound(found) == {}
    assert code(found) is Exit.DONE
    assert "can be created" in of(found, "state").said
    assert "The first worker's set becomes" in of(found, "data").said
    assert "140 k parameters to train; the first worker's" in of(found, "model").said
    steps = [each.said for each in found if each.name == "step"]
    assert steps[0].startswith("micro-batch auto: all 4 sequences at once")
    assert "for 128 tokens in fp32" in steps[1]
    assert "A round's 5 take" in steps[1]
    assert "A round's upload (int8) of" in of(found, "line").said
    assert sorted(running.data_dir.rglob("*")) == files
    assert not (tmp_path / "state").exists()
    with running.client() as http:
        assert http.get(f"/v1/runs/{run}/workers").json()["items"] == []


def test_what_the_worker_of_a_live_run_has_is_compared(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    join(running, run, "other", text)
    found = examined(worker_settings(running, run, tmp_path / "state"))
    assert unsound(found) == {}
    assert "1 live worker (other)" in of(found, "run").said
    assert of(found, "data").said.endswith("the same digest as the run's workers")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--gpus", "2", "--mode", "fsdp"]])
def test_the_command_and_its_processes(running: InThread, run: str, tmp_path: Path, options: list[str]) -> None:
    """As people start it. The steps are taken by other processes; what it ends with can be started as it is."""
    token = tmp_path / "token"
    token.write_text(running.token(Scope.WORKER))
    words = [running.url, "--run", run, "--token-file", str(token), "--name", "a", "--state", str(tmp_path / "state")]
    words += ["--device", "cpu", *options, "--data-root", "/"]
    command = [sys.executable, "-m", "outerstep", "doctor", *words]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n\nready to train: start it with: outerstep worker {' '.join(words)}\n")
    lines = done.stdout.splitlines()
    found = [each.split()[:2] for each in lines[: len(CHECKS)]]
    assert [name for name, _ in found] == CHECKS
    # Rounds this short are warned of where an exchange takes more than a share of one: this machine decides, as it does
    # of what TCP does after a silence.
    assert {state for name, state in found if name not in ("tcp", "line")} == {"fine"}
    assert {state for name, state in found if name in ("tcp", "line")} <= {"fine", "warning"}
    if options:
        assert "mode fsdp: --mode fsdp; micro-batch auto: all 2 sequences of each process at once" in done.stdout
        assert "gathered layers" in done.stdout


@pytest.mark.system
def test_json_is_one_document(running: InThread, run: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outerstep", "doctor", running.url, "--run", run, "--device", "cpu"]
    command += ["--format", "json", "--data-root", "/"]
    done = subprocess.run(
        [*command, "--state", str(tmp_path / "state"), "--micro-batch", "64"],
        env=os.environ | {"OUTERSTEP_TOKEN": running.token(Scope.VIEWER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.REFUSED, done.stderr
    document = json.loads(done.stdout)
    assert document["exit_code"] == Exit.REFUSED
    assert document["verdict"] == "not ready: 1 problem to fix"
    assert document["command"].startswith(f"outerstep worker {running.url} --run {run} ")
    states = {each["name"]: each["state"] for each in document["findings"]}
    assert (states["token"], states["line"], states["model"]) == ("wrong", "skipped", "fine")


# --- the way to the coordinator -----------------------------------------------------------------------------------


def test_nobody_listens(running: InThread, run: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings = worker_settings(running, run, tmp_path / "state").model_copy(
            update={"url": f"http://127.0.0.1:{free.getsockname()[1]}"}
        )
        found = examined(settings)
    assert "refuses the connection: nothing listens there" in of(found, "connection").said
    assert "--host 0.0.0.0" in of(found, "connection").remedy
    assert {name for name, state in unsound(found).items() if state is State.WRONG} == {"connection"}
    assert of(found, "state").state is State.FINE, "what needs no coordinator is looked at all the same"
    assert of(found, "data").said == "not checked: the run's spec is unknown"
    assert code(found) is Exit.RETRY


def test_a_host_that_is_not_found(running: InThread, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    settings = worker_settings(running, run, tmp_path / "state")
    monkeypatch.setattr("outerstep.doctor.coordinator.socket.getaddrinfo", unknown)
    found = examined(settings.model_copy(update={"url": "https://nobody.invalid"}))
    assert of(found, "host").said == "nobody.invalid was not found: Name or service not known"
    assert of(found, "host").remedy == "fix the URL, or this machine's DNS"
    assert of(found, "connection").state is State.SKIPPED
    assert code(found) is Exit.RETRY


class Page(Handler):
    """A web page, whatever is asked for; it keeps the tokens that it is sent."""

    sent: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:  # noqa: N802
        self.sent.append(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Length", "13")
        self.end_headers()
        self.wfile.write(b"<h1>Hello</h1>"[:13])


class BadGateway(Handler):
    def do_GET(self) -> None:  # noqa: N802
        self.send_response(502)
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_another_server_answers_and_is_not_given_the_token(running: InThread, run: str, tmp_path: Path) -> None:
    with serving(Page) as url:
        found = examined(worker_settings(running, run, tmp_path / "state").model_copy(update={"url": url}))
    assert of(found, "coordinator").said.startswith(f"something else answers at {url}: ")
    assert code(found) is Exit.REFUSED
    assert Page.sent == [None]


def test_a_proxy_without_its_coordinator(running: InThread, run: str, tmp_path: Path) -> None:
    with serving(BadGateway) as url:
        found = examined(worker_settings(running, run, tmp_path / "state").model_copy(update={"url": url}))
    assert of(found, "coordinator").remedy == "a proxy answers, but the server behind it does not"
    assert code(found) is Exit.RETRY


def test_http_where_tls_is_expected(running: InThread, run: str, tmp_path: Path) -> None:
    url = running.url.replace("http://", "https://")
    found = examined(worker_settings(running, run, tmp_path / "state").model_copy(update={"url": url}))
    assert of(found, "connection").said == f"{url} does not speak HTTPS"
    assert of(found, "connection").remedy == f"give {running.url}"
    assert code(found) is Exit.REFUSED


def greeting(certificate: dict[str, Any] | None = None, at: float = 0.0, **headers: str) -> coordinator.Greeting:
    return coordinator.Greeting(httpx.Response(200, headers=headers), certificate, at, 0.01)


@pytest.mark.parametrize(
    ("days", "state", "told"),
    [
        (90.0, State.FINE, "signed by Authority, expires 1970-04-01"),
        (3.0, State.WARNING, "expires 1970-04-01, in 3.0 days"),
    ],
)
def test_a_certificate_that_ends_soon(days: float, state: State, told: str) -> None:
    certificate = {"notAfter": "Apr  1 00:00:00 1970 GMT", "issuer": ((("organizationName", "Authority"),),)}
    (found,) = coordinator.judge_tls("https://example.org", greeting(certificate), 90 * 86400 - days * 86400)
    assert (found.state, told in found.said) == (state, True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes a certificate, is not installed")
def test_who_signed_the_certificate_and_whether_that_is_trusted(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/O=Ourselves"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with open_http(url) as http, pytest.raises(httpx.ConnectError) as raised:
                coordinator.greet(http)
            with open_http(url, tmp_path / "certificate.pem") as http:
                seen = coordinator.greet(http)
        finally:
            server.shutdown()
            thread.join()
    (found,) = coordinator.judge_connection(url, raised.value)
    assert found.said == f"the certificate of {url} is not trusted: self-signed certificate"
    assert (found.state, found.passing) == (State.WRONG, False)
    assert "--ca FILE" in found.remedy
    (found,) = coordinator.judge_tls(url, seen, time.time())
    assert found.said.startswith("signed by Ourselves, expires 20")


@pytest.mark.parametrize(
    ("url", "state"),
    [
        ("http://8.8.8.8:8470", State.WARNING),
        ("http://example.org", State.WARNING),
        ("http://10.0.0.7:8470", State.FINE),
        ("http://localhost:8470", State.FINE),
    ],
)
def test_a_token_over_the_internet_needs_tls(url: str, state: State) -> None:
    (found,) = coordinator.judge_tls(url, greeting(), 0.0)
    assert found.state is state


def test_another_version() -> None:
    (found,) = coordinator.judge_coordinator("http://x", greeting_of("0.0.1", PROTOCOL_VERSION), "0.1.0")
    assert (found.state, found.said) == (
        State.FINE,
        f"an Outerstep coordinator, version 0.0.1, here 0.1.0; both speak protocol {PROTOCOL_VERSION}",
    )


def test_another_protocol_is_found_even_if_a_proxy_removes_the_headers() -> None:
    (found,) = coordinator.judge_coordinator("http://x", greeting_of("0.1.0", PROTOCOL_VERSION + 1), "0.1.0")
    assert (found.state, code([found])) == (State.WRONG, Exit.REFUSED)
    assert f"protocol {PROTOCOL_VERSION + 1}" in found.said
    assert found.remedy == "upgrade this client to Outerstep 0.1.0"


def greeting_of(version: str, protocol: int) -> coordinator.Greeting:
    health = {"status": "ok", "version": version, "protocol": protocol}
    answer = httpx.Response(200, json=health, request=httpx.Request("GET", "http://x"))
    return coordinator.Greeting(answer, None, 0.0, 0.0)


@pytest.mark.parametrize(
    ("ahead", "told"), [(0.0, "within 5 s"), (75.0, "1 min 15 s ahead of"), (-3600.0, "1 h 0 min behind")]
)
def test_the_clock(ahead: float, told: str) -> None:
    seen = greeting(at=1000.5 + ahead, Date=formatdate(1000, usegmt=True))
    (found,) = coordinator.judge_clock(coordinator.clock_offset_s(seen))
    assert told in found.said
    assert found.state is (State.WARNING if ahead else State.FINE)


@pytest.mark.covers("security:clock-set")
def test_a_clock_that_is_off_is_told_and_keeps_nobody_from_training(
    running: InThread, run: str, tmp_path: Path
) -> None:
    found = examined(worker_settings(running, run, tmp_path / "state"), now=lambda: time.time() + 7200)
    assert unsound(found) == {"clock": State.WARNING}
    assert "2 h 0 min ahead of the coordinator's" in of(found, "clock").said
    assert code(found) is Exit.DONE


# --- the token, the run, the name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        ("unknown", State.WRONG, "unknown to the coordinator"),
        ("viewer", State.WRONG, "read-only"),
        ("admin", State.WARNING, "an admin token"),
    ],
)
def test_the_token(running: InThread, run: str, tmp_path: Path, kind: str, state: State, told: str) -> None:
    tokens = {"unknown": "ost_unknown", "viewer": running.token(Scope.VIEWER), "admin": running.admin_token}
    found = examined(worker_settings(running, run, tmp_path / "state", token=tokens[kind]))
    assert of(found, "token").state is state
    assert told in of(found, "token").said
    assert "outerstep token create --scope join" in of(found, "token").remedy
    assert code(found) is (Exit.REFUSED if state is State.WRONG else Exit.DONE)
    assert of(found, "run").state is (State.SKIPPED if kind == "unknown" else State.FINE)
    assert of(found, "line").state is (State.FINE if kind == "admin" else State.SKIPPED)


def test_no_such_run(running: InThread, run: str, tmp_path: Path) -> None:
    found = examined(worker_settings(running, "elsewhere", tmp_path / "state"))
    assert of(found, "run").state is State.WRONG
    assert of(found, "run").said.startswith("there is no run elsewhere; runs here: ")
    assert of(found, "line").state is State.FINE
    assert code(found) is Exit.REFUSED


def test_a_run_that_is_over(running: InThread, run: str, tmp_path: Path) -> None:
    with running.client() as http:
        http.patch(f"/v1/runs/{run}", json=RunChange(state="stopped").model_dump()).raise_for_status()
    found = examined(worker_settings(running, run, tmp_path / "state"))
    assert "is stopped" in of(found, "run").said
    assert of(found, "data").said == "not checked: the run is stopped"
    assert code(found) is Exit.REFUSED


def test_the_name_of_a_live_worker(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    """But this worker itself, by the token in its directory, is welcome, as when it joins."""
    member = join(running, run, "a", text, host={"host": "box-7"})
    settings = worker_settings(running, run, tmp_path / "state")
    found = examined(settings)
    assert of(found, "name").said.startswith("a is the name of a live worker on box-7, last seen ")
    assert "another --name" in of(found, "name").remedy
    assert code(found) is Exit.REFUSED
    with StateDir(settings.directory) as files:
        files.save_member_tokens(MemberTokens(member.member_token, None))
    found = examined(settings)
    assert unsound(found) == {}
    assert "its lease has not ended" in of(found, "name").said


def test_a_join_token_is_not_exchanged(running: InThread, run: str, tmp_path: Path) -> None:
    with running.client() as admin:
        made = admin.post("/v1/tokens", json={"scope": "join", "uses": 1}).json()
        found = examined(worker_settings(running, run, tmp_path / "state", token=made["token"]))
        assert unsound(found) == {}
        assert of(found, "token").said == "valid, and lets workers join"
        listed = admin.get("/v1/tokens?limit=1000").json()["items"]
    assert next(token["used"] for token in listed if token["id"] == made["id"]) == 0


def test_a_name_that_belongs_to_another_token(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    """As where a box has lost its state directory."""
    member = join(running, run, "a", text)
    with running.client(member.member_token) as http:
        http.delete(f"/v1/runs/{run}/workers/a").raise_for_status()
    token = running.token(Scope.JOIN)
    found = examined(worker_settings(running, run, tmp_path / "state", token=token))
    assert of(found, "name").said.startswith("a belongs to a token")
    assert of(found, "name").remedy.endswith(f"outerstep run release {run} a")
    assert code(found) is Exit.REFUSED
    with StateDir(tmp_path / "state") as files:
        files.save_worker_token(WorkerToken(run, "a", running.token(Scope.WORKER), exchanged=True))
    found = examined(worker_settings(running, run, tmp_path / "state", token=token))
    assert of(found, "name").state is State.FINE


def test_a_banned_worker(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    join(running, run, "a", text)
    with running.client() as http:
        http.patch(f"/v1/runs/{run}/workers/a", json=WorkerChange(state="banned").model_dump()).raise_for_status()
    found = examined(worker_settings(running, run, tmp_path / "state"))
    assert of(found, "name").said == "a was banned from the run"
    assert of(found, "name").remedy.endswith(f"outerstep run readmit {run} a")


# --- the box ------------------------------------------------------------------------------------------------------


def test_the_state_directory_of_a_worker_that_runs(running: InThread, run: str, tmp_path: Path) -> None:
    settings = worker_settings(running, run, tmp_path / "state")
    with StateDir(settings.directory):
        found = examined(settings)
    assert "another process uses" in of(found, "state").said
    assert code(found) is Exit.REFUSED
    before = sorted((each.name, each.read_bytes()) for each in settings.directory.iterdir())
    assert of(examined(settings), "state").state is State.FINE
    assert sorted((each.name, each.read_bytes()) for each in settings.directory.iterdir()) == before


def test_a_state_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    (found,) = machine.judge_directory(machine.look_at_directory(tmp_path / "file" / "state"))
    assert found.said == f"nothing can be written to {tmp_path / 'file'}: Not a directory"
    assert "--state" in found.remedy


@pytest.mark.parametrize(("free", "state"), [(9e9, State.FINE), (5e9, State.WARNING), (3.9e9, State.WRONG)])
def test_the_disk(free: float, state: State, tmp_path: Path) -> None:
    """16 bytes of two outer states, 12 of a snapshot with AdamW, 12 of the next one. In files: 24 of three outer states,
    4 of the pseudo-gradient, and two snapshots."""
    need = disk_bytes(10**8, 8, in_files=False)
    assert need == 40 * 10**8
    assert disk_bytes(10**8, 2, in_files=True) == 40 * 10**8
    (found,) = machine.judge_disk(machine.Directory(tmp_path, None, True, False, False, int(free)), need)
    assert found.state is state


def test_a_device_that_is_not_there(running: InThread, run: str, tmp_path: Path) -> None:
    found = examined(worker_settings(running, run, tmp_path / "state", device="cudda"))
    assert "device 'cudda' cannot be used" in of(found, "device").said
    assert of(found, "step").state is State.SKIPPED
    assert of(found, "line").state is State.FINE
    assert code(found) is Exit.REFUSED


def test_other_data_than_the_runs(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    join(running, run, "other", text)
    own = write_chapters(tmp_path / "own", words="something else")
    found = examined(worker_settings(running, run, tmp_path / "state", data=str(own)))
    assert "this worker's training set" in of(found, "data").said
    assert "is not the run's" in of(found, "data").said
    assert of(found, "step").state is State.SKIPPED
    assert code(found) is Exit.REFUSED


def test_data_that_are_not_there(running: InThread, run: str, tmp_path: Path) -> None:
    found = examined(worker_settings(running, run, tmp_path / "state", data=str(tmp_path / "nowhere")))
    assert str(tmp_path / "nowhere") in of(found, "data").said
    assert of(found, "model").state is State.FINE
    assert code(found) is Exit.REFUSED


def test_another_model_than_the_runs(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    """The layout is known once somebody has seeded the run."""
    running.create_run(tiny_spec(f"{run}-b", text, seed=0, rounds=1, min_workers=1))
    assert run_worker(worker_settings(running, f"{run}-b", tmp_path / "b")) == Exit.DONE
    with running.client() as http:
        layout = http.get(f"/v1/runs/{run}-b/checkpoints/latest").json()["layout"]
        detail = RunDetail.model_validate(http.get(f"/v1/runs/{run}-b").json())
    seen = training.build(detail, 1, None)
    (found,) = training.judge_model(seen, detail, Layout.model_validate(layout))
    assert found.said.startswith("LlamaForCausalLM, 140 k parameters to train, ")
    assert found.said.endswith("3 fragments")
    layout["tensors"][0]["shape"][0] += 1
    (found,) = training.judge_model(seen, detail, Layout.model_validate(layout))
    assert found.state is State.WRONG
    assert layout["tensors"][0]["name"] in found.said


def test_a_vocabulary_that_is_too_small(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    spec = tiny_spec(f"{run}-small", text, seed=0, rounds=1, min_workers=1)
    running.create_run(spec.replace('preset = "tiny"', 'preset = "tiny"\nvocab_size = 100'))
    found = examined(worker_settings(running, f"{run}-small", tmp_path / "state"))
    assert "vocab_size = 100 is too small" in of(found, "model").said
    assert of(found, "step").state is State.SKIPPED
    assert code(found) is Exit.REFUSED


def test_a_spec_that_asks_for_what_is_not_allowed(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    spec = f'name = "{run}-code"\nmodel.factory = "http.server:test"\ndata.source = "{text}"\nsync.rounds = 1\n'
    running.create_run(spec)
    found = examined(worker_settings(running, f"{run}-code", tmp_path / "state", data_root=()))
    allowed = of(found, "allowed")
    assert allowed.state is State.WRONG
    assert "model.factory = 'http.server:test' is code that would run here" in allowed.said
    assert allowed.remedy.endswith(f"add: --allow-factory http.server:test --data-root {text}")
    assert {of(found, name).state for name in ("data", "model", "memory", "step")} == {State.SKIPPED}
    assert code(found) is Exit.REFUSED


def test_a_run_of_scripts(running: InThread, run: str, tmp_path: Path) -> None:
    running.create_run(f'name = "{run}-own"\n[data]\nsource = "custom"\n[sync]\nrounds = 1\n')
    found = examined(worker_settings(running, f"{run}-own", tmp_path / "state"))
    assert "its workers are scripts" in of(found, "data").said
    assert code(found) is Exit.REFUSED


def test_a_batch_that_the_processes_cannot_share(running: InThread, run: str, tmp_path: Path) -> None:
    found = examined(worker_settings(running, run, tmp_path / "state"), 3)
    assert "cannot be divided by 3 processes" in of(found, "model").said
    assert code(found) is Exit.REFUSED


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (64, "micro-batch of 4 of 4 sequences: --micro-batch 64, which is more than a batch has"),
        (3, "--micro-batch 3 does not divide the batch: the last micro-batch has only 1"),
    ],
)
def test_a_micro_batch_that_does_not_fit_the_batch(
    running: InThread, run: str, tmp_path: Path, size: int, told: str
) -> None:
    found = examined(worker_settings(running, run, tmp_path / "state", micro_batch=size))
    assert unsound(found) == {"step": State.WARNING}
    assert told in of(found, "step").said
    assert code(found) is Exit.DONE


def test_what_fit_auto_would_choose(
    running: InThread, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examined(worker_settings(running, run, tmp_path / "state", fit="auto"))
    assert of(found, "fit").said == "--fit auto chooses the defaults"
    monkeypatch.setattr("worker.fit.free_memory", lambda device: (10**6, None))
    found = examined(worker_settings(running, run, tmp_path / "state", fit="auto"))
    assert of(found, "fit").state is State.WRONG
    assert "nothing fits" in of(found, "fit").said
    assert {of(found, name).state for name in ("data", "model", "memory", "step")} == {State.SKIPPED}


def test_a_step_that_the_memory_does_not_hold(
    running: InThread, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("worker.inner.loss.functional.cross_entropy", no_room)
    found = examined(worker_settings(running, run, tmp_path / "state", micro_batch=4))
    assert of(found, "step").said.startswith("--micro-batch 4 ")
    assert "takes" not in of(found, "line").remedy
    assert code(found) is Exit.REFUSED


def test_what_the_worker_warns_of_is_a_finding(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("all work and no play. " * 14)
    running.create_run(
        tiny_spec(f"{run}-short", tmp_path / "short.txt", seed=0, rounds=1, min_workers=1).replace(
            "sequence_length = 32", "sequence_length = 32\nholdout = 0.05"
        )
    )
    found = examined(worker_settings(running, f"{run}-short", tmp_path / "state"))
    assert "this worker measures no held-out loss" in of(found, "step").said


# --- memory, arithmetic -------------------------------------------------------------------------------------------


def model_of(elements: int, **changes: Any) -> Model:
    return Model(**{
        "kind": "Model", "tensors": [], "elements": elements, "frozen": 0, "frozen_bytes": None, "frozen_summary": None,
        "optimizer_bytes": 8, "largest_layer": elements // 10, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "processes", "parameters", "device_bytes", "host_bytes"),
    [
        (None, 1, "fp32", 16e9, 12e9),
        (None, 1, "bf16", 8e9, 12e9),
        ("ddp", 4, "fp32", 20e9, 12e9),
        ("fsdp", 4, "fp32", 4e9 + 0.8e9, 16e9),
    ],
)
def test_the_memory_by_mode(mode: Any, processes: int, parameters: str, device_bytes: float, host_bytes: float) -> None:
    needed = training.memory_needed(model_of(10**9), mode, processes, parameters)
    assert (needed.device_bytes, needed.host_bytes) == (device_bytes, host_bytes)


@pytest.mark.parametrize(
    ("parameters", "moments", "size"), [("fp32", "8bit", 2), ("bf16", None, 4), ("bf16", "8bit", 2)]
)
def test_moments_in_fewer_bits(parameters: str, moments: Any, size: int) -> None:
    assert training.memory_needed(model_of(10**9), None, 1, parameters, moments).optimizer == size * 10**9


def test_offloaded_gradients_and_moments_are_in_host_memory() -> None:
    needed = training.memory_needed(model_of(10**9), None, 1, "bf16", "8bit", mapped=True, offload=True)
    assert needed.device_bytes == 2e9
    assert needed.host_bytes == 2e9 + 2e9 + 4 * IN_USE
    shown = training.judge_memory(needed, training.FreeMemory(10**10, 10**10), 1, CPU)[0].said
    assert shown.startswith(
        "2 GB on cpu (parameters 2 GB) and activations; in host memory gradients 2 GB, optimizer 2 GB"
    )


def test_frozen_parameters_have_no_gradients() -> None:
    needed = training.memory_needed(model_of(10**6, frozen=10**9), None, 1)
    assert needed.device_bytes == 4 * (10**9 + 10**6) + 12 * 10**6
    assert (needed.outer_state, needed.work) == (8 * 10**6, 4 * 10**6)
    assert training.memory_needed(model_of(10**6), None, 1, mapped=True).host_bytes == 4 * 10**6
    needed = training.memory_needed(model_of(10**6, frozen=10**9, frozen_bytes=6 * 10**8), None, 1)
    assert needed.parameters == 4 * 10**6 + 6 * 10**8, "in 4 bits, but for the embeddings"


@pytest.mark.parametrize(
    ("device", "host", "state"),
    [
        (24, 64, State.FINE),
        (18, 64, State.WARNING),
        (12, 64, State.WRONG),
        (24, 7, State.WRONG),
        (None, 64, State.FINE),
        (None, 20, State.WRONG),
        (None, None, State.FINE),
    ],
)
def test_the_memory_that_is_there(device: int | None, host: int | None, state: State) -> None:
    needed = training.memory_needed(model_of(10**9), None, 1)
    room = training.FreeMemory(device and device * 10**9, host and host * 10**9)
    (found,) = training.judge_memory(needed, room, 1, torch.device("cuda"))
    assert found.state is state


def test_a_container_may_have_less_memory_than_its_host(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert host_free_bytes(meminfo, tmp_path) == 1024_000
    for name, content in {"memory.max": "max", "memory.current": "600", "memory.stat": "inactive_file 100\n"}.items():
        (tmp_path / name).write_text(content)
    assert host_free_bytes(meminfo, tmp_path) == 1024_000
    (tmp_path / "memory.max").write_text("900\n")
    assert host_free_bytes(meminfo, tmp_path) == 400


# --- the line and the round, arithmetic ---------------------------------------------------------------------------


class Slow:
    """A line of 8 Mbit/s up and 80 down with 50 ms, for a clock that it moves."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def line_check_down(self, count: int) -> None:
        self.now += 0.05 + 8 * count / 80e6

    def line_check_up(self, content: bytes) -> None:
        self.now += 0.05 + 8 * len(content) / 8e6
        self.sent += len(content)


def test_the_line_is_measured_for_some_seconds() -> None:
    slow = Slow()
    seen = network.measure(slow, clock=slow)  # type: ignore[arg-type]
    assert (seen.up, seen.down, seen.latency_s) == pytest.approx((8e6, 80e6, 0.05))
    assert slow.sent == pytest.approx(network.LEAST_BYTES + 4_000_000, abs=2)


def detail(running: InThread, text: Path, name: str, sync: str = "") -> RunDetail:
    running.create_run(tiny_spec(name, text, seed=0, rounds=3, min_workers=2, sync=sync))
    with running.client() as http:
        return RunDetail.model_validate(http.get(f"/v1/runs/{name}").json())


def test_a_line_is_reckoned_with_as_far_as_the_worker_may_use_it() -> None:
    seen = network.Connection(1e6, 50e6, 0.05)
    assert seen.limited_to(None, None) == seen
    assert seen.limited_to(8e6, 10e6) == network.Connection(1e6, 10e6, 0.05)


def test_how_much_of_a_round_is_communication(running: InThread, run: str, text: Path) -> None:
    of_the_run, slow = detail(running, text, f"{run}-line"), network.Connection(1e6, 1e6, 0.05)
    (found,) = network.judge_connection(slow, of_the_run, 139_584, 1.0)
    assert found.state is State.WARNING
    assert found.said.startswith("1 Mbit/s up, 1 Mbit/s down, round trip 50 ms. A round's upload (int8)")
    command = "outerstep plan --params 139584 --up 1mbit --down 1mbit --step-time 1 --latency 50ms"
    assert found.remedy.endswith(command)
    planned = CliRunner().invoke(
        app, [*command.split()[1:], "--format", "json"]
    )  # of this line, and not of the default's
    assert json.loads(planned.stdout)["given"]["latency_s"] == 0.05
    (found,) = network.judge_connection(slow, of_the_run, 139_584, 10.0)
    assert found.state is State.FINE
    (found,) = network.judge_connection(slow, of_the_run, 139_584, None)
    assert "is communication" not in found.said
    (found,) = network.judge_connection(slow, None, None, None)
    assert found.said == "1 Mbit/s up, 1 Mbit/s down, round trip 50 ms"
    (found,) = network.judge_connection(slow, detail(running, text, f"{run}-eager", 'overlap = "eager"'), 139_584, 1.0)
    assert "sync.overlap = 'eager' hides behind training" in found.said
    never = detail(running, text, f"{run}-never", 'wait = "never"')
    (found,) = network.judge_connection(slow, never, 139_584, 1.0)
    assert found.state is State.FINE
    assert "during which a worker trains on if its memory suffices" in found.said
    (found,) = network.judge_connection(slow, never, 139_584, 0.01)
    assert found.state is State.WARNING, "it takes longer than workers train on"


# --- the examination itself ---------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_left() -> None:
    def hang(stop: threading.Event) -> int:
        stop.wait()
        return 1

    with pytest.raises(OutOfTime):
        _within(0.01, hang)
    exam = Examination(Told())
    assert exam.check("hung", hang, lambda _: [fine("hung", "")], within_s=0.01) is None
    assert exam.findings == [wrong("hung", "not done within 0.0 s", "run the doctor again", passing=True)]


def never_built() -> None:
    """A model's factory that does not return; its process can be looked for."""
    Path(os.environ["NEVER_BUILT"], str(os.getpid())).touch()
    threading.Event().wait()


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_the_processes_of_a_step_that_hangs_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """By torchrun, which has them in sessions of their own: its own end alone would leave them."""
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("NEVER_BUILT", str(tmp_path / "pids"))
    spec = parse_spec(tiny_spec("r", tmp_path, seed=0, rounds=1, min_workers=1))
    spec = spec.model_copy(update={"model": ModelSpec(factory=f"{__name__}:never_built")})
    stop, ended = threading.Event(), Future[TrialSteps]()

    def take() -> None:
        try:
            ended.set_result(take_steps_apart(spec, BoxSettings(device="cpu"), processes, stop))
        except Stopped as error:
            ended.set_exception(error)

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == processes)
    stop.set()
    thread.join()
    assert isinstance(ended.exception(), Stopped)
    for started in (tmp_path / "pids").iterdir():
        wait_until(lambda pid=int(started.name): not psutil.pid_exists(pid))  # type: ignore[misc]


def test_data_that_are_not_ready_in_time_keep_nobody_from_joining(
    running: InThread, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on where the doctor was; nothing is trained meanwhile."""

    def prepare(*_: object, stop: threading.Event, **__: object) -> None:
        stop.wait()
        raise Stopped("asked to stop")

    monkeypatch.setattr("outerstep.doctor.training.open_training_set", prepare)
    monkeypatch.setattr(examine, "DATA_S", 0.01)
    found = examined(worker_settings(running, run, tmp_path / "state"))
    assert unsound(found) == {"data": State.WARNING, "step": State.SKIPPED}
    assert "outerstep data prepare" in of(found, "data").remedy
    assert code(found) is Exit.DONE


def test_a_run_that_is_paused_is_waited_for(running: InThread, run: str, text: Path, tmp_path: Path) -> None:
    with running.client() as http:
        http.patch(f"/v1/runs/{run}", json=RunChange(state="paused").model_dump()).raise_for_status()
    found = examined(worker_settings(running, run, tmp_path / "state"))
    assert unsound(found) == {"run": State.WARNING}
    assert of(found, "run").remedy.endswith(f"outerstep run resume {run}")


def test_a_fault_of_a_check_ends_no_examination() -> None:
    exam = Examination(Told())

    def broken(_: threading.Event) -> int:
        raise KeyError("x")

    exam.check("broken", broken, lambda _: [], within_s=PATIENCE_S)
    assert exam.findings == [wrong("broken", "unexpected error: KeyError: 'x'")]


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ([], Exit.DONE),
        ([wrong("line", "away", passing=True)], Exit.RETRY),
        ([wrong("line", "away", passing=True), wrong("data", "other", "copy them")], Exit.REFUSED),
    ],
)
def test_the_verdict(faults: list[Finding], code: Exit) -> None:
    ended = conclude([fine("versions", "1"), *faults], "outerstep worker http://x --run r")
    assert ended.code is code
    if faults:
        assert ended.lines[0].startswith(f"not ready: {len(faults)} problem")
        assert len(ended.lines) == 1 + len(faults)
    else:
        assert ended.lines == ["ready to train: start it with: outerstep worker http://x --run r"]


def test_the_command_does_not_repeat_a_token() -> None:
    given = {name: each.default for name, each in inspect.signature(worker).parameters.items()}
    given |= {"url": "http://x", "run": "r", "token": "ost_secret", "gpus": 2, "compile_model": True}
    assert worker_command(given) == "OUTERSTEP_TOKEN=… outerstep worker http://x --run r --gpus 2 --compile"
    assert worker_command({**given, "token": None, "state": Path("/a b")}) == (
        "outerstep worker http://x --run r --state '/a b' --gpus 2 --compile"
    )
    roots = worker_command({**given, "data_root": ["/a", "hub:b"], "allow_factory": []})
    assert roots.endswith(" --run r --gpus 2 --data-root /a --data-root hub:b --compile")


def test_of_steps_that_take_long_one_is_enough(running: InThread, run: str, text: Path) -> None:
    spec = detail(running, text, f"{run}-slow").spec
    taken = take_steps(spec, BoxSettings(device="cpu", threads=1), CPU, clock=ticking(30.0))
    assert (taken.first_s, taken.step_s) == (30.0, 30.0)
    assert "30.0 s for 128 tokens in fp32: 4 tokens/s" in trial.step_in_words(taken, spec)
