"""Watching a run: at a terminal, as lines of JSON, and its events alone; on a real coordinator."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.member import Member, spec_toml
from tests.outerstep.conftest import Served, serving
from tests.support.terminal import Terminal
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PATIENT = "lease_s = 600\ngrace_min_s = 600\ngrace_max_s = 600"  # so that no deadline passes while this is looked at


def read_until(stream, text: str) -> list[str]:
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was never said: {lines}")


def heartbeat(worker: Member, **metrics: object) -> None:
    worker.http.put(worker.path("/lease"), json=metrics).raise_for_status()


@pytest.mark.system
def test_the_picture_moves_fits_and_outlives_the_coordinator(tmp_path: Path):
    with serving(tmp_path / "data") as first:
        port = first.port
        spec = spec_toml("watched", min_workers=2, members=PATIENT)
        assert first.outerstep("run", "create", "-", stdin=spec)[0] == 0
        command = [sys.executable, "-m", "outerstep", "run", "watch", "watched"]
        with Terminal(command, first.environment, 100, 30) as terminal:
            terminal.read_until(lambda shown: "seeding: waiting for the first worker" in shown)
            workers = [first.seeded("watched", "box-1")]
            workers += [first.member("watched", name) for name in ("box-2", "box-3")]
            for each in workers[1:]:
                each.join(first.admin_token)
                for theta in each.theta:
                    theta[:] = 0.5
            for each in workers:
                each.assignment(0)
            heartbeat(workers[2], round=0, phase="train", tokens_per_second=4321.0, upload_bytes=7_000_000)
            terminal.read_until(
                lambda shown: re.search(r"^box-3 +train +0 +4\.32 k +\d+ s +7 MB ", shown, re.MULTILINE) is not None
            )
            for each in workers[:2]:
                each.take_part(0)
            waits = r"running: round 0: waiting for 1 of 3 workers \(box-3\); closes in \d+ s +\(at \d\d:\d\d:\d\d\)"
            terminal.read_until(lambda shown: re.search(waits, " ".join(shown.split())) is not None)

            terminal.resize(60, 20)
            terminal.read_until(  # what was read may end within a picture
                lambda shown: (
                    max(map(len, shown.split("\n"))) <= 60
                    and shown.count("run watched") == 1
                    and all(name in shown for name in ("box-1", "box-2", "box-3"))
                )
            )

            first.child.process.send_signal(signal.SIGKILL)
            terminal.read_until(lambda shown: "cannot reach the coordinator" in " ".join(shown.split()))
            with serving(tmp_path / "data", port):
                terminal.read_until(
                    lambda shown: (
                        "running: round 0: waiting for 1 of 3 workers" in shown and shown.count("run watched") == 1
                    )
                )
                terminal.press("\x03")  # Ctrl-C
                assert terminal.read_to_the_end() == 130
    assert terminal.screen.cursor_shown
    assert "Traceback" not in "\n".join(terminal.screen.lines)


def test_watching_as_json_is_a_line_for_each_look(served: Served):
    served.create("in-json")
    assert served.outerstep("run", "stop", "in-json")[0] == 0
    code, out, err = served.outerstep("run", "watch", "in-json", "--format", "json")
    (look,) = map(json.loads, out.splitlines())
    assert (code, err, sorted(look)) == (0, "", ["events", "rounds", "run", "trouble", "workers"])
    assert (look["run"]["state"], look["run"]["eta_s"], look["trouble"]) == ("stopped", 0, None)
    assert [event["kind"] for event in look["events"]] == ["created", "stopped"]


def test_events_are_told_with_time_kind_and_message(served: Served):
    served.create("told")
    for command in ("pause", "resume", "pause"):
        assert served.outerstep("run", command, "told")[0] == 0
    code, out, _ = served.outerstep("run", "events", "told")
    created, *changed = out.splitlines()
    assert code == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  created               the run told was created", created)
    assert len(changed) == 3
    assert served.outerstep("run", "events", "told", "--limit", "1")[1].splitlines() == changed[-1:]
    assert served.outerstep("run", "events", "told", "--kind", "created")[1].splitlines() == [created]
    both = ["--kind", "created", "--kind", "paused", "--limit", "2"]
    assert served.outerstep("run", "events", "told", *both)[1].splitlines() == [changed[0], changed[2]]
    documents = served.shown("run", "events", "told")
    assert [each["kind"] for each in documents] == ["created", "paused", "running", "paused"]
    assert served.outerstep("run", "events", "nothing")[0] == 3


def test_a_kind_of_event_that_there_is_not_is_told_of(served: Served):
    """A mistyped one looked as if nothing had happened."""
    served.create("typed")
    code, out, err = served.outerstep("run", "events", "typed", "--kind", "created", "--kind", "creatd")
    assert (code, len(out.splitlines())) == (0, 1)
    assert err.endswith("no event of kind creatd so far; kinds seen: created\n")


@pytest.mark.parametrize("form", ["table", "json"])
def test_events_are_followed_to_the_end_of_the_run(served: Served, form: str):
    served.create(f"followed-{form}")
    command = ["run", "events", f"followed-{form}", "-f", "--limit", "1", "--format", form]
    command += [word for kind in ("paused", "running", "stopped") for word in ("--kind", kind)]
    assert served.outerstep("run", "pause", f"followed-{form}")[0] == 0
    assert served.outerstep("run", "resume", f"followed-{form}")[0] == 0
    following = subprocess.Popen(
        [sys.executable, "-m", "outerstep", *command],
        env={**os.environ, **served.environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert len(read_until(following.stdout, "running")) == 1, "the newest of those that are past"
    assert served.outerstep("run", "pause", f"followed-{form}")[0] == 0
    assert len(read_until(following.stdout, "paused")) == 1
    assert served.outerstep("run", "stop", f"followed-{form}")[0] == 0
    (last,) = read_until(following.stdout, "stopped")
    assert (following.communicate(timeout=PATIENCE_S)[0], following.returncode) == ("", 0)
    if form == "json":
        assert json.loads(last)["kind"] == "stopped"
