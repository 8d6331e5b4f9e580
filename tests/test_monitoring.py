"""`deploy/prometheus` and `deploy/grafana`: alerts and panels use exported metrics only, and a real Prometheus that
scrapes a real coordinator has data for them."""

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

from coordinator.api.metrics.families import FAMILIES, PREFIX
from harness.coordinator import InThread, coordinator_thread
from harness.ports import free_port
from protocol.messages import Scope
from tests.coordinator.crew import measure_everything
from tests.support.text import replaced
from tests.support.waiting import PATIENCE_S, answers, wait_until

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


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", expression))


def test_alerts_and_panels_use_exported_metrics() -> None:
    exported = {family.name for family in FAMILIES} | {
        family.name + ending
        for family in FAMILIES
        if family.type == "histogram"
        for ending in ("_bucket", "_count", "_sum")
    }
    for where, expression in [*((name, rule["expr"]) for name, rule in ALERTS.items()), *PANELS.items()]:
        assert metrics_in(expression) or "process_" in expression or "up{" in expression, where
        assert metrics_in(expression) <= exported, where
    for variable in DASHBOARD["templating"]["list"]:
        assert metrics_in(variable["query"]) <= exported


def test_every_alert_has_a_remedy_with_existing_commands() -> None:
    commands = set(re.findall(r"^## outerstep (.+)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))
    for name, rule in ALERTS.items():
        assert name.startswith("Outerstep")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "remedy"}
        named = re.findall(r"`outerstep ((?:run |token )?\w+)", rule["annotations"]["remedy"].replace("\n", " "))
        assert set(named) <= commands, name


def test_every_alert_has_a_promtool_test() -> None:
    tried = re.findall(r'alertname="(\w+)"', (SAMPLES / "alerts_test.yml").read_text())
    assert set(tried) == set(ALERTS)


@pytest.mark.slow
@installed
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "config", "--syntax-only", "../compose/prometheus.yml"],
        ["check", "config", "--syntax-only", "../compose/prometheus-scale.yml"],
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
    """Yield a client of a Prometheus that scrapes with a viewer's token. It has the sample configuration, except for address,
    scheme and intervals."""
    sample = (SAMPLES / "prometheus.yml").read_text()
    changed = {
        "scrape_interval: 15s": "scrape_interval: 1s",
        "evaluation_interval: 15s": "evaluation_interval: 1s",
        "scheme: https": "scheme: http",
        "coordinator.example.org": f"127.0.0.1:{running.port}",
    }
    (folder / "prometheus.yml").write_text(replaced(sample, changed))
    shutil.copy(SAMPLES / "alerts.yml", folder)
    (folder / "viewer.token").write_text(running.token(Scope.VIEWER))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address={address}", "--log.level=warn"]
    process = subprocess.Popen(["prometheus", f"--config.file={folder / 'prometheus.yml'}", *options])
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=PATIENCE_S) as client:
            wait_until(lambda: process.poll() is not None or answers(client, "/-/ready"))
            assert process.poll() is None, "prometheus has ended"
            yield client
    finally:
        process.terminate()
        process.wait()


def answer(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Return the result of a query now."""
    reply = client.get("/api/v1/query", params={"query": expression})
    assert reply.is_success, f"{expression}: {reply.text}"
    result: list[dict[str, Any]] = reply.json()["data"]["result"]
    return result


def as_shown(expression: str) -> str:
    """Return a panel's expression as Grafana sends it for all runs."""
    shown = expression.replace("$run", ".*").replace("$__rate_interval", "1m")
    assert "$" not in shown, "an unknown variable"
    return shown


@installed
@pytest.mark.system
def test_a_prometheus_that_scrapes_a_run_has_an_answer_to_every_panel_and_alert(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, prometheus(tmp_path, running) as client:
        a, _ = measure_everything(running, "r")
        with httpx.Client(base_url=running.url, trust_env=False) as stranger:
            assert stranger.get("/metrics").status_code == 401, "a rejection, for the panel that shows them"
        a.http.put(a.path("/lease"), json={}).raise_for_status()  # heartbeats have a panel too

        wait_until(lambda: all(answer(client, as_shown(expression)) for expression in PANELS.values()))
        for name, rule in ALERTS.items():
            found = answer(client, rule["expr"])
            of_this_machine = re.search(r"\bup\b|_disk_", rule["expr"])  # which may be slow, or its disk full
            assert not found or of_this_machine, f"{name} fires for a healthy run: {found}"
        loaded = client.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["name"] for group in loaded for rule in group["rules"]} == set(ALERTS)


def test_the_sample_scrapes_the_job_that_alerts_and_panels_name() -> None:
    (job,) = yaml.safe_load((SAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert "metrics_path" not in job, "the default of Prometheus is the coordinator's path"
    named = re.findall(r'job="(\w+)"', str([*ALERTS.values(), *PANELS.values()]))
    assert set(named) == {job["job_name"]}
