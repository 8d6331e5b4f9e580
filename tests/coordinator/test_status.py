"""How the coordinator is: by REST and by the command, with what to do about what is wrong; and no secrets in it."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.api.server import REMEDIES
from coordinator.process import MAX_CHARACTERS, RECENT, RecentErrors, scrubbed
from coordinator.reporting.alerts import CHECK_S, NO_ROUND_S, Disk
from coordinator.store.blobs import StoreOutage
from harness.coordinator import SettableClock, coordinator_thread
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.messages import ServerStatus
from tests.coordinator.crew import crew
from tests.support.waiting import wait_until

TOKEN = "ost_" + "a" * 43


@pytest.mark.slow
@pytest.mark.in_sqlite
def test_all_is_well_and_then_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, place = SettableClock(), tmp_path / "backups"
    with coordinator_thread(
        tmp_path / "data", clock=clock, backup_dir=place, notify_url="http://127.0.0.1:9/secret-path"
    ) as running:
        service = running.coordinator
        wait_until(lambda: service.last_backup_at is not None)
        crew(running, "r", ["a", "b"], min_workers=2, members="lease_s = 86400")
        with running.client() as admin:
            found = ServerStatus.model_validate(admin.get("/v1/status").raise_for_status().json())
            assert found.findings == []
            assert found.disks[0].places == ["data", "database"]
            assert found.disks[0].size_bytes >= found.disks[0].free_bytes > 0
            assert (found.database.backend, found.database.fault) == ("sqlite", "")
            assert (found.database.size_bytes or 0) > 10_000
            assert (found.clients.workers, found.clients.connections > 0) == (2, True)
            assert found.backup is not None
            assert (found.backup.last_at, found.backup.fault) == (service.last_backup_at, "")
            assert [(each.name, each.signed) for each in found.notifications] == [("127.0.0.1", False)]

            clock.advance(CHECK_S)
            service.tick()
            service.alerts.disks = lambda places: [Disk(tuple(places), 5, 100)]
            logging.getLogger("coordinator.trial").error("refused with %s", TOKEN)
            clock.advance(NO_ROUND_S + 1)
            service.tick()
            wait_until(lambda: service.notifier.senders[0].fault != "")
            reply = admin.get("/v1/status").raise_for_status()
            assert "secret-path" not in reply.text
            assert TOKEN not in reply.text
            found = ServerStatus.model_validate(reply.json())
        about = [(each.run, each.about) for each in found.findings]
        assert about == [(None, "disk-filling"), (None, "notifications"), ("r", "run-stalled")]
        assert "outerstep run show r" in found.findings[2].remedy
        assert "refused with" in {each.message.partition(" ost_")[0] for each in found.errors}

        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("OUTERSTEP_TOKEN", running.admin_token)
        command = ["coordinator", "status", "--url", running.url]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == Exit.WRONG, done.output
        for said in ("r: run stalled", "5.0% of the disk", found.version, "refused with"):
            assert said in done.output
        done = CliRunner().invoke(app, [*command, "--format", "json"])
        assert (done.exit_code, json.loads(done.output)["clients"]["workers"]) == (Exit.WRONG, 2)


def test_cron_hears_of_what_is_wrong_by_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        command = ["coordinator", "status", "--url", running.url, "--token", running.admin_token]
        assert CliRunner().invoke(app, command).exit_code == Exit.DONE
        running.coordinator.storage.note(StoreOutage("the bucket is gone"))
        assert CliRunner().invoke(app, command).exit_code == Exit.WRONG
    assert CliRunner().invoke(app, command).exit_code == Exit.RETRY


def test_every_remedy_can_be_said() -> None:
    for about, remedy in REMEDIES.items():
        assert "{" not in remedy.format(run="r"), about


@pytest.mark.covers("security:secrets-in-logs")
@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"with {TOKEN} in it", "aaaa"),
        ("join by ostj_" + "b" * 43, "bbbb"),
        ("signed by whsec_AAAABBBBCCCC+/==", "AAAABBBB"),
        ("Authorization: Bearer abcdefgh12345", "abcdefgh12345"),
        ("at https://ann:pa55word@example.org/x", "pa55word"),
        ("GET /x?X-Amz-Signature=0123456789&y=1", "0123456789"),
        ("api_key=0123456789", "0123456789"),
    ],
)
def test_what_looks_like_a_secret_is_not_shown(text: str, hidden: str) -> None:
    assert hidden not in scrubbed(text)
    assert scrubbed(text)[:3] == text[:3]


def test_recent_errors_are_bounded_and_counted() -> None:
    errors = RecentErrors()
    logger = logging.Logger("trial")
    logger.addHandler(errors)
    for number in range(500):
        logger.warning("again: %d", number)
        logger.info("not this")
    (only,) = errors.newest_first
    assert (only.count, only.message, only.level) == (500, "again: 499", "warning")
    try:
        raise OSError("x" * 100_000)
    except OSError:
        logger.exception("it failed\x1b[2J")
    newest = errors.newest_first[0]
    assert len(newest.message) == MAX_CHARACTERS
    assert "\x1b" not in newest.message
    for line in range(2 * RECENT):
        record = logging.LogRecord("trial", logging.ERROR, "file.py", line, "line", (), None)
        errors.handle(record)
    assert len(errors.newest_first) == RECENT
