"""`deploy/prometheus` and `deploy/grafana`: alerts and panels ask for what is exported, and a real Prometheus that scrapes
a real coordinator answers them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from coordinator.metrics.families import FAMILIES, PREFIX
from harness.coordinator import InThread, coordinator_thread
from protocol.messages import Scope
from tests.coordinator.crew import measure_everything
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "outerstep.json").read_text())
(GROUP,) = yaml.safe_load((SAMPLES / "alerts.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
PANELS = {
    f"{panel['title']}, {target['legendFormat']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
}
NEEDED = ("prometheus", "promtool")  # both in Debian's package prometheus
MISSING = [name for name in NEEDED if shutil.which(name) is None]
installed = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def asked_for(expression: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", expression))


def test_alerts_and_panels_ask_for_what_is_exported() -> None:
    exported = {family.name for family in FAMILIES} | {
        family.name + ending
        for family in FAMILIES
        if family.type == "histogram"
        for ending in ("_bucket", "_count", "_sum")
    }
    for where, expression in [*((name, rule["expr"]) for name, rule in ALERTS.items()), *PANELS.items()]:
        assert asked_for(expression) or "process_" in expression or "up{" in expression, where
        assert asked_for(expression) <= exported, where
    for variable in DASHBOARD["templating"]["list"]:
        assert asked_for(variable["query"]) <= exported


def test_every_alert_says_what_to_do_by_commands_that_there_are() -> None:
    commands = set(re.findall(r"^## outerstep (.+)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))
    for name, rule in ALERTS.items():
        assert name.startswith("Outerstep")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "remedy"}
        named = re.findall(r"`outerstep ((?:run |token )?\w+)", rule["annotations"]["remedy"].replace("\n", " "))
        assert set(named) <= commands, name


def test_every_panel_says_what_it_shows_and_has_a_place_of_its_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["fieldConfig"]["defaults"]["unit"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_is_tried() -> None:
    tried = re.findall(r'alertname="(\w+)"', (SAMPLES / "alerts_test.yml").read_text())
    assert set(tried) == set(ALERTS)


@installed
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "config", "--syntax-only", "../compose/prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing(arguments: list[str]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=SAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(folder: Path, running: InThread) -> Iterator[httpx.Client]:
    """A Prometheus with the sample configuration, but for address, scheme and pace, which scrapes with a viewer's token."""
    sample = (SAMPLES / "prometheus.yml").read_text()
    changed = {
        "scrape_interval: 15s": "scrape_interval: 1s",
        "evaluation_interval: 15s": "evaluation_interval: 1s",
        "scheme: https": "scheme: http",
        "coordinator.example.org": f"127.0.0.1:{running.port}",
    }
    for before, after in changed.items():
        assert before in sample, before
        sample = sample.replace(before, after)
    (folder / "prometheus.yml").write_text(sample)
    shutil.copy(SAMPLES / "alerts.yml", folder)
    (folder / "viewer.token").write_text(running.token(Scope.VIEWER))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address={address}", "--log.level=warn"]
    process = subprocess.Popen(["prometheus", f"--config.file={folder / 'prometheus.yml'}", *options])
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=60) as client:
            wait_until(lambda: process.poll() is not None or is_ready(client))
            assert process.poll() is None, "prometheus has ended"
            yield client
    finally:
        process.terminate()
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").is_success
    except httpx.TransportError:
        return False


def answer(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """What Prometheus finds now."""
    reply = client.get("/api/v1/query", params={"query": expression})
    assert reply.is_success, f"{expression}: {reply.text}"
    result: list[dict[str, Any]] = reply.json()["data"]["result"]
    return result


def as_shown(expression: str) -> str:
    """A panel's expression as Grafana asks it for all runs."""
    shown = expression.replace("$run", ".*").replace("$__rate_interval", "1m")
    assert "$" not in shown, "a variable that nobody sets"
    return shown


@installed
@pytest.mark.system
def test_a_prometheus_that_scrapes_a_run_has_an_answer_to_every_panel_and_alert(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, prometheus(tmp_path, running) as client:
        a, _ = measure_everything(running, "r")
        with httpx.Client(base_url=running.url, trust_env=False) as stranger:
            assert stranger.get("/metrics").status_code == 401, "a refusal, of which there is a panel"
        a.http.put(a.path("/lease"), json={}).raise_for_status()  # of heartbeats too, once there was a first one

        wait_until(lambda: all(answer(client, as_shown(expression)) for expression in PANELS.values()))
        for name, rule in ALERTS.items():
            found = answer(client, rule["expr"])
            of_this_machine = re.search(r"\bup\b|_disk_", rule["expr"])  # which may be slow, and its disk full
            assert not found or of_this_machine, f"{name} is about a run that is well: {found}"
        loaded = client.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["name"] for group in loaded for rule in group["rules"]} == set(ALERTS)


def test_the_sample_scrapes_what_the_alerts_and_panels_name() -> None:
    (job,) = yaml.safe_load((SAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert "metrics_path" not in job, "Prometheus' own default is the coordinator's path"
    named = re.findall(r'job="(\w+)"', str([*ALERTS.values(), *PANELS.values()]))
    assert set(named) == {job["job_name"]}
