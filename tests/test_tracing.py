"""Traces of a real run, as a collector gets them by OTLP over HTTP; and nothing of it where nobody asks."""

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from harness.coordinator import CoordinatorProcess
from outerstep.common.exit_codes import Exit
from outerstep.common.tracing import is_requested
from protocol.messages import Scope
from tests.support.http_server import Handler, serving
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.workers import WorkerProcess

ROUNDS, WORKERS = 2, 2
STAGES = {"train", "gather", "sync", "encode", "upload", "await-delta", "download", "outer-step", "wait"}


# Read by Python as it starts: the SDK is not there, as without the extra. (FastAPI has OpenTelemetry's API.)
HIDE = """
import sys
class Hide:
    def find_spec(name, path=None, target=None):
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide)
"""


class Collector:
    """An OTLP/HTTP collector: what it was sent, by service."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spans: dict[str, list[Any]] = defaultdict(list)
        self.paths: set[str] = set()

    def handler(self) -> type[Handler]:
        class Collect(Handler):
            def do_POST(collect: Handler) -> None:  # noqa: N802, N805, http.server's name
                body = collect.rfile.read(int(collect.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                with self.lock:
                    self.paths.add(collect.path)
                    for resource in request.resource_spans:
                        about = attributes(resource.resource)
                        for scope in resource.scope_spans:
                            self.spans[about["service.name"]] += scope.spans
                answer = ExportTraceServiceResponse().SerializeToString()
                collect.send_response(200)
                collect.send_header("Content-Type", "application/x-protobuf")
                collect.send_header("Content-Length", str(len(answer)))
                collect.end_headers()
                collect.wfile.write(answer)

        return Collect


def attributes(of: Any) -> dict[str, Any]:
    """... with the values as Python has them."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that the processes of this test are told of."""
    collector = Collector()
    with serving(collector.handler()) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield collector


def play(tmp_path: Path, workers: int = 1, rounds: int = 1) -> list[int]:
    """A run from beginning to end; the workers' exit codes."""
    coordinator = CoordinatorProcess(tmp_path / "data")
    try:
        running = coordinator.start()
        text = write_text(tmp_path / "text", seed=1)
        running.create_run(tiny_spec("r", text, seed=1, rounds=rounds, min_workers=workers))
        token = running.token(Scope.WORKER)
        crew = [WorkerProcess(running.url, "r", f"w{n}", token, tmp_path / f"w{n}") for n in range(workers)]
        for worker in crew:
            worker.start()
        return [worker.wait() for worker in crew]
    finally:
        coordinator.stop()


@pytest.mark.system
def test_a_round_is_one_trace_of_all_machines(collector: Collector, tmp_path: Path) -> None:
    assert play(tmp_path, WORKERS, ROUNDS) == [Exit.DONE] * WORKERS
    assert collector.paths == {"/v1/traces"}
    ours, theirs = collector.spans["outerstep-coordinator"], collector.spans["outerstep-worker"]
    assert set(collector.spans) == {"outerstep-coordinator", "outerstep-worker"}
    by_id = {span.span_id: span for span in [*ours, *theirs]}

    traces: dict[int, set[bytes]] = {}
    for number in range(ROUNDS):
        rounds = [span for span in theirs if span.name == "round" and attributes(span)["outerstep.round"] == number]
        assert sorted(attributes(span)["outerstep.worker"] for span in rounds) == ["w0", "w1"]
        traces[number] = {span.trace_id for span in rounds}
        assert len(traces[number]) == 1, "of both workers"
        for root in rounds:
            mine = [
                span
                for span in theirs
                if attributes(span).get("outerstep.worker") == attributes(root)["outerstep.worker"]
            ]
            of_round = [span for span in mine if span.trace_id == root.trace_id]
            assert {span.name for span in of_round} >= STAGES - ({"wait"} if number == 0 else set())
            assert all(attributes(span)["outerstep.run"] == "r" for span in of_round)
            (train,) = [span for span in of_round if span.name == "train"]
            assert train.parent_span_id == root.span_id
            assert root.start_time_unix_nano <= train.start_time_unix_nano < train.end_time_unix_nano

        work = [span for span in ours if not attributes(span).get("http.request.method")]
        of_round = [span for span in work if {span.trace_id} == traces[number]]
        assert {span.name for span in of_round} >= {"aggregate", "publish", "outer-step"}
        for span in of_round:
            assert (attributes(span)["outerstep.run"], attributes(span)["outerstep.round"]) == ("r", number)
            if span.name == "aggregate":
                assert by_id[span.parent_span_id].name == "publish"
    assert traces[0] != traces[1]
    assert "checkpoint" in {span.name for span in ours}

    uploads = [span for span in ours if span.name.startswith("PUT ") and span.name.endswith("/contributions/{worker}")]
    fragments = {attributes(span)["outerstep.fragment"] for span in uploads}
    assert len(uploads) == ROUNDS * WORKERS * len(fragments)
    for span in uploads:
        about, sender = attributes(span), by_id[span.parent_span_id]
        assert (sender.name, about["http.response.status_code"] in (200, 201)) == ("upload", True)
        assert attributes(sender)["outerstep.worker"] == about["outerstep.worker"]
        assert {span.trace_id} == {sender.trace_id} == traces[about["outerstep.round"]]
    told = {key for span in [*ours, *theirs] for key, value in attributes(span).items() if "ost_" in str(value)}
    assert told == set(), "tokens"


@pytest.mark.nightly
def test_without_the_extra_a_line_says_what_to_install_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hidden = tmp_path / "site"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE)
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    assert play(tmp_path) == [Exit.DONE]
    for log in (tmp_path / "data.log", tmp_path / "w0.log"):
        (line,) = [line for line in log.read_text().splitlines() if "OpenTelemetry" in line]
        assert line.endswith("its SDK is not installed: nothing is traced; run: pip install 'outerstep[otel]'")


@pytest.mark.nightly
def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert play(tmp_path) == [Exit.DONE]
    assert "Traceback" not in (tmp_path / "w0.log").read_text()


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_when_traces_are_asked_for(environment: dict[str, str], asked: bool) -> None:
    assert is_requested(environment) is asked


STARTED = """
import logging, sys
logging.basicConfig(format="%(message)s")
from coordinator.app import create_app
import worker.diloco
from outerstep.common import tracing
print(tracing.start("s"), "opentelemetry.sdk" in sys.modules, len(create_app(None).user_middleware))
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("environment", "printed", "said"),
    [
        ({}, "False False 6", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, "False False 6", ""),
        ({"OTEL_TRACES_EXPORTER": "console"}, "True True 7", ""),
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "False True 6",
            "OTEL_TRACES_EXPORTER is 'zipkin'",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "False True 6",
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
    ],
)
def test_nothing_of_it_is_there_where_nobody_asks(environment: dict[str, str], printed: str, said: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", STARTED], env=clean | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == printed
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)


IN_PARTS = """
import httpx
from outerstep.common import tracing
from protocol.messages import Stage
from worker.accounts.stages import RoundTrace
from worker.line.line import Line

assert tracing.start("s")
trace = RoundTrace("r", 1.5, "w")
trace.begin_round(3)
trace.phase(Stage.SYNC)

def sent():
    request = httpx.Request("PUT", "http://c")
    trace.mark(request)
    marked.append(request.headers["traceparent"].split("-"))

marked = []
with trace.stage(Stage.UPLOAD):
    Line().up.run_all([sent, sent, sent])
    sent()
sent()
trace.end()
upload, phase = marked[3], marked[4]
assert marked[:3] == [upload] * 3, marked
assert upload[2] != phase[2] and upload[1] == phase[1] == f"{tracing.round_trace_id('r', 1.5, 3):032x}", marked
tracing.stop()
"""


def test_the_parts_of_an_upload_carry_it_on_whatever_thread_they_are_sent() -> None:
    environment = os.environ | {"OTEL_TRACES_EXPORTER": "console"}
    done = subprocess.run(
        [sys.executable, "-c", IN_PARTS], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split('"')[3] for line in done.stdout.splitlines() if '"name"' in line and "service" not in line] == [
        *("upload", "sync", "round")
    ]
