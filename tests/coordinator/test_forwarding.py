"""What a standby forwards, to whom, and what it believes of the answer. Attackers have no token, or any token."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import make_url
from typer.testing import CliRunner

from coordinator.http.downloads import BLOB_HEADER
from coordinator.leadership.forwarding import TICKET_HEADER, request_to
from coordinator.leadership.tickets import Ticket, blob_names
from coordinator.store import postgresql as backend
from coordinator.store.blobs import OWNER, StoredBlob
from harness import stores
from harness.aggregator import opened
from harness.coordinator import InThread, coordinator_thread
from harness.postgres import PostgreSQL
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.digest import digest
from protocol.errors import PROBLEM_PREFIX, Problem
from tests.coordinator.crew import connected, crew, play_rounds, problem, two
from tests.support.http_server import Handler, serving
from tests.support.waiting import PATIENCE_S, wait_until

STATE = "/v1/runs/r/checkpoints/0/fragments/0"


class Pair(NamedTuple):
    leader: InThread
    standby: InThread


@pytest.fixture(scope="module")
def pair(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A leader and a standby, with the run r and its state 0. Nobody on this machine is a proxy."""
    folder = tmp_path_factory.mktemp("pair")
    with postgres.database() as url, two(folder, url, proxies="192.0.2.1") as (leader, standby):
        crew(leader, "r", ["a"], rounds=1)
        yield Pair(leader, standby)


class Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def slug(self) -> str:
        """The problem's slug; empty if it is none."""
        if self.headers["content-type"] != "application/problem+json":
            return ""
        document = json.loads(self.body)
        assert document["status"] == self.status
        return str(document["type"]).removeprefix(PROBLEM_PREFIX)


def ask(running: InThread, request: bytes) -> Answer:
    """Send the bytes of one request, and read the answer to its end."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        answer = HTTPResponse(connection, method=request.split(b" ")[0].decode())
        answer.begin()
        return Answer(answer.status, answer.headers, answer.read())


def head_of(method: str, target: bytes, *lines: bytes) -> bytes:
    ending = [b"Host: c", b"Connection: close", *lines, b"", b""]
    return b"\r\n".join([method.encode() + b" " + target + b" HTTP/1.1", *ending])


# --- targets ----------------------------------------------------------------------------------------------------------


@contextmanager
def canary() -> Iterator[socket.socket]:
    """A server to which nobody connects: the system would complete a connection without `accept`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server
        with pytest.raises(BlockingIOError):
            server.accept()


def made_targets(place: bytes, count: int) -> Iterator[bytes]:
    """Targets of pieces that parsers of URLs treat differently, around the address of somebody else."""
    rng = random.Random(53)
    pieces = [
        *b"* / // \\ @ : ? # .. . % ; [ ] & = x 0 %2e%2e %2f %40 %00 %0d%0a %zz http: https:// HTTP:// ftp://".split(),
        *b"file:/ 127.0.0.1 localhost [::1] v1 runs r".split(),
        *(b"\x7f", b"\x80", b"\xc3\xa9", b"\x00", b"\t"),
        *(place, b"@" + place, b"//" + place, b"http://" + place, b"/v1/runs", b"/healthz", STATE.encode()),
    ]
    for _ in range(count):
        target = b"".join(rng.choices(pieces, k=rng.randint(1, 6)))
        yield target if rng.random() < 0.5 else rng.choice([b"/", b"*"]) + target


HOSTILE = [
    *(b"*", b"*@%s/x", b"*:x@%s/", b"*/@%s", b"*?@%s/", b"*#@%s/", b"*.%s/", b"*%%40%s"),
    *(b"http://%s/x", b"HTTP://%s", b"https://%s/healthz", b"http://c@%s/", b"ftp://%s/", b"//%s/x", b"///%s/x"),
    *(b"%s", b"@%s/x", b":@%s/", b".%s/", b"?@%s", b"#@%s", b"\\\\%s\\x", b"/\\%s/x", b"/@%s/x", b"/..//%s/x", b""),
]


@pytest.mark.slow
@pytest.mark.covers("security:forwarding-elsewhere")
def test_whatever_the_target_a_standby_connects_to_nobody_but_the_leader(pair: Pair) -> None:
    """Both answer alike, with an answer of ours; `*@HOST:PORT/x` was requested from HOST:PORT, without a token."""
    token = b"Authorization: Bearer " + pair.leader.admin_token.encode()
    with canary() as elsewhere:
        place = b"127.0.0.1:%d" % elsewhere.getsockname()[1]
        targets = [target % place if b"%s" in target else target for target in HOSTILE] + [*made_targets(place, 100)]
        for number, target in enumerate(targets):
            method = ("GET", "GET", "OPTIONS", "POST", "HEAD")[number % 5]
            request = head_of(method, target, *([token] if number % 3 else []), b"Content-Length: 0")
            found = [ask(running, request) for running in pair]
            for answer in found:
                assert answer.headers["Outerstep-Version"], target
                assert answer.status < 500 or answer.slug == "not-ready", (target, answer)
                if answer.status >= 400 and answer.body:
                    assert answer.slug, (target, answer)
                assert target[:1] == b"/" or answer.status == 400, (target, answer)
            assert found[0].status == found[1].status or any(each.status == 503 for each in found), (target, found)


@pytest.mark.parametrize(
    ("lines", "version", "status"),
    [
        ([], "1.1", 400),
        ([b"Host: a", b"Host: b"], "1.1", 400),
        ([b"Host: a", b"host: a"], "1.0", 400),
        ([b"Host: a, b"], "1.1", 400),
        ([b"Host: me@b"], "1.1", 400),
        ([b"Host: http://b/"], "1.1", 400),
        ([], "1.0", 200),
        ([b"Host:"], "1.1", 200),
        ([b"Host: [::1]:8470"], "1.1", 200),
        ([b"Host: a_b.c-d:80"], "1.1", 200),
    ],
)
def test_a_request_has_one_host(pair: Pair, lines: list[bytes], version: str, status: int) -> None:
    """RFC 9112, section 3.2. The standby said that the leader does not answer."""
    token = b"Authorization: Bearer " + pair.leader.admin_token.encode()
    request = b"\r\n".join([b"GET /v1/runs HTTP/" + version.encode(), *lines, token, b"Connection: close", b"", b""])
    for running in pair:
        answer = ask(running, request)
        assert (answer.status, answer.slug) == (status, "invalid-request" if status == 400 else "")


@pytest.mark.parametrize("target", [b"*@127.0.0.1:9/x", b"http://127.0.0.1:9/x", b""])
def test_no_request_is_made_that_could_go_elsewhere(target: bytes) -> None:
    """The parser refuses such targets before."""
    with pytest.raises(Problem, match="invalid-request"):
        request_to("http://10.0.0.1:8470", scope(target), TICKET)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://10.0.0.1:8470", "10.0.0.1"),
        ("https://C.example", "c.example"),
        ("http://[::1]:80", "::1"),
        ("http://b\u00fc.de", "b\u00fc.de"),
        ("http://xn--bcher-kva.de", "b\u00fccher.de"),
    ],
)
def test_a_request_goes_to_the_leader_as_it_came(address: str, host: str) -> None:
    request = request_to(address, scope(b"/a/../%2e%2e//b"), TICKET)
    assert (request.url.scheme, request.url.host) == (address.split(":")[0], host)
    assert request.extensions["target"] == b"/a/../%2e%2e//b?c=%41&d"
    ours = [(b"x-request-id", b"its-id"), (TICKET_HEADER.encode(), TICKET.header().encode())]
    assert request.headers.raw == [(b"host", b"c"), *ours]


def scope(target: bytes) -> dict[str, Any]:
    headers = [(b"host", b"c"), (b"x-forwarded-for", b"1.2.3.4"), (b"x-forwarded-proto", b"https"), (b"te", b"x")]
    state = {"request_id": "its-id"}
    return {"method": "GET", "raw_path": target, "query_string": b"c=%41&d", "headers": headers, "state": state}


# --- tickets ----------------------------------------------------------------------------------------------------------

TICKET = Ticket(b"secret", "a1", 7, "0f", True, "10.0.0.1")
BLOB = StoredBlob("runs/r/checkpoints/0/0.61" + 7 * "61", b"a" * 32, 5)


@pytest.mark.parametrize("client", [None, "10.0.0.1", "fe80::1%eth0", "a b\xe9"])
def test_a_ticket_is_read_as_it_was_made_and_only_by_who_has_the_secret(client: str | None) -> None:
    ticket = replace(TICKET, client=client)
    assert Ticket.read(ticket.header(), b"secret") == ticket
    assert Ticket.read(ticket.header(), b"another") is None
    for at in range(len(ticket.header())):
        changed = ticket.header()[:at] + "!" + ticket.header()[at + 1 :]
        assert Ticket.read(changed, b"secret") is None
        assert Ticket.read(changed[:at], b"secret") is None


def test_a_blob_is_the_one_that_was_asked_for_and_named_for_this_ticket() -> None:
    named = TICKET.named(BLOB)
    assert TICKET.blob(named, STATE) == BLOB
    assert TICKET.blob(TICKET.named(replace(BLOB, size=None)), STATE) == replace(BLOB, size=None)
    for other in ({"secret": b"another"}, {"leader": "b"}, {"term": 8}, {"nonce": "10"}, {"offers": False}):
        assert replace(TICKET, **other).blob(named, STATE) is None
    for path in ("/v1/runs/s/checkpoints/0/fragments/0", STATE.replace("/0/", "/1/"), "/v1/runs", "/owner"):
        assert TICKET.blob(named, path) is None
    for name in (OWNER, "backups/1/database", "runs/r/removed", BLOB.name.replace("checkpoints", "contributions")):
        assert TICKET.blob(TICKET.named(replace(BLOB, name=name)), STATE) is None
    for wrong in (
        "",
        " ",
        named.replace("61", "62"),
        named.replace(" 5 ", " 6 "),
        f"{OWNER} {'00' * 32} 0",
        named[:-1],
    ):
        assert TICKET.blob(wrong, STATE) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (STATE, "runs/r/checkpoints/0/0.6161616161616161"),
        ("/v1/runs/r/rounds/12/fragments/3/delta", "runs/r/deltas/12/3.6161616161616161"),
        ("/v1/runs/../checkpoints/0/fragments/0", None),
        ("/v1/runs/r/../s/checkpoints/0/fragments/0", None),
        ("/v1/runs/r/checkpoints/latest", None),
        ("/v1/runs/r/rounds/0/fragments/0/contributions/w", None),
        ("/v1/runs/r/checkpoints/\u0661/fragments/0", None),
        (f"{STATE}\n", None),
        ("/v1/runs/R/checkpoints/0/fragments/0", None),
    ],
)
def test_only_deltas_and_checkpoints_are_offered(path: str, name: str | None) -> None:
    name_of = blob_names(path)
    assert (name_of and name_of(b"a" * 32)) == name


def ticket_for(running: InThread, **changed: Any) -> str:
    """A ticket of a coordinator of the same database, for the leader `running`."""
    shared = running.server.shared
    assert shared is not None
    read, term = shared.terms.election.leader, shared.terms.election.fence
    assert read is not None
    assert term is not None  # the lease that was read last may be the one before it
    made = Ticket(read.secret, term.holder, term.token, "0f", False, "203.0.113.9")
    return replace(made, **changed).header()


def addresses(leader: InThread) -> list[str]:
    """The addresses in the audit, newest first."""
    return [entry["address"] for entry in leader.client().get("/v1/audit").json()["items"]]


@pytest.mark.covers("security:ticket-of-another-term")
def test_a_ticket_is_for_one_leader_in_one_term(pair: Pair) -> None:
    """A key that was seen once was one for ever, at every coordinator."""
    new = {"scope": "viewer", "note": ""}
    with pair.leader.client() as client:
        for other in ({"term": 0}, {"term": 2}, {"leader": "0" * 16}):
            refused = client.post("/v1/tokens", json=new, headers={TICKET_HEADER: ticket_for(pair.leader, **other)})
            assert "another one led" in problem(refused, "not-ready")["detail"]
        changed = ticket_for(pair.leader).replace("203.0.113.9", "203.0.113.8")
        forged = ticket_for(pair.leader, secret=b"guessed")
        for header, address in (
            (ticket_for(pair.leader), "203.0.113.9"),
            (changed, "127.0.0.1"),
            (forged, "127.0.0.1"),
        ):
            client.post("/v1/tokens", json=new, headers={TICKET_HEADER: header}).raise_for_status()
            assert addresses(pair.leader)[0] == address
    with pair.standby.client() as client:
        refused = client.get("/v1/runs", headers={TICKET_HEADER: ticket_for(pair.leader)})
        assert "another one led" in problem(refused, "not-ready")["detail"], "not forwarded a second time"


@pytest.mark.covers("security:forged-forwarding")
def test_a_client_cannot_pose_as_a_standby(pair: Pair) -> None:
    """The leader takes a client's address from a standby, and from nobody else."""
    forged = {TICKET_HEADER: "0" * 64, "X-Forwarded-For": "203.0.113.10"}
    for running in pair:
        with running.client() as client:
            client.get("/v1/runs", headers=[(TICKET_HEADER.encode(), b"\xe9")]).raise_for_status()
            client.post("/v1/tokens", json={"scope": "viewer", "note": ""}, headers=forged).raise_for_status()
    assert "203.0.113.10" not in addresses(pair.leader)


@pytest.mark.covers("security:blobs-are-named-to-standbys-alone")
def test_a_client_is_told_no_name_of_a_blob(pair: Pair) -> None:
    forged = ticket_for(pair.leader, secret=b"guessed", offers=True)
    for running in pair:
        found = running.client().get(STATE, headers={TICKET_HEADER: forged})
        assert len(found.content) > 1000
        assert BLOB_HEADER not in found.headers


# --- what answers at the leader's address -----------------------------------------------------------------------------


class Stranger(Handler):
    """Answers at the leader's address with `blob` as the blob's name. Each of these classes is one test's own."""

    protocol_version = "HTTP/1.1"
    blob: str | None = None
    requests: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:  # noqa: N802
        self.requests.append(
            (self.requestline.split()[1], {name.lower(): value for name, value in self.headers.items()})
        )
        self.send_response(200)
        if self.blob is not None:
            self.send_header(BLOB_HEADER, self.blob)
        self.send_header("Content-Length", "8")
        self.end_headers()
        self.wfile.write(b"stranger")


@pytest.fixture(scope="module")
def beside(
    postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[type[Stranger], InThread, InThread]]:
    """A stranger that answers at the address that the leader advertises; a leader with the run r; a standby."""
    stranger, folder = type("Answers", (Stranger,), {"requests": []}), tmp_path_factory.mktemp("stranger")
    with (
        postgres.database() as url,
        serving(stranger) as address,
        two(folder, url, addresses=(address, None)) as (leader, standby),
    ):
        crew(leader, "r", ["a"], rounds=1)
        yield stranger, leader, standby


@pytest.mark.slow
@pytest.mark.covers("security:blob-of-a-stranger")
def test_a_standby_sends_no_blob_that_a_stranger_names(beside: tuple[type[Stranger], InThread, InThread]) -> None:
    """It sent `owner`, or a backup with the whole database."""
    stranger, leader, standby = beside
    assert standby.server.shared is not None
    blobs: Any = standby.server.shared._open_blobs()  # noqa: SLF001
    blobs.put(OWNER, memoryview(b"the owner"))
    with leader.client() as direct, standby.client() as client:
        state = digest(direct.get(STATE).content).hex()
        earlier = ""
        for blob in (f"{OWNER} {digest(b'the owner').hex()} 0", f"{state} 0 {'0' * 64}", "", "x", "replayed"):
            stranger.blob = earlier if blob == "replayed" else blob
            assert "is not the leader" in problem(client.get(STATE), "not-ready")["detail"]
            ticket = stranger.requests[-1][1][TICKET_HEADER]
            earlier = direct.get(STATE, headers={TICKET_HEADER: ticket}).headers[BLOB_HEADER]
            assert earlier.startswith(state), "the leader itself names the state to the holder of this ticket"
        problem(client.get("/v1/runs"), "not-ready")  # nothing was offered


def test_a_request_arrives_as_it_was_sent(beside: tuple[type[Stranger], InThread, InThread]) -> None:
    """With its target, and without headers that the standby's own client would add, or that a proxy's would be."""
    stranger, _, standby = beside
    stranger.blob = None
    for target in (b"/v1/../healthz", b"/v1/%2e%2e/x", b"//c/x", b"/a?b=%41&c=;d", b"/a/./b//", b"/\\c/x|^"):
        lines = (b"X-Forwarded-Proto: https", b"X-Forwarded-For: 1.2.3.4", b"Forwarded: for=1.2.3.4")
        answer = ask(standby, head_of("GET", target, b"X-Request-Id: <b>", b"X-Other: 1", *lines))
        path, headers = stranger.requests[-1]
        assert (answer.status, path.encode()) == (200, target)
        assert set(headers) == {"host", "x-other", "x-request-id", TICKET_HEADER}
        assert headers["x-request-id"] == answer.headers["X-Request-Id"]
        assert headers["x-request-id"].isalnum()


# --- the secret -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.covers("security:stolen-secret")
def test_the_secret_can_be_rotated_while_coordinators_run(tmp_path: Path, postgres: PostgreSQL) -> None:
    """The same coordinator leads in a new term, so that nothing is measured with two secrets."""
    with postgres.database() as url, two(tmp_path, url) as (leader, standby):
        members = crew(standby, "r", ["a", "b"], rounds=2, min_workers=2)
        play_rounds(leader, members, [0])
        stolen, before = ticket_for(leader), leader.live("r")
        with (
            connected(url) as connection,
            opened("aggregator", make_url(url), stores.MemoryBlobs(), tmp_path / "c") as aggregator,
        ):
            old = backend.deployment(connection).secret
            done = CliRunner().invoke(app, ["coordinator", "rotate-secret", "--database", url])
            assert done.exit_code == 0, done.output
            new = backend.deployment(connection).secret
            assert aggregator._secret(connection) == new  # noqa: SLF001
        assert new != old
        assert len(new) == 32

        def leads_anew() -> bool:
            assert leader.server.shared is not None
            found = leader.server.shared.terms.coordinator  # None between the terms
            return found is not None and found.run("r") is not before

        wait_until(lambda: leads_anew() and standby.client().get("/v1/runs").is_success)
        assert leader.live("r").context.secret == new
        play_rounds(leader, members, [1])
        with leader.client() as client:
            (entry,) = [each for each in client.get("/v1/audit").json()["items"] if each["act"] == "secret-rotated"]
            assert (entry["token"], entry["address"]) == (None, None)
            new_token = {"scope": "viewer", "note": ""}
            client.post("/v1/tokens", json=new_token, headers={TICKET_HEADER: stolen}).raise_for_status()
        assert addresses(leader)[0] == "127.0.0.1"


@pytest.mark.in_sqlite
def test_the_secret_of_one_coordinator_is_rotated_while_it_is_stopped(tmp_path: Path) -> None:
    command = ["coordinator", "rotate-secret", "--data-dir", str(tmp_path / "data")]
    assert CliRunner().invoke(app, command).exit_code == Exit.USAGE
    with coordinator_thread(tmp_path / "data") as running:
        old = running.coordinator.database.secret()
        done = CliRunner().invoke(app, command)
        assert done.exit_code == Exit.REFUSED
        assert "in use by another coordinator" in done.output
    assert CliRunner().invoke(app, command).exit_code == 0
    with coordinator_thread(tmp_path / "data") as running:
        assert running.coordinator.database.secret() != old
        assert running.client().get("/v1/audit").json()["items"][0]["act"] == "secret-rotated"
