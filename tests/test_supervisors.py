"""`deploy/systemd`, `deploy/kubernetes`, `deploy/skypilot.yaml`: they are what those who read them take, and start again
what is worth it, by exit code."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from coordinator.settings import Settings
from outerstep.common.exit_codes import Exit
from tests.support.python import python

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = {path.name: path for path in sorted((DEPLOY / "systemd").iterdir())}
MANIFESTS = {
    f"{path.stem}, {document['kind']}": document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
SKYPILOT = DEPLOY / "skypilot.yaml"
FOR_GOOD = {Exit.USAGE, Exit.REFUSED}  # so the next time too
KUBERNETES = ("1.31", "1.37")  # the first that knows podFailurePolicy as stable, and the newest
SKYPILOT_VERSION = "0.14.1"


def settings_of(unit: Path) -> dict[str, str]:
    """A unit's settings; of one that is given twice, the last."""
    lines = [line for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def offered(*command: str) -> str:
    return python("-m", "outerstep", *command, "--help").stdout


def container(manifest: str) -> dict[str, Any]:
    (only,) = MANIFESTS[manifest]["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.system
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_not_started_again_after_what_is_so_the_next_time_too(name: str) -> None:
    settings = settings_of(UNITS[name])
    assert settings["Restart"] in ("always", "on-failure")
    assert {int(code) for code in settings["RestartPreventExitStatus"].split()} == FOR_GOOD
    command = settings["ExecStart"].split()
    help_text = offered(command[1])
    assert all(option in help_text for option in command if option.startswith("--"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt install systemd")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_in_a_unit(name: str, tmp_path: Path) -> None:
    here = str(Path(sys.executable).parent)
    unit = tmp_path / name.replace("@", "@my-run")
    unit.write_text(UNITS[name].read_text().replace("/opt/outerstep/bin", here))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


@pytest.mark.parametrize("path", UNITS.values(), ids=UNITS)
def test_a_unit_s_first_lines_make_the_directory_that_it_reads(path: Path) -> None:
    """... and create the user, before anything is put there."""
    head = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    made = head.index("install -d -m 0750 -g outerstep /etc/outerstep")
    assert head[made - 1].startswith("useradd --system ")
    assert all("/etc/outerstep/" not in line for line in head[:made])
    assert "/etc/outerstep/" in settings_of(path)["EnvironmentFile"]


def test_a_unit_of_a_cluster_outlasts_any_outage() -> None:
    """systemd gives up a unit that has failed too often, unless it counts nothing."""
    for part in ("coordinator", "aggregator"):
        settings = settings_of(UNITS[f"outerstep-{part}.service"])
        assert (settings["Restart"], settings["StartLimitIntervalSec"]) == ("always", "0")


@pytest.mark.parametrize("file", ["coordinator", "coordinators"])
def test_either_file_of_coordinators_is_reached_from_outside(file: str) -> None:
    """Applied alone: its Ingress leads to its Service, and that one to its pods."""
    ingress, service = (MANIFESTS[f"{file}, {kind}"] for kind in ("Ingress", "Service"))
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    pods = MANIFESTS[f"{file}, StatefulSet" if file == "coordinator" else f"{file}, Deployment"]["spec"]["template"]
    assert service["spec"]["selector"] == pods["metadata"]["labels"]
    assert service["spec"]["publishNotReadyAddresses"], "what is not ready answers with the cause"
    assert ingress == MANIFESTS["coordinator, Ingress"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_a_manifest(name: str) -> None:
    for version in KUBERNETES:
        kubernetes_validate.validate(MANIFESTS[name], version, strict=True)


def test_a_job_ends_where_its_worker_is_refused_and_only_there() -> None:
    job = MANIFESTS["worker, Job"]["spec"]
    (rule,) = (rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule)
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["operator"] == "In"
    assert set(rule["onExitCodes"]["values"]) == FOR_GOOD
    assert rule["onExitCodes"]["containerName"] == container("worker, Job")["name"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_pods_are_the_images_users_and_may_write_to_volumes_alone() -> None:
    for manifest, part, volume in (
        ("coordinator, StatefulSet", "coordinator", "/data"),
        ("coordinators, Deployment", "coordinator", "/data"),
        ("worker, Job", "worker", "/state"),
    ):
        dockerfile = (ROOT / f"Dockerfile.{part}").read_text()
        (uid,) = re.findall(r"useradd --uid (\d+)", dockerfile)
        pod, only = MANIFESTS[manifest]["spec"]["template"]["spec"], container(manifest)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(uid)
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert f"VOLUME {volume}\n" in dockerfile
        assert volume in {mount["mountPath"] for mount in only["volumeMounts"]}
        assert only["image"].startswith(f"outerstep-{part}:")


def test_of_several_coordinators_one_stays_through_an_upgrade_or_a_drain() -> None:
    deployment = MANIFESTS["coordinators, Deployment"]["spec"]
    budget = MANIFESTS["coordinators, PodDisruptionBudget"]["spec"]
    assert deployment["replicas"] > budget["minAvailable"] == 1
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    labels = deployment["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"] == labels == MANIFESTS["coordinators, Service"]["spec"]["selector"]
    variables = {each["name"]: each for each in container("coordinators, Deployment")["env"]}
    assert variables["OUTERSTEP_COORDINATOR_ADVERTISE_URL"]["value"] == f"http://$(POD_IP):{Settings().port}"
    assert list(variables).index("POD_IP") < list(variables).index("OUTERSTEP_COORDINATOR_ADVERTISE_URL")


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ["coordinator, StatefulSet", "coordinators, Deployment"])
def test_the_coordinator_is_asked_where_it_answers(manifest: str) -> None:
    only = container(manifest)
    assert [port["containerPort"] for port in only["ports"]] == [Settings().port]
    assert {name: only[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    known = {f"OUTERSTEP_COORDINATOR_{name.upper()}" for name in Settings.model_fields}
    of_others = {"POD_IP", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}
    assert {each["name"] for each in only["env"]} <= known | of_others
    worker = container("worker, Job")
    help_text = offered("worker")
    assert worker["command"][:2] == ["outerstep", "worker"]
    assert all(argument.split("=")[0] in help_text for argument in worker["args"])


@pytest.mark.slow
def test_skypilot_starts_again_by_exit_code() -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    again = set(task["resources"]["job_recovery"]["recover_on_exit_codes"])
    assert Exit.RETRY in again
    assert not again & (FOR_GOOD | {Exit.DONE})
    help_text = offered("worker")
    assert all(option in help_text for option in re.findall(r" (--[a-z-]+)", task["run"]))


TAKEN = """
import sys, yaml
import sky
task = sky.Task.from_yaml_config(
    yaml.safe_load(open(sys.argv[1])),
    env_overrides=[("OUTERSTEP_URL", "https://coordinator.example.org"), ("OUTERSTEP_RUN", "my-run")],
    secrets_overrides=[("OUTERSTEP_TOKEN", "t")],
)
print(sorted({tuple(each.job_recovery["recover_on_exit_codes"]) for each in task.resources}))
"""


@pytest.mark.nightly
def test_skypilot_takes_it(tmp_path: Path) -> None:
    """In an environment of its own: what SkyPilot needs is older than what Outerstep is installed with."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([python, *install, f"skypilot=={SKYPILOT_VERSION}"], check=True)
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)

    def briefly_locked(task: Path) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-c", TAKEN, str(task)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    task = briefly_locked(SKYPILOT)
    assert task.returncode == 0, task.stderr
    assert (
        str(tuple(yaml.safe_load(SKYPILOT.read_text())["resources"]["job_recovery"]["recover_on_exit_codes"]))
        in task.stdout
    )

    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SKYPILOT.read_text().replace("recover_on_exit_codes", "recover_on_exit_code"))
    assert briefly_locked(wrong).returncode != 0, "it looks"
