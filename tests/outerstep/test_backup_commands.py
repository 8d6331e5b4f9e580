"""`outerstep coordinator backup|restore`, beside a coordinator that runs."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.coordinator import coordinator_thread
from harness.seaweedfs import SeaweedFS
from outerstep.cli import app
from tests.outerstep.conftest import Served, serving
from tests.outerstep.examples import SPEC


def outerstep(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)), prog_name="outerstep")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.system
def test_backing_up_listing_and_restoring(tmp_path: Path):
    root, new = tmp_path / "backups", tmp_path / "new"
    with serving(tmp_path / "data") as served:
        assert served.outerstep("run", "create", "-", stdin=SPEC.replace("demo", "kept"))[0] == 0
        assert outerstep("coordinator", "backup", root, "--data", served.data) == (
            0,
            f"made backup 1 in {root}: kept at state 0\n",
            "",
        )
        assert served.outerstep("run", "create", "-", stdin=SPEC.replace("demo", "later"))[0] == 0
        code, out, err = outerstep("coordinator", "backup", root, "--data", served.data, "--keep", 1)
        assert (code, out, err) == (0, f"made backup 2 in {root}: kept at state 0, later at state 0\n", "")
        assert outerstep("coordinator", "backup", root, "--data", served.data)[0] == 0
        token = served.admin_token
    code, out, _ = outerstep("coordinator", "backup", root, "--list")
    assert (code, out.split()[:6]) == (0, ["backup", "made", "at", "runs", "lost", "blobs"])
    assert re.search(r"^3 +20\S+ \S+ +kept at state 0, later at state 0 +0 *$", out, re.MULTILINE)
    listed = json.loads(outerstep("coordinator", "backup", root, "--list", "--format", "json")[1])
    assert [(each["number"], each["lost"], len(each["runs"])) for each in listed] == [(3, [], 2), (2, [], 2)]

    code, out, err = outerstep("coordinator", "restore", root, "--data", new, "--backup", 2, "--new-admin-token")
    assert (code, err) == (0, "")
    assert re.search(rf"restored backup 2 of 20.* into {new}: kept at state 0, later at state 0", out)
    assert f"created an admin token: {new}/admin.token" in out
    with serving(new) as again:
        for secret in (token, again.admin_token):
            assert "later" in again.outerstep("run", "ls", token=secret)[1]
    found = [path for folder in (root, new) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_what_was_made_and_restored_as_json(tmp_path: Path):
    root, data, new = tmp_path / "backups", tmp_path / "data", tmp_path / "new"
    with coordinator_thread(data) as running:
        running.create_run(SPEC)
        code, out, _ = outerstep("coordinator", "backup", root, "--data", data, "--format", "json")
    made = json.loads(out)
    assert (code, made["number"], made["lost"]) == (0, 1, [])
    assert len(made["runs"]) == 1
    options = ("--data", new, "--new-admin-token", "--format", "json")
    code, out, _ = outerstep("coordinator", "restore", root, *options)
    restored = json.loads(out)
    assert (code, restored["made_at"], restored["runs"]) == (0, made["made_at"], made["runs"])
    assert restored["admin_token_file"] == f"{new}/admin.token"


def test_a_damaged_backup_is_shown_and_ends_with_3(tmp_path: Path, served: Served):
    root = tmp_path / "backups"
    for _ in range(2):
        outerstep("coordinator", "backup", root, "--data", served.data)
    manifest = root / "2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    code, out, err = outerstep("coordinator", "backup", root, "--list")
    assert (code, [line.split()[0] for line in out.strip().splitlines()[1:]]) == (3, ["1"])
    assert err == "outerstep: backup 2: its manifest is not what was written\n"
    code, out, err = outerstep("coordinator", "restore", root, "--data", tmp_path / "new")
    assert (code, out.startswith("restored backup 1")) == (0, True)
    assert err.startswith("backup 2 is damaged, trying an older one: ")


@pytest.mark.slow
def test_those_beside_the_blobs_of_a_bucket(tmp_path: Path, store: SeaweedFS):
    url = store.url("backup-commands")
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        running.create_run(SPEC.replace("demo", "kept"))
        assert outerstep("coordinator", "backup", tmp_path / "b", "--data", tmp_path / "data")[0] == 0
    with coordinator_thread(tmp_path / "data", blobs=url):
        pass
    code, out, _ = outerstep("coordinator", "backup", url, "--list")
    assert (code, re.findall(r"^(\d) .* 0 *$", out, re.MULTILINE)) == (0, ["2", "1"])
    given = ("coordinator", "restore", url, "--data", tmp_path / "new")
    code, out, err = outerstep(*given, "--new-admin-token")
    assert (code, err) == (0, "")
    assert re.search(rf"restored backup 2 of 20.* into {tmp_path}/new: kept at state 0", out)
    with coordinator_thread(tmp_path / "new", blobs=url) as running, running.client() as admin:
        assert [each["name"] for each in admin.get("/v1/runs").json()["items"]] == ["kept"]
    code, out, err = outerstep(*given)
    assert (code, "has a database already: restore into a new directory" in err) == (3, True)
    code, _, err = outerstep("coordinator", "backup", store.url("nothing-there"), "--list")
    assert (code, "there is no backup in" in err) == (3, True)


def test_into_a_bucket(tmp_path: Path, store: SeaweedFS):
    url = store.url("restore-command")
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(SPEC.replace("demo", "kept"))
        assert outerstep("coordinator", "backup", tmp_path / "b", "--data", tmp_path / "data")[0] == 0
    given = ("coordinator", "restore", tmp_path / "b", "--blobs", url)
    assert outerstep(*given, "--data", tmp_path / "new", "--new-admin-token")[::2] == (0, "")
    with coordinator_thread(tmp_path / "new", blobs=url) as running, running.client() as admin:
        assert [each["name"] for each in admin.get("/v1/runs").json()["items"]] == ["kept"]
    code, _, err = outerstep(*given, "--data", tmp_path / "other")
    assert (code, f"the bucket {url} belongs to another coordinator: give another prefix" in err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["backup", "{tmp}/b", "--data", "{tmp}/none"], 2, "{tmp}/none does not exist: give --data"),
        (["backup", "{tmp}/b", "--data", "{tmp}"], 3, "overlap: store backups in another directory"),
        (
            ["backup", "{tmp}/b", "--data", "{tmp}/empty"],
            2,
            "{tmp}/empty has no database, so it is not a coordinator's",
        ),
        (
            ["backup", "ftp://host/b", "--data", "{tmp}/empty"],
            2,
            "ftp://host/b is no directory: back up to a directory and copy that with rclone, or",
        ),
        (["restore", "--data", "{tmp}/new"], 2, "Missing argument 'DIR|URL'"),
        (["restore", "s3://b", "--data", "{tmp}/new", "--blobs", "s3://c"], 2, "--blobs: the files stay in s3://b. To"),
        (
            ["restore", "{tmp}/b", "--data", "{tmp}/new", "--database", "postgresql+psycopg://me@host/runs"],
            2,
            "--database: with PostgreSQL, the files are in a bucket: give --blobs URL",
        ),
        (
            ["restore", "{tmp}/b", "--data", "{tmp}/new", "--database", "sqlite:////x.db"],
            2,
            "--database: only a PostgreSQL database; one in the data directory needs no option",
        ),
        (["backup", "{tmp}/b", "--keep", "0"], 2, "--keep"),
        (["backup", "{tmp}/none", "--list"], 3, "there is no directory {tmp}/none"),
        (["backup", "{tmp}/empty", "--list"], 3, "there is no backup in {tmp}/empty: `outerstep coordinator backup"),
        (["restore", "{tmp}/empty", "--data", "{tmp}/new"], 3, "there is no backup in {tmp}/empty"),
        (["--data", "{tmp}/empty", "backup", "{tmp}/b"], 2, "give --data after `coordinator backup`, not before it"),
        (
            ["--backup", "ftp://host/b", "--data", "{tmp}/empty"],
            2,
            "--backup = 'ftp://host/b': ftp://host/b is no directory; with --blobs URL",
        ),
    ],
)
def test_what_is_refused_with_a_sentence(tmp_path: Path, arguments: list[str], code: int, told: str):
    (tmp_path / "empty").mkdir()
    found = outerstep("coordinator", *(each.format(tmp=tmp_path) for each in arguments))
    assert found[0] == code
    assert told.format(tmp=tmp_path) in " ".join(found[2].split())


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "told"),
    [
        ("BACKUP_EVERY_S", "60", [], "BACKUP_EVERY_S needs --backup DIR or --blobs URL"),
        ("BACKUP_KEEP", "3", [], "BACKUP_KEEP needs --backup DIR"),
        ("BLOBS_PUBLIC_URL", "https://cdn", [], "BLOBS_PUBLIC_URL needs --blobs URL"),
        ("BACKUP_EVERY_S", "1h", ["--backup", "b"], "BACKUP_EVERY_S = '1h': input should be a valid number"),
        ("BACKUP_EVERY_S", "0", ["--backup", "b"], "BACKUP_EVERY_S = '0': input should be greater than 0"),
        ("BACKUP_KEEP", "0", ["--backup", "b"], "BACKUP_KEEP = '0': input should be greater than or equal to 1"),
    ],
)
def test_settings_of_the_environment_are_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, arguments: list[str], told: str
):
    monkeypatch.setenv(f"OUTERSTEP_COORDINATOR_{variable}", value)
    code, _, err = outerstep("coordinator", "--data", tmp_path / "data", *arguments)
    assert (code, f"outerstep: OUTERSTEP_COORDINATOR_{told}" in " ".join(err.split())) == (2, True), err
    assert not (tmp_path / "data").exists()
