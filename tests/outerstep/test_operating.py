"""The operators' commands against a real coordinator."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from harness.coordinator import make_certificate
from harness.member import Member, spec_toml
from protocol.messages import FrozenSummary
from tests.outerstep.conftest import Served, serving
from tests.outerstep.examples import SPEC
from tests.support.python import python
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def test_a_run_is_created_once(served: Served, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(SPEC.replace("demo", "once"))
    assert "is created" in served.outerstep("run", "create", str(path))[1]
    code, out, _ = served.outerstep("run", "create", str(path))
    assert (code, "already exists" in out) == (0, True)
    other = SPEC.replace("demo", "once") + "outer.momentum = 0.5\n"
    code, out, err = served.outerstep("run", "create", "-", stdin=other)
    assert (code, out, err.startswith("outerstep: run-exists: ")) == (3, "", True)
    assert served.shown("run", "create", str(path))["name"] == "once"


def test_runs_are_listed_and_shown_as_table_and_json(served: Served):
    served.create("listed")
    code, table, _ = served.outerstep("run", "ls")
    assert (code, table.split()[:3]) == (0, ["run", "state", "round"])
    assert re.search(r"^listed +seeding +0/5 ", table, re.MULTILINE)
    runs = served.shown("run", "ls")
    assert "listed" in [run["name"] for run in runs]

    facts = served.outerstep("run", "show", "listed")[1]
    for expected in ("seeding: waiting for", "0 of 5, up to 10 inner steps each", "int8 up, int8 down"):
        assert expected in facts
    shown = served.shown("run", "show", "listed")
    assert sorted(shown) == ["rounds", "run", "workers"]
    assert (shown["rounds"], shown["workers"]) == ([], [])
    assert shown["run"]["spec"]["sync"]["inner_steps"] == 10


def test_what_is_trained_is_shown_beside_what_is_frozen(served: Served):
    served.create("base")
    spec = 'name = "adapted"\nsync.rounds = 1\nmodel = {pretrained = "llama", run = "base", lora.rank = 2}\n'
    assert served.outerstep("run", "create", "-", stdin=spec)[0] == 0
    frozen = FrozenSummary(digest="ab" * 32, elements=5_000_000)
    served.member("adapted").ask_to_join(frozen=frozen).raise_for_status()
    facts = " ".join(served.outerstep("run", "show", "adapted")[1].split())
    assert "llama with adapters of rank 2 from the run base, 977 parameters in 1 fragment, 5 M frozen" in facts


def test_a_whole_model_has_no_adapters_to_merge(served: Served, tmp_path: Path):
    served.create("whole")
    code, _, err = served.outerstep("run", "export", "whole", "--out", str(tmp_path / "out"), "--merge")
    assert (code, "the run whole has no adapters to merge: its export is the whole model" in err) == (3, True)
    assert not (tmp_path / "out").exists()


def test_checkpoints_are_listed(served: Served):
    served.create("kept")
    assert served.shown("run", "show", "kept", "--checkpoints") == []
    served.seeded("kept")
    code, table, _ = served.outerstep("run", "show", "kept", "--checkpoints")
    (kept,) = served.shown("run", "show", "kept", "--checkpoints")
    assert (code, table.split()[:4]) == (0, ["round", "at", "size", "digest"])
    assert (kept["round"], kept["bytes"] > 0) == (0, True)
    assert re.search(rf"^ +0 .*{kept['state_digest']}", table, re.MULTILINE)


def test_an_export_of_a_checkpoint_that_the_disk_has_lost_ends_and_says_so(served: Served, tmp_path: Path):
    """It asked again for ever, in silence."""
    served.create("lost")
    http = served.seeded("lost").http
    for file in (served.data / "runs" / "lost").glob("*/**/*"):
        if file.is_file():
            file.unlink()
    fragment = "/v1/runs/lost/checkpoints/0/fragments/0"
    wait_until(lambda: http.get(fragment).json()["type"].endswith("file-lost"))
    (kept,) = served.shown("run", "show", "lost", "--checkpoints")
    assert "missing on disk" in kept["damage"]
    assert "missing on disk" in " ".join(served.outerstep("run", "show", "lost", "--checkpoints")[1].split())
    code, _, err = served.outerstep("run", "export", "lost", "--out", str(tmp_path / "out"))
    assert (code, err.startswith("outerstep: file-lost: "), "from a backup" in err) == (3, True, True)


def test_pause_resume_and_stop(served: Served):
    served.create("steered")
    # a run without workers is drained at once
    for command, state in (("pause", "paused"), ("resume", "seeding"), ("drain", "paused"), ("stop", "stopped")):
        code, out, _ = served.outerstep("run", command, "steered")
        assert (code, out.startswith(f"run steered is {state}: ")) == (0, True)
        assert served.shown("run", "show", "steered")["run"]["state"] == state
    again = served.shown("run", "stop", "steered")
    assert (again["name"], again["state"]) == ("steered", "stopped")
    code, _, err = served.outerstep("run", "resume", "steered")
    assert (code, err.startswith("outerstep: run-ended: ")) == (3, True)


def test_workers_are_evicted_banned_and_readmitted_and_the_units_are_shown(served: Served):
    served.create("crewed")
    served.member("crewed").ask_to_join().raise_for_status()
    for action, state in (("evict", "evicted"), ("ban", "banned"), ("readmit", "readmitted")):
        code, out, _ = served.outerstep("run", "member", "crewed", "w", action)
        assert (code, out) == (0, f"worker w of run crewed is {state}\n")
        other = served.member("crewed", "v")
        assert other.ask_to_join().status_code == 200
        other.http.delete(other.path()).raise_for_status()
    released = served.shown("run", "member", "crewed", "w", "release")
    assert (released["name"], released["token"]) == ("w", None)
    assert served.outerstep("run", "member", "crewed", "ghost", "evict")[0] == 3
    code, table, _ = served.outerstep("run", "show", "crewed", "--units")
    assert (code, table.split()[:3]) == (0, ["epoch", "units", "trained"])
    assert served.shown("run", "show", "crewed", "--units") == []


def test_workers_are_listed_and_each_is_shown_in_full(served: Served):
    assert served.outerstep("run", "create", "-", stdin=spec_toml("staffed", min_workers=1))[0] == 0
    told = served.member("staffed", "box-2")
    told.ask_to_join(host={"device": "cuda:0: Some GPU", "threads": 8}).raise_for_status()
    told.http.delete(told.path()).raise_for_status()
    worker = served.seeded("staffed", "box-1")
    assignment = worker.take_part(0)
    worker.step(0)
    report = {"round": 0, "epoch": worker.joined.epoch, "upload_bytes": 5000, "download_bytes": 7000}
    asked = {"state_round": 1, "report": report | {"seconds": {"train": 75.0, "sync": 25.0}}}
    worker.http.put(worker.path("/assignment"), json=asked).raise_for_status()
    metrics = {"round": 1, "inner_step": 3, "phase": "train", "tokens_per_second": 4321.0, "upload_bytes": 6000}
    worker.http.put(worker.path("/lease"), json=metrics).raise_for_status()

    code, table, _ = served.outerstep("run", "show", "staffed", "--workers")
    header, first, second = table.splitlines()
    assert (code, header.split()) == (
        0,
        ["worker", "state", "device", "tokens", "tokens/s", "up", "down", "score", "quarantine", "seen"],
    )
    assert re.search(r"^box-1 +live +– +\d+ +4\.32 k +6 kB +0 B +1\.00 +– +\d+\.\d s ago$", first), first
    assert re.search(r"^box-2 +left +cuda:0: Some GPU +0 +– +0 B +0 B +1\.00 +– +–$", second.rstrip()), second
    listed = served.shown("run", "show", "staffed", "--workers")
    assert [each["name"] for each in listed] == ["box-1", "box-2"]

    code, facts, _ = served.outerstep("run", "show", "staffed", "--worker", "box-1")
    assert code == 0
    for fact in (
        r"^state +live *$",
        r"^doing +train *$",
        r"^round +1, inner step 3 *$",
        r"^moved +5 kB up, 7 kB down *$",
        r"^time +1 min 40 s: train 75%, sync 25% *$",
        r"^score +1\.00 *$",
        r"^ +0 +2 of 2 +1\.00 +– +– +1 min 40 s",
    ):
        assert re.search(fact, facts, re.MULTILINE), f"{fact}\n{facts}"
    document = served.shown("run", "show", "staffed", "--worker", "box-1")
    taken = next(each for each in document["rounds"] if each["round"] == 0)
    assert (document["worker"]["name"], assignment.round) == ("box-1", 0)
    assert {fragment: verdict["factor"] for fragment, verdict in taken["verdicts"].items()} == {"0": 1.0, "1": 1.0}
    assert (taken["late"], taken["account"]["upload_bytes"]) == ({}, 5000)

    facts = served.outerstep("run", "show", "staffed", "--worker", "box-2")[1]
    assert re.search(r"^its device +cuda:0: Some GPU *$", facts, re.MULTILINE)
    assert "fragments" not in facts, "it took part in no round"
    code, out, err = served.outerstep("run", "show", "staffed", "--worker", "ghost")
    assert (code, out, err.startswith("outerstep: not-found: ")) == (3, "", True)


def test_what_is_not_there_is_refused(served: Served):
    for command in (["run", "show", "nothing"], ["run", "watch", "nothing"], ["run", "stop", "nothing"]):
        code, out, err = served.outerstep(*command)
        assert (code, out, err.startswith("outerstep: not-found: ")) == (3, "", True)
    assert served.outerstep("token", "revoke", "nothing")[0] == 3


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


def test_a_token_says_what_it_is_for(served: Served):
    served.create("for-one")
    options = ["--scope", "join", "--run", "for-one", "--uses", "3", "--expires", "12h"]
    made = served.shown("token", "create", *options)
    assert (made["run"], made["uses"], made["used"]) == ("for-one", 3, 0)
    assert made["expires_at"] - made["created_at"] == 12 * 3600
    assert made["token"].startswith("ostj_")
    assert served.shown("token", "create", "--scope", "worker")["names"] == 1
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
    made = served.shown("token", "create", "--scope", "viewer")
    code, secret, said = served.outerstep("token", "rotate", made["id"])
    assert (code, said.split()[1]) == (0, made["id"])
    assert served.outerstep("run", "ls", token=secret.strip())[0] == 0
    assert served.outerstep("run", "ls", token=made["token"])[0] == 3
    assert served.outerstep("token", "rotate", "nothing")[0] == 3


def test_the_audit_tells_who_did_what(served: Served):
    served.create("audited")
    made = served.shown("token", "create", "--scope", "operator")
    assert served.outerstep("run", "pause", "audited", token=made["token"])[0] == 0
    assert served.outerstep("token", "ls", "--audit", token=made["token"])[0] == 3
    newest, *_ = served.shown("token", "ls", "--audit")
    assert (newest["act"], newest["token"], newest["run"]) == ("run-changed", made["id"], "audited")
    lines = served.outerstep("token", "ls", "--audit", "--limit", "2")[1].strip().splitlines()
    assert re.search(rf"{made['id']} +127\.0\.0\.1 +run-changed +audited +set the run to paused", lines[1])
    assert len(lines) == 3


@pytest.mark.system
@pytest.mark.covers("security:secrets-at-rest")
def test_what_a_coordinator_writes_is_for_its_user_alone(tmp_path: Path):
    with serving(tmp_path / "data", "0", "--log-file", str(tmp_path / "log")) as served:
        served.create("mine")
        served.seeded("mine")
        found = [tmp_path / "log", *(path for path in served.data.rglob("*"))]
        assert len(found) > 10
        assert [path for path in found if path.stat().st_mode & 0o077] == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ("--data-dir {tmp} --port {taken}", 2, "{taken} from {tmp}: address already in use; give another --port"),
        ("--data-dir {served} --port 0", 3, "in use by another coordinator"),
        ("--data-dir {tmp}/file --port 0", 2, "{tmp}/file is not a directory"),
        ("--data-dir {tmp}/data --host coordinator.invalid", 2, "its name is not known here"),
        ("--data-dir {tmp}/data --port 0 --log-file {tmp}", 2, "--log-file: {tmp}: is a directory"),
    ],
)
def test_a_coordinator_that_cannot_serve_says_why(served: Served, tmp_path: Path, options: str, code: int, told: str):
    (tmp_path / "file").touch()
    places = {"tmp": tmp_path, "taken": served.port, "served": served.data}
    done = python("-m", "outerstep", "coordinator", *options.format(**places).split())
    assert (done.returncode, told.format(**places) in done.stderr) == (code, True), done.stderr
    assert not re.search("Errno|Traceback", done.stderr)


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
        data = ["--data-dir", str(tmp_path / "data"), "--port", "0"]
        code, _, err = served.outerstep("coordinator", *data, "--tls-certificate", str(certificate), *keys)
        assert (code, err) == (2, f"outerstep: {told}\n")
    assert not (tmp_path / "data").exists()


@pytest.mark.system
def test_a_log_of_json_says_of_which_request_run_worker_and_round_a_line_is(tmp_path: Path):
    log = tmp_path / "coordinator.log"
    options, in_json = ("--log-level", "debug", "--log-file", str(log)), {"OUTERSTEP_COORDINATOR_LOG_FORMAT": "json"}
    with serving(tmp_path / "data", "0", *options, **in_json) as served:
        served.create("told")
        with served.client(**{"X-Request-Id": "from-a-proxy"}) as http:
            Member(http, "told", "w").ask_to_join().raise_for_status()
            assert http.get("/v1/runs/told/rounds/7").headers["X-Request-Id"] == "from-a-proxy"
            wait_until(lambda: "/rounds/7" in log.read_text())
        assert "the run told was created" in served.child.log.read_text(), "as in the file"
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


def test_an_ended_run_is_removed_after_a_question(served: Served):
    served.create("old")
    code, _, err = served.outerstep("run", "rm", "old", "--yes")
    assert (code, "run-not-ended: the run old is running; stop it first" in err) == (3, True), err
    assert served.outerstep("run", "stop", "old")[0] == 0
    code, _, err = served.outerstep("run", "rm", "old", stdin="n\n")
    assert (code, "Remove the run old" in err, "nothing was changed" in err) == (3, True, True), err
    code, _, err = served.outerstep("run", "rm", "old", stdin="")
    assert (code, "give --yes" in err) == (2, True), err
    assert served.shown("run", "show", "old")["run"]["state"] == "stopped"
    code, out, _ = served.outerstep("run", "rm", "old", stdin="y\n")
    assert (code, out.splitlines()[-1]) == (0, "run old is removed")
    assert served.outerstep("run", "show", "old")[0] == 3
    served.create("old")
