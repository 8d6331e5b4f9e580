"""Who may do what: every address of the REST interface with every kind of token, as docs/rest.md says."""

import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.coordinator import InThread, coordinator_thread
from benchmarks.harness.member import Member, spec_toml
from coordinator.app import create_app
from protocol.messages import Scope
from tests.coordinator.crew import crew, enlist, problem

ROOT = Path(__file__).parents[2]
KINDS = ["none", "unknown", "admin", "worker", "viewer", "member", "another member", "member of another run"]
READERS = {"admin", "worker", "viewer", "member", "another member"}

# The column "who" of docs/rest.md -> the kinds of token that it means.
MAY: dict[str, set[str]] = {
    "anybody": set(KINDS),
    "any": READERS,
    "admin": {"admin"},
    "worker": {"admin", "worker"},
    "member": {"member"},
    "member, admin": {"admin", "member"},
}


def documented() -> list[tuple[str, str, str]]:
    """(method, path, who) of every address that docs/rest.md lists."""
    page = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([A-Z]+) (/\S+)` \| ([^|]+?) \|", page, re.MULTILINE)


@dataclass
class Scene:
    """A run with two members, another run with one, and a token of every kind."""

    running: InThread
    http: httpx.Client
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def scene(shared: InThread) -> Iterator[Scene]:
    a, b = crew(shared, "here", ["a", "b"])
    a.assignment(0)
    (elsewhere,) = crew(shared, "elsewhere", ["a"])
    tokens = {
        "unknown": "ost_unknown",
        "admin": shared.admin_token,
        "worker": shared.token(Scope.WORKER),
        "viewer": shared.token(Scope.VIEWER),
        "member": a.joined.member_token,
        "another member": b.joined.member_token,
        "member of another run": elsewhere.joined.member_token,
    }
    with shared.client() as http:
        del http.headers["Authorization"]
        yield Scene(shared, http, tokens)


def ask(scene: Scene, method: str, path: str, kind: str) -> httpx.Response:
    names = {"run": "here", "worker": "a", "n": "0", "p": "0", "token_id": "nothing"}
    token = scene.tokens.get(kind)
    if (method, path, kind) == ("DELETE", "/v1/runs/{run}/workers/{worker}", "member"):
        leaver = enlist(scene.running, "here", "leaver")  # who really leaves
        token, names["worker"] = leaver.joined.member_token, "leaver"
    elif method == "DELETE" and path.endswith("/workers/{worker}"):
        names["worker"] = "ghost"
    elif path == "/v1/runs/{run}/checkpoints/{n}/fragments/{p}":
        names["n"] = "0"
    body: dict[str, object] | None = None if method in ("GET", "DELETE") else {}
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return scene.http.request(method, path.format(**names), json=body, headers=headers)


def test_the_table_covers_every_address(scene: Scene) -> None:
    paths = create_app(scene.running.coordinator).openapi()["paths"]
    assert len(documented()) == sum(len(methods) for methods in paths.values())
    assert {who for _, _, who in documented()} == set(MAY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "path", "who"), documented(), ids=lambda value: str(value))
def test_every_address_answers_every_token_as_documented(
    scene: Scene, method: str, path: str, who: str, kind: str
) -> None:
    reply = ask(scene, method, path, kind)
    allowed = kind in MAY[who]
    if path == "/v1/runs" and method == "GET" and kind == "member of another run":
        allowed = True  # it sees its own run
    if path.endswith("/evaluation") or path.startswith("/v1/runs/{run}/checkpoints/0"):
        allowed = allowed or kind == "another member"  # of this run, too: the address names no worker
    if allowed:
        assert reply.status_code not in (401, 403, 405, 500), reply.text
    elif kind in ("none", "unknown"):
        problem(reply, "unauthorized")
        assert reply.headers["www-authenticate"] == "Bearer"
    else:
        problem(reply, "forbidden")


def test_a_member_sees_only_its_own_run_in_the_list(scene: Scene) -> None:
    for kind, names in [
        ("member", ["here"]),
        ("member of another run", ["elsewhere"]),
        ("viewer", ["elsewhere", "here"]),
    ]:
        listed = ask(scene, "GET", "/v1/runs", kind).json()["items"]
        assert [run["name"] for run in listed] == names


def test_a_revoked_token_is_refused_from_then_on_and_its_members_stay(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    with shared.client() as admin:
        made = admin.post("/v1/tokens", json={"scope": "worker", "note": "box 7"}).json()
        member = Member(shared.client(), run, "w")
        member.join(made["token"])
        listed = {token["id"]: token for token in admin.get("/v1/tokens").json()["items"]}
        assert listed[made["id"]]["note"] == "box 7"
        assert "token" not in listed[made["id"]]
        assert admin.delete(f"/v1/tokens/{made['id']}").status_code == 204
        problem(admin.delete(f"/v1/tokens/{made['id']}"), "not-found")
        assert made["id"] not in [token["id"] for token in admin.get("/v1/tokens").json()["items"]]
    with shared.client(made["token"]) as revoked:
        problem(revoked.get("/v1/runs"), "unauthorized")
    assert member.http.put(member.path("/lease"), json={}).status_code == 200


def test_the_last_admin_token_cannot_be_revoked(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, running.client() as admin:
        (first,) = admin.get("/v1/tokens").json()["items"]
        problem(admin.delete(f"/v1/tokens/{first['id']}"), "forbidden")
        second = admin.post("/v1/tokens", json={"scope": "admin"}).json()
        assert admin.delete(f"/v1/tokens/{first['id']}").status_code == 204
        problem(admin.get("/v1/tokens"), "unauthorized")
        with running.client(second["token"]) as other:
            problem(other.delete(f"/v1/tokens/{second['id']}"), "forbidden")


def test_tokens_made_at_the_same_time_all_work(shared: InThread) -> None:
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(shared.token(Scope.VIEWER))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(made)) == 8
    for token in made:
        with shared.client(token) as client:
            assert client.get("/v1/runs").status_code == 200


def test_tokens_are_listed_page_by_page(shared: InThread) -> None:
    with shared.client() as admin:
        everything = [token["id"] for token in admin.get("/v1/tokens?limit=1000").json()["items"]]
        pages, after = [], ""
        while after is not None:
            page = admin.get(f"/v1/tokens?limit=3&after={after}").json()
            pages += [token["id"] for token in page["items"]]
            after = page["next"]
    assert pages == everything == sorted(everything)


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
