"""`outerstep doctor`: a real coordinator and a run of text, and a story for each thing that may be wrong."""

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import httpx
import pytest
import torch
from blake3 import blake3
from typer.testing import CliRunner

from harness.coordinator import InThread, coordinator_thread
from outerstep import rest
from outerstep.cli import app
from outerstep.cli.doctor import worker_command
from outerstep.common.exit_codes import Exit
from outerstep.doctor import examine, line
from outerstep.doctor.findings import Examination, Finding, State, conclude
from outerstep.doctor.steps import take_steps
from protocol import PROTOCOL_VERSION
from protocol.errors import NotUnderstood
from protocol.fragments import plan_fragments
from protocol.messages import JoinRequest, RunChange, RunDetail, Scope
from protocol.spec.run import parse_spec
from tests.support.http_server import answering, serving
from tests.support.python import python
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.waiting import PATIENCE_S
from tests.support.workers import worker_settings
from worker.box import choose
from worker.data.open_training_set import open_training_set
from worker.errors import ModelError
from worker.models.building import build_model
from worker.settings import BoxSettings
from worker.state.parameters import tensor_specs
from worker.state.state_dir import SNAPSHOT, StateDir

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CHECKS = ["versions", "device", "coordinator", "TLS", "clock", "token", "run", "state", "allowed", "settings"]
CHECKS += ["memory", "disk", "model", "data", "step", "line"]


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


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that is so much later whenever it is looked at."""
    times = itertools.count()
    return lambda: next(times) * seconds


Examined = Callable[..., list[Finding]]


@pytest.fixture
def examined(running: InThread, run: str, tmp_path: Path) -> Examined:
    """Examines a worker of the run, with changed settings. An inner step takes `step_s`, and a request a
    millisecond, however busy this machine is."""

    def look(now: Callable[[], float] = time.time, step_s: float = 0.5, **changes: Any) -> list[Finding]:
        told, settings = Mock(), worker_settings(running, run, tmp_path / "state").model_copy(update=changes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line, "TOLERATED_S", PATIENCE_S)  # an answer may be as old when it arrives
            patch.setattr(examine, "take_steps", lambda box, **_: take_steps(box, clock=ticking(step_s)))
            found = examine.examine(settings, told, now=now, clock=ticking(0.001))
        assert [call.args[0] for call in told.found.call_args_list] == found
        return found

    return look


def detail_of(running: InThread, run: str) -> RunDetail:
    with running.client() as http:
        return RunDetail.model_validate(http.get(f"/v1/runs/{run}").json())


def of(found: list[Finding], name: str) -> str:
    """What is said of this name, last."""
    return [each.said for each in found if each.name == name][-1]


def unsound(found: list[Finding]) -> dict[str, State]:
    return {each.name: each.state for each in found if each.state is not State.FINE}


def only_fault(found: list[Finding], name: str, code: Exit = Exit.REFUSED) -> str:
    """What is said of the check of this name, which alone is wrong."""
    assert unsound(found) == {name: State.WRONG}
    assert conclude(found, "outerstep worker")[0] is code
    return of(found, name)


# --- a box that is fine -------------------------------------------------------------------------------------------


def test_a_box_that_is_ready(running: InThread, run: str, examined: Examined, tmp_path: Path) -> None:
    """No trace of it is left in the run, and no token in the state directory."""
    files = sorted(running.data_dir.rglob("*"))
    found = examined()
    assert [each.name for each in found] == CHECKS
    assert unsound(found) == {}
    assert conclude(found, "outerstep worker")[0] is Exit.DONE
    assert "140 k parameters to train; the first worker's" in of(found, "model")
    assert "The first worker's set becomes" in of(found, "data")
    assert "parameters 558 kB, gradients 558 kB, moments 1.12 MB" in of(found, "memory")
    assert of(found, "step").startswith("micro-batch auto: all 4 sequences at once")
    assert "500 ms for 128 tokens, 4 sequences at once: 256 tokens/s" in of(found, "step")
    assert "A round's 5 take 2.5 s" in of(found, "step")
    assert "A round's sync, " in of(found, "line")
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["lock"]
    assert sorted(running.data_dir.rglob("*")) == files
    with running.client() as http:
        assert http.get(f"/v1/runs/{run}/workers").json()["items"] == []


def test_a_run_that_others_train(running: InThread, run: str, tmp_path: Path, examined: Examined) -> None:
    spec = detail_of(running, run).spec
    joining = JoinRequest(tensors=tensor_specs(build_model(spec, CPU)), data=open_training_set(spec).summary)
    with running.client(running.token(Scope.WORKER)) as http:
        http.put(f"/v1/runs/{run}/workers/other", json=joining.model_dump(mode="json")).raise_for_status()
    found = examined(step_s=30.0)
    assert unsound(found) == {}
    assert of(found, "run").endswith("1 live worker")
    assert "30.0 s for 128 tokens, 4 sequences at once: 4 tokens/s" in of(found, "step")
    assert of(found, "data").endswith("the same digest as the run's workers")
    own = write_chapters(tmp_path / "own", words="something else")
    assert "is not the run's" in only_fault(examined(data=str(own)), "data")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--gpus", "2", "--parallel", "fsdp"]])
def test_the_command_and_its_processes(running: InThread, run: str, tmp_path: Path, options: list[str]) -> None:
    """As people start it; what it ends with can be started as it is."""
    token = tmp_path / "token"
    token.write_text(running.token(Scope.WORKER))
    words = [running.url, "--run", run, "--name", "a", "--state-dir", str(tmp_path / "state"), "--device", "cpu"]
    words += [*options, "--data-root", "/", "--token-file", str(token)]
    done = python("-m", "outerstep", "doctor", *words, OMP_NUM_THREADS="1")
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n\nready to train: start it with: outerstep worker {' '.join(words)}\n")
    found = [each.split()[:2] for each in done.stdout.splitlines()[: len(CHECKS)]]
    assert [name for name, _ in found] == CHECKS
    # Rounds this short are warned of where an exchange takes more than a share of one: this machine decides.
    assert {state for name, state in found if name != "line"} == {"fine"}
    if options:
        assert "mode fsdp: --parallel fsdp; micro-batch auto: all 2 sequences of each process at once" in done.stdout


@pytest.mark.system
def test_json_is_one_document(running: InThread, run: str, tmp_path: Path) -> None:
    words = [running.url, "--run", run, "--device", "cpu", "--format", "json", "--state-dir", str(tmp_path / "state")]
    done = python("-m", "outerstep", "doctor", *words, OUTERSTEP_TOKEN=running.token(Scope.VIEWER))
    assert done.returncode == Exit.REFUSED, done.stderr
    document = json.loads(done.stdout)
    assert (document["exit_code"], document["verdict"]) == (Exit.REFUSED, "not ready: 1 problem to fix")
    assert document["command"].startswith(f"outerstep worker {running.url} --run {run} ")
    assert [(each["name"], each["state"]) for each in document["findings"]][-2:] == [
        ("token", "wrong"),
        ("state", "fine"),
    ]


# --- the coordinator and the run ----------------------------------------------------------------------------------


def test_nobody_is_there(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = examined(url=f"http://127.0.0.1:{free.getsockname()[1]}")
    said = only_fault(found, "coordinator", Exit.RETRY)
    assert "connection refused: nothing listens there" in said
    assert "--host 0.0.0.0" in said
    assert [each.name for each in found] == ["versions", "device", "coordinator", "state"]
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "unknown")))
    said = only_fault(examined(url="https://nobody.invalid"), "coordinator", Exit.RETRY)
    assert "its name is not known here" in said
    assert said.endswith("fix the URL, or this machine's DNS (/etc/resolv.conf)")


class Page(answering(200, b"<h1>Hello</h1>")):  # type: ignore[misc]
    """A web page, whatever is asked for; it keeps the tokens that it is sent."""

    sent: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:  # noqa: N802
        self.sent.append(self.headers["Authorization"])
        super().do_GET()


def test_another_server_answers_and_is_not_given_the_token(examined: Examined) -> None:
    with serving(Page) as url:
        found = examined(url=url)
    assert only_fault(found, "coordinator").startswith(f"something else answers at {url}: ")
    assert Page.sent == [None]


ENDS = {"notAfter": "Apr  1 00:00:00 1970 GMT", "issuer": ((("organizationName", "Authority"),),)}
APRIL = 90 * 86400.0


@pytest.mark.parametrize(
    ("url", "certificate", "now", "state", "told"),
    [
        ("https://example.org", ENDS, 0.0, State.FINE, "signed by Authority, expires 1970-04-01"),
        ("https://example.org", ENDS, APRIL - 3 * 86400, State.WARNING, "expires 1970-04-01, in 3.0 days"),
        ("http://8.8.8.8:8470", None, 0.0, State.WARNING, "--tls-certificate"),
        ("http://10.0.0.7:8470", None, 0.0, State.FINE, "not on the internet"),
        ("http://localhost:8470", None, 0.0, State.FINE, "not on the internet"),
    ],
)
def test_the_certificate(url: str, certificate: dict[str, Any] | None, now: float, state: State, told: str) -> None:
    """Over the internet, a token needs one."""
    found, said = line.judge_tls(url, line.Greeting("0.1.0", certificate, 0.0, 0.01), now)
    assert (found, told in said) == (state, True)


def test_another_protocol_is_found_even_if_a_proxy_removes_the_headers() -> None:
    health = {"status": "ok", "version": "0.1.0", "protocol": PROTOCOL_VERSION + 1}
    answer = httpx.Response(200, json=health, extensions={"network_stream": Mock()})
    transport = httpx.MockTransport(lambda _: answer)
    with pytest.raises(NotUnderstood, match=f"protocol {PROTOCOL_VERSION + 1}.*: upgrade this client"):
        line.greet(rest.Client(httpx.Client(base_url="http://x", transport=transport)))


@pytest.mark.covers("security:clock-set")
def test_a_clock_that_is_off_is_told_and_keeps_nobody_from_training(examined: Examined) -> None:
    found = examined(now=lambda: time.time() + 7200)
    assert unsound(found) == {"clock": State.WARNING}
    assert "2 h 0 min ahead of the coordinator's" in of(found, "clock")
    assert line.clock_offset_s(formatdate(1000, usegmt=True), 925.5) == -75.0
    assert line.judge_clock(line.Greeting("0.1.0", None, -75.0, 0.0))[1].startswith("1 min 15 s behind")


def test_tokens(running: InThread, examined: Examined) -> None:
    """One that only reads, and a join token, which is not exchanged."""
    said = only_fault(examined(token=running.token(Scope.VIEWER)), "token")
    assert said.startswith("the coordinator rejected the request: forbidden: ")
    assert said.endswith("outerstep token create --scope join")
    with running.client() as admin:
        made = admin.post("/v1/tokens", json={"scope": "join", "uses": 1}).json()
        assert unsound(examined(token=made["token"])) == {}
        listed = admin.get("/v1/tokens?limit=1000").json()["items"]
    assert next(token["used"] for token in listed if token["id"] == made["id"]) == 0


def test_a_run_that_does_not_train(running: InThread, run: str, examined: Examined) -> None:
    with running.client() as http:
        http.patch(f"/v1/runs/{run}", json=RunChange(state="paused").model_dump()).raise_for_status()
        found = examined()
        assert unsound(found) == {"run": State.WARNING}
        assert of(found, "run").endswith(f"outerstep run resume {run}")
        http.patch(f"/v1/runs/{run}", json=RunChange(state="stopped").model_dump()).raise_for_status()
    assert "is stopped: nothing is left to train" in only_fault(examined(), "run")


# --- the box ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({"device": "cudda"}, "device", "device 'cudda' cannot be used"),
        ({"token": "ost_unknown"}, "token", "rejected the request: unauthorized: "),
        ({"run": "elsewhere"}, "run", "there is no run elsewhere; runs here: "),
        ({"state_dir": Path(__file__, "state")}, "state", "cannot hold this worker's state"),
        ({"precision": "tf32", "device": "cpu"}, "device", "--precision tf32 needs CUDA"),
        ({"compile": True, "offload": True}, "settings", "--offload moves gradients"),
        ({"data": "/nowhere"}, "data", "/nowhere"),
    ],
)
def test_a_setting_that_is_wrong(examined: Examined, changes: dict[str, Any], name: str, told: str) -> None:
    assert told in only_fault(examined(**changes), name)


@pytest.mark.parametrize(
    ("spec", "name", "told"),
    [
        ('model.factory = "http.server:test"', "allowed", "add: --allow-code http.server:test"),
        ('data.source = "custom"', "settings", "its workers are scripts"),
        ('model = { preset = "tiny", vocab_size = 100 }', "data", "vocab_size = 100 is too small"),
    ],
)
def test_a_spec_that_cannot_be_trained_here(
    running: InThread, run: str, examined: Examined, spec: str, name: str, told: str
) -> None:
    running.create_run(f'name = "{run}-own"\nsync.rounds = 1\n{spec}\n')
    assert told in only_fault(examined(run=f"{run}-own", data_root=()), name)


def test_the_state_directory_of_a_worker_that_runs(examined: Examined, tmp_path: Path) -> None:
    """Everything else is examined all the same."""
    with StateDir(tmp_path / "state"):
        found = examined()
    assert "already uses" in only_fault(found, "state")
    assert [each.name for each in found] == CHECKS


def test_the_disk(tmp_path: Path) -> None:
    states = [examine.judge_disk(40, tmp_path, free)[0] for free in (90, 50, 39)]
    assert states == [State.FINE, State.WARNING, State.WRONG]
    (tmp_path / SNAPSHOT).touch()
    assert examine.judge_disk(40, tmp_path, 39)[0] is State.FINE


def test_another_model_than_the_runs(running: InThread, run: str) -> None:
    """The layout is known once somebody has seeded the run."""
    detail = detail_of(running, run)
    chosen = choose(detail.spec, BoxSettings(device="cpu"), CPU)
    tensors = tensor_specs(build_model(detail.spec, CPU))
    layout = plan_fragments(tensors, 50_000)
    _, said = examine.judge_model(layout, examine.build_for(chosen, detail, layout))
    assert said.startswith("LlamaForCausalLM, 140 k parameters to train, matching the run's layout of ")
    tensors[0].shape[0] += 1
    with pytest.raises(ModelError, match=tensors[0].name):
        examine.build_for(chosen, detail, plan_fragments(tensors, 50_000))


def test_a_model_that_does_not_fit(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of(examined(fit="auto"), "settings").endswith("chooses the defaults")
    monkeypatch.setattr("worker.fit.free_memory", lambda device: (10**6, None))
    assert only_fault(examined(), "memory").startswith("the model does not fit into memory: parameters 558 kB")
    assert "nothing fits" in only_fault(examined(fit="auto"), "settings")


def test_a_step_that_the_memory_does_not_hold(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    monkeypatch.setattr("worker.inner.loss.functional.cross_entropy", no_room)
    found = examined(micro_batch=4)
    assert only_fault(found, "step").startswith("--micro-batch 4 ")
    assert "is communication" not in of(found, "line")


def test_what_the_worker_warns_of_is_a_finding(running: InThread, run: str, examined: Examined, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("all work and no play. " * 14)
    spec = tiny_spec(f"{run}-short", tmp_path / "short.txt", seed=0, rounds=1, min_workers=1)
    running.create_run(spec.replace("sequence_length = 32", "sequence_length = 32\nholdout = 0.05"))
    found = examined(run=f"{run}-short")
    assert unsound(found) == {"data": State.WARNING}
    assert "this worker measures no held-out loss" in of(found, "data")


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


def test_the_line_is_measured_for_some_seconds_as_far_as_the_worker_may_use_it() -> None:
    slow = Slow()
    seen = line.measure(slow, clock=slow)  # type: ignore[arg-type]
    assert (seen.up, seen.down, seen.latency_s) == pytest.approx((8e6, 80e6, 0.05))
    assert slow.sent == pytest.approx(line.LEAST_BYTES + 4_000_000, abs=2)
    limited = line.measure(slow, 10e6, 10e6, clock=slow)  # type: ignore[arg-type]
    assert (limited.up, limited.down) == pytest.approx((8e6, 10e6))


def test_how_much_of_a_round_is_communication(running: InThread, run: str) -> None:
    detail, slow = detail_of(running, run), line.Line(1e6, 1e6, 0.05)

    def judged(step_s: float | None, sync: str = 'wait = "always"') -> tuple[State, str]:
        spec = parse_spec(tiny_spec(run, Path("text"), seed=0, rounds=3, min_workers=2, sync=sync))
        return line.judge_line(slow, detail.model_copy(update={"spec": spec}), 139_584, step_s)

    state, said = judged(1.0)
    assert state is State.WARNING
    assert said.startswith("1 Mbit/s up, 1 Mbit/s down, round trip 50 ms. A round's sync, ")
    command = "outerstep plan --params 139584 --up 1mbit --down 1mbit --step-time 1 --latency 50ms"
    assert said.endswith(command)
    planned = CliRunner().invoke(app, [*command.split()[1:], "--format", "json"])
    assert json.loads(planned.stdout)["given"]["latency_s"] == 0.05
    assert judged(10.0)[0] is State.FINE
    assert "is communication" not in judged(None)[1]
    assert line.judge_line(slow, None, None, None)[1] == "1 Mbit/s up, 1 Mbit/s down, round trip 50 ms"
    assert "sync.overlap = 'eager' hides behind training" in judged(1.0, 'overlap = "eager"')[1]
    state, said = judged(1.0, 'wait = "never"')
    assert (state, said.endswith("during which a worker trains on if its memory suffices")) == (State.FINE, True)
    assert judged(0.01, 'wait = "never"')[0] is State.WARNING, "it takes longer than workers train on"


def test_a_fault_of_a_check_ends_no_examination() -> None:
    exam = Examination(Mock())
    assert exam.check("broken", Mock(side_effect=KeyError("x")), lambda _: (State.FINE, "")) is None
    assert exam.findings == [Finding("broken", State.WRONG, "unexpected error: KeyError: 'x'")]


def test_the_verdict() -> None:
    away, other = Finding("line", State.WRONG, "away", passing=True), Finding("data", State.WRONG, "other")
    assert conclude([], "outerstep worker") == (Exit.DONE, ["ready to train: start it with: outerstep worker"])
    assert conclude([away], "") == (Exit.RETRY, ["not ready: 1 problem to fix", "line: away"])
    assert conclude([away, other], "")[0] is Exit.REFUSED


def test_the_command_has_what_was_given() -> None:
    given = {"run": "r", "gpus": 2, "compile": True, "offload": False, "data_root": None}
    assert worker_command("http://x", None, given) == "outerstep worker http://x --run r --gpus 2 --compile"
    where = worker_command(None, Path("/t"), {"state_dir": Path("/a b"), "data_root": ["/a", "hub:b"]})
    assert where == "outerstep worker --state-dir '/a b' --data-root /a --data-root hub:b --token-file /t"
