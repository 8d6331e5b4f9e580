"""Notifications: what is sent to a real webhook, when it is sent again, and what a restart makes of it."""

import asyncio
import base64
import errno
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError
from sqlalchemy import select
from typer.testing import CliRunner

from coordinator.notifications import outbox as outboxes
from coordinator.notifications.alerts import CHECK_S, NO_ROUND_S, ROUND_S, Disk
from coordinator.notifications.formats import EVENT_KINDS, KINDS, Notification, format_of, request_of
from coordinator.notifications.outbox import Outbox
from coordinator.notifications.sending import (
    FIRST_PAUSE_S,
    GIVE_UP_S,
    LONGEST_PAUSE_S,
    DeliveryError,
    Sender,
    Webhook,
    new_client,
    pause_s,
    send,
)
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.database import Database
from coordinator.store.tables import NotificationRow
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import spec_toml
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.messages import RunState
from tests.coordinator.crew import crew, play_round
from tests.support.http_server import Handler, serving
from tests.support.waiting import PATIENCE_S, wait_until

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
NOW = 1_700_000_000.25


@dataclass
class Sink:
    """A webhook: what came, and what it answers; without more answers 200."""

    url: str = ""
    came: list[tuple[str, Message, bytes]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self.came]


@contextmanager
def receiving() -> Iterator[Sink]:
    sink = Sink()

    class Receiving(Handler):
        def do_POST(self) -> None:  # noqa: N802, http.server's name
            sink.came.append((self.path, self.headers, self.rfile.read(int(self.headers["content-length"]))))
            status, headers, body = sink.answers.pop(0) if sink.answers else (200, {}, b"ok")
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Receiving) as url:
        sink.url = url
        yield sink


@pytest.fixture
def sink() -> Iterator[Sink]:
    with receiving() as sink:
        yield sink


def unproxied() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False, verify=False)


def a_notification(**values: Any) -> Notification:
    return Notification(**{"id": "msg_1", "at": NOW, "kind": "worker-lost", "message": "box-3 is gone", **values})


@dataclass
class Box:
    """An outbox with its sender to a real webhook; everything else is set by the test."""

    outbox: Outbox
    sender: Sender
    clock: SettableClock

    def deliver(self) -> None:
        asyncio.run(self.sender.deliver_due())


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite.url_in(tmp_path))
    yield database
    database.close()


@pytest.fixture
def box(sink: Sink, database: Database) -> Callable[[], Box]:
    numbers = iter(range(1_000_000))
    clock = SettableClock()

    def make() -> Box:
        outbox = Outbox(database, lambda: f"msg_{next(numbers)}", clock, lambda: NOW)
        webhook = Webhook(SecretStr(f"{sink.url}/hook"), "json", SecretStr(SECRET))
        return Box(outbox, Sender(webhook, outbox, clock, lambda: NOW, lambda: 0.0, unproxied), clock)

    return make


def note(box: Box, database: Database, kind: str, run: str = "r", **data: Any) -> None:
    with database.write() as session:
        committed = box.outbox.note_event(session, run, kind, f"{kind} {data}", data)
    if committed is not None:
        committed()


# --- formats ----------------------------------------------------------------------------------------------------------


def test_the_signature_is_the_one_of_standard_webhooks() -> None:
    request = request_of(a_notification(run="r", worker="box-3"), "https://h.example/x", "json", SECRET, NOW + 60)
    assert request.url == "https://h.example/x"
    assert json.loads(request.body) == {
        "type": "worker-lost",
        "timestamp": "2023-11-14T22:13:20.250Z",
        "data": {"state": None, "run": "r", "worker": "box-3", "round": None, "message": "box-3 is gone"},
    }
    assert request.headers["webhook-timestamp"] == "1700000060"
    signed = b"msg_1.1700000060." + request.body
    expected = base64.b64encode(hmac.new(bytes(range(32)), signed, hashlib.sha256).digest()).decode()
    assert request.headers["webhook-signature"] == f"v1,{expected}"
    unsigned = request_of(a_notification(), "https://h.example/x", "json", None, NOW)
    assert "webhook-signature" not in unsigned.headers


@pytest.mark.covers("security:forged-notification")
def test_the_example_of_the_page_verifies_the_signature() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    request = request_of(a_notification(), "https://h.example/x", "json", SECRET, time.time())
    assert names["is_genuine"](SECRET, request.headers, request.body)
    assert not names["is_genuine"](SECRET, request.headers, request.body + b" ")
    assert not names["is_genuine"](SECRET, request.headers | {"webhook-id": "msg_2"}, request.body)
    late = request_of(a_notification(), "https://h.example/x", "json", SECRET, time.time() - 1000)
    assert not names["is_genuine"](SECRET, late.headers, late.body)


def test_each_preset_has_the_body_that_its_receiver_takes() -> None:
    each = a_notification(run="r", message="<!channel> & @everyone " + "x" * 9000)
    slack = json.loads(request_of(each, "https://hooks.slack.com/services/T/B/x", "slack", None, NOW).body)
    assert set(slack) == {"text"}
    assert slack["text"].startswith("*r: worker lost*\n&lt;!channel&gt; &amp; @everyone")
    discord = json.loads(request_of(each, "https://discord.com/api/webhooks/1/x", "discord", None, NOW).body)
    assert set(discord) == {"content", "allowed_mentions"}
    assert len(discord["content"]) <= 2000
    assert discord["allowed_mentions"] == {"parse": []}
    ntfy = request_of(each, "https://:tk_1@ntfy.example.org/base/topic", "ntfy", None, NOW)
    assert ntfy.url == "https://:tk_1@ntfy.example.org/base/"
    document = json.loads(ntfy.body)
    assert (document["topic"], document["title"], document["priority"]) == ("topic", "r: worker lost", 3)
    assert len(document["message"].encode()) <= 4096
    for format_ in ("json", "slack", "discord", "ntfy"):
        for kind in KINDS:
            json.loads(request_of(a_notification(kind=kind, state="resolved"), "http://h/t", format_, None, NOW).body)


def test_the_host_says_the_format() -> None:
    hosts = {"https://hooks.slack.com/services/x": "slack", "https://discord.com/api/webhooks/1/x": "discord"}
    others = {"https://ntfy.sh/topic": "ntfy", "https://example.org/hooks.slack.com": "json"}
    for url, expected in (hosts | others).items():
        assert format_of(url) == expected


def test_settings_take_secrets_from_files_and_show_none(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("https://hooks.slack.com/services/T/B/very-secret\n")
    (tmp_path / "secret").write_text(SECRET + "\n")
    settings = Settings(notify_url=f"@{tmp_path}/url", notify_secret=f"@{tmp_path}/secret")
    assert settings.notify_url == SecretStr("https://hooks.slack.com/services/T/B/very-secret")
    assert settings.notify_secret == SecretStr(SECRET)
    assert "very-secret" not in repr(settings)
    assert SECRET not in repr(settings)
    for wrong in (
        "ftp://example.org/x",
        "example.org",
        "https://",
        "https://ex ample.org",
        f"@{tmp_path}/none",
        "https://[",
    ):
        with pytest.raises(ValidationError):
            Settings(notify_url=wrong)
    for wrong in ("whsec_", "whsec_dG9vIHNob3J0", SECRET[6:], "whsec_!"):
        with pytest.raises(ValidationError):
            Settings(notify_secret=wrong)


# --- sending ----------------------------------------------------------------------------------------------------------


def test_what_is_not_taken_is_sent_again_with_the_same_id(
    sink: Sink, box: Callable[[], Box], database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    made = box()
    note(made, database, "lost", worker="a")
    note(made, database, "finished")
    sink.answers += [(500, {}, b""), (429, {"Retry-After": "77"}, b"slow down")]
    made.deliver()
    assert len(sink.came) == 1, "the webhook is at fault: the other one waits"
    made.deliver()
    assert len(sink.came) == 1, "not before the pause is over"
    made.clock.advance(FIRST_PAUSE_S / 2)
    made.deliver()
    assert len(sink.came) == 2
    assert "429" in made.sender.fault
    made.clock.advance(76)
    made.deliver()
    assert len(sink.came) == 2, "as long as the webhook asks for"
    made.clock.advance(1)
    made.deliver()
    assert [headers["webhook-id"] for _, headers, _ in sink.came] == ["msg_0", "msg_0", "msg_0", "msg_1"]
    assert (made.sender.fault, made.sender.sent, made.sender.failed) == ("", 2, 2)
    assert made.outbox.pending == []
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "two failures within ten minutes are one line"


def test_one_that_is_refused_holds_up_no_other_and_is_given_up(
    sink: Sink, box: Callable[[], Box], database: Database
) -> None:
    made = box()
    note(made, database, "lost", worker="a")
    note(made, database, "finished")
    sink.answers.append((400, {}, b"invalid_payload " * 10_000))
    made.deliver()
    assert [body["type"] for body in sink.bodies] == ["worker-lost", "run-finished"]
    (left,) = made.outbox.pending
    sink.answers.append((404, {}, b"no_service"))
    made.clock.advance(GIVE_UP_S + 1)
    made.deliver()
    assert left.attempts == 2
    assert "no_service" in made.sender.fault
    assert made.outbox.pending == []
    assert made.outbox.dropped == 1
    assert box().outbox.pending == [], "nor after a restart"


@pytest.mark.covers("security:hostile-webhook")
def test_redirects_are_not_followed_and_answers_are_cut(sink: Sink) -> None:
    webhook = Webhook(SecretStr(f"{sink.url}/hook-of-9999"), "json")
    sink.answers.append((302, {"Location": f"{sink.url}/elsewhere"}, b""))
    with pytest.raises(DeliveryError, match="redirects"):
        asyncio.run(send(webhook, a_notification(), NOW, unproxied))
    assert [path for path, _, _ in sink.came] == ["/hook-of-9999"]
    sink.answers.append((400, {}, b"no such hook-of-9999 ost_" + b"a" * 43 + b"\x1b[2J" + b"x" * 5_000_000))
    with pytest.raises(DeliveryError) as refused:
        asyncio.run(send(webhook, a_notification(), NOW, unproxied))
    assert len(str(refused.value)) < 400
    assert not refused.value.for_all
    for hidden in ("hook-of-9999", "aaaa", "\x1b"):
        assert hidden not in str(refused.value)
    assert new_client().follow_redirects is False


def test_nobody_listens(box: Callable[[], Box], database: Database, caplog: pytest.LogCaptureFixture) -> None:
    made = box()
    with receiving() as gone:
        pass
    made.sender.webhook = Webhook(SecretStr(f"{gone.url}/secret-path"), "json")
    note(made, database, "finished")
    made.deliver()
    assert "127.0.0.1" in made.sender.fault
    assert "secret-path" not in caplog.text + made.sender.fault
    assert len(made.outbox.pending) == 1


def test_the_pauses_double_up_to_an_hour_and_differ() -> None:
    assert [pause_s(n, 0.0) for n in (1, 2, 3)] == [2.5, 5.0, 10.0]
    assert pause_s(1, 0.999) < FIRST_PAUSE_S
    assert pause_s(10_000, 1.0) == LONGEST_PAUSE_S


def test_the_command_sends_a_test(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OUTERSTEP_COORDINATOR_NOTIFY_SECRET", SECRET)
    command = ["coordinator", "notify-test", "--notify", f"{sink.url}/hook-of-9999"]
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, sink.bodies[0]["type"]) == (0, "test"), done.output
    assert sink.came[0][1]["webhook-signature"].startswith("v1,")
    sink.answers.append((403, {}, b"no"))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == Exit.REFUSED
    assert "403" in done.output
    assert "hook-of-9999" not in done.output
    assert CliRunner().invoke(app, ["coordinator", "notify-test"]).exit_code == Exit.USAGE


def test_every_event_that_is_notified_is_one_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rest.md").read_text(encoding="utf-8")
    for event, kind in EVENT_KINDS.items():
        assert f"\n| `{event}` |" in page, event
        assert kind in KINDS


# --- the outbox -------------------------------------------------------------------------------------------------------


def test_a_restart_loses_nothing_and_repeats_nothing(sink: Sink, box: Callable[[], Box], database: Database) -> None:
    first = box()
    note(first, database, "lost", worker="a")
    first.outbox.begin("disk-filling", "5% is free")
    first.deliver()
    first.outbox.begin("disk-filling", "4% is free")
    note(first, database, "spoilt")
    again = box()
    assert [each.notification.kind for each in again.outbox.pending] == ["guard"]
    again.outbox.begin("disk-filling", "3% is free")
    again.outbox.end("disk-filling", "room")
    again.outbox.end("disk-filling", "room")
    again.deliver()
    states = [(body["type"], body["data"]["state"]) for body in sink.bodies]
    assert states == [
        *(("worker-lost", None), ("disk-filling", "firing")),
        *(("guard", None), ("disk-filling", "resolved")),
    ]
    assert len({headers["webhook-id"] for _, headers, _ in sink.came}) == 4
    assert box().outbox.pending == []


def test_an_event_that_is_not_committed_is_not_notified(box: Callable[[], Box], database: Database) -> None:
    made = box()

    def fail_halfway() -> None:
        with database.write() as session:
            made.outbox.note_event(session, "r", "finished", "", {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert made.outbox.pending == box().outbox.pending == []


def test_a_flood_is_a_few_messages(box: Callable[[], Box], database: Database) -> None:
    made = box()
    for number in range(40):
        note(made, database, "lost", worker=f"box-{number % 20}")
        note(made, database, "round-published", round=number)
    assert len(made.outbox.pending) == outboxes.PER_WINDOW
    note(made, database, "lost", run="other", worker="box-1")
    assert len(made.outbox.pending) == outboxes.PER_WINDOW + 1, "of each run"
    made.clock.advance(outboxes.WINDOW_S + 1)
    note(made, database, "lost", worker="box-1")
    note(made, database, "lost", worker="box-1")
    assert len(made.outbox.pending) == outboxes.PER_WINDOW + 2
    assert "35 " in made.outbox.pending[-1].notification.message


def test_there_is_a_limit_to_what_waits_and_to_what_is_kept(
    box: Callable[[], Box], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outboxes, "MAX_PENDING", 3)
    monkeypatch.setattr(outboxes, "KEPT", 2)
    made = box()
    for number in range(5):
        made.outbox.begin("run-stalled", "", run=f"r{number}")
    assert [each.notification.run for each in made.outbox.pending] == ["r2", "r3", "r4"]
    assert made.outbox.dropped == 2
    for number in range(5):
        made.outbox.end("run-stalled", "", run=f"r{number}")
    for each in made.outbox.pending:
        made.outbox.done(each.notification.id)
    with database.read() as session:
        assert len(session.scalars(select(NotificationRow)).all()) == 2


def test_a_full_disk_is_notified_though_it_takes_no_row(sink: Sink, box: Callable[[], Box], database: Database) -> None:
    made = box()
    with database.writing.connect() as connection_:  # the only one in the pool
        pages = int(connection_.exec_driver_sql("PRAGMA page_count").scalar_one())
        connection_.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    made.outbox.begin("disk-filling", "x" * 50_000)
    made.deliver()
    assert [body["type"] for body in sink.bodies] == ["disk-filling"]
    assert box().outbox.is_open("disk-filling") is None, "there was no room for the row"
    with database.writing.connect() as connection_:
        connection_.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1000}")
    made.outbox.flush()
    again = box().outbox
    assert again.is_open("disk-filling") is not None
    assert again.pending == [], "it was sent"


# --- what begins and ends ---------------------------------------------------------------------------------------------


@dataclass
class Watched:
    running: InThread
    sink: Sink
    clock: SettableClock

    @property
    def service(self) -> Coordinator:
        return self.running.coordinator

    def look(self) -> list[tuple[str, str | None]]:
        """Look once more; what was notified meanwhile."""
        before = len(self.sink.came)
        self.clock.advance(CHECK_S)
        self.service.tick()
        outbox = self.service.outbox
        assert outbox is not None
        wait_until(lambda: not outbox.pending)
        return [(body["type"], body["data"]["state"]) for body in self.sink.bodies[before:]]


@contextmanager
def watched(tmp_path: Path, sink: Sink, clock: SettableClock, **settings: Any) -> Iterator[Watched]:
    with coordinator_thread(tmp_path / "data", clock=clock, notify_url=f"{sink.url}/hook", **settings) as running:
        yield Watched(running, sink, clock)


def test_a_stalled_run_is_notified_once_and_once_more_when_it_goes_on(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.app.SEND_S", 0.01)
    clock = SettableClock()
    patient = "lease_s = 86400"
    with watched(tmp_path, sink, clock) as found:
        a, b = crew(found.running, "r", ["a", "b"], rounds=2, min_workers=2, members=patient)
        for each in (a, b):
            each.assignment(0)
        a.take_part(0)
        assert found.look() == []
        clock.advance(ROUND_S)
        assert found.look() == [("run-stalled", "firing")]
        assert "waiting for" in sink.bodies[-1]["data"]["message"]
        assert found.look() == []
        assert ("run-stalled", "r") in found.service.alerts.conditions
    with watched(tmp_path, sink, clock) as found:
        assert found.look() == [], "the clock of a new process knows nothing, and that is no end"
        b.http = found.running.client(b.joined.member_token)
        b.take_part(0)
        found.running.await_state("r", 1)
        assert found.look() == [("run-stalled", "resolved")]
        found.running.create_run(spec_toml("idle"))
        assert found.look() == []
        clock.advance(NO_ROUND_S + 1)
        assert ("run-stalled", "firing") in found.look()
        with found.running.client() as admin:
            admin.patch("/v1/runs/idle", json={"state": RunState.STOPPED}).raise_for_status()
            assert ("run-stalled", "resolved") in found.look()


def test_a_disk_that_fills_up_a_failed_backup_and_the_end_of_a_run(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.app.SEND_S", 0.01)
    clock, free = SettableClock(), [50]
    with watched(tmp_path, sink, clock) as found:
        found.service.alerts.disks = lambda places: [Disk(tuple(places), free[0], 100)]
        assert found.look() == []
        for bytes_, expected in ((9, "firing"), (11, None), (8, None), (13, "resolved")):
            free[0] = bytes_
            assert found.look() == ([] if expected is None else [("disk-filling", expected)])
        found.service.storage.note(OSError(errno.ENOSPC, "no space"))
        assert found.look() == [("disk-filling", "firing")]
        (a,) = crew(found.running, "r", ["a"], rounds=1)
        play_round([a], 0)
        found.running.await_state("r", 1)
        found.look()
        assert [body["data"]["run"] for body in sink.bodies if body["type"] == "run-finished"] == ["r"]


def test_a_failed_backup_is_notified_until_one_is_good(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.app.SEND_S", 0.01)
    clock, place = SettableClock(), tmp_path / "backups"
    place.write_text("in the way")
    with watched(tmp_path, sink, clock, backup_dir=place) as found:
        backups = found.service.backups
        assert backups is not None
        wait_until(lambda: bool(backups.fault))
        assert found.look() == [("backup-failed", "firing")]
        place.unlink()
        assert backups.failed_at is not None
        clock.advance(400)
        found.service.tick()
        wait_until(lambda: not backups.fault)
        assert found.look() == [("backup-failed", "resolved")]
