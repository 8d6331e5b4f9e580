"""The operators' commands against a real coordinator."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from harness.coordinator import make_certificate
from harness.member import Member
from protocol.messages import FrozenSummary
from tests.outerstep.conftest import Served, serving
from tests.outerstep.examples import SPEC
from tests.support.signals import default_signals
from tests.support.waiting import PATIENCE_S, wait_until


def create(served: Served, name: str) -> None:
    code, out, err = served.outerstep("run", "create", "-", stdin=SPEC.replace("demo", name))
    assert (code, err) == (0, ""), err
    assert out.startswith(f"run {name} is created: ")


def read_run(served: Served, name: str) -> dict:
    code, out, _ = served.outerstep("run", "show", name, "--format", "json")
    assert code == 0
    return json.loads(out)["run"]


def test_a_run_is_created_once(served: Served, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(SPEC.replace("demo", "once"))
    assert "is created" in served.outerstep("run", "create", str(path))[1]
    code, out, _ = served.outerstep("run", "create", str(path))
    assert (code, "already exists" in out) == (0, True)
    code, out, err = served.outerstep(
        "run", "create", "-", stdin=SPEC.replace("demo", "once") + "outer.momentum = 0.5\n"
    )
    assert (code, out, err.startswith("outerstep: run-exists: ")) == (3, "", True)
    code, out, _ = served.outerstep("run", "create", str(path), "--format", "json")
    assert (code, json.loads(out)["name"]) == (0, "once")


def test_runs_are_listed_and_shown_as_table_and_json(served: Served):
    create(served, "listed")
    code, table, _ = served.outerstep("run", "ls")
    assert (code, table.split()[:3]) == (0, ["run", "state", "round"])
    assert re.search(r"^listed +seeding +0/5 ", table, re.MULTILINE)
    runs = json.loads(served.outerstep("run", "ls", "--format", "json")[1])
    assert "listed" in [run["name"] for run in runs]

    code, facts, _ = served.outerstep("run", "show", "listed")
    assert code == 0
    for expected in (
        "seeding: waiting for the first worker",
        "0 of 5, up to 10 inner steps each",
        "int8 up, int8 down",
    ):
        assert expected in facts
    shown = json.loads(served.outerstep("run", "show", "listed", "--format", "json")[1])
    assert sorted(shown) == ["rounds", "run", "workers"]
    assert (shown["rounds"], shown["workers"]) == ([], [])
    assert shown["run"]["spec"]["sync"]["inner_steps"] == 10


def test_what_is_trained_is_shown_beside_what_is_frozen(served: Served):
    create(served, "base")
    spec = 'name = "adapted"\nsync.rounds = 1\nmodel = {pretrained = "llama", run = "base", lora.rank = 2}\n'
    assert served.outerstep("run", "create", "-", stdin=spec)[0] == 0
    frozen = FrozenSummary(digest="ab" * 32, elements=5_000_000)
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin_token}"}) as http:
        Member(http, "adapted", "w").ask_to_join(frozen=frozen).raise_for_status()
    facts = " ".join(served.outerstep("run", "show", "adapted")[1].split())
    assert "llama with adapters of rank 2 from the run base, 977 parameters in 1 fragment, 5 M frozen" in facts


def test_a_whole_model_has_no_adapters_to_merge(served: Served, tmp_path: Path):
    create(served, "whole")
    code, _, err = served.outerstep("run", "export", "whole", "--out", str(tmp_path / "out"), "--merge")
    assert (code, "the run whole has no adapters to merge: its export is the whole model" in err) == (3, True)
    assert not (tmp_path / "out").exists()


def test_checkpoints_are_listed(served: Served):
    create(served, "kept")
    assert json.loads(served.outerstep("run", "show", "kept", "--checkpoints", "--format", "json")[1]) == []
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin_token}"}) as http:
        member = Member(http, "kept", "w")
        member.join(served.admin_token)
        assert member.assignment(None).action == "seed"
        member.seed()
        code, table, _ = served.outerstep("run", "show", "kept", "--checkpoints")
        (kept,) = json.loads(served.outerstep("run", "show", "kept", "--checkpoints", "--format", "json")[1])
    assert (code, table.split()[:4]) == (0, ["round", "at", "size", "digest"])
    assert (kept["round"], kept["bytes"] > 0) == (0, True)
    assert re.search(rf"^ +0 .*{kept['state_digest']}", table, re.MULTILINE)


def test_an_export_of_a_checkpoint_that_the_disk_has_lost_ends_and_says_so(served: Served, tmp_path: Path):
    """It asked again for ever, in silence."""
    create(served, "lost")
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin_token}"}) as http:
        member = Member(http, "lost", "w")
        member.join(served.admin_token)
        assert member.assignment(None).action == "seed"
        member.seed()
        for file in (served.data / "runs" / "lost").glob("*/**/*"):
            if file.is_file():
                file.unlink()
        fragment = "/v1/runs/lost/checkpoints/0/fragments/0"
        wait_until(lambda: http.get(fragment).json()["type"].endswith("file-lost"))
    (kept,) = json.loads(served.outerstep("run", "show", "lost", "--checkpoints", "--format", "json")[1])
    assert "missing on disk" in kept["damage"]
    assert "missing on disk" in " ".join(served.outerstep("run", "show", "lost", "--checkpoints")[1].split())
    code, _, err = served.outerstep("run", "export", "lost", "--out", str(tmp_path / "out"))
    assert (code, err.startswith("outerstep: file-lost: "), "from a backup" in err) == (3, True, True)


@pytest.mark.slow
def test_pause_resume_and_stop(served: Served):
    create(served, "steered")
    # a run without workers is drained at once
    for command, state in (("pause", "paused"), ("resume", "seeding"), ("drain", "paused"), ("stop", "stopped")):
        code, out, _ = served.outerstep("run", command, "steered")
        assert (code, out.startswith(f"run steered is {state}: ")) == (0, True)
        assert read_run(served, "steered")["state"] == state
    again = json.loads(served.outerstep("run", "stop", "steered", "--format", "json")[1])
    assert (again["name"], again["state"]) == ("steered", "stopped")
    code, _, err = served.outerstep("run", "resume", "steered")
    assert (code, err.startswith("outerstep: run-ended: ")) == (3, True)


@pytest.mark.slow
def test_workers_are_evicted_banned_and_readmitted_and_the_units_are_shown(served: Served):
    create(served, "crewed")
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin_token}"}) as http:
        Member(http, "crewed", "w").ask_to_join().raise_for_status()
        for action, state in (("evict", "evicted"), ("ban", "banned"), ("readmit", "readmitted")):
            code, out, _ = served.outerstep("run", "member", "crewed", "w", action)
            assert (code, out) == (0, f"worker w of run crewed is {state}\n")
            other = Member(http, "crewed", "v")
            assert other.ask_to_join().status_code == 200
            http.delete(other.path()).raise_for_status()
        released = json.loads(served.outerstep("run", "member", "crewed", "w", "release", "--format", "json")[1])
        assert (released["name"], released["token"]) == ("w", None)
    assert served.outerstep("run", "member", "crewed", "ghost", "evict")[0] == 3
    code, table, _ = served.outerstep("run", "show", "crewed", "--units")
    assert (code, table.split()[:3]) == (0, ["epoch", "units", "trained"])
    assert json.loads(served.outerstep("run", "show", "crewed", "--units", "--format", "json")[1]) == []


def test_what_is_not_there_is_refused(served: Served):
    for command in (["run", "show", "nothing"], ["run", "watch", "nothing"], ["run", "stop", "nothing"]):
        code, out, err = served.outerstep(*command)
        assert (code, out, err.startswith("outerstep: not-found: ")) == (3, "", True)
    assert served.outerstep("token", "revoke", "nothing")[0] == 3


@pytest.mark.slow
def test_a_token_is_made_used_listed_and_revoked(served: Served):
    code, secret, said = served.outerstep("token", "create", "--scope", "viewer", "--note", "Ann's [box]")
    assert code == 0
    token_id = said.split()[1]
    secret = secret.strip()
    assert served.outerstep("run", "ls", token=secret)[0] == 0
    code, _, err = served.outerstep("run", "create", "-", token=secret, stdin=SPEC)
    assert (code, err.startswith("outerstep: forbidden: ")) == (3, True)

    assert re.search(rf"^{token_id} +viewer .*Ann's \[box\]", served.outerstep("token", "ls")[1], re.MULTILINE)
    listed = served.outerstep("token", "ls", "--format", "json")[1]
    assert secret not in listed
    assert token_id in [token["id"] for token in json.loads(listed)]

    assert served.outerstep("token", "revoke", token_id)[:2] == (0, f"token {token_id} is revoked\n")
    code, _, err = served.outerstep("run", "ls", token=secret)
    assert (code, err.startswith("outerstep: unauthorized: ")) == (3, True)


@pytest.mark.slow
def test_a_token_says_what_it_is_for(served: Served):
    create(served, "for-one")
    options = ["--scope", "join", "--run", "for-one", "--uses", "3", "--expires", "12h", "--format", "json"]
    made = json.loads(served.outerstep("token", "create", *options)[1])
    assert (made["run"], made["uses"], made["used"]) == ("for-one", 3, 0)
    assert made["expires_at"] - made["created_at"] == 12 * 3600
    assert made["token"].startswith("ostj_")
    assert json.loads(served.outerstep("token", "create", "--scope", "worker", "--format", "json")[1])["names"] == 1
    table = served.outerstep("token", "ls")[1]
    assert re.search(rf"^{made['id']} +join +for-one +0 of 3 used +\d", table, re.MULTILINE)
    for options, said in (
        (["--scope", "worker", "--expires", "soon"], "--expires: 'soon' is not a time such as 12h or 30d"),
        (["--scope", "viewer", "--names", "2"], "names is for worker tokens"),
        (["--scope", "worker", "--names", "0"], "--names = 0: "),
        (["--scope", "viewer", "--run", "UPPER"], "--run = 'UPPER': "),
    ):
        code, _, err = served.outerstep("token", "create", *options)
        assert (code, said in err) == (2, True), err


def test_a_token_is_rotated(served: Served):
    made = json.loads(served.outerstep("token", "create", "--scope", "viewer", "--format", "json")[1])
    code, secret, said = served.outerstep("token", "rotate", made["id"])
    assert (code, said.split()[1]) == (0, made["id"])
    assert served.outerstep("run", "ls", token=secret.strip())[0] == 0
    assert served.outerstep("run", "ls", token=made["token"])[0] == 3
    assert served.outerstep("token", "rotate", "nothing")[0] == 3


def test_the_audit_tells_who_did_what(served: Served):
    create(served, "audited")
    made = json.loads(served.outerstep("token", "create", "--scope", "operator", "--format", "json")[1])
    assert served.outerstep("run", "pause", "audited", token=made["token"])[0] == 0
    assert served.outerstep("token", "ls", "--audit", token=made["token"])[0] == 3
    newest, *_ = json.loads(served.outerstep("token", "ls", "--audit", "--format", "json")[1])
    assert (newest["act"], newest["token"], newest["run"]) == ("run-changed", made["id"], "audited")
    lines = served.outerstep("token", "ls", "--audit", "--limit", "2")[1].strip().splitlines()
    assert re.search(rf"{made['id']} +127\.0\.0\.1 +run-changed +audited +set the run to paused", lines[1])
    assert len(lines) == 3


@pytest.mark.system
@pytest.mark.covers("security:secrets-at-rest")
def test_what_a_coordinator_writes_is_for_its_user_alone(tmp_path: Path):
    with serving(tmp_path / "data", "0", "--log-file", str(tmp_path / "log")) as served:
        create(served, "mine")
        with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin_token}"}) as http:
            member = Member(http, "mine", "w")
            member.join(served.admin_token)
            member.assignment(None)
            member.seed()
        found = [tmp_path / "log", *(path for path in served.data.rglob("*"))]
        assert len(found) > 10
        assert [path for path in found if path.stat().st_mode & 0o077] == []


def coordinator_command(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `outerstep coordinator`, which here ends by itself."""
    command = [sys.executable, "-m", "outerstep", "coordinator", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stderr


@pytest.mark.system
def test_a_taken_port_and_a_taken_directory_are_told(served: Served, tmp_path: Path):
    code, err = coordinator_command("--data", str(tmp_path), "--port", served.port)
    taken = f"cannot serve at 127.0.0.1:{served.port} from {tmp_path}: address already in use; give another --port"
    assert (code, err.count("Errno"), taken in err) == (2, 0, True), err
    code, err = coordinator_command("--data", str(served.data), "--port", "0")
    assert (code, "in use by another coordinator" in err) == (3, True)


def test_settings_of_the_coordinator_are_checked_and_named(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTERSTEP_COORDINATOR_PORT", "eight")
    code, _, err = served.outerstep("coordinator", "--data", str(tmp_path / "data"), "--log-level", "loud")
    assert (code, err.count("\n")) == (2, 1)
    assert "OUTERSTEP_COORDINATOR_PORT = 'eight': " in err
    assert "--log-level = 'loud': " in err
    monkeypatch.delenv("OUTERSTEP_COORDINATOR_PORT")
    key = tmp_path / "key.pem"
    key.touch()
    code, _, err = served.outerstep("coordinator", "--data", str(tmp_path / "data"), "--tls-key", str(key))
    assert (code, err) == (2, "outerstep: --tls-key needs --tls-certificate\n")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_certificate_that_cannot_be_served_with_is_told_before_anything_is_made(served: Served, tmp_path: Path):
    """Nothing of the data directory is made, and no passphrase is asked for; it was `[SSL] PEM lib (_ssl.c:3926)`."""
    one, other = make_certificate(tmp_path / "one"), make_certificate(tmp_path / "other")
    locked = tmp_path / "locked.pem"
    lock = ["openssl", "pkcs8", "-topk8", "-v2", "aes-256-cbc", "-passout", "pass:x"]
    subprocess.run([*lock, "-in", str(one.key), "-out", str(locked)], check=True)
    for certificate, key, told in (
        (one.file, None, f"--tls-certificate {one.file} contains no private key: give --tls-key FILE"),
        (one.file, other.key, f"--tls-key {other.key} does not belong to the certificate {one.file}"),
        (one.file, one.file, f"--tls-key {one.file} contains no PEM private key, or one that needs a passphrase"),
        (one.file, locked, f"--tls-key {locked} contains no PEM private key, or one that needs a passphrase"),
        (one.key, one.key, f"--tls-certificate: {one.key}: it has no certificate in PEM"),
    ):
        keys = [] if key is None else ["--tls-key", str(key)]
        data = ["--data", str(tmp_path / "data"), "--port", "0"]
        code, _, err = served.outerstep("coordinator", *data, "--tls-certificate", str(certificate), *keys)
        assert (code, err) == (2, f"outerstep: {told}\n")
    assert not (tmp_path / "data").exists()


@pytest.mark.system
def test_the_coordinators_log_goes_to_a_file_too(tmp_path: Path):
    with serving(tmp_path / "data", "0", "--log-file", str(tmp_path / "coordinator.log")) as coordinator:
        create(coordinator, "logged")
        for log in (tmp_path / "coordinator.log", coordinator.child.log):
            assert "the run logged was created" in log.read_text()
    code, err = coordinator_command("--data", str(tmp_path / "data"), "--port", "0", "--log-file", str(tmp_path))
    assert (code, err) == (2, f"outerstep: --log-file: {tmp_path}: is a directory\n")


@pytest.mark.system
def test_a_log_of_json_says_of_which_request_run_worker_and_round_a_line_is(tmp_path: Path):
    log = tmp_path / "coordinator.log"
    options, in_json = ("--log-level", "debug", "--log-file", str(log)), {"OUTERSTEP_COORDINATOR_LOG_FORMAT": "json"}
    with serving(tmp_path / "data", "0", *options, **in_json) as served:
        create(served, "told")
        headers = {"Authorization": f"Bearer {served.admin_token}", "X-Request-Id": "from-a-proxy"}
        with httpx.Client(base_url=served.url, headers=headers) as http:
            Member(http, "told", "w").ask_to_join().raise_for_status()
            assert http.get("/v1/runs/told/rounds/7").headers["X-Request-Id"] == "from-a-proxy"
            wait_until(lambda: "/rounds/7" in log.read_text())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (created,) = (line for line in lines if "the run told was created" in line["message"])
    assert created["run"] == "told"
    assert (created["level"], "worker" in created) == ("info", False)
    (joined,) = (line for line in lines if line["message"].startswith("told: w joined"))
    about = {"request_id": "from-a-proxy", "run": "told", "worker": "w"}
    assert {name: joined[name] for name in about} == about
    (asked,) = (line for line in lines if "GET /v1/runs/told/rounds/7 answered 404" in line["message"])
    assert (asked["request_id"], asked["run"], asked["round"]) == ("from-a-proxy", "told", 7)


@pytest.mark.system
def test_a_data_directory_that_is_a_file_and_a_host_that_is_not_ours(tmp_path: Path):
    (tmp_path / "file").touch()
    code, err = coordinator_command("--data", str(tmp_path / "file"), "--port", "0")
    told = f"cannot serve at 127.0.0.1:0 from {tmp_path}/file: {tmp_path}/file is not a directory"
    assert (code, told in err, "Traceback" in err) == (2, True, False), err
    code, err = coordinator_command("--data", str(tmp_path / "data"), "--host", "coordinator.invalid")
    assert (code, "its name is not known here" in err, "Errno" in err) == (2, True, False), err


@pytest.mark.slow
def test_an_ended_run_is_removed_after_a_question(served: Served):
    create(served, "old")
    code, _, err = served.outerstep("run", "rm", "old", "--yes")
    assert (code, "run-not-ended: the run old is running; stop it first" in err) == (3, True), err
    assert served.outerstep("run", "stop", "old")[0] == 0
    code, _, err = served.outerstep("run", "rm", "old", stdin="n\n")
    assert (
        code,
        err.startswith("Remove the run old with its checkpoints and history"),
        "nothing was changed" in err,
    ) == (3, True, True)
    code, _, err = served.outerstep("run", "rm", "old", stdin="")
    assert (code, "give --yes" in err) == (2, True), err
    assert read_run(served, "old")["state"] == "stopped"
    code, out, _ = served.outerstep("run", "rm", "old", stdin="y\n")
    assert (code, out.splitlines()[-1]) == (0, "run old is removed")
    assert served.outerstep("run", "show", "old")[0] == 3
    create(served, "old")


def test_a_database_that_cannot_be_is_refused_without_its_password(served: Served, tmp_path: Path):
    code, _, err = served.outerstep(
        "coordinator", "--data", str(tmp_path / "data"), "--database", "mysql://me:secret@db/runs"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "--database, or its variable: mysql is not supported: use one of sqlite, postgresql" in err
    assert "secret" not in err
    assert not (tmp_path / "data").exists()


def worker_command(served: Served, run: str, token: str, state: Path) -> tuple[int, str]:
    """Exit code and stderr of `outerstep worker`, where it ends by itself."""
    command = [sys.executable, "-m", "outerstep", "worker", served.url, "--run", run, "--state-dir", str(state)]
    environment = {**os.environ, "OUTERSTEP_TOKEN": token}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    return done.returncode, done.stderr


@pytest.mark.system
def test_a_worker_that_is_refused_and_one_that_has_nothing_to_do(served: Served, tmp_path: Path):
    create(served, "ended")
    assert served.outerstep("run", "stop", "ended")[0] == 0
    code, err = worker_command(served, "ended", "not-a-token", tmp_path / "state")
    assert (code, "unauthorized" in err) == (3, True), err
    code, err = worker_command(served, "ended", served.admin_token, tmp_path / "state")
    assert (code, "nothing to do" in err) == (0, True), err


def read_until(stream, text: str) -> list[str]:
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was never said: {lines}")


@pytest.mark.system
def test_watching_survives_a_restart_of_the_coordinator(tmp_path: Path):
    with serving(tmp_path / "data") as first:
        create(first, "watched")
        port = first.port
        environment = {"OUTERSTEP_URL": first.url, "OUTERSTEP_TOKEN": first.admin_token, "PYTHONUNBUFFERED": "1"}
        watching = subprocess.Popen(
            [sys.executable, "-m", "outerstep", "run", "watch", "watched"],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        read_until(watching.stdout, "the run watched was created")
        first.child.process.send_signal(signal.SIGKILL)
        read_until(watching.stdout, "retrying")
    with serving(tmp_path / "data", port) as second:
        read_until(watching.stdout, "the coordinator is back")
        assert second.outerstep("run", "stop", "watched")[0] == 0
        read_until(watching.stdout, "run watched: the run is stopped")
        assert watching.wait(PATIENCE_S) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_background")
def test_interrupting_the_watching_is_quiet_and_leaves_the_run_alone(served: Served):
    create(served, "left-alone")
    environment = {"OUTERSTEP_URL": served.url, "OUTERSTEP_TOKEN": served.admin_token, "PYTHONUNBUFFERED": "1"}
    watching = subprocess.Popen(
        [sys.executable, "-m", "outerstep", "run", "watch", "left-alone"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    read_until(watching.stdout, "was created")
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=PATIENCE_S)
    assert (watching.returncode, err) == (130, "")
    assert read_run(served, "left-alone")["state"] == "seeding"
