"""What holds at every address: problems, request ids, limits, paging, OpenAPI with local assets, health."""

import base64
import hashlib
import http.client
import json
import re
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from sqlalchemy import text

from coordinator.api.app import create_app
from coordinator.http.bodies import LimitedRoute, max_body
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member, spec_toml
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.messages import WorkerChange
from protocol.spec.run import MAX_SPEC_BYTES
from tests.coordinator.crew import crew, info, pages, play_rounds, problem
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def admin(shared: InThread) -> Iterator[httpx.Client]:
    with shared.client() as client:
        yield client


@pytest.fixture(scope="module")
def member(shared: InThread) -> Member:
    (member,) = crew(shared, "r", ["w"], rounds=9)
    member.assignment(0)
    return member


# --- problems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "slug"),
    [
        ("GET", "/nowhere", "not-found"),
        ("GET", "/v1/nowhere", "not-found"),
        ("GET", "/v1/runs/none", "not-found"),
        ("GET", "/v1/runs/UPPER", "invalid-message"),
        ("GET", "/v1/runs/r/workers/none", "not-found"),
        ("GET", "/v1/runs/r/rounds/7", "not-found"),
        ("GET", "/v1/runs/r/rounds/x", "invalid-message"),
        ("GET", "/v1/runs/r/rounds/-1/fragments/0/delta", "invalid-message"),
        ("GET", f"/v1/runs/r/rounds/{1 << 63}/fragments/0/delta", "invalid-message"),
        ("GET", f"/v1/runs/r/rounds/{(1 << 63) - 1}/fragments/0/delta", "not-published"),
        ("GET", f"/v1/runs/r/rounds/0/fragments/{(1 << 63) - 1}/delta", "not-found"),
        ("GET", "/v1/runs/r/checkpoints/7", "not-found"),
        ("GET", "/v1/runs/r/checkpoints/7/fragments/0", "not-found"),
        ("GET", "/v1/runs/r/checkpoints/latest/fragments/0", "invalid-message"),
        ("GET", f"/v1/runs/r/rounds?after={10**30}", "invalid-message"),
        ("GET", f"/v1/runs/r/checkpoints?after={10**30}", "invalid-message"),
        ("GET", "/v1/runs?limit=0", "invalid-message"),
        ("GET", "/v1/runs?limit=1001", "invalid-message"),
        ("POST", "/v1/runs/r", "method-not-allowed"),
        ("DELETE", "/v1/runs", "method-not-allowed"),
        ("HEAD", "/v1/runs/r/rounds/7/fragments/0/delta", "not-published"),
        ("DELETE", "/v1/tokens/none", "not-found"),
    ],
)
def test_errors_are_problems(admin: httpx.Client, member: Member, method: str, path: str, slug: str) -> None:
    reply = admin.request(method, path)
    if method == "HEAD":
        assert reply.status_code == PROBLEMS[slug].status
    else:
        assert problem(reply, slug)["detail"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is not JSON: Expecting property name"),
        (b'{"scope": "king"}', "scope: input should be 'admin', 'operator', 'worker', 'viewer' or 'join'"),
        (b'{"note": "x"}', "scope: this key is missing"),
        (b'{"scope": "admin", "colour": "red"}', "colour: unknown key"),
    ],
)
def test_a_malformed_message_is_refused_with_the_key_and_what_is_wrong(
    admin: httpx.Client, body: bytes, said: str
) -> None:
    reply = admin.post("/v1/tokens", content=body, headers={"Content-Type": "application/json"})
    assert said in problem(reply, "invalid-message")["detail"]


@pytest.mark.slow
def test_every_json_request_but_metrics_refuses_unknown_keys(admin: httpx.Client, member: Member) -> None:
    names = {"run": "r", "worker": member.name}
    takes_json = [
        (method, re.sub(r"\{(\w+)\}", lambda each: names.get(each[1], "0"), path))
        for path, methods in admin.get("/openapi.json").json()["paths"].items()
        for method, operation in methods.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    assert len(takes_json) > 5
    created = admin.post("/v1/tokens", json={"scope": "join"}).raise_for_status().json()
    box = {"Authorization": f"Bearer {created['token']}"}
    for method, path in takes_json:
        replies = [client.request(method, path, json={"surprise": 1}) for client in (admin, member.http)]
        replies.append(admin.request(method, path, json={"surprise": 1}, headers=box))
        allowed = [reply for reply in replies if reply.status_code != 403]
        assert allowed, (method, path)
        if path.endswith("/lease"):  # no worker is to lose it for a figure that an older coordinator cannot show
            assert [reply.status_code for reply in allowed] == [200]
            continue
        for reply in allowed:
            assert "surprise: unknown key" in problem(reply, "invalid-message")["detail"]


def test_numbers_that_json_has_not_are_refused(member: Member) -> None:
    for loss in ("NaN", "Infinity", "1e999"):
        body = f'{{"loss": {loss}, "tokens": 1}}'.encode()
        reply = member.http.put(
            "/v1/runs/r/rounds/0/evaluation", content=body, headers={"Content-Type": "application/json"}
        )
        problem(reply, "invalid-message")


def test_an_evaluation_of_a_state_that_does_not_exist_yet_is_refused(member: Member) -> None:
    problem(member.report_loss(5, 1.0), "round-not-open")


@pytest.mark.parametrize(
    ("spec", "slug", "said"),
    [
        (b"\xff", "invalid-spec", "UTF-8"),
        (spec_toml("x", rounds=-1).encode(), "invalid-spec", "sync.rounds = -1"),
        (
            b'name = "x"\nmodel = {preset = "tiny", run = "y"}\nsync.rounds = 1',
            "invalid-spec",
            "model.run = 'y': there",
        ),
        (b"#" * (MAX_SPEC_BYTES + 1), "payload-too-large", "65536"),
        (spec_toml("r", rounds=5).encode(), "run-exists", "another spec"),
    ],
)
def test_a_spec_that_cannot_be_run_is_refused_with_key_and_value(
    admin: httpx.Client, member: Member, spec: bytes, slug: str, said: str
) -> None:
    assert said in problem(admin.post("/v1/runs", content=spec), slug)["detail"]
    assert admin.get("/v1/runs/x").status_code == 404


def test_a_run_that_is_not_there_is_told_with_those_that_are(admin: httpx.Client, run: str) -> None:
    admin.post("/v1/runs", content=spec_toml(run).encode()).raise_for_status()
    detail = problem(admin.get(f"/v1/runs/{run}x"), "not-found")["detail"]
    assert detail.startswith(f"there is no run {run}x; runs here: {run}")


def test_the_same_spec_again_is_the_same_run_and_it_is_kept_byte_for_byte(admin: httpx.Client, run: str) -> None:
    spec = spec_toml(run) + "\n# grüße\r\n"
    assert admin.post("/v1/runs", content=spec.encode()).status_code == 201
    again = admin.post("/v1/runs", content=spec.encode())
    assert (again.status_code, again.json()["name"]) == (200, run)
    assert admin.get(f"/v1/runs/{run}/spec").content == spec.encode()


@pytest.mark.in_sqlite
def test_an_unforeseen_fault_is_a_problem_with_the_request_id_that_the_log_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with coordinator_thread(tmp_path / "data") as running, running.client() as client:
        running.create_run(spec_toml("r"))
        with sqlite3.connect(tmp_path / "data" / "outerstep.db") as database:
            database.execute("DROP TABLE rounds")
        reply = client.get("/v1/runs/r/rounds", headers={"X-Request-Id": "find-me"})
        detail = problem(reply, "internal")["detail"]
        assert "find-me" in detail
        assert "rounds" not in detail, "innards are for the log"
        assert reply.headers["x-request-id"] == "find-me"
    assert "request find-me: GET /v1/runs/r/rounds failed" in caplog.text


# --- request ids and limits ---------------------------------------------------------------------------------------


def test_every_answer_carries_a_request_id_the_clients_own_where_it_is_decent(admin: httpx.Client) -> None:
    for path in ("/healthz", "/v1/runs", "/docs", "/nowhere"):
        assert admin.get(path, headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        for indecent in ("x" * 65, "a b", 'a"'):
            made = admin.get(path, headers={"X-Request-Id": indecent}).headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{32}", made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [
        ("POST", "/v1/tokens", 16 << 10),
        ("POST", "/v1/runs", MAX_SPEC_BYTES),
        ("PUT", "/v1/runs/fragments/workers/fragments", 16 << 20),
        ("PUT", "/v1/runs/a/workers/assignment", 16 << 20),
        ("PUT", "/v1/runs/a/workers/b/assignment", 4 << 20),
        ("PUT", "/v1/runs/a/workers/fragments/lease", 16 << 10),
        ("DELETE", "/v1/runs/a/workers/b", 16 << 10),
    ],
)
@pytest.mark.parametrize("announced", [True, False], ids=["with Content-Length", "chunked"])
def test_a_message_over_the_limit_of_its_address_is_refused(
    admin: httpx.Client, method: str, path: str, limit: int, announced: bool
) -> None:
    for size in (limit, limit + 1):
        content = b" " * size
        headers = {"Content-Type": "application/json"} | ({"Content-Length": str(size)} if announced else {})
        pieces = (content[start : start + (1 << 16)] for start in range(0, size, 1 << 16))
        reply = admin.request(method, path, content=pieces, headers=headers)
        if size > limit:
            assert str(limit) in problem(reply, "payload-too-large")["detail"]
        else:
            assert reply.status_code in (403, 422), reply.text


def ask_and_wait(running: InThread, method: str, path: str, *headers: str) -> tuple[http.client.HTTPResponse, Any]:
    """The answer, and its document, to a request of which the headers alone are sent. Then the line must be cut."""
    address = httpx.URL(running.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as line:
        line.sendall("\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {address.host}", *headers, "", ""]).encode())
        answer = http.client.HTTPResponse(line)
        answer.begin()
        document = json.loads(answer.read())
        assert line.recv(1) == b"", "the connection goes on"
    return answer, document


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/tokens"),
        ("PUT", "/v1/runs/r/rounds/0/fragments/0/contributions/w"),
        ("PATCH", "/v1/nowhere"),
    ],
)
@pytest.mark.parametrize("body", [f"Content-Length: {1 << 40}", "Transfer-Encoding: chunked"], ids=["huge", "endless"])
@pytest.mark.parametrize("token", [None, "Bearer ost_unknown"])
def test_whoever_shows_no_token_is_refused_before_a_byte_of_the_body(
    shared: InThread, method: str, path: str, body: str, token: str | None
) -> None:
    authorization = [] if token is None else [f"Authorization: {token}"]
    answer, document = ask_and_wait(shared, method, path, body, *authorization)
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert document["type"] == PROBLEM_PREFIX + "unauthorized"


@pytest.mark.slow
def test_every_address_limits_what_it_reads(shared: InThread) -> None:
    """With a good token, and a body that is announced to be huge: no address reads a byte of it."""
    authorization = f"Authorization: Bearer {shared.admin_token}"
    paths = create_app(shared.coordinator).openapi()["paths"]
    asked = {(method.upper(), re.sub(r"\{\w+\}", "0", path)) for path, methods in paths.items() for method in methods}
    uploads = {(method, path) for method, path in asked if method == "PUT" and "fragments" in path}
    assert (len(asked) > 20, len(uploads)) == (True, 2)
    for method, path in asked - uploads:
        answer, _ = ask_and_wait(shared, method, path, f"Content-Length: {1 << 40}", authorization)
        assert answer.status == 413, (method, path)
    answer, _ = ask_and_wait(shared, "PATCH", "/v1/nowhere", f"Content-Length: {1 << 40}", authorization)
    assert answer.status == 404


def test_an_address_that_takes_a_body_must_say_how_large_it_may_be() -> None:
    """Nobody gets a limit that he has not thought of."""
    router = APIRouter(route_class=LimitedRoute)

    def reads_by_hand(request: Request) -> None: ...

    def takes_a_message(change: WorkerChange) -> None: ...

    router.get("/x")(reads_by_hand)
    cases: list[tuple[Any, Any]] = [(router.put, reads_by_hand), (router.delete, takes_a_message)]
    for add, endpoint in cases:
        with pytest.raises(TypeError, match="/x: declare by max_body how large"):
            add("/x")(endpoint)
        add("/x")(max_body(1)(endpoint))


def test_a_worker_whose_lease_has_ended_learns_of_it_on_the_same_connection(shared: InThread, member: Member) -> None:
    """What it was uploading is not kept, but the line is not cut either: the answer must get there."""
    with shared.client("ost_ended") as client:
        refused = client.put(member.contribution_path(0, 0), content=bytes(8 << 20))
        problem(refused, "unauthorized")
        assert "connection" not in refused.headers


# --- paging -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_listings_go_page_by_page_through_everything_once(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b", "c"], rounds=5, min_workers=3, checkpoints="every_rounds = 1\nkeep = 9")
    play_rounds(shared, members, range(5))
    for what, key, expected in [
        ("rounds", "round", [4, 3, 2, 1, 0]),
        ("checkpoints", "round", [5, 4, 3, 2, 1, 0]),
        ("workers", "name", ["a", "b", "c"]),
    ]:
        assert [each[key] for each in pages(shared, f"/runs/{run}/{what}")] == expected
    rounds = info(shared, run, "/rounds")["items"]
    assert all(each["state"] == "published" and each["closed_at"] >= each["opened_at"] for each in rounds)
    assert all(each["tokens"] == 3 * 5 * 32 and each["loss"] == 1.5 for each in rounds)


def test_runs_are_listed_by_name_page_by_page(shared: InThread, run: str) -> None:
    made = {f"{run}-{each}" for each in "cab"}
    for name in made:
        shared.create_run(spec_toml(name))
    listed = [each["name"] for each in pages(shared, "/runs")]
    assert made < set(listed)
    assert listed == sorted(set(listed))


# --- OpenAPI and health -------------------------------------------------------------------------------------------


@pytest.mark.covers("security:api-docs-assets")
def test_the_documentation_loads_nothing_from_elsewhere(shared: InThread) -> None:
    html = httpx.get(shared.url + "/docs", verify=False).text
    assets = re.findall(r"""(?:src|href)=["']([^"']+)["']""", html)
    assert assets
    for asset in assets:
        assert re.match("/[^/]", asset), asset
        assert httpx.get(shared.url + asset, verify=False).status_code == 200, asset
    elsewhere = [url for url in re.findall(r"https?://[^\s\"'<]+", html) if not url.startswith(shared.url)]
    assert elsewhere == []


@pytest.mark.covers("security:documentation-scripts")
def test_a_browser_runs_no_script_of_the_documentation_but_its_own(shared: InThread) -> None:
    answer = httpx.get(shared.url + "/docs", verify=False)
    policy = answer.headers["content-security-policy"]
    (scripts,) = re.findall(r"script-src ([^;]*)", policy)
    assert "'unsafe-inline'" not in scripts
    assert re.findall(r"'sha256-(.*?)'", scripts) == [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall(r"(?s)<script>(.*?)</script>", answer.text)
    ]
    assert {"default-src 'none'", "frame-ancestors 'none'"} < set(policy.split("; "))


@pytest.mark.covers("security:documentation-scripts")
@pytest.mark.parametrize("path", ["/docs", "/", "/openapi.json", "/healthz", "/v1/runs", "/nowhere"])
def test_no_answer_is_taken_for_another_type_than_it_names(shared: InThread, path: str) -> None:
    for token in (shared.admin_token, "none"):
        assert shared.client(token).get(path).headers["x-content-type-options"] == "nosniff"


@pytest.mark.covers("security:host-redirect")
def test_no_answer_leads_to_the_host_that_the_request_names(shared: InThread) -> None:
    with shared.client() as http:
        for path in ("/v1/runs/", "/v1/tokens/", "/healthz/", "/docs/", "/static-offline-docs", "/dashboard"):
            answer = http.get(path, headers={"Host": "evil.example"})
            assert answer.status_code == 404, path
            assert "location" not in answer.headers


def test_openapi_tells_the_token_scheme_and_a_sentence_for_every_address(admin: httpx.Client) -> None:
    schema = admin.get("/openapi.json").json()
    assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), (method, path)


def test_ready_means_that_the_data_directory_takes_writes(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, running.client() as client:
        incoming = tmp_path / "data" / "incoming"
        incoming.rmdir()
        incoming.write_bytes(b"")
        refused = client.get("/readyz")
        assert str(tmp_path) in problem(refused, "not-ready")["detail"]
        assert refused.headers["retry-after"] == "5"
        assert client.get("/healthz").status_code == 200
        incoming.unlink()
        problem(client.get("/readyz"), "not-ready")
        incoming.mkdir()
        assert client.get("/readyz").status_code == 200
        assert list(incoming.iterdir()) == []


def test_ready_means_that_the_database_answers(tmp_path: Path) -> None:
    """Not blamed on the data directory: the database may be elsewhere."""
    with coordinator_thread(tmp_path / "data") as running, running.client() as client:
        with running.coordinator.database.write() as session:
            session.execute(text("ALTER TABLE runs RENAME TO gone"))
        assert problem(client.get("/readyz"), "not-ready")["detail"].startswith("the database: ")
        with running.coordinator.database.write() as session:
            session.execute(text("ALTER TABLE gone RENAME TO runs"))
        assert client.get("/readyz").status_code == 200
