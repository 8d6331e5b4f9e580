"""Notifications: what a real webhook and a real service get, and that nothing waits for one that does not answer."""

import base64
import errno
import hashlib
import hmac
import importlib.util
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError
from typer.testing import CliRunner

from coordinator.notifications import sending, services, webhook
from coordinator.notifications.notification import DeliveryError, Notification, shown
from coordinator.notifications.sending import MAX_QUEUED, PER_WINDOW, WINDOW_S, Notifier, Sender, receivers_of
from coordinator.notifications.webhook import request_of
from coordinator.reporting.alerts import CHECK_S, NO_ROUND_S, ROUND_S, Disk
from coordinator.service import Coordinator
from coordinator.settings import Settings
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import spec_toml
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.errors import OuterstepError
from protocol.messages import RunState, ServerStatus
from tests.coordinator.crew import crew, play_round, play_rounds, ready, set_state
from tests.support.http_server import Handler, serving
from tests.support.waiting import PATIENCE_S, wait_until

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
NOW = 1_700_000_000.25
ROOT = Path(__file__).parents[2]


@dataclass
class Sink:
    """A receiver: what came, and what it answers; without more answers 200. `hold`: it answers once this is set."""

    url: str = ""
    came: list[tuple[str, Message, bytes]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self.came]

    @property
    def service(self) -> str:
        """The URL by which Apprise sends JSON here."""
        return self.url.replace("http:", "json:") + "/very-secret"


@contextmanager
def receiving() -> Iterator[Sink]:
    sink = Sink()
    sink.hold.set()

    class Receiving(Handler):
        def do_POST(self) -> None:  # noqa: N802, http.server's name
            sink.came.append((self.path, self.headers, self.rfile.read(int(self.headers["content-length"]))))
            sink.hold.wait()
            status, headers, body = sink.answers.pop(0) if sink.answers else (200, {}, b"ok")
            with suppress(OSError):  # it no longer waits
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    with serving(Receiving) as url:
        sink.url = url
        yield sink
        sink.hold.set()


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for module in (services, webhook):
        monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)
    with receiving() as sink:
        yield sink


def a_notification(**values: Any) -> Notification:
    return Notification(**{"id": "msg_1", "at": NOW, "kind": "worker-lost", "message": "box-3 is gone", **values})


def settings_for(*urls: str, **others: Any) -> Settings:
    return Settings(notify_url=SecretStr("\n".join(urls)), **others)


@contextmanager
def notifying(*urls: str, clock: SettableClock | None = None, secret: str | None = None) -> Iterator[Notifier]:
    settings = settings_for(*urls, notify_secret=None if secret is None else SecretStr(secret))
    notifier = Notifier(receivers_of(settings), clock or SettableClock(), lambda: NOW)
    yield notifier
    notifier.close()


def done(sender: Sender, count: int) -> None:
    wait_until(lambda: sender.sent + sender.failed == count)


# --- signed JSON ------------------------------------------------------------------------------------------------------


def test_the_signature_is_the_one_of_standard_webhooks(sink: Sink) -> None:
    with notifying(f"{sink.url}/hook", secret=SECRET) as notifier:
        notifier.note_event("r", "lost", "box-3 is gone", {"worker": "box-3"})
        done(notifier.senders[0], 1)
    ((path, headers, body),) = sink.came
    assert path == "/hook"
    assert json.loads(body) == {
        "type": "worker-lost",
        "timestamp": "2023-11-14T22:13:20.250Z",
        "data": {"state": None, "run": "r", "worker": "box-3", "round": None, "message": "box-3 is gone"},
    }
    assert headers["webhook-timestamp"] == "1700000000"
    signed = f"{headers['webhook-id']}.1700000000.".encode() + body
    expected = base64.b64encode(hmac.new(bytes(range(32)), signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert "webhook-signature" not in request_of(a_notification(), None, NOW)[0]


@pytest.mark.covers("security:forged-notification")
def test_the_example_of_the_page_verifies_the_signature() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    headers, body = request_of(a_notification(), SECRET, time.time())
    assert names["is_genuine"](SECRET, headers, body)
    assert not names["is_genuine"](SECRET, headers, body + b" ")
    assert not names["is_genuine"](SECRET, headers | {"webhook-id": "msg_2"}, body)
    late, body = request_of(a_notification(), SECRET, time.time() - 1000)
    assert not names["is_genuine"](SECRET, late, body)


@pytest.mark.covers("security:hostile-webhook")
def test_redirects_are_not_followed_and_answers_are_cut(sink: Sink) -> None:
    url = f"{sink.url}/hook-of-9999"
    sink.answers.append((302, {"Location": f"{sink.url}/elsewhere"}, b""))
    with pytest.raises(DeliveryError, match="redirects"):
        webhook.send(url, None, a_notification(), NOW)
    assert [path for path, _, _ in sink.came] == ["/hook-of-9999"]
    sink.answers.append((400, {}, b"no such hook-of-9999 ost_" + b"a" * 43 + b"\x1b[2J" + b"x" * 5_000_000))
    with pytest.raises(DeliveryError) as refused:
        webhook.send(url, None, a_notification(), NOW)
    assert "answered 400" in str(refused.value)
    assert len(str(refused.value)) < 400
    for hidden in ("hook-of-9999", "aaaa", "\x1b"):
        assert hidden not in str(refused.value)


@pytest.mark.slow
def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as gone:
        pass
    with notifying(f"{gone.url}/secret-path") as notifier:
        (sender,) = notifier.senders
        for count in (1, 2):
            notifier.note_event("r", "finished", "", {})
            done(sender, count)
    assert "127.0.0.1: " in sender.fault
    assert "secret-path" not in caplog.text + sender.fault + repr(sender.receiver)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "the same reason is logged once"


# --- services ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_service_gets_a_message_by_apprise(sink: Sink) -> None:
    with notifying(sink.service, f"{sink.url}/hook", secret=SECRET) as notifier:
        notifier.note_alert("run-stalled", "no round", "resolved", "r", 3)
        for sender in notifier.senders:
            done(sender, 1)
        assert [(each.receiver.name, each.sent) for each in notifier.senders] == [("json", 1), ("127.0.0.1", 1)]
    (body,) = (json.loads(body) for path, _, body in sink.came if path == "/very-secret")
    assert (body["title"], body["message"]) == ("r: run stalled: resolved", "no round")
    assert body["type"] == "success"


@pytest.mark.slow
@pytest.mark.covers("security:hostile-webhook")
def test_what_apprise_says_has_no_part_of_the_url(sink: Sink) -> None:
    sink.answers += [(500, {}, b""), (302, {"Location": f"{sink.url}/elsewhere"}, b"")]
    for _ in range(2):
        with pytest.raises(DeliveryError, match="^json: ") as refused:
            services.send(sink.service, a_notification())
        assert "very-secret" not in str(refused.value)
        assert "JSON" in str(refused.value)
    assert {path for path, _, _ in sink.came} == {"/very-secret"}, "redirects are not followed"
    with pytest.raises(DeliveryError, match="^discord: ") as refused:
        services.send("discord://short-id", a_notification())
    assert "short-id" not in str(refused.value)
    assert "p@ss/word" not in shown("p@ss/word is wrong", "mailto://me:p%40ss%2Fword@example.org")


@pytest.mark.covers("security:hostile-webhook")
@pytest.mark.parametrize(
    "send",
    [
        pytest.param(lambda sink: webhook.send(f"{sink.url}/hook", None, a_notification(), NOW), id="webhook"),
        pytest.param(lambda sink: services.send(sink.service, a_notification()), id="service"),
    ],
)
def test_one_that_never_answers_gets_its_time_and_no_more(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, send: Callable[[Sink], None]
) -> None:
    for module in (services, webhook):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    sink.hold.clear()
    with pytest.raises(DeliveryError, match="no answer"):
        send(sink)


def test_a_missing_apprise_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OuterstepError, match=r"outerstep\[coordinator,notify\]"):
        Coordinator(settings_for("discord://id/token", data_dir=tmp_path / "data"))
    assert len(receivers_of(settings_for("https://example.org/x", "http://example.org/y"))) == 2, "without it"


# --- settings and the command -----------------------------------------------------------------------------------------


def test_settings_take_secrets_from_files_and_show_none(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("https://example.org/very-secret\n\ndiscord://id/token\n")
    (tmp_path / "secret").write_text(SECRET + "\n")
    settings = Settings(notify_url=f"@{tmp_path}/urls", notify_secret=f"@{tmp_path}/secret")
    assert settings.notify_url == SecretStr("https://example.org/very-secret\ndiscord://id/token")
    assert settings.notify_secret == SecretStr(SECRET)
    assert "very-secret" not in repr(settings)
    assert SECRET not in repr(settings)
    for wrong in ("example.org", "https://", "https://ok.example https://[", " ", "slack:/x", f"@{tmp_path}/none"):
        with pytest.raises(ValidationError):
            Settings(notify_url=wrong)
    for wrong in ("whsec_", "whsec_dG9vIHNob3J0", SECRET[6:], "whsec_!"):
        with pytest.raises(ValidationError):
            Settings(notify_secret=wrong)


@pytest.mark.slow
def test_the_command_sends_a_test(sink: Sink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTERSTEP_COORDINATOR_NOTIFY_SECRET", SECRET)
    (tmp_path / "urls").write_text(f"{sink.url}/hook-of-9999\n{sink.service}\n")
    command = ["coordinator", "notify-test", "--notify-url", f"@{tmp_path}/urls"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (sink.bodies[0]["type"], sink.bodies[1]["title"]) == ("test", "Outerstep coordinator: test")
    assert sink.came[0][1]["webhook-signature"].startswith("v1,")
    sink.answers.append((403, {}, b"no"))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == Exit.REFUSED
    assert "403" in done.output
    assert "json accepted it" in done.output, "the others are tested as well"
    assert "hook-of-9999" not in done.output
    assert "very-secret" not in done.output
    assert CliRunner().invoke(app, ["coordinator", "notify-test"]).exit_code == Exit.USAGE


# --- nothing waits ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_flood_is_a_few_messages(sink: Sink) -> None:
    clock = SettableClock()
    with notifying(f"{sink.url}/hook", clock=clock) as notifier:
        for number in range(40):
            notifier.note_event("r", "lost", "gone", {"worker": f"box-{number}"})
            notifier.note_event("r", "published", "", {"round": number})
        notifier.note_event("other", "lost", "gone", {"worker": "box-1"})
        clock.advance(WINDOW_S + 1)
        notifier.note_event("r", "lost", "gone", {"worker": "box-1"})
        done(notifier.senders[0], PER_WINDOW + 2)
    assert [body["data"]["run"] for body in sink.bodies] == [*["r"] * PER_WINDOW, "other", "r"]
    assert "(35 similar" in sink.bodies[-1]["data"]["message"]


@pytest.mark.slow
@pytest.mark.covers("security:hostile-webhook")
def test_one_that_does_not_answer_holds_up_no_round_and_no_other(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sending, "CLOSE_S", 0.1)
    sink.hold.clear()
    with receiving() as other:
        urls = f"{sink.url}/very-secret {other.url}/x"
        with coordinator_thread(tmp_path / "data", notify_url=urls) as running:
            stuck, good = running.coordinator.notifier.senders
            for number in range(MAX_QUEUED + 5):
                stuck.post(a_notification(message=str(number)))
            (a,) = crew(running, "r", ["a"], rounds=1)
            play_rounds(running, [a], range(1))
            done(good, 1)
            assert (stuck.sent, good.sent) == (0, 1)
            assert stuck.failed >= 4
            with running.client() as admin:
                reply = admin.get("/v1/status").raise_for_status()
                metrics = admin.get("/metrics").raise_for_status().text
            assert f'outerstep_notifications_total{{outcome="failed"}} {stuck.failed}.0' in metrics
            (finding,) = ServerStatus.model_validate(reply.json()).findings
            assert "waiting already" in finding.message
            assert "very-secret" not in reply.text + metrics + caplog.text


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
        self.service.notifier.note_alert("test", "", "", None, None)  # after all others
        wait_until(lambda: any(body["type"] == "test" for body in self.sink.bodies[before:]))
        bodies = self.sink.bodies[before:]
        return [(body["type"], body["data"]["state"]) for body in bodies if body["type"] != "test"]


@contextmanager
def watched(tmp_path: Path, sink: Sink, clock: SettableClock, **settings: Any) -> Iterator[Watched]:
    with coordinator_thread(tmp_path / "data", clock=clock, notify_url=f"{sink.url}/hook", **settings) as running:
        yield Watched(running, sink, clock)


@pytest.mark.slow
def test_a_stalled_run_is_notified_once_and_once_more_when_it_goes_on(tmp_path: Path, sink: Sink) -> None:
    clock = SettableClock()
    patient = "lease_s = 86400"
    with watched(tmp_path, sink, clock) as found:
        a, b = crew(found.running, "r", ["a", "b"], rounds=2, min_workers=2, members=patient)
        ready([a, b], 0)
        a.take_part(0)
        assert found.look() == []
        clock.advance(ROUND_S)
        assert found.look() == [("run-stalled", "firing")]
        assert "waiting for" in sink.bodies[-2]["data"]["message"]
        assert found.look() == []
        assert ("run-stalled", "r") in found.service.alerts.conditions
        b.take_part(0)
        found.running.await_state("r", 1)
        assert found.look() == [("run-stalled", "resolved")]
        found.running.create_run(spec_toml("idle"))
        assert found.look() == []
        clock.advance(NO_ROUND_S + 1)
        assert ("run-stalled", "firing") in found.look()
        set_state(found.running, "idle", RunState.STOPPED)
        assert ("run-stalled", "resolved") in found.look()


@pytest.mark.slow
def test_a_disk_that_fills_up_and_the_end_of_a_run(tmp_path: Path, sink: Sink) -> None:
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


@pytest.mark.slow
def test_a_failed_backup_is_notified_until_one_is_good(tmp_path: Path, sink: Sink) -> None:
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
