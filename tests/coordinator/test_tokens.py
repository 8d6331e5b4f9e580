"""Who may do what: every route of the application with every kind of token, as docs/rest.md says."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi.routing import APIRoute

from coordinator.api.app import create_app
from coordinator.http.bodies import LimitedRoute
from coordinator.service import Coordinator
from harness.coordinator import InThread
from protocol.messages import Scope
from tests.coordinator.crew import crew, enlist, problem
from tests.support.openapi import problems_of, schema

ROOT = Path(__file__).parents[2]
HERE, ELSEWHERE = "here", "elsewhere"
MEMBERS = {"member", "another member"}  # of the run here

# The column "who" of docs/rest.md -> the scopes and members that it means.
MAY: dict[str, set[str]] = {
    "any": {*Scope, *MEMBERS},
    "admin": {"admin"},
    "operator": {"admin", "operator"},
    "worker": {"admin", "worker"},
    "worker, join": {"admin", "worker", "join"},
    "join": {"join"},
    "member": {"member"},
    "member, operator": {"admin", "operator", "member"},
}
# Without a run in the path a token for one run does as well, but not here.
FOR_ALL_RUNS = {("POST", "/v1/runs"), ("GET", "/v1/status")}


@dataclass(frozen=True)
class Kind:
    """A kind of token: what it is of, and for which run alone, if so."""

    of: str
    run: str | None = None


KINDS = [
    Kind("none"),
    Kind("unknown"),
    *(Kind(scope, run) for scope in Scope for run in (None, HERE, ELSEWHERE)),
    Kind("member", HERE),
    Kind("another member", HERE),
    Kind("member", ELSEWHERE),
]


def routes() -> list[tuple[str, str]]:
    """(method, path) of every route that the application has, but for the pages of its documentation."""
    found = [route for route in create_app(cast(Coordinator, None)).routes if isinstance(route, APIRoute)]
    assert {type(route) for route in found} == {LimitedRoute}
    return [(method, route.path) for route in found for method in sorted(route.methods or ())]


def nameless(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


def rules() -> dict[tuple[str, str], str]:
    """Who may do what, by method and path without names, as docs/rest.md lists it."""
    page = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z]+) (/\S+)` \| ([^|]+?) \|", page, re.MULTILINE)
    return {(method, nameless(path)): who for method, path, who in rows}


def may(kind: Kind, method: str, path: str) -> bool:
    who = rules()[method, nameless(path)]  # KeyError: a route without a rule
    if who == "anybody":
        return True
    if (method, path) == ("GET", "/v1/runs") and kind.of in MEMBERS:
        return True  # of whatever run: it sees its own
    if path.endswith("/evaluation") or "/without" in path or path.startswith("/v1/runs/{run}/checkpoints/0"):
        return kind in (Kind("member", HERE), Kind("another member", HERE))  # the address does not name who asks
    if kind.of not in MAY[who]:
        return False
    if "{run}" in path:
        return kind.run in (None, HERE)
    return kind.run is None or (method, path) not in FOR_ALL_RUNS


@dataclass
class Scene:
    """A run with two members, another run with one, and a token of every kind."""

    running: InThread
    http: httpx.Client
    tokens: dict[Kind, str]


@pytest.fixture(scope="module")
def scene(shared: InThread) -> Iterator[Scene]:
    a, b = crew(shared, HERE, ["a", "b"])
    a.assignment(0)
    (elsewhere,) = crew(shared, ELSEWHERE, ["a"])
    tokens = {
        Kind("unknown"): "ost_unknown",
        Kind("member", HERE): a.joined.member_token,
        Kind("another member", HERE): b.joined.member_token,
        Kind("member", ELSEWHERE): elsewhere.joined.member_token,
    }
    for scope in Scope:
        for run in (None, HERE, ELSEWHERE):
            tokens[Kind(scope, run)] = shared.token(scope, **({} if run is None else {"run": run}))
    with shared.client() as http:
        del http.headers["Authorization"]
        yield Scene(shared, http, tokens)


def ask(scene: Scene, method: str, path: str, kind: Kind) -> httpx.Response:
    names = {"run": HERE, "worker": "a", "number": "0", "fragment": "0", "token_id": "nothing"}
    token = scene.tokens.get(kind)
    if (method, path, kind) == ("DELETE", "/v1/runs/{run}/workers/{worker}", Kind("member", HERE)):
        leaver = enlist(scene.running, HERE, "leaver")  # who really leaves
        token, names["worker"] = leaver.joined.member_token, "leaver"
    elif method == "DELETE" and path.endswith("/workers/{worker}"):
        names["worker"] = "ghost"
    body: dict[str, object] | None = None if method in ("GET", "DELETE") else {}
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return scene.http.request(method, path.format(**names), json=body, headers=headers)


@pytest.mark.slow
@pytest.mark.covers("security:unauthorized-request")
def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    served = {(method, nameless(path)) for method, path in routes()}
    paths = create_app(cast(Coordinator, None)).openapi()["paths"]
    assert served == {(method.upper(), nameless(path)) for path, methods in paths.items() for method in methods}
    assert served == set(rules())
    assert set(rules().values()) == {*MAY, "anybody"}
    assert len(routes()) == len(served) > 30


@pytest.mark.slow
@pytest.mark.covers("reliability:documented-access", "security:unauthorized-request")
@pytest.mark.parametrize(("method", "path"), routes(), ids=lambda value: str(value))
def test_every_route_answers_every_token_as_documented(scene: Scene, method: str, path: str) -> None:
    for kind in KINDS:
        reply = ask(scene, method, path, kind)
        if may(kind, method, path):
            assert reply.status_code not in (401, 403, 405, 500), (kind, reply.text)
        elif kind.of in ("none", "unknown"):
            problem(reply, "unauthorized")
            assert reply.headers["www-authenticate"] == "Bearer"
        else:
            assert "token" in problem(reply, "forbidden")["detail"] or "member" in reply.text, kind
        if path.startswith("/v1/"):
            cached = reply.headers["cache-control"]
            assert cached in ("private, no-store", "private, max-age=31536000, immutable"), (kind, cached)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), routes(), ids=lambda value: str(value))
def test_openapi_tells_of_401_and_403_just_where_they_come(method: str, path: str) -> None:
    operation = schema()["paths"][path][method.lower()]
    refused = {kind.of in ("none", "unknown") for kind in KINDS if not may(kind, method, path)}
    assert ("unauthorized" in problems_of(operation, 401)) == (True in refused)
    assert ("forbidden" in problems_of(operation, 403)) == (False in refused)


def test_a_token_for_one_run_sees_that_run_alone_in_the_list(scene: Scene) -> None:
    for kind, names in [
        (Kind("member", HERE), [HERE]),
        (Kind("member", ELSEWHERE), [ELSEWHERE]),
        (Kind("viewer", HERE), [HERE]),
        (Kind("viewer"), [ELSEWHERE, HERE]),
    ]:
        listed = ask(scene, "GET", "/v1/runs", kind).json()["items"]
        assert [run["name"] for run in listed] == names


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.of not in ("none", "unknown")], ids=str)
def test_every_token_learns_what_it_allows(scene: Scene, kind: Kind) -> None:
    """What it says is what the routes do: whoever is told of a scope is refused nothing that asks for it."""
    own = ask(scene, "GET", "/v1/tokens/self", kind).raise_for_status().json()
    assert own["run"] == kind.run
    if "member" in kind.of:
        assert (own["scope"], own["allows"]) == (None, [])
        assert own["worker"] == ("b" if kind.of == "another member" else "a")
        return
    assert (own["scope"], own["worker"]) == (kind.of, None)
    assert kind.of in own["allows"]
    for scope, method, path in [
        ("admin", "GET", "/v1/tokens"),
        ("operator", "PATCH", "/v1/runs/{run}"),
        ("worker", "PUT", "/v1/runs/{run}/workers/{worker}"),
        ("viewer", "GET", "/v1/runs"),
        ("join", "POST", "/v1/runs/{run}/workers/{worker}/token"),
    ]:
        of_this_run = kind.run in (None, HERE) or "{run}" not in path
        assert (scope in own["allows"] and of_this_run) == may(kind, method, path), (scope, kind)


def test_an_admin_of_one_run_has_the_tokens_for_that_run_alone(scene: Scene, shared: InThread) -> None:
    with shared.client(scene.tokens[Kind("admin", HERE)]) as admin:
        listed = admin.get("/v1/tokens?limit=1000").json()["items"]
        assert {token["run"] for token in listed} == {HERE}
        assert {token["scope"] for token in listed} == set(Scope)
        problem(admin.post("/v1/tokens", json={"scope": "viewer"}), "forbidden")
        problem(admin.post("/v1/tokens", json={"scope": "viewer", "run": ELSEWHERE}), "forbidden")
        made = admin.post("/v1/tokens", json={"scope": "viewer", "run": HERE}).raise_for_status().json()
        with shared.client() as other:
            others = [token["id"] for token in other.get("/v1/tokens?limit=1000").json()["items"] if not token["run"]]
        problem(admin.delete(f"/v1/tokens/{others[0]}"), "not-found")
        problem(admin.post(f"/v1/tokens/{others[0]}/secret"), "not-found")
        assert admin.delete(f"/v1/tokens/{made['id']}").status_code == 204
        assert {entry["run"] for entry in admin.get("/v1/audit?limit=1000").json()["items"]} == {HERE}


def test_no_token_is_made_for_a_run_that_there_is_not(shared: InThread) -> None:
    with shared.client() as admin:
        problem(admin.post("/v1/tokens", json={"scope": "viewer", "run": "not-there"}), "not-found")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"scope": "viewer", "names": 2}, "names is for worker tokens"),
        ({"scope": "worker", "uses": 2}, "uses is for join tokens"),
        ({"scope": "join", "uses": 0}, "uses"),
        ({"scope": "worker", "names": 0}, "names"),
        ({"scope": "worker", "expires_in_s": 0}, "expires_in_s"),
        ({"scope": "worker", "expires_in_s": 1e300}, "expires_in_s"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(shared: InThread, body: dict[str, object], said: str) -> None:
    with shared.client() as admin:
        assert said in problem(admin.post("/v1/tokens", json=body), "invalid-message")["detail"]


@pytest.mark.covers("security:secrets-at-rest")
def test_no_value_that_was_sent_is_in_a_refusal(shared: InThread, run: str) -> None:
    """A secret under a wrong key, or cut short, would be in the logs of whoever keeps answers."""
    secret = "ost_" + "s" * 20
    with shared.client() as admin, shared.client(secret) as stranger:
        for reply in (
            admin.put(f"/v1/runs/{run}/workers/w", json={"tensors": [], "member_token": secret}),
            admin.post("/v1/tokens", json={"scope": secret}),
            admin.post("/v1/tokens", json=[secret]),
            admin.get("/v1/runs", params={"limit": secret}),
            admin.delete(f"/v1/tokens/{secret}"),
            stranger.get("/v1/runs"),
        ):
            assert reply.status_code in (401, 404, 422)
            assert secret not in reply.text
