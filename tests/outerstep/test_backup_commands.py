"""`outerstep coordinator backup|backups|restore`, beside a coordinator that runs."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outerstep.cli import app
from tests.outerstep.conftest import Served, serving
from tests.outerstep.examples import SPEC


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


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
            f"made backup 1 in {root}: 0 new of 0 blobs, 0 B\n",
            "",
        )
        assert served.outerstep("run", "create", "-", stdin=SPEC.replace("demo", "later"))[0] == 0
        code, out, err = outerstep("coordinator", "backup", root, "--data", served.data, "--keep", 1)
        assert (code, out.splitlines()[1:], err) == (0, ["removed backup 1; --keep 1"], "")
        assert outerstep("coordinator", "backup", root, "--data", served.data)[0] == 0
        token = served.admin_token
    code, out, _ = outerstep("coordinator", "backups", root)
    assert (code, out.split()[:7]) == (0, ["backup", "made", "at", "runs", "bytes", "blobs", "state"])
    assert re.search(r"^3 +20\S+ \S+ +kept 0, later 0 +.* intact$", out, re.MULTILINE)
    listed = json.loads(outerstep("coordinator", "backups", root, "--format", "json")[1])
    assert [(each["number"], each["damage"], len(each["runs"])) for each in listed] == [(3, "", 2), (2, "", 2)]

    code, out, err = outerstep("coordinator", "restore", root, "--data", new, "--backup", 2, "--new-admin-token")
    assert (code, err) == (0, "")
    assert re.search(rf"restored backup 2 of 20.* into {new}: kept at state 0, later at state 0", out)
    assert f"created an admin token: {new}/admin.token" in out
    with serving(new) as again:
        for secret in (token, again.admin_token):
            assert "later" in again.outerstep("run", "ls", token=secret)[1]
    found = [path for folder in (root, new) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_what_was_made_and_restored_as_json(tmp_path: Path, served: Served):
    root, new = tmp_path / "backups", tmp_path / "new"
    code, out, _ = outerstep("coordinator", "backup", root, "--data", served.data, "--format", "json")
    made = json.loads(out)
    assert (code, made["number"], made["copied_blobs"], made["removed"], made["lost"]) == (0, 1, 0, [], [])
    options = ("--data", new, "--new-admin-token", "--format", "json")
    code, out, _ = outerstep("coordinator", "restore", root, *options)
    restored = json.loads(out)
    assert (code, restored["made_at"], restored["runs"]) == (0, made["made_at"], made["runs"])
    assert restored["admin_token_file"] == f"{new}/admin.token"


def test_a_damaged_backup_is_shown_and_ends_with_3(tmp_path: Path, served: Served):
    root = tmp_path / "backups"
    for _ in range(2):
        outerstep("coordinator", "backup", root, "--data", served.data)
    database = root / "backups" / "2.db"
    database.write_bytes(database.read_bytes()[:-1] + b"?")
    code, out, err = outerstep("coordinator", "backups", root)
    assert code == 3
    assert [line.split()[-1] for line in out.strip().splitlines()[1:]] == ["damaged", "intact"]
    assert err.startswith(f"outerstep: backup 2: {database} is missing or damaged. Do not rely on it: restore another")
    code, out, err = outerstep("coordinator", "restore", root, "--data", tmp_path / "new")
    assert (code, out.startswith("restored backup 1")) == (0, True)
    assert err.startswith("backup 2 is damaged, trying an older one: ")


@pytest.mark.system
def test_a_bucket_in_the_place_of_a_directory(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
    pytest.importorskip("moto", reason="no S3 server for tests: pip install 'moto[s3]' flask flask-cors")
    from tests.support.s3_server import BUCKET, s3_server

    url, new = f"s3://{BUCKET}/deep/er", tmp_path / "new"
    with s3_server() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        code, out, err = outerstep("coordinator", "backup", f"{url}/", "--data", served.data)
        assert (code, out.startswith(f"made backup 1 in {url}: 0 new of 0 blobs"), err) == (0, True, "")
        assert re.search(r"^1 +20\S+ .* intact$", outerstep("coordinator", "backups", url)[1], re.MULTILINE)
        code, out, err = outerstep("coordinator", "restore", url, "--data", new, "--new-admin-token")
        assert (code, out.startswith("restored backup 1"), err) == (0, True, "")
        manifest = s3.read("deep/er/backups/1.json")
        s3.write("deep/er/backups/1.json", manifest[:-1])
        code, _, err = outerstep("coordinator", "backups", url)
        assert (code, "backup 1: its manifest is not what was written" in err) == (3, True)
        s3.fault = lambda request: (403, "AccessDenied") if request.method == "GET" else None
        code, _, err = outerstep("coordinator", "restore", url, "--data", tmp_path / "other")
        assert (code, f"this machine may not list {url}" in err) == (3, True)
    with serving(new) as again:
        assert again.outerstep("run", "ls")[0] == 0


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
            "ftp://host/b: backups go to a directory, or to a URL",
        ),
        (["restore", "https://host/b", "--data", "{tmp}/new"], 2, "https://host/b: backups go to a directory, or"),
        (["backup", "{tmp}/b", "--keep", "0"], 2, "--keep"),
        (["backups", "{tmp}/none"], 3, "there is no directory {tmp}/none"),
        (["backups", "{tmp}/empty"], 3, "there is no backup in {tmp}/empty: `outerstep coordinator backup"),
        (["restore", "{tmp}/empty", "--data", "{tmp}/new"], 3, "there is no backup in {tmp}/empty"),
        (["--data", "{tmp}/empty", "backup", "{tmp}/b"], 2, "give --data after `coordinator backup`, not before it"),
        (["--backup-every", "1h"], 2, "--backup-every and --backup-keep need --backup DIR|URL"),
        (
            ["--backup", "ftp://host/b", "--data", "{tmp}/empty"],
            3,
            "ftp://host/b: backups go to a directory, or to a URL",
        ),
        (["--backup", "{tmp}/b", "--backup-every", "soon"], 2, "--backup-every: 'soon' is not a time such as 30min"),
        (["--backup", "{tmp}/b", "--backup-every", "0"], 2, "--backup-every = 0.0: input should be greater than 0"),
        (["--backup", "{tmp}/b", "--backup-keep", "0"], 2, "--backup-keep"),
    ],
)
def test_what_is_refused_with_a_sentence(tmp_path: Path, arguments: list[str], code: int, told: str):
    (tmp_path / "empty").mkdir()
    found = outerstep("coordinator", *(each.format(tmp=tmp_path) for each in arguments))
    assert found[0] == code
    assert told.format(tmp=tmp_path) in " ".join(found[2].split())
