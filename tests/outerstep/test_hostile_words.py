"""Words of a hostile coordinator, and of workers that it has believed, reach no terminal as they are."""

import ast
import io
import json
import re
from pathlib import Path

import pytest

from outerstep.cli.printing import PrintableConsole
from outerstep.follow import Look
from outerstep.live_view import LiveDisplay
from protocol.errors import Problem
from protocol.messages import Event, RunInfo, WorkerInfo
from tests.outerstep.conftest import outerstep
from tests.outerstep.examples import event_document, page, round_document, run_document, worker_document
from tests.support.http_server import Handler, serving

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\nround 7 is published\u202e"
RUN = run_document(state="finished", reason=f"all done {EVIL}", rounds=1, round=1)
WORKER = worker_document("box-7", token=EVIL)
UNPRINTABLE_FACTS = [{"host": {"host": EVIL}}, {"host": {"share": float("nan")}}, {"metrics": {"phase": EVIL[:20]}}]
EVENTS = [event_document(1, f"box-7 joined {EVIL}")]
FRAGMENT = {
    "fragment": 0,
    "state": "published",
    "reason": EVIL,
    "contributors": ["box-7"],
    "closes_in_s": None,
    "verdicts": {"box-7": {"factor": 0.25, "reason": f"too long {EVIL}"}},
    "delta_bytes": 1,
    "delta_digest": None,
}
LATE = {"worker": "box-7", "fragment": 1, "late_s": 75.0}
TAKEN_PART = {"fragments": [FRAGMENT, {**FRAGMENT, "fragment": 1, "contributors": []}], "late": [LATE]}
TOKEN = {"id": "t1", "scope": "worker", "note": EVIL, "created_at": 1_700_000_000.0}


class Hostile(Handler):
    """A coordinator that says EVIL wherever there is room for words."""

    def do_GET(self) -> None:  # noqa: N802, the library's name
        path = self.path.partition("?")[0]
        answers = {
            "/v1/runs": page([RUN], None),
            "/v1/runs/demo": RUN,
            "/v1/runs/demo/workers": page([WORKER], None),
            "/v1/runs/demo/workers/box-7": WORKER,
            "/v1/runs/demo/rounds/0": round_document(0, **TAKEN_PART),
            "/v1/runs/demo/rounds": page([round_document(0, reason=EVIL)], None),
            "/v1/runs/demo/events": page(EVENTS, None),
            "/v1/tokens": page([TOKEN], None),
            "/v1/runs/demo/units": page(
                [{"worker": EVIL, "epoch": 0, "units": 1, "consumed": 0, "assigned": {EVIL: 1}, "free": 0}], None
            ),
        }
        self._answer(200, answers[path]) if path in answers else self._refuse()

    def do_PATCH(self) -> None:  # noqa: N802, the library's name
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, RUN if self.path == "/v1/runs/demo" else WORKER)

    def do_DELETE(self) -> None:  # noqa: N802, the library's name
        self._refuse()

    def _refuse(self) -> None:
        self._answer(404, Problem("not-found", f"nothing here {EVIL}").document())

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def said(coordinator: type[Handler], *command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, which may all be printed."""
    with serving(coordinator) as url:
        code, out, err = outerstep(*command, OUTERSTEP_URL=url, OUTERSTEP_TOKEN="t")
    assert [line for line in [*out.split("\n"), *err.split("\n")] if not line.isprintable()] == []
    return code, out, err


@pytest.mark.slow
@pytest.mark.covers("security:terminal-escapes")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run show demo", 0),
        ("run show demo --format json", 0),
        ("run show demo --workers --format json", 0),
        ("run show demo --worker box-7", 0),
        ("run show demo --worker box-7 --format json", 0),
        ("run watch demo", 0),
        ("run watch demo --format json", 0),
        ("run events demo", 0),
        ("run events demo --follow", 0),
        ("run ls", 0),
        ("run show demo --units", 0),
        ("run pause demo", 0),
        ("run member demo box-7 evict", 0),
        ("run show demo --checkpoints", 3),
        ("run rm demo --yes", 3),
        ("token ls", 0),
        ("token revoke t1", 3),
    ],
)
def test_what_a_coordinator_says_is_shown_and_not_obeyed(command: str, code: int) -> None:
    found, out, err = said(Hostile, *command.split())
    assert found == code, err
    assert not re.search("^round 7 is published", out + err, re.MULTILINE), "a forged line"
    if command != "run member demo box-7 evict":  # which says what was asked for
        assert re.search(r"\\(x|u00)1b", out + err)


@pytest.mark.slow
@pytest.mark.covers("security:terminal-escapes")
@pytest.mark.parametrize("facts", UNPRINTABLE_FACTS, ids=str)
def test_facts_that_no_coordinator_keeps_are_rejected(facts: dict[str, object]) -> None:
    """A coordinator stores only facts that can be printed, so a reply with others does not come from one."""

    class Forging(Hostile):
        def _answer(self, status: int, document: object) -> None:
            super()._answer(status, {**WORKER, **facts})

    assert said(Forging, "run", "show", "demo", "--worker", "box-7")[0] == 3


@pytest.mark.slow
def test_json_says_just_what_was_said() -> None:
    assert json.loads(said(Hostile, "run", "ls", "--format", "json")[1])[0]["reason"] == f"all done {EVIL}"


def test_the_picture_on_a_terminal_has_only_the_escapes_of_its_own() -> None:
    out = io.StringIO()
    console = PrintableConsole(file=out, width=120, height=40, force_terminal=True, color_system=None)
    look = Look(
        run=RunInfo.model_validate(RUN),
        rounds=(),
        workers=(WorkerInfo.model_validate({**WORKER, "name": "box\x1b[2J"}),),
        events=(Event.model_validate(EVENTS[0]),),
        last_event=1,
    )
    with LiveDisplay(console) as display:
        display.show(look)
    shown = out.getvalue()
    own = re.sub(r"\x1b\[(\?25[lh]|\d*[AK]|2K)|\r", "", shown)  # the cursor hidden and shown, lines drawn anew
    assert all(line.isprintable() for line in own.split("\n")), repr(own)
    assert "box-7 joined \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\nround 7" in own


@pytest.mark.covers("security:terminal-escapes")
def test_there_is_one_way_to_the_terminal() -> None:
    """Another print, echo or Console would not clean what it is given."""
    folder, ways = Path(__file__).parents[2] / "outerstep", {"print", "typer.echo", "click.echo", "Console"}
    found = {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ways
    }
    assert found == {"cli/printing.py"}
