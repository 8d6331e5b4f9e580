"""`outerstep coordinator backup|restore`, beside a coordinator that runs."""

import json
import re
from pathlib import Path

import pytest

from harness.coordinator import coordinator_thread
from harness.seaweedfs import SeaweedFS
from tests.outerstep.conftest import Served, outerstep, serving
from tests.outerstep.examples import SPEC


@pytest.mark.system
def test_backing_up_listing_and_restoring(tmp_path: Path):
    root, new = tmp_path / "backups", tmp_path / "new"
    with serving(tmp_path / "data") as served:
        assert served.outerstep("run", "create", "-", stdin=SPEC.replace("demo", "kept"))[0] == 0
        made = outerstep("coordinator", "backup", root, "--data-dir", served.data)
        assert made == (0, f"made backup 1 in {root}: kept at state 0\n", "")
        assert served.outerstep("run", "create", "-", stdin=SPEC.replace("demo", "later"))[0] == 0
        code, out, err = outerstep("coordinator", "backup", root, "--data-dir", served.data, "--backup-keep", 1)
        assert (code, out, err) == (0, f"made backup 2 in {root}: kept at state 0, later at state 0\n", "")
        assert outerstep("coordinator", "backup", root, "--data-dir", served.data)[0] == 0
        token = served.admin_token
    code, out, _ = outerstep("coordinator", "backup", root, "--list")
    assert (code, out.split()[:6]) == (0, ["backup", "made", "at", "runs", "lost", "blobs"])
    assert re.search(r"^3 +20\S+ \S+ +kept at state 0, later at state 0 +0 *$", out, re.MULTILINE)
    listed = json.loads(outerstep("coordinator", "backup", root, "--list", "--format", "json")[1])
    assert [(each["number"], each["lost"], len(each["runs"])) for each in listed] == [(3, [], 2), (2, [], 2)]

    code, out, err = outerstep("coordinator", "restore", root, "--data-dir", new, "--number", 2, "--new-admin-token")
    assert (code, err) == (0, "")
    assert re.search(rf"restored backup 2 of 20.* into {new}: kept at state 0, later at state 0", out)
    assert f"created an admin token: {new}/admin.token" in out
    with serving(new) as again:
        for secret in (token, again.admin_token):
            assert "later" in again.outerstep("run", "ls", token=secret)[1]
    found = [path for folder in (root, new) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_a_damaged_backup_is_shown_and_ends_with_3(tmp_path: Path, served: Served):
    root = tmp_path / "backups"
    back_up = ("coordinator", "backup", root, "--data-dir", served.data, "--format", "json")
    made = [json.loads(outerstep(*back_up)[1]) for _ in range(2)]
    assert [(each["number"], each["lost"]) for each in made] == [(1, []), (2, [])]
    manifest = root / "2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    code, out, err = outerstep("coordinator", "backup", root, "--list")
    assert (code, [line.split()[0] for line in out.strip().splitlines()[1:]]) == (3, ["1"])
    assert err == "outerstep: backup 2: its manifest is not what was written\n"
    options = ("--data-dir", tmp_path / "new", "--new-admin-token", "--format", "json")
    code, out, err = outerstep("coordinator", "restore", root, *options)
    restored = json.loads(out)
    assert (code, restored["made_at"], restored["runs"]) == (0, made[0]["made_at"], made[0]["runs"])
    assert restored["admin_token_file"] == f"{tmp_path}/new/admin.token"
    assert err.startswith("backup 2 is damaged, trying an older one: ")


@pytest.mark.slow
def test_those_beside_the_blobs_of_a_bucket(tmp_path: Path, store: SeaweedFS):
    url = store.url("backup-commands")
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        running.create_run(SPEC.replace("demo", "kept"))
        assert outerstep("coordinator", "backup", tmp_path / "b", "--data-dir", tmp_path / "data")[0] == 0
    with coordinator_thread(tmp_path / "data", blobs=url):
        pass
    code, out, _ = outerstep("coordinator", "backup", url, "--list")
    assert (code, re.findall(r"^(\d) .* 0 *$", out, re.MULTILINE)) == (0, ["2", "1"])
    given = ("coordinator", "restore", url, "--data-dir", tmp_path / "new")
    code, out, err = outerstep(*given, "--new-admin-token")
    assert (code, err) == (0, "")
    assert re.search(rf"restored backup 2 of 20.* into {tmp_path}/new: kept at state 0", out)
    with coordinator_thread(tmp_path / "new", blobs=url) as running, running.client() as admin:
        assert [each["name"] for each in admin.get("/v1/runs").json()["items"]] == ["kept"]
    code, out, err = outerstep(*given)
    assert (code, "has a database already: restore into a new directory" in err) == (3, True)
    code, _, err = outerstep("coordinator", "backup", store.url("nothing-there"), "--list")
    assert (code, "there is no backup in" in err) == (3, True)


@pytest.mark.slow
def test_into_a_bucket(tmp_path: Path, store: SeaweedFS):
    url = store.url("restore-command")
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(SPEC.replace("demo", "kept"))
        assert outerstep("coordinator", "backup", tmp_path / "b", "--data-dir", tmp_path / "data")[0] == 0
    given = ("coordinator", "restore", tmp_path / "b", "--blobs", url)
    assert outerstep(*given, "--data-dir", tmp_path / "new", "--new-admin-token")[::2] == (0, "")
    with coordinator_thread(tmp_path / "new", blobs=url) as running, running.client() as admin:
        assert [each["name"] for each in admin.get("/v1/runs").json()["items"]] == ["kept"]
    code, _, err = outerstep(*given, "--data-dir", tmp_path / "other")
    assert (code, f"the bucket {url} belongs to another coordinator: give another prefix" in err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("backup {tmp}/b --data-dir {tmp}/none", 2, "{tmp}/none does not exist: give --data-dir"),
        ("backup {tmp}/b --data-dir {tmp}", 3, "overlap: store backups in another directory"),
        ("backup {tmp}/b --data-dir {tmp}/empty", 2, "{tmp}/empty has no database, so it is not a coordinator's"),
        (
            "backup ftp://host/b --data-dir {tmp}/empty",
            2,
            "ftp://host/b is no directory: back up to a directory and copy",
        ),
        ("restore --data-dir {tmp}/new", 2, "Missing argument 'DIR|URL'"),
        ("restore s3://b --data-dir {tmp}/new --blobs s3://c", 2, "--blobs: the files stay in s3://b"),
        ("restore {tmp}/b --data-dir {tmp}/new --database postgresql+psycopg://me@host/runs", 2, "give --blobs URL"),
        (
            "restore {tmp}/b --data-dir {tmp}/new --database sqlite:////x.db",
            2,
            "--database: only a PostgreSQL database",
        ),
        ("backup {tmp}/b --backup-keep 0", 2, "--backup-keep"),
        ("backup {tmp}/none --list", 3, "there is no directory {tmp}/none"),
        ("backup {tmp}/empty --list", 3, "there is no backup in {tmp}/empty: `outerstep coordinator backup"),
        ("restore {tmp}/empty --data-dir {tmp}/new", 3, "there is no backup in {tmp}/empty"),
        ("--data-dir {tmp}/empty backup {tmp}/b", 2, "give --data-dir after `coordinator backup`, not before it"),
        (
            "--backup-dir ftp://host/b --data-dir {tmp}/empty",
            2,
            "--backup-dir = 'ftp://host/b': ftp://host/b is no directory",
        ),
    ],
)
def test_what_is_refused_with_a_sentence(tmp_path: Path, arguments: str, code: int, told: str):
    (tmp_path / "empty").mkdir()
    found = outerstep("coordinator", *arguments.format(tmp=tmp_path).split())
    assert found[0] == code
    assert told.format(tmp=tmp_path) in " ".join(found[2].split())


@pytest.mark.parametrize(
    ("variables", "arguments", "told"),
    [
        ({"BACKUP_EVERY_S": "60"}, "", "BACKUP_EVERY_S needs --backup-dir DIR or --blobs URL"),
        ({"BACKUP_KEEP": "3"}, "", "BACKUP_KEEP needs --backup-dir DIR"),
        ({"BLOBS_PUBLIC_URL": "https://cdn"}, "", "BLOBS_PUBLIC_URL needs --blobs URL"),
        ({"BACKUP_EVERY_S": "1h"}, "--backup-dir b", "BACKUP_EVERY_S = '1h': input should be a valid number"),
        ({"BACKUP_EVERY_S": "0"}, "--backup-dir b", "BACKUP_EVERY_S = '0': input should be greater than 0"),
        ({"BACKUP_KEEP": "0"}, "--backup-dir b", "BACKUP_KEEP = '0': input should be greater than or equal to 1"),
        ({"PORT": "eight"}, "--advertise-url loud", "PORT = 'eight': "),
        ({"PORT": "eight"}, "--advertise-url loud", "--advertise-url = 'loud': "),
        ({}, "--tls-key {key}", "--tls-key needs --tls-certificate"),
        ({}, "--database mysql://me:secret@db/runs", "mysql is not supported: use one of sqlite, postgresql"),
    ],
)
def test_settings_of_a_coordinator_are_refused_with_a_sentence(
    tmp_path: Path, variables: dict[str, str], arguments: str, told: str
):
    (tmp_path / "key.pem").touch()
    environment = {f"OUTERSTEP_COORDINATOR_{name}": value for name, value in variables.items()}
    words = arguments.format(key=tmp_path / "key.pem").split()
    code, _, err = outerstep("coordinator", "--data-dir", tmp_path / "data", *words, **environment)
    assert (code, told in " ".join(err.split())) == (2, True), err
    assert err.count("\n") == 1
    assert err.startswith("outerstep: ")
    assert "secret" not in err
    assert not (tmp_path / "data").exists()
