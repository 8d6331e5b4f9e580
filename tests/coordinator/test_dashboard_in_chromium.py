"""The dashboard in a real browser, with a real run behind it: what it shows, what is clicked, what strangers write."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from coordinator.dashboard import serving
from coordinator.reporting.alerts import Disk
from coordinator.store.database import Fault
from coordinator.store.tables import EvaluationRow, FragmentRow, RoundRow, WorkerRow
from coordinator.upkeep.storage import Storage
from harness.browser import Tab, chromium, tab
from harness.coordinator import CoordinatorProcess, InThread, coordinator_thread
from harness.member import Member, spec_toml
from protocol.messages import Cause, DataSummary, Scope
from tests.coordinator.crew import crew, events, info, play_round
from tests.support.browser import needs_chromium
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [needs_chromium, pytest.mark.system]

WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "color_scheme": "dark"}
HOSTILE = "<img src=x onerror=alert(1)><b>box</b>"
SECONDS = {"train": 4.0, "gather": 0.1, "sync": 1.0, "upload": 0.6, "wait": 0.5, "evaluate": 0.2}

expect.set_options(timeout=1000 * PATIENCE_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with coordinator_thread(tmp_path_factory.mktemp("dashboard") / "data") as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def browser(running: InThread) -> Iterator[Browser]:  # which ends after it: Playwright has an event loop in this thread
    with chromium() as opened:
        yield opened


@dataclass
class Played:
    """A run with its members, who tell of their rounds as workers do."""

    running: InThread
    run: str
    members: list[Member]
    round: int = 0

    def play(self, rounds: int = 1, slow: str | None = None) -> None:
        for _ in range(rounds):
            for member in self.members:
                self._tell(member, slow)
            play_round(self.members, self.round)
            self.round += 1
        self.running.await_state(self.run, self.round)

    def _tell(self, member: Member, slow: str | None) -> None:
        metrics = {"round": self.round, "inner_step": 2, "tokens_per_second": 12_345.6, "phase": "train"}
        member.http.put(member.path("/lease"), json={**metrics, "loss": 1.5}).raise_for_status()
        if self.round:
            seconds = {**SECONDS, "train": SECONDS["train"] * (2 if member.name == slow else 1)}
            report = {"round": self.round - 1, "epoch": 1, "upload_bytes": 5000, "download_bytes": 4000}
            asked = {"state_round": self.round, "report": {**report, "seconds": seconds}}
            member.http.put(member.path("/assignment"), json=asked).raise_for_status()


@pytest.fixture
def played(running: InThread, run: str) -> Played:
    """A run of 3 workers, of which 4 rounds were played; in the fifth nobody has contributed."""
    played = Played(
        running, run, crew(running, run, ["ann", "bob", "cas"], rounds=8, min_workers=3, members="lease_s = 3600")
    )
    played.play(4, slow="cas")
    return played


# A notice is on the page for six seconds only.
KEEP_NOTICES = """window.notices = [];
new MutationObserver((changes) => changes.filter((each) => each.target.id === "notice").forEach((each) =>
  each.addedNodes.forEach((line) => notices.push(line.textContent)))
).observe(document, { childList: true, subtree: true });"""


@contextmanager
def opened(
    browser: Browser, running: InThread, fragment: str, token: str | None = None, **options: Any
) -> Iterator[Tab]:
    """The page, by a link with a token; at the end its console must have been silent, and nobody else asked."""
    with tab(browser, **(options or WIDE)) as found:
        found.page.add_init_script(KEEP_NOTICES)
        found.page.goto(f"{running.url}/#token={token or running.admin_token}&{fragment}")
        yield found
        assert found.complaints == []
        assert {url for url in found.asked if not url.startswith(f"{running.url}/")} == set()


def await_notice(found: Tab, text: str) -> None:
    wait_until(lambda: bool(found.page.evaluate("text => notices.some((each) => each.includes(text))", text)))


def sentence(found: Tab) -> Locator:
    return found.page.locator(".now .sentence")


def click(found: Tab, name: str, within: str = "body") -> None:
    found.page.locator(within).get_by_role("button", name=name, exact=True).click()


def test_signing_in_and_the_way_to_a_run(browser: Browser, played: Played) -> None:
    running = played.running
    with tab(browser, **WIDE) as found:
        page = found.page
        page.goto(running.url)
        expect(page.get_by_label("Token")).to_be_focused()
        assert [url for url in found.asked if "/v1/" in url] == [], "nothing is asked for without a token"
        page.keyboard.type("ost_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("this token is unknown, was revoked")
        page.get_by_label("Token").fill(running.admin_token)
        page.get_by_role("button", name="Sign in").click()
        card = page.get_by_role("link").filter(has=page.get_by_role("heading", name=played.run, exact=True))
        expect(card).to_contain_text("4 of 8")
        expect(card).to_contain_text("3 live")
        card.press("Enter")
        expect(sentence(found)).to_have_text(info(running, played.run)["reason"])
        page.reload()
        expect(page.get_by_role("heading", name=played.run)).to_be_visible()  # the token is kept as long as the tab
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        page.reload()
        expect(page.get_by_label("Token")).to_be_visible()
        assert [each for each in found.complaints if "401" not in each] == []  # Chromium's word for the wrong one


def test_a_run_is_shown_as_it_is_and_as_it_goes_on(browser: Browser, played: Played) -> None:
    running = played.running
    with opened(browser, running, f"run={played.run}") as found:
        page, shown = found.page, info(running, played.run)
        expect(sentence(found)).to_have_text(shown["reason"])
        assert shown["reason"].startswith("round 4: waiting for 3 of 3 workers")
        expect(page.locator(".now")).to_contain_text("4 of 8 rounds done")
        figures = page.locator(".tiles")
        for said in (
            "1.5000",
            "of the time in inner steps",
            f"{shown['tokens'] / 1000:g}",
            "3 live",
            "all replicas agree",
        ):
            expect(figures).to_contain_text(said)
        rows = page.locator("table.workers tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.first).to_contain_text("12.3 k tokens/s")
        expect(page.get_by_text("cas is the slowest: its inner steps take 2.00 times the median")).to_be_visible()
        for title in ("Loss", "Bytes"):
            expect(page.locator(f'section[aria-label="{title}"] .js-plotly-plot path.js-line').first).to_be_attached()
        page.get_by_role("group", name="Loss by").get_by_role("button", name="Tokens").click()
        expect(page.locator('section[aria-label="Loss"]')).to_contain_text("million tokens")
        (epoch,) = info(running, played.run, "/units")["items"]
        expect(page.locator('section[aria-label="Work units"]')).to_contain_text(f"{epoch['consumed']} of 1 k units")
        assert page.locator(".units .consumed").count() == -(-epoch["consumed"] // 3)
        expect(page.locator('section[aria-label="Events"]')).to_contain_text(
            "round-opened round 4 opened with 3 workers"
        )

        played.play()
        expect(page.locator(".now")).to_contain_text("5 of 8 rounds done")
        expect(sentence(found)).to_contain_text("round 5: ")
        expect(page.locator('section[aria-label="Events"]')).to_contain_text("round-opened round 5")
        expect(page.locator('section[aria-label="Verdicts"]')).to_contain_text("of the last 5 rounds counted in full")
        played.members[0].take_part(5)
        expect(page.locator(".now")).to_contain_text("1 of 3 workers have sent all of round 5")


def test_the_open_round_counts_down_to_its_deadline(browser: Browser, running: InThread, run: str) -> None:
    members = crew(running, run, ["a", "b", "c"], min_workers=1, members="lease_s = 600\ngrace_min_s = 500")
    for member in members:
        member.assignment(0)
    for member in members[:2]:
        member.take_part(0)
    with opened(browser, running, f"run={run}") as found:
        clock = found.page.get_by_role("timer")
        expect(clock).to_have_text(re.compile(r"^8:[0-5]\d$"))
        before = clock.inner_text()
        expect(clock).not_to_have_text(before)
        expect(found.page.locator(".now")).to_contain_text("until round 0 closes")


def test_the_headline_and_the_badge_name_a_full_disk_and_not_a_worker(
    browser: Browser, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The badge was green, the sentence named a worker, and a time to go was shown all the while."""
    full = Fault(Cause.STORAGE_FULL, "the coordinator's disk is full")
    with opened(browser, played.running, f"run={played.run}") as found:
        badge = found.page.locator("h1 + span .badge")
        expect(badge).to_have_text("running")
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "fault", full)
            expect(badge).to_have_text("disk full")
            expect(sentence(found)).to_contain_text("disk is full")
            expect(found.page.locator(".now")).to_contain_text("– to go")
        expect(badge).to_have_text("running")


def test_steering_by_clicks(browser: Browser, played: Played) -> None:
    running, run = played.running, played.run
    with opened(browser, running, f"run={run}") as found:
        page = found.page
        steer = page.get_by_role("group", name="Steer the run")
        click(found, "Pause")
        expect(page.locator("h1 + span .badge")).to_have_text("paused")
        assert info(running, run)["state"] == "paused"
        await_notice(found, "The run is paused")
        expect(steer.get_by_role("button")).to_have_text(["Resume", "Drain", "Stop"])
        click(found, "Resume")
        expect(page.locator("h1 + span .badge")).to_have_text("running")

        click(found, "Stop")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(f"Stop {run}?")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert info(running, run)["state"] == "running"
        click(found, "Drain")
        expect(page.locator("h1 + span .badge")).to_have_text("draining")
        click(found, "Stop")
        click(found, "Stop the run", "dialog")
        expect(page.locator("h1 + span .badge")).to_have_text("stopped")
        expect(sentence(found)).to_contain_text("the run is stopped after 4 of 8 rounds")
        expect(steer.get_by_role("button")).to_have_count(0)
        kinds = [each["kind"] for each in info(running, run, "/events?limit=1000")["items"]]
        assert [kind for kind in kinds if kind in ("paused", "running", "draining", "stopped")] == [
            "paused", "running", "draining", "stopped",
        ]  # fmt: skip


@pytest.mark.nightly
def test_a_button_that_is_pressed_while_its_row_changes_is_clicked(browser: Browser, played: Played) -> None:
    """The row was taken out of the page and put back, and the press was lost."""
    with opened(browser, played.running, f"run={played.run}") as found:
        page, (bob,) = found.page, [each for each in played.members if each.name == "bob"]
        row = page.locator("table.workers tbody tr", has_text="bob")
        expect(row).to_be_visible()
        evict = page.get_by_role("button", name="Evict bob", exact=True)
        evict.focus()  # pressed with a key: a mouse would miss it where the panels above grow meanwhile
        page.keyboard.down("Space")
        bob.http.put(bob.path("/lease"), json={"phase": "one thing"}).raise_for_status()
        expect(row).to_contain_text("one thing")
        page.keyboard.up("Space")
        click(found, "Cancel", "dialog")


@pytest.mark.nightly
def test_evicting_banning_and_readmitting(browser: Browser, played: Played) -> None:
    running, run = played.running, played.run
    with opened(browser, running, f"run={run}") as found:
        page = found.page
        click(found, "Evict bob")
        click(found, "Cancel", "dialog")
        assert info(running, run, "/workers/bob")["state"] == "live"
        click(found, "Evict bob")
        click(found, "Evict", "dialog")
        expect(page.locator("tr", has_text="bob").locator(".badge")).to_have_text("evicted")
        click(found, "Evict cas")
        page.get_by_label("Ban it until it is readmitted").check()
        click(found, "Evict", "dialog")
        expect(page.locator("tr", has_text="cas").locator(".badge")).to_have_text("banned")
        click(found, "Readmit cas")
        await_notice(found, "cas can take part again")
        wait_until(lambda: len(events(running, run, "readmitted")) == 1)
        expect(page.get_by_role("button", name="Readmit cas")).to_have_count(0)


def test_making_and_revoking_a_join_token(browser: Browser, played: Played) -> None:
    running = played.running
    with opened(browser, running, "tokens") as found:
        page = found.page
        click(found, "Create a token")
        page.get_by_label("Run", exact=True).select_option(played.run)
        page.get_by_label("Uses").fill("7")
        page.get_by_label("Note").fill(HOSTILE)
        click(found, "Create it")
        secret = page.locator(".fresh code").first.inner_text()
        assert secret.startswith("ostj_")
        expect(page.locator(".fresh")).to_contain_text(f"outerstep worker {running.url} --run {played.run}")
        with running.client(secret) as box:
            own = box.get("/v1/tokens/self").raise_for_status().json()
        assert (own["scope"], own["run"]) == ("join", played.run)
        row = page.locator("tr", has_text=HOSTILE)  # as it was typed, and no element of it
        expect(row).to_contain_text("0 of 7")
        row.get_by_role("button").click()
        click(found, "Revoke it")
        expect(row).to_have_count(0)
        with running.client(secret) as box:
            assert box.get("/v1/tokens/self").status_code == 401


@pytest.mark.covers("security:token-in-link")
def test_a_viewers_link(browser: Browser, played: Played) -> None:
    """The admin makes it by the page; whoever opens it sees the run, and nothing to press."""
    running = played.running
    with opened(browser, running, "tokens") as admin:
        click(admin, "Create a token")
        admin.page.get_by_label("Scope").select_option("viewer")
        admin.page.get_by_label("Run", exact=True).select_option(played.run)
        click(admin, "Create it")
        link = admin.page.locator(".fresh code").nth(1).inner_text()
    token = link.partition("token=")[2].partition("&")[0]
    with tab(browser, **WIDE) as found:
        page = found.page
        page.goto(link)
        expect(sentence(found)).to_contain_text("round 4: ")
        expect(page.locator("table.workers tbody tr")).to_have_count(3)
        assert page.url == f"{running.url}/#run={played.run}", "the token is in nobody's history"
        assert [url for url in found.asked if token in url] == []
        acts = re.compile("^(Pause|Resume|Drain|Stop|Evict .*|Readmit .*|Create.*|Make.*|Revoke.*)$")
        assert page.get_by_role("button", name=acts).count() == 0
        assert page.get_by_role("link", name="Tokens").count() == 0
        page.goto(f"{running.url}/#tokens")
        expect(page.get_by_text("needs an admin token")).to_be_visible()
        page.goto(f"{running.url}/#")
        expect(page.locator(".card")).to_have_count(1)
        assert page.get_by_role("button", name=acts).count() == 0
        assert found.complaints == []


def test_a_token_that_is_revoked_shows_nothing_more(browser: Browser, played: Played) -> None:
    running = played.running
    viewer = running.token(Scope.VIEWER, run=played.run)
    with tab(browser, **WIDE) as found:
        found.page.goto(f"{running.url}/#token={viewer}&run={played.run}")
        expect(sentence(found)).to_be_visible()
        with running.client() as admin:
            listed = admin.get("/v1/tokens?limit=1000").json()["items"]
            (own,) = [each["id"] for each in listed if (each["scope"], each["run"]) == ("viewer", played.run)]
            admin.delete(f"/v1/tokens/{own}").raise_for_status()
        expect(found.page.get_by_role("alert")).to_contain_text("this token is unknown, was revoked")
        expect(found.page.get_by_label("Token")).to_be_visible()
        assert played.run not in found.page.content()


def test_creating_a_run(browser: Browser, running: InThread, run: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(spec_toml(run, rounds=6))
    with tab(browser, **WIDE) as found:
        page = found.page
        page.goto(f"{running.url}/#token={running.admin_token}")
        click(found, "Create a run")
        click(found, "As TOML", "dialog")
        page.get_by_label("The run's spec, TOML").fill('name = "x"\n[sync]\nroundz = 3\n')
        click(found, "Create", "dialog")
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text(
            "sync"
        )  # the coordinator's own sentence
        page.get_by_label("From a file").set_input_files(file)
        expect(page.get_by_label("The run's spec, TOML")).to_have_value(file.read_text())
        click(found, "Create", "dialog")
        expect(page.get_by_role("heading", name=run)).to_be_visible()
        expect(page.get_by_text("No worker has joined yet.")).to_be_visible()
        assert info(running, run)["rounds"] == 6
        assert [each for each in found.complaints if "422" not in each] == []  # Chromium's word for the refusal


def test_creating_a_run_by_fields(browser: Browser, running: InThread, run: str) -> None:
    filled = {
        "name": run,
        "seed": "7",
        "model.factory": "mine:model",
        "data.source": 'C:\\my "texts"',
        "inner.learning_rate": "4e-4",
        "inner.clip_norm": "none",
        "sync.inner_steps": "600",
        "checkpoints.keep": "3",
    }
    with tab(browser, **WIDE) as found:
        page = found.page
        page.goto(f"{running.url}/#token={running.admin_token}")
        click(found, "Create a run")
        for section in ("inner", "checkpoints"):
            page.locator("summary", has_text=f"[{section}]").click()
        for key, value in filled.items():
            page.get_by_label(key, exact=True).fill(value)
        page.get_by_label("sync.zstd", exact=True).select_option("false")
        page.get_by_label("sync.upload_codec", exact=True).select_option("int4")
        click(found, "Create", "dialog")
        assert page.get_by_label("sync.rounds", exact=True).evaluate("each => !each.validity.valid"), "it is needed"
        page.get_by_label("sync.rounds", exact=True).fill("6 rounds")
        click(found, "Create", "dialog")
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("rounds")
        page.get_by_label("sync.rounds", exact=True).fill("6")
        click(found, "As TOML", "dialog")
        expect(page.get_by_label("The run's spec, TOML")).to_have_value(re.compile(r"\[sync\]\nrounds = 6\n"))
        click(found, "By fields", "dialog")
        status = page.get_by_role("dialog").get_by_role("status")
        expect(status).to_be_empty()
        click(found, "As TOML", "dialog")
        page.get_by_label("The run's spec, TOML").press("Control+End")
        page.get_by_label("The run's spec, TOML").press_sequentially("# typed")
        click(found, "By fields", "dialog")
        expect(status).to_contain_text("Changes in the TOML")
        assert page.get_by_role("dialog").evaluate("each => each.scrollWidth <= each.clientWidth")
        click(found, "Create", "dialog")
        expect(page.get_by_role("heading", name=run)).to_be_visible()
        assert [each for each in found.complaints if "422" not in each] == []
    spec = info(running, run)["spec"]
    assert (spec["seed"], spec["model"]["factory"], spec["data"]["source"]) == (7, "mine:model", 'C:\\my "texts"')
    assert (spec["inner"]["learning_rate"], spec["inner"]["clip_norm"]) == (4e-4, "none")
    sync = {key: spec["sync"][key] for key in ("rounds", "inner_steps", "zstd", "upload_codec")}
    assert sync == {
        "rounds": 6,
        "inner_steps": 600,
        "zstd": False,
        "upload_codec": "int4",
    }
    assert spec["checkpoints"] == {"every_rounds": 10, "keep": 3}


@pytest.mark.covers("security:script-injection")
def test_what_strangers_write_is_text(
    browser: Browser, running: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_text() -> None:
        assert found.page.locator("img, main b, main script").count() == 0
        assert found.page.evaluate("document.documentElement.scrollWidth") <= 390

    (member,) = crew(running, run, ["a"], rounds=3)
    name = "x" + "-_.y" * 15
    stranger = Member(running.client(), run, name)
    host = {"host": HOSTILE, "device": "javascript:alert(1)", HOSTILE[:60]: "`${1}`"}
    stranger.ask_to_join(running.worker_token, host=host).raise_for_status()
    phase = HOSTILE[:28]
    member.http.put(member.path("/lease"), json={"phase": phase}).raise_for_status()
    with running.live(run).lock, running.live(run).change() as change:
        change.record("late", HOSTILE)
    running.token(Scope.VIEWER, note=HOSTILE)
    logging.getLogger("coordinator.trial").error(HOSTILE)
    with monkeypatch.context() as patch, opened(browser, running, f"run={run}", **PHONE) as found:
        patch.setattr(Storage, "fault", Fault(Cause.STORAGE_UNAVAILABLE, HOSTILE))
        expect(found.page.locator("tr", has_text=name)).to_contain_text(HOSTILE)
        expect(found.page.locator('td[data-label="Doing"]').filter(has_text=phase)).to_be_visible()
        expect(found.page.locator(".events")).to_contain_text(HOSTILE)
        expect(sentence(found)).to_contain_text(HOSTILE)
        is_text()
        for fragment, where in (
            ("", ".card"),
            ("tokens", "table.tokens"),
            ("server", ".errors"),
            ("server", ".finding"),
        ):
            found.page.goto(f"{running.url}/#{fragment}")
            expect(found.page.locator(where).filter(has_text=HOSTILE).first).to_be_visible()
            is_text()


@pytest.mark.nightly
def test_on_a_phone_nothing_is_wider_than_it(browser: Browser, played: Played) -> None:
    running = played.running
    width = "document.documentElement.scrollWidth"
    with opened(browser, running, f"run={played.run}", **PHONE) as found:
        page = found.page
        expect(page.locator("table.workers tbody tr")).to_have_count(3)
        names = page.locator("table.workers tbody th")
        assert names.all_inner_texts() == sorted(names.all_inner_texts())
        page.locator("table.workers").get_by_role("button", name=re.compile("^Worker")).click()  # it has an arrow
        expect(names.first).to_have_text("cas")
        click(found, "Rate", "table.workers")
        expect(page.locator("table.workers tbody tr").first).to_contain_text("12.3 k tokens/s")
        page.locator('section[aria-label="Bytes"]').scroll_into_view_if_needed()
        expect(page.locator('section[aria-label="Bytes"] path.js-line').first).to_be_visible()
        assert page.evaluate(width) == 390
        page.get_by_text("Show as a table").click()
        expect(page.get_by_role("row", name=re.compile("cas .* 0 rounds 0 rounds"))).to_be_attached()
        assert page.evaluate(width) == 390
        click(found, "Evict bob")
        assert page.evaluate(width) == 390
        click(found, "Cancel", "dialog")
        for fragment, there in (("", ".card"), ("tokens", "table.tokens tbody tr")):
            page.goto(f"{running.url}/#{fragment}")
            expect(page.locator(there).first).to_be_visible()
            assert page.evaluate(width) == 390


@pytest.mark.nightly
def test_everything_is_reached_by_the_keyboard(browser: Browser, played: Played) -> None:
    with opened(browser, played.running, f"run={played.run}") as found:
        page = found.page
        expect(page.locator("table.workers tbody tr")).to_have_count(3)
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "[document.activeElement.ariaLabel || document.activeElement.textContent,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            reached.append(focused[0].strip())
            assert focused[1] != "none" or page.evaluate("document.activeElement === document.body"), focused
        for name in ("Skip to the content", "Runs", "Pause", "Drain", "Stop", "Wall time", "Score", "Evict cas"):
            assert name in reached, (name, reached)


@pytest.mark.nightly
def test_an_outage_is_told_and_outlived(browser: Browser, tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(tmp_path / "data")
    try:
        running = coordinator.start()
        running.create_run(spec_toml("r"))
        with tab(browser, **WIDE) as found:
            page = found.page
            page.goto(f"{running.url}/#token={running.admin_token}&run=r")
            reason, badge = sentence(found), page.locator("h1 + span .badge")
            steering = page.get_by_role("group", name="Steer the run").get_by_role("button")
            expect(reason).to_have_text(info(running, "r")["reason"])
            expect(steering.first).to_be_enabled()
            coordinator.kill()
            expect(reason).to_contain_text("The coordinator does not answer")
            expect(badge).to_have_text("unreachable")
            assert [each.is_enabled() for each in steering.all()] == [False, False, False]
            coordinator.start()
            expect(reason).to_have_text(info(running, "r")["reason"])
            expect(badge).to_have_text("seeding")
            expect(steering.first).to_be_enabled()
            with running.client() as admin:
                admin.patch("/v1/runs/r", json={"state": "paused"}).raise_for_status()
            expect(page.locator("h1 + span .badge")).to_have_text("paused")
            expect(page.get_by_role("log")).to_contain_text("paused")
    finally:
        coordinator.stop()


BREAK_OFF = """() => {
  const whole = Response.prototype.json;
  let left = 3;
  Response.prototype.json = function () {
    return left-- > 0 ? Promise.reject(new TypeError("Failed to fetch")) : whole.call(this);
  };
}"""


@pytest.mark.nightly
def test_answers_that_break_off_in_the_middle_are_an_outage(browser: Browser, played: Played) -> None:
    """As where the coordinator is killed while it answers: the page gave up, with "Failed to fetch"."""
    running = played.running
    with tab(browser, **WIDE) as found:
        page = found.page
        page.goto(f"{running.url}/#token={running.admin_token}&run={played.run}")
        expect(page.get_by_role("button", name="Evict bob")).to_be_enabled()
        page.evaluate(BREAK_OFF)
        expect(page.locator("h1 + span .badge")).to_have_text("unreachable")
        expect(page.get_by_role("button", name="Evict bob")).to_be_enabled()
        expect(page.get_by_text("Something went wrong")).to_have_count(0)


def test_the_command_that_joins_has_the_coordinator_s_address(browser: Browser, running: InThread, run: str) -> None:
    running.create_run(spec_toml(run))
    with opened(browser, running, f"run={run}") as found:
        workers = found.page.locator('section[aria-label="Workers"]')
        expect(workers).to_contain_text(f"outerstep worker {running.url} --run {run}")


@pytest.mark.nightly
def test_what_is_not_there_is_told_with_a_way_back(browser: Browser, running: InThread) -> None:
    with tab(browser, **WIDE) as found:
        found.page.goto(f"{running.url}/#token={running.admin_token}&run=nowhere")
        expect(found.page.locator("main")).to_contain_text("nowhere")
        found.page.get_by_role("link", name="All runs").click()
        expect(found.page.get_by_role("heading", name="Runs")).to_be_visible()


@pytest.mark.nightly
def test_where_nobody_answers_at_first_it_asks_again_and_keeps_the_token(browser: Browser, running: InThread) -> None:
    with tab(browser, **WIDE) as found:
        found.page.route("**/tokens/self", lambda route: route.abort())
        found.page.goto(f"{running.url}/#token={running.admin_token}")
        expect(found.page.get_by_role("alert")).to_contain_text("does not answer")
        found.page.unroute("**/tokens/self")
        expect(found.page.get_by_role("heading", name="Runs")).to_be_visible()


@pytest.mark.nightly
def test_the_timeline_tells_who_is_slow_late_and_gone(browser: Browser, running: InThread) -> None:
    account = {"seconds": {"train": 2.0, "sync": 1.0, "upload": 0.7, "wait": 0.5}}
    slow = {"seconds": {"train": 6.0, "sync": 1.0, "upload": 0.7}, "dropped_steps": 12}
    details: list[dict[str, Any]] = [
        {
            "round": n,
            "opened_at": 100 + n,
            "accounts": {"a": account, "b": account, "c": slow} if n == 0 else {"a": account, "c": slow},
            "waits": {"a": {"upload": 0.7, "workers": 0.1, "coordinator": 0.0, "download": 0.2, "opening": 0.5}},
            "waiting": {"share": 0.25, "never": 0.2, "doubled_h": 0.1},
            "closed_at": 110 + n,
            "adds": {
                "a": {"tokens": 0.75, "weight": 0.75, "held_s": None},
                "c": {"tokens": 0.25, "weight": 0.2, "held_s": 2.4 + n},
            },
            "late": [{"worker": "c", "fragment": 0, "late_s": 3.5}] if n == 1 else [],
            "fragments": [{"contributors": ["a", "b", "c"] if n == 0 else ["a"]}],
        }
        for n in range(2)
    ]
    workers = [{"name": name, "state": "live", "epoch": 1, "joined_at": 1.0} for name in "abc"]
    workers += [{"name": "new", "state": "live", "epoch": 1, "joined_at": 101.5}]  # in the middle of the second round
    with opened(browser, running, "") as found:
        found.page.get_by_role("heading", name="Runs").wait_for()
        module = f"{running.url}/dashboard/{serving.version()}/derived.js"
        rows = found.page.evaluate(
            f"async ([details, workers]) => (await import('{module}')).timeline(details, workers)", [details, workers]
        )
        text = found.page.evaluate(f"async (detail) => (await import('{module}')).waitingText(detail)", details[1])
        costs = [
            found.page.evaluate(f"async (detail) => (await import('{module}')).costsText(detail)", each)
            for each in details
        ]
    assert "In round 1 the workers waited 25.0 % of their time" in text
    assert 'without sync.wait = "always" up to 20.0 % would be saved, with twice as many inner steps 10.0 %' in text
    cells = {row["worker"]: row["cells"] for row in rows}
    assert {row["worker"]: row["slow"] for row in rows} == {"a": 0.75, "b": 1.0, "c": 2.25, "new": None}
    assert cells["a"][0]["stages"] == {"train": 2.0, "send": 0.7, "wait": 0.8, "other": 0, "all": 3.5}
    assert cells["a"][0]["waits"] == details[0]["waits"]["a"]
    assert cells["b"][0]["waits"] is None
    assert (cells["c"][0]["adds"], cells["b"][0]["adds"]) == (details[0]["adds"]["c"], None)
    dropped = "c dropped 12 inner steps before round {}: the others were a round further before it had their deltas; "
    dropped += "more sync.inner_steps give its line time."
    assert costs == [
        dropped.format(0),
        f"{dropped.format(1)} c costs more than it gives: 34.0 % of round 1 was spent waiting for it, and it gave 25.0 % of the tokens; "
        'with sync.wait = "never" nobody waits for it.',
    ]
    assert [cell["gone"] for cell in cells["b"]] == [False, True]
    assert [cell["late_s"] for cell in cells["c"]] == [None, 3.5]
    assert [cell["gone"] for cell in cells["new"]] == [False, False]


@pytest.mark.nightly
def test_where_nobody_looks_nothing_is_asked(browser: Browser, played: Played) -> None:
    with opened(browser, played.running, f"run={played.run}") as found:
        page = found.page
        expect(page.locator('section[aria-label="Events"] li').first).to_be_visible()
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
            hide(page.evaluate, True)
        del found.asked[:]
        played.play()
        with page.expect_request(lambda request: request.url.endswith("/events")):
            assert found.asked == []
            hide(page.evaluate, False)
        expect(page.locator(".now")).to_contain_text("5 of 8 rounds done")


def hide(evaluate: Callable[[str], Any], hidden: bool) -> None:
    evaluate(
        f"Object.defineProperty(document, 'hidden', {{ value: {json.dumps(hidden)}, configurable: true }});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


@pytest.mark.nightly
def test_a_thousand_rounds_and_two_hundred_workers_are_few_requests(
    browser: Browser, running: InThread, run: str
) -> None:
    long_run(running, run, rounds=1000, workers=200)
    with opened(browser, running, f"run={run}") as found:
        page = found.page
        expect(page.get_by_role("button", name="Show all 201 workers").first).to_be_visible()
        expect(page.locator('section[aria-label="Loss"]')).to_contain_text("over 1000 rounds")
        expect(page.locator('section[aria-label="Verdicts"]')).to_contain_text("of the last 24 rounds")
        listings = [url.partition("/v1/")[2] for url in found.asked if "/v1/" in url]
        assert sum("/rounds?" in each for each in listings) <= 3
        assert sum("/workers?" in each for each in listings) <= 2
        assert len(listings) < 60
        page.locator('section[aria-label="Workers"]').get_by_role("button", name="Show all 201 workers").click()
        expect(page.locator("table.workers tbody tr")).to_have_count(201)


def long_run(running: InThread, run: str, *, rounds: int, workers: int, tokens: int = 10_000) -> None:
    """A run that has gone on for long, as its rows have it."""
    crew(running, run, ["w"], rounds=2 * rounds)
    live = running.live(run)
    seconds = {"train": 4.0, "sync": 1.0, "upload": 0.5}
    account = {"upload_bytes": 1000, "download_bytes": 900, "seconds": seconds}
    with live.change() as change:
        change.session.query(FragmentRow).filter_by(run_id=live.id).delete()
        change.session.query(RoundRow).filter_by(run_id=live.id).delete()
        for n in range(rounds):
            held_out = {"tokens": tokens, "loss": 2 + 3 / (n + 1), "upload_bytes": 1000, "delta_bytes": 900}
            stamps = {"opened_at": 1e9 + 10 * n, "closed_at": 1e9 + 10 * n + 9}
            change.session.add(RoundRow(run_id=live.id, round=n, step=0, account=account, **stamps, **held_out))
        for n in range(workers):
            change.session.add(
                WorkerRow(
                    run_id=live.id, name=f"box-{n:03d}", state="lost", epoch=1, joined_at=1e9, host={"host": f"h{n}"},
                    metrics={}, contributions=rounds, tokens=1000, upload_bytes=1000, account=account, place=n + 1,
                )
            )  # fmt: skip


@pytest.mark.nightly
def test_a_run_is_shown_beside_its_baseline_or_another_run(browser: Browser, running: InThread, run: str) -> None:
    """At equal tokens, although the rounds of the other have twice as many."""
    for name, tokens, above in (
        (run, 10_000, 0.02),
        (f"{run}-baseline", 20_000, 0.0),
        (f"{run}-third", 10_000, 0.01),
        (f"{run}-other", 10_000, 0.03),
    ):
        long_run(running, name, rounds=8, workers=0, tokens=tokens)
        live = running.live(name)
        with live.change() as change:
            for n in range(8):
                loss = 3 - tokens * n / 1e5 + above
                measured = {"tokens": 100, "loss": loss}
                change.session.add(EvaluationRow(run_id=live.id, round=n, worker="", **measured))
    other = running.live(f"{run}-other")
    assert other.model is not None
    with other.change() as change:
        change.set_model(other.model.model_copy(update={"data": DataSummary(digest="0" * 64, units=7)}))
    with opened(browser, running, f"run={run}") as found:
        panel = found.page.locator('section[aria-label="Loss"]')
        expect(panel).to_contain_text(f"the perplexity is 2.02 % above that of {run}-baseline")
        expect(panel.locator(".js-plotly-plot")).to_contain_text("held-out, the other run")
        choice = found.page.get_by_label("Compare with another run")
        expect(choice).to_have_value(f"{run}-baseline")
        choice.select_option(f"{run}-third")
        expect(panel).to_contain_text(f"At 70 k tokens the perplexity is 1.01 % above that of {run}-third")
        panel.get_by_role("button", name="Bytes").click()
        expect(panel).to_contain_text("megabytes moved by all workers")
        choice.select_option(f"{run}-other")
        expect(panel).to_contain_text(f"{run}-other is trained on other text: its losses cannot be compared")
        choice.select_option("")
        expect(panel.locator(".js-plotly-plot")).not_to_contain_text("the other run")
        expect(panel).not_to_contain_text("perplexity")


@pytest.mark.nightly
def test_the_last_of_many_events_are_found(browser: Browser, running: InThread, run: str) -> None:
    """The listing begins with the oldest: the page finds its end without reading all of it."""
    events_kept = 2600
    running.create_run(spec_toml(run))
    with running.live(run).change() as change:
        for n in range(events_kept):
            change.record("late", f"number {n}", round=n, fragment=0, workers=[])
    with opened(browser, running, f"run={run}") as found:
        log = found.page.get_by_role("log")
        expect(log).to_contain_text(f"number {events_kept - 1}")
        assert log.locator("li").count() >= 25
        assert sum("/events?" in url for url in found.asked) < 20


@pytest.mark.nightly
def test_the_server_page_says_what_is_wrong_and_what_to_do(
    browser: Browser, running: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_as_wide_as_the_phone() -> bool:
        return bool(found.page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"])

    with opened(browser, running, "server", **PHONE) as found:
        expect(found.page.locator(".fine")).to_be_visible()
        expect(found.page.locator(".tile")).to_have_count(6)
        assert is_as_wide_as_the_phone()
        monkeypatch.setattr(running.coordinator.alerts, "disks", lambda places: [Disk(tuple(places), 5, 100)])
        logging.getLogger("coordinator.trial").error(HOSTILE + "x" * 500)
        finding = found.page.locator(".finding")
        expect(finding).to_contain_text("disk filling")
        expect(finding.locator("code")).to_have_text("outerstep run rm RUN")
        expect(found.page.locator(".errors li").first).to_contain_text(HOSTILE)
        assert is_as_wide_as_the_phone()
    with tab(browser, **WIDE) as found:
        found.page.goto(f"{running.url}/#token={running.token(Scope.VIEWER)}&server")
        expect(found.page.get_by_role("heading")).to_have_text("Not for this token")
        expect(found.page.get_by_role("link", name="Server")).to_have_count(0)
        assert [url for url in found.asked if url.endswith("/v1/status")] == []
