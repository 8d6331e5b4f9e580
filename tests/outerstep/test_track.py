"""`outerstep run track`: whatever is killed, cut or unreachable, every round is tracked once."""

import errno
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.coordinator import coordinator_thread
from outerstep.common.exit_codes import Exit
from outerstep.tracking.records import Record, follow_records, tracked_name
from outerstep.tracking.to_jsonl import Tracker as JsonLines
from protocol.errors import OuterstepError, Problem
from protocol.messages import RunDetail
from tests.coordinator.crew import crew, play_round
from tests.outerstep.conftest import Served
from tests.outerstep.examples import History, client_of, round_document, run_document

NAME = "demo-12345678"
RUN = RunDetail.model_validate(run_document())


def event(number: int, kind: str, **data: Any) -> dict[str, Any]:
    return {"id": number, "at": 1_700_000_000.0 + number, "kind": kind, "message": f"{kind} {number}", "data": data}


# Of a run of three rounds: what was told, in order.
EVENTS = [
    event(1, "created"),
    event(2, "joined", worker="a"),
    event(5, "round-published", round=0),
    event(6, "lost", worker="b"),
    event(7, "round-published", round=1),
    event(9, "round-published", round=2),
    event(10, "finished"),
    event(12, "evaluated", round=3, worker="a"),
    event(13, "left", worker="a"),
]


def history(at: int = 13, trouble: dict[int, Exception] | None = None, forgotten: int = 0) -> History:
    """A coordinator that has come as far as the event of this number, and has forgotten some. Each wait for an event lets
    the next one happen."""

    def moment(at: int) -> dict[str, Any]:
        events = [each for each in EVENTS if each["id"] <= at]
        kinds = [each["kind"] for each in events]
        published = kinds.count("round-published")
        run = run_document(
            state="finished" if "finished" in kinds else "running",
            round=published,
            rounds=3,
            live_workers=0 if "left" in kinds else 1,
            held_out_loss=1.5 if "evaluated" in kinds else 2.5,
        )
        rounds = [round_document(number, tokens=1000 * (number + 1)) for number in reversed(range(published))]
        return {"run": run, "rounds": rounds, "events": [each for each in events if each["id"] > forgotten]}

    return History(*(moment(each["id"]) for each in EVENTS if each["id"] >= at), trouble=trouble)


def follow(played: History, first: int = 0, told: list[str] | None = None) -> Iterator[Record]:
    told = [] if told is None else told
    return follow_records(played.client(), "demo", first, patience_s=1, sleep=lambda _: None, on_trouble=told.append)


def summary(records: Iterator[Record]) -> list[tuple[int, list[int], float | None]]:
    return [(each.round, [event.id for event in each.events], each.figures.get("tokens")) for each in records]


WHOLE = [(0, [1, 2, 5], 1000), (1, [6, 7], 3000), (2, [9], 6000), (3, [10, 12, 13], None)]


def test_every_round_is_a_record_with_the_events_since_the_one_before() -> None:
    assert summary(follow(history())) == WHOLE, "of a run that is over"
    assert summary(follow(history(at=1))) == WHOLE, "as it happens"
    *_, last = follow(history())
    assert (last.final, last.figures) == (True, {"held_out_loss": 1.5})


@pytest.mark.parametrize("first", range(5))
def test_whoever_goes_on_has_neither_gap_nor_repetition(first: int) -> None:
    assert summary(follow(history(), first)) == WHOLE[first:]


@pytest.mark.slow
@pytest.mark.parametrize("at", range(1, 40))
def test_an_outage_at_any_request_costs_nothing(at: int) -> None:
    told: list[str] = []
    troubled = history(at=1, trouble={at: httpx.ConnectError("refused"), at + 1: httpx.ConnectError("refused")})
    assert summary(follow(troubled, told=told)) == WHOLE
    assert len(told) == 2 - len(troubled.trouble)


def test_rounds_whose_events_are_deleted_are_tracked_without_them() -> None:
    assert summary(follow(history(forgotten=6))) == [(0, [], 1000), (1, [7], 3000), *WHOLE[2:]]
    assert summary(follow(history(forgotten=9))) == [*((n, [], t) for n, _, t in WHOLE[:3]), WHOLE[3]]


def test_a_run_that_went_back_to_a_backup_is_told() -> None:
    """Its rounds would be tracked twice, with other figures."""
    with pytest.raises(OuterstepError, match="round 2 of run demo .* at round 1"):
        list(follow(history(at=5), first=3))


def test_a_refusal_ends_the_tracking() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        problem = Problem("unauthorized", "the token was revoked")
        return httpx.Response(problem.status, json=problem.document())

    client = client_of(refuse)
    with pytest.raises(Problem, match="revoked"):
        list(follow_records(client, "demo", 0, patience_s=1, sleep=lambda _: None, on_trouble=lambda _: None))


def test_another_run_of_the_same_name_is_tracked_under_another() -> None:
    again = RunDetail.model_validate(run_document(created_at=1_700_000_001.0))
    assert tracked_name(RUN) == tracked_name(RunDetail.model_validate(run_document(round=3, state="finished")))
    assert tracked_name(RUN) != tracked_name(again)
    assert tracked_name(again).startswith("demo-")


# --- trackers ---------------------------------------------------------------------------------------------------------


def track(tracker: Any, records: int | None = None) -> None:
    """Track at most so many records, and close."""
    for record in islice(follow(history(), tracker.first), records):
        tracker.write(record)
    tracker.close()


def test_a_file_of_lines_has_all_of_it(tmp_path: Path) -> None:
    track(JsonLines(tmp_path / "new" / "demo.jsonl", NAME, RUN))
    head, *lines = [json.loads(line) for line in (tmp_path / "new" / "demo.jsonl").read_text().splitlines()]
    assert (head["kind"], head["name"], head["spec"]["name"]) == ("run", NAME, "demo")
    assert [line["id"] if line["kind"] == "event" else f"round {line['round']}" for line in lines] == [
        *(1, 2, 5, "round 0"),
        *(6, 7, "round 1"),
        *(9, "round 2"),
        *(10, 12, 13, "round 3"),
    ]
    assert [line["loss"] for line in lines if line["kind"] == "round" and not line["final"]] == [3.25] * 3
    assert lines[1]["event"] == "joined"
    assert lines[1]["data"] == {"worker": "a"}


@pytest.mark.slow
def test_a_file_that_was_cut_anywhere_becomes_what_it_would_have_been(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    track(JsonLines(whole, NAME, RUN))
    content = whole.read_bytes()
    for size in {0, 1, 30, *range(content.index(b"\n") - 2, len(content) + 1, 7), len(content)}:
        cut.write_bytes(content[:size])
        track(JsonLines(cut, NAME, RUN))
        assert cut.read_bytes() == content, size


@pytest.mark.parametrize(
    "content", [b"my thesis", b"my thesis\n", b'{"my": "thesis"}\n', b'{"kind": "run", "name": "other-1"}\n']
)
def test_a_file_that_is_not_of_this_run_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(OuterstepError, match="choose another --out"):
        JsonLines(tmp_path / "x", NAME, RUN)
    assert (tmp_path / "x").read_bytes() == content


def test_a_damaged_file_is_told_by_its_line(tmp_path: Path) -> None:
    track(JsonLines(tmp_path / "x", NAME, RUN))
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes().replace(b'{"kind": "event"', b"****", 1))
    with pytest.raises(OuterstepError, match="x, line 2, is damaged"):
        JsonLines(tmp_path / "x", NAME, RUN)


def test_two_cannot_write_one_file(tmp_path: Path) -> None:
    first = JsonLines(tmp_path / "x", NAME, RUN)
    with pytest.raises(OuterstepError, match="in use by another"):
        JsonLines(tmp_path / "x", NAME, RUN)
    first.close()
    JsonLines(tmp_path / "x", NAME, RUN).close()


def needs(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'outerstep[{name}]'")


STEPS = [(0, 3.25), (1, 3.25), (2, 3.25), (3, None)]


def test_tensorboard_reads_every_round_once_wherever_its_file_was_cut(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from outerstep.tracking.to_tensorboard import Tracker

    track(Tracker(tmp_path / "first", NAME, RUN))
    (whole,) = (tmp_path / "first" / NAME).glob("*tfevents*")
    content = whole.read_bytes()
    for size in range(0, len(content) + 1, 61):
        out = tmp_path / str(size)
        (out / NAME).mkdir(parents=True)
        (out / NAME / "events.out.tfevents.1000000000.host").write_bytes(content[:size])
        track(Tracker(out, NAME, RUN))
        found = EventAccumulator(str(out / NAME), size_guidance={"tensors": 0}).Reload()
        assert [each.step for each in found.Tensors("loss")] == [0, 1, 2], size
        assert [each.step for each in found.Tensors("events")] == [0, 1, 2, 3], size
    assert found.Tensors("tokens")[1].tensor_proto.float_val == [3000.0]
    assert b"left 13" in found.Tensors("events")[-1].tensor_proto.string_val[0]


def test_wandb_offline_has_every_round_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    from outerstep.tracking.to_wandb import Tracker

    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    track(Tracker(tmp_path / "out", NAME, RUN), records=2)
    track(Tracker(tmp_path / "out", NAME, RUN))
    rows = [
        row for path in sorted(tmp_path.rglob("*.wandb"), key=lambda p: p.stat().st_mtime) for row in wandb_rows(path)
    ]
    assert [(row["_step"], row.get("loss")) for row in rows] == STEPS
    assert rows[3]["held_out_loss"] == 1.5
    assert "lost 6" in rows[1]["events"]


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """The history in an offline file of theirs."""
    from wandb.proto.wandb_internal_pb2 import Record as Stored

    rows = []
    for data in level_db_log(path.read_bytes()):
        stored = Stored()
        stored.ParseFromString(data)
        if stored.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in stored.history.item}
            rows.append({"_step": stored.history.step.num, **items})
    return rows


def level_db_log(data: bytes, header: int = 7, block: int = 1 << 15) -> Iterator[bytes]:
    """The entries of a log as LevelDB writes it: parts of crc (4 bytes), length (2), kind (1) and content, in blocks."""
    at, entry = header, b""
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if block - at % block < 7 or (length, kind) == (0, 0):
            at += block - at % block
            continue
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path):
    """A run of two rounds that is over, and whose workers have left."""
    with coordinator_thread(tmp_path / "data") as running:
        members = crew(running, "demo", ["a", "b"], rounds=2, min_workers=2)
        for round_ in range(2):
            play_round(members, round_)
        running.await_state("demo", 2)
        members[0].http.put("/v1/runs/demo/rounds/2/evaluation", json={"loss": 1.25, "tokens": 10}).raise_for_status()
        for member in members:
            member.http.delete(member.path()).raise_for_status()
        yield Served(running.url, running.data_dir, child=None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_is_tracked_to_its_end_and_once(
    finished: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = finished.outerstep("run", "track", "demo", "--to", "jsonl")
    assert (code, out.splitlines()[-1]) == (0, "run demo is tracked to its end in demo.jsonl"), err
    content = (tmp_path / "demo.jsonl").read_text()
    rounds = [line for line in map(json.loads, content.splitlines()) if line["kind"] == "round"]
    assert [(line["round"], line["final"]) for line in rounds] == [(0, False), (1, False), (2, True)]
    assert rounds[1]["workers"] == 2
    assert rounds[1]["tokens"] == 2 * rounds[0]["tokens"] > 0
    assert rounds[2]["held_out_loss"] == 1.25
    assert finished.outerstep("run", "track", "demo", "--to", "jsonl")[0] == 0
    assert (tmp_path / "demo.jsonl").read_text() == content


@pytest.mark.slow
def test_what_is_not_installed_or_not_there_is_told(
    finished: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Callable[..., Any]:
        raise ModuleNotFoundError(f"No module named {name!r}", name="wandb")

    code, _, err = finished.outerstep("run", "track", "other", "--to", "jsonl")
    assert (code, "not-found" in err) == (3, True)
    code, _, err = finished.outerstep("run", "track", "demo", "--to", "jsonl", "--out", str(tmp_path))
    assert (code, "--out: " in err) == (2, True)
    monkeypatch.setattr("outerstep.cli.errors.importlib.import_module", absent)
    code, _, err = finished.outerstep("run", "track", "demo", "--to", "wandb")
    assert (code, "run: pip install 'outerstep[wandb]'" in err) == (2, True), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), Exit.RETRY, "--to jsonl: [Errno 104] reset by peer; the"),
        (OSError("the server is busy"), Exit.RETRY, "--to jsonl: the server is busy; the same command"),
        (OSError(errno.ENOSPC, "No space left on device"), Exit.USAGE, "--out: no space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "a/file"), Exit.USAGE, "--out: a/file: permission denied"),
    ],
)  # fmt: skip
def test_what_a_tracker_cannot_do_is_told_as_what_it_is(
    finished: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, code: Exit, said: str
) -> None:
    """What requests raises of a line is an OSError as well: it was told as a fault of --out."""

    def write(*_: Any) -> None:
        raise error

    monkeypatch.setattr("outerstep.tracking.to_jsonl.Tracker.write", write)
    found, _, err = finished.outerstep("run", "track", "demo", "--to", "jsonl", "--out", str(tmp_path / "out.jsonl"))
    assert (found, said in err) == (code, True), err
