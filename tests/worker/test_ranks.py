"""One worker of several processes: replicated or sharded, it is one worker to the run, and goes on after any of them was
killed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.messages import RunState
from tests.support.cases import in_the_night
from tests.worker import toy
from tests.worker.rank_script import STAGES, RankProcesses
from tests.worker.toy import MakeToy, Toy, coordinator_thread
from worker.ranks import Ranks

Start = Callable[..., RankProcesses]

LONGER = toy.spec(rounds=4)

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("one_h")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RankProcesses]]:
    """Starts a worker, of which nothing is left after the test."""
    with ExitStack() as started:

        def begin(
            run: Toy, mode: str, size: int, name: str = "a", *, directory: Path = tmp_path, **how: Any
        ) -> RankProcesses:
            worker = RankProcesses(run.coordinator, directory, mode, size, name, **how)
            started.callback(worker.kill)
            return worker

        yield begin


def finished(run: Toy, *names: str) -> str:
    """The digest of the run's last state, which all workers have as well."""
    final = run.final()
    assert final.state is RunState.FINISHED
    for name in names or ("a",):
        assert run.told(name).state_digest == final.state_digest
    assert final.state_digest is not None
    return final.state_digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests, by mode, that a run of one worker of two processes, which nothing happens to, ends with."""
    digests = {}
    for mode in ("fsdp", "ddp"):
        directory = tmp_path_factory.mktemp(mode)
        with coordinator_thread(directory / "coordinator") as running:
            run = Toy(running, LONGER, directory)
            worker = RankProcesses(running, directory, mode, 2)
            assert worker.wait() == [0, 0], worker.told()
            digests[mode] = finished(run)
    return digests


@pytest.mark.parametrize(
    "sync", ['wait = "never"', *map(in_the_night, ["", 'overlap = 1\noffsets = "spread"\nalpha = 0.5'])]
)
def test_sharded_replicated_and_plain_workers_have_one_state(start: Start, toy_run: MakeToy, sync: str) -> None:
    run = toy_run(toy.spec(min_workers=4, sync=sync))
    workers = {
        name: start(run, mode, size, name)
        for name, mode, size in (("d", "hybrid", 4), ("a", "fsdp", 3), ("b", "ddp", 2), ("c", "plain", 1))
    }
    for worker in workers.values():
        assert not any(worker.wait()), worker.told()
    finished(run, *workers)
    assert [run.told(name).host.get("processes") for name in "abcd"] == [3, 2, None, 4]
    # Each worker's loss is the mean over its processes.
    found = [workers["a"].result(rank) for rank in range(3)]
    steps = found[0]["rounds"].count(found[0]["rounds"][-1])  # of the last round
    losses = [each["losses"][-steps:] for each in found]
    assert run.told("a").metrics.loss == pytest.approx(sum(map(sum, losses)) / 3 / steps, rel=1e-5)


def test_each_process_holds_its_shard_and_its_fragments_and_the_line_carries_no_more(
    start: Start, tmp_path: Path
) -> None:
    held, moved = {}, {}
    for size in (1, 2, 4):
        with coordinator_thread(tmp_path / f"coordinator-{size}") as running:
            run = Toy(running, toy.spec(), tmp_path)
            worker = start(run, "fsdp" if size > 1 else "plain", size, directory=tmp_path / str(size))
            assert worker.wait() == [0] * size, worker.told()
            held[size] = [worker.result(rank) for rank in range(size)]
            account = run.told("a").account
            assert account is not None
            moved[size] = (account.upload_bytes, account.download_bytes)
    total, longest = held[1][0]["model"], 256
    assert held[1][0]["outer_state"] == total
    for size in (2, 4):
        assert sum(each["outer_state"] for each in held[size]) == sum(each["model"] for each in held[size]) == total
        assert max(each["outer_state"] for each in held[size]) <= total / size + longest
        assert max(each["model"] for each in held[size]) <= total / size + 32  # a row of each tensor
        assert moved[size][1] == moved[1][1]
        assert moved[size][0] == pytest.approx(moved[1][0], rel=0.01)


def test_more_processes_than_fragments(start: Start, toy_run: MakeToy) -> None:
    """Those that own none train all the same."""
    spec = toy.spec().replace("fragment_elements = 256", "fragment_elements = 100000")
    run = toy_run(spec)
    worker = start(run, "fsdp", 3)
    assert worker.wait() == [0, 0, 0], worker.told()
    finished(run)
    assert run.told("a").contributions == 3


@pytest.mark.parametrize(("mode", "victim"), [("fsdp", 1), in_the_night("ddp", 0)])
@pytest.mark.parametrize(
    "stage", ["an inner step", *(in_the_night(stage) for stage in STAGES if stage != "an inner step")]
)
def test_a_process_killed_at_any_stage_loses_nothing(
    start: Start, toy_run: MakeToy, undisturbed: dict[str, str], stage: str, mode: str, victim: int
) -> None:
    """The others end with a clear word, and the same command comes to the same bits as if nothing had happened."""
    run = toy_run(LONGER)
    worker = start(run, mode, 2, stage=stage, victim=victim)
    codes = worker.wait()
    assert codes[victim] == -9
    assert codes[1 - victim] == 1
    assert "another process of this worker has died" in worker.told(1 - victim)
    worker = start(run, mode, 2)
    assert worker.wait() == [0, 0], worker.told()
    assert finished(run) == undisturbed[mode]


@pytest.mark.parametrize(
    ("before", "after", "sync"),
    [
        (("fsdp", 3), ("fsdp", 2), ""),
        in_the_night(("ddp", 2), ("fsdp", 4), ""),
        in_the_night(("fsdp", 2), ("plain", 1), "overlap = 2"),
        in_the_night(("plain", 1), ("fsdp", 2), ""),
    ],
)
def test_another_number_of_processes_goes_on(
    start: Start, toy_run: MakeToy, before: tuple[str, int], after: tuple[str, int], sync: str
) -> None:
    """With the work, the outer state and the inner optimizer that were saved."""
    run = toy_run(toy.spec(rounds=4, sync=sync))
    worker = start(run, *before, stage="an inner step", victim=0)
    assert -9 in worker.wait()
    worker = start(run, *after)
    assert worker.wait() == [0] * after[1], worker.told()
    assert "resuming with the work of round" in worker.told()
    finished(run)
    if not sync:  # else a round may close with the fragments of it that were sent before
        assert run.told("a").tokens == 4 * toy.STEPS * run.info().spec.unit_tokens


@pytest.mark.parametrize("victim", [0, in_the_night(1)])
def test_a_signal_to_one_process_is_for_all(start: Start, toy_run: MakeToy, victim: int) -> None:
    """They leave after the same inner step, and hand in what is done."""
    run = toy_run()
    worker = start(run, "fsdp", 2, stop=toy.STEPS + 1, victim=victim)
    assert worker.wait() == [0, 0], worker.told()
    found = [worker.result(rank) for rank in range(2)]
    assert [(len(each["losses"]), each["stopped"]) for each in found] == [(toy.STEPS + 2, True)] * 2
    assert "contributed the work on 2 units before leaving" in worker.told()
    worker = start(run, "fsdp", 2)
    assert worker.wait() == [0, 0], worker.told()
    finished(run)


def test_processes_that_train_models_of_their_own_are_told(start: Start, toy_run: MakeToy) -> None:
    """DistributedDataParallel was forgotten: the run would have got the model of one of them."""
    run = toy_run()
    worker = start(run, "plain", 2)
    assert worker.wait() == [1, 1]
    assert "parameter 0.weight is not the same in all processes of this worker" in worker.told()
    assert run.info().round == 0


def test_processes_that_train_on_the_same_rows_are_told(start: Start, toy_run: MakeToy) -> None:
    """The worker is as fast as one of them."""
    run = toy_run()
    worker = start(run, "ddp", 2, whole_units=True)
    assert worker.wait() == [0, 0]
    assert worker.told().count("all 2 processes of this worker have the same loss") == 1


def test_processes_of_torchrun_without_a_group_are_told() -> None:
    """Each of them would have been a worker of its own."""
    with pytest.raises(RuntimeError, match=r"torchrun has started 2 processes.*init_process_group"):
        Ranks.here({"WORLD_SIZE": "2", "RANK": "1"})
    assert Ranks.here({"WORLD_SIZE": "1", "RANK": "0"}).size == 1
    assert Ranks.here({}).size == 1
    assert torch.distributed.is_available()
