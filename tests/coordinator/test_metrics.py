"""`GET /metrics`: exactly the families of the table, with their types and labels; and what each token sees."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.metrics import runs
from coordinator.api.metrics.families import FAMILIES, OF_RUNS, PREFIX
from coordinator.api.metrics.runs import run_values, snapshot
from coordinator.api.metrics.server import of_peers
from coordinator.store.lease import Peers
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import spec_toml
from protocol.messages import RunState, Scope
from tests.coordinator.crew import crew, events, measure_everything, problem, set_state
from tests.support.waiting import wait_until

LIBRARY = ("process_", "python_")

Found = dict[str, Metric]


def scraped(running: InThread, token: str | None = None) -> Found:
    with running.client(token) as client:
        return parsed(client.get("/metrics").raise_for_status())


def parsed(reply: httpx.Response) -> Found:
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def values(found: Found, name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """The values of a family that have these labels, by what labels they have beside."""
    family = found[PREFIX + name.removesuffix("_total")]
    return {
        tuple(value for label, value in sample.labels.items() if label not in labels): sample.value
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    }


def value(found: Found, name: str, **labels: str) -> float:
    (only,) = values(found, name, **labels).values()
    return only


@pytest.fixture(scope="module")
def played(shared: InThread, clock: SettableClock) -> InThread:
    measure_everything(shared, "two")
    clock.advance(7)
    return shared


def test_every_family_of_the_table_is_exported_and_no_other(played: InThread) -> None:
    with httpx.Client(base_url=played.url, trust_env=False) as stranger:
        problem(stranger.get("/metrics"), "unauthorized")
    found, shared = scraped(played), {name for name, _, _ in of_peers(Peers("", store_answer_s=1.0))}
    assert len(shared) == 5
    shared |= {f"{PREFIX}{name}" for name in ("aggregators", "aggregation_tasks_waiting", "aggregation_tasks_total")}
    ours = {name: family for name, family in found.items() if not name.startswith(LIBRARY)}
    assert set(ours) == {family.name.removesuffix("_total") for family in FAMILIES}
    for family in FAMILIES:
        metric = ours[family.name.removesuffix("_total")]
        assert metric.type == family.type, family
        assert metric.documentation == f"{family.meaning} ({family.unit})"
        labels = {label for sample in metric.samples for label in sample.labels if label != "le"}
        absent = "backup" in family.name or (family.name in shared and played.coordinator.peers is None)
        assert metric.samples or absent or family.name == f"{PREFIX}store_answer_seconds", f"{family.name} has no value"
        assert labels == set(family.labels) or not metric.samples, family.name
        assert all(family.type != "counter" or sample.name.endswith("_total") for sample in metric.samples)
    assert not [name for name in found if name.endswith("_created")]
    assert {"process_resident_memory_bytes", "process_open_fds", "python_gc_collections"} <= set(found)


def test_names_and_units_are_those_of_prometheus() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    for family in FAMILIES:
        assert family.name.startswith(PREFIX)
        assert (family.type == "counter") == family.name.endswith("_total")
        assert (family.unit == "s") == ("_seconds" in family.name), family.name
        assert (family.unit == "bytes") == ("_bytes" in family.name), family.name


def test_the_metrics_of_a_run(played: InThread) -> None:
    found = scraped(played)
    states = values(found, "run_state", run="two")
    assert states == {(state,): float(state is RunState.RUNNING) for state in RunState}
    of = {"run": "two"}
    trained = 2 * 5 * 2 * 16
    single: dict[str, float] = {"round": 1, "rounds_expected": 3, "step": 5, "tokens": trained}
    single |= {"last_round_tokens": trained, "live_workers": 2, "workers_not_shown": 0, "open_round_age_seconds": 7}
    single |= {"loss": 1.5, "held_out_loss": 2.5, "upload_bytes_total": 700, "download_bytes_total": 900}
    assert {name: value(found, f"run_{name}", **of) for name in single} == single
    assert value(found, "run_last_round_age_seconds", **of) >= 0
    assert values(found, "run_stage_seconds_total", **of) == {("train",): 8.0, ("sync",): 2.0}
    outcomes = values(found, "run_contributions_total", **of)
    assert outcomes == {("counted",): 4, ("shortened",): 0, ("left_out",): 0, ("late",): 0}
    assert value(found, "run_events_total", kind="round-published", **of) == 1
    assert value(found, "run_events_total", kind="joined", **of) == len(events(played, "two", "joined")) == 2
    assert value(found, "run_disk_bytes", kind="checkpoints", **of) > 0
    worker = {"last_seen_seconds": 7, "rounds_behind": 1, "tokens_per_second": 1500, "inner_step": 4, "joins_total": 1}
    for name in "ab":
        assert {each: value(found, f"worker_{each}", worker=name, **of) for each in worker} == worker


def test_requests_are_counted_by_route_and_not_by_address(shared: InThread) -> None:
    def counted(**labels: str) -> float:
        return sum(values(scraped(shared), "http_requests_total", **labels).values())

    before = {each: counted(**each_labels) for each, each_labels in LABELS.items()}
    with shared.client() as client, httpx.Client(base_url=shared.url, trust_env=False) as stranger:
        client.get("/v1/runs/here-is-none/rounds")
        client.head("/healthz").raise_for_status()
        client.get("/here/is/nothing")
        client.request("TRACE", "/here/is/nothing")
        problem(stranger.get("/v1/runs"), "unauthorized")
    after = {each: counted(**each_labels) for each, each_labels in LABELS.items()}
    assert {each: after[each] - before[each] for each in LABELS} == dict.fromkeys(LABELS, 1.0) | {"none": 3.0}
    routes = set(values(scraped(shared), "http_requests_total", method="GET", status="4xx"))
    assert ("/v1/runs/{run}/rounds",) in routes
    assert not [key for key in routes if "nothing" in key[0]]
    assert value(scraped(shared), "http_requests_refused_total", code="401") >= 1
    seconds = scraped(shared)[PREFIX + "http_request_duration_seconds"]
    assert {sample.labels["le"] for sample in seconds.samples if "le" in sample.labels} >= {"0.005", "60.0", "+Inf"}


LABELS = {
    "a run that there is not": {"route": "/v1/runs/{run}/rounds", "method": "GET", "status": "4xx"},
    "head": {"route": "/healthz", "method": "HEAD", "status": "2xx"},
    "a method that nobody knows": {"route": "none", "method": "other", "status": "4xx"},
    "none": {"route": "none", "status": "4xx"},
}


@pytest.mark.in_sqlite
def test_connections_that_are_refused_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with coordinator_thread(data, max_connections_per_address=1, proxies="") as running, running.client() as held:
        running.create_run(spec_toml("r"))
        events = held.stream("GET", "/v1/runs/r/events", headers={"Accept": "text/event-stream"})
        wait_until(lambda: not len(running.server.connections))
        with events, running.client() as other:
            problem(other.get("/healthz"), "not-ready")
        wait_until(lambda: not len(running.server.connections))
        found = parsed(held.get("/metrics"))
    assert value(found, "connections_refused_total", problem="not-ready") == 1
    assert value(found, "connections_open") == 1


def test_the_last_backup_has_a_metric_if_backups_are_scheduled(played: InThread, tmp_path: Path) -> None:
    for name in ("backup_interval_seconds", "last_backup_timestamp_seconds"):
        assert not scraped(played)[PREFIX + name].samples
    with coordinator_thread(tmp_path / "data", backup_dir=tmp_path / "backups", backup_every_s=900.0) as running:
        wait_until(lambda: running.coordinator.last_backup_at is not None)
        found = scraped(running)
        assert value(found, "backup_interval_seconds") == 900
        assert value(found, "last_backup_timestamp_seconds") == running.coordinator.last_backup_at


def test_a_token_for_one_run_sees_that_run_alone(shared: InThread, run: str) -> None:
    other = f"{run}-other"
    (member,) = crew(shared, run, ["a"])
    crew(shared, other, ["b"])
    everywhere = scraped(shared, shared.token(Scope.VIEWER))
    assert {run, other} <= {labels[0] for labels in values(everywhere, "run_round")}
    for token in (shared.token(Scope.VIEWER, run=run), member.joined.member_token):
        found = scraped(shared, token)
        assert set(found) == {family.name.removesuffix("_total") for family in OF_RUNS}
        assert {sample.labels.get("run", run) for family in found.values() for sample in family.samples} == {run}
        assert sum(values(found, "runs").values()) == 1


def test_time_series_are_bounded(shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crew(shared, run, ["a", "b", "c"])
    monkeypatch.setattr(runs, "MAX_WORKERS", 2)
    found = scraped(shared, shared.token(Scope.VIEWER, run=run))
    assert set(values(found, "worker_joins_total", run=run)) == {("a",), ("b",)}
    assert value(found, "run_workers_not_shown", run=run) == 1
    last = f"{run}-last"
    shared.create_run(spec_toml(last))
    set_state(shared, run, "stopped")
    monkeypatch.setattr(runs, "MAX_RUNS", 1)
    found = scraped(shared)
    assert set(values(found, "run_round")) == {(last,)}, "the newest of those that go on"
    assert value(found, "runs_not_shown") == len(shared.coordinator.runs()) - 1


def test_a_run_that_is_removed_meanwhile_is_left_out(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew(shared, run, ["a"])
    live = shared.live(run)
    set_state(shared, run, "stopped")
    with shared.client() as admin:
        admin.delete(f"/v1/runs/{run}/workers/a").raise_for_status()
        wait_until(lambda: admin.delete(f"/v1/runs/{run}").status_code == 204)  # 503 while a job works on its files
    others = shared.coordinator.runs()
    monkeypatch.setattr(shared.coordinator, "runs", lambda: [*others, live])
    assert run not in {labels[0] for labels in values(scraped(shared), "run_round")}


def test_what_is_not_known_has_no_value(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"])
    seen = snapshot(shared.live(run))
    bare = replace(seen, last_round=None, last_round_age_s=None, checkpoint_age_s=None, open_round_age_s=None)
    names = {name for name, _, _ in run_values(bare)}
    for absent in ("loss", "held_out_loss", "last_round_age_seconds", "open_round_age_seconds"):
        assert f"{PREFIX}run_{absent}" not in names
    assert not {name for name in names if name.endswith(("rounds_behind", "tokens_per_second"))}
