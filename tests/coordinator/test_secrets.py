"""Secrets of tokens: made, kept as hashes, listed without; the first admin token; the last one."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.tokens import secret_hash
from harness.coordinator import InThread, coordinator_thread
from outerstep.cli.errors import UsageError, validated
from protocol.messages import Scope
from tests.coordinator.crew import crew, problem


def test_the_last_admin_token_cannot_be_revoked(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, running.client() as admin:
        (first,) = admin.get("/v1/tokens").json()["items"]
        problem(admin.delete(f"/v1/tokens/{first['id']}"), "forbidden")
        second = admin.post("/v1/tokens", json={"scope": "admin"}).json()
        assert admin.delete(f"/v1/tokens/{first['id']}").status_code == 204
        problem(admin.get("/v1/tokens"), "unauthorized")
        with running.client(second["token"]) as other:
            problem(other.delete(f"/v1/tokens/{second['id']}"), "forbidden")


def test_tokens_made_at_the_same_time_all_work_and_are_listed_page_by_page(shared: InThread) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: shared.token(Scope.VIEWER), range(8)))
    assert len(set(made)) == 8
    for token in made:
        with shared.client(token) as client:
            assert client.get("/v1/runs").status_code == 200
    with shared.client() as admin:
        everything = [token["id"] for token in admin.get("/v1/tokens?limit=1000").json()["items"]]
        pages, after = [], ""
        while after is not None:
            page = admin.get(f"/v1/tokens?limit=3&after={after}").json()
            pages += [token["id"] for token in page["items"]]
            after = page["next"]
    assert pages == everything == sorted(everything)
    assert len(pages) > 8


@pytest.mark.in_sqlite
@pytest.mark.covers("security:secrets-at-rest")
def test_secrets_are_neither_in_the_database_nor_in_the_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with coordinator_thread(tmp_path / "data") as running:
        (member,) = crew(running, "r", ["w"])
        secrets = [running.admin_token, running.token(Scope.WORKER), member.joined.member_token]
        with running.client("ost_wrong-secret") as stranger:
            problem(stranger.get("/v1/runs"), "unauthorized")
    secrets.append("ost_wrong-secret")
    with sqlite3.connect(tmp_path / "data" / "outerstep.db") as database:
        assert database.execute("SELECT count(*) FROM tokens").fetchone() == (2,)
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file() and path.name != "admin.token"]
    assert tmp_path / "data" / "outerstep.db" in files
    for secret in secrets:
        assert not [path for path in files if secret.encode() in path.read_bytes()]
        # Our side of the log: the client's library logs nothing of headers either.
        assert secret not in caplog.text


def test_the_first_admin_token_is_in_a_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    stale = data / "admin.token"
    stale.write_text("left over\n")
    stale.chmod(0o644)
    with coordinator_thread(data) as running:
        assert stale.stat().st_mode & 0o777 == 0o600
        token = stale.read_text().strip()
        assert token == running.admin_token
    with coordinator_thread(data) as running, running.client() as admin:
        assert stale.read_text().strip() == token, "a later start makes no other"
        assert len(admin.get("/v1/tokens").json()["items"]) == 1


def test_the_first_admin_token_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own, other = "ost_" + "a" * 43, "ost_" + "b" * 43
    for secret in (own, own, other):
        monkeypatch.setenv("OUTERSTEP_COORDINATOR_ADMIN_TOKEN", secret)
        service = Coordinator(Settings(data_dir=tmp_path))
        found = service.tokens.find(secret_hash(own))
        assert found is not None
        assert found.scope is Scope.ADMIN
        assert service.tokens.find(secret_hash(other)) is None
        service.close()
    assert not (tmp_path / "admin.token").exists()
    assert "the admin token in the settings is ignored" in caplog.text
    assert own not in caplog.text
    monkeypatch.setenv("OUTERSTEP_COORDINATOR_ADMIN_TOKEN", "short-and-secret")
    with pytest.raises(UsageError, match="OUTERSTEP_COORDINATOR_ADMIN_TOKEN: a token is ost_ and 43") as refusal:
        validated(Settings, {})
    assert "short-and-secret" not in str(refusal.value)
