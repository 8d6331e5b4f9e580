"""The demo as a user runs it: a process of its own, with a real coordinator and real workers under it."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.outerstep.conftest import serving
from tests.support.signals import default_signals
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


@contextmanager
def demo(
    tmp_path: Path, *arguments: str, outerstep: Sequence[str] = ("-m", "outerstep"), directory: Path = ROOT
) -> Iterator[subprocess.Popen[str]]:
    """A running demo; whatever is left of it in the end is killed. `outerstep`: what Python is given to run."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, *outerstep, "demo", "--workers", "2", "--rounds", "2", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": "" if directory == ROOT else str(ROOT),
            "TMPDIR": str(temporary),
            "PYTHONUNBUFFERED": "1",
        },
        preexec_fn=default_signals,
    ) as process:
        try:
            yield process
        finally:
            for each in family(process):
                each.kill()
            process.kill()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def wait_for_family(process: subprocess.Popen[str], size: int) -> list[psutil.Process]:
    """The demo's processes, once there are `size` of them. One that was just forked still has its parent's command."""

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()
        return sum("outerstep.demo.child" in command(each) for each in family(process)) >= size

    wait_until(is_there)
    return family(process)


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the demo never said {text!r}: {process.communicate()}")


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_the_demo_trains_sums_up_and_leaves_what_it_says(tmp_path: Path):
    kept = tmp_path / "kept"
    with demo(tmp_path, "--keep", str(kept), "--format", "json", "--codec", "bf16") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + err
    summary = json.loads(out)  # which is all of it: what else there is to see is on stderr
    assert (summary["workers"], summary["rounds"], summary["codec"]) == (2, 2, "bf16")
    assert summary["replicas_identical"] is True
    assert 5 < summary["first_loss"] < 6.5
    assert summary["final_loss"] < summary["first_loss"] - 1.5
    assert summary["final_bits_per_byte"] == pytest.approx(summary["final_loss"] / math.log(2))
    assert 0 < summary["seconds"] < PATIENCE_S
    assert summary["sample"].startswith("def ")
    for expected in ("round 0 ", "round 1 ", "  to go ", "Kept in "):
        assert expected in err
    assert not list((tmp_path / "temporary").glob("outerstep-demo-*"))
    assert (kept / "logs" / "worker-1.log").read_text()

    check_against_rest(kept / "coordinator", summary, tmp_path)


def check_against_rest(data: Path, summary: dict, tmp_path: Path) -> None:
    """The kept coordinator tells the same, and exports the same model."""
    with serving(data) as served:
        code, out, _ = served.outerstep("run", "show", "demo", "--format", "json")
        assert code == 0
        shown = json.loads(out)
        run, workers, rounds = shown["run"], shown["workers"], shown["rounds"]
        assert (run["state"], run["round"], len(rounds), len(workers)) == ("finished", 2, 2, 2)
        assert [worker["state_digest"] for worker in workers] == [run["state_digest"]] * 2
        assert summary["final_loss"] == run["held_out_loss"]
        assert summary["first_loss"] == rounds[-1]["held_out_loss"]
        for key in ("upload_bytes", "download_bytes"):
            assert summary[key] == round(sum(worker["metrics"][key] for worker in workers) / 2)
            assert [worker["account"][key] for worker in workers] == [worker["metrics"][key] for worker in workers]
            assert run["account"][key] == sum(worker["account"][key] for worker in workers)
        assert {"train", "sync", "upload", "download", "outer-step", "snapshot"} <= set(summary["stage_seconds"])
        # What the workers counted holds what the coordinator accepted, and the initial state of one of them.
        assert run["upload_bytes"] <= 2 * summary["upload_bytes"] <= run["upload_bytes"] + 10 * run["elements"]
        steps = 2 * run["spec"]["sync"]["inner_steps"]
        assert summary["allreduce_bytes"] == 2 * (2 - 1) / 2 * 4 * run["elements"] * steps

        code, table, _ = served.outerstep("run", "show", "demo")
        assert (code, "worker-1" in table, run["state_digest"] in table) == (0, True, True)
        code, watched, _ = served.outerstep("run", "watch", "demo")
        assert code == 0
        assert "run demo: the run is finished after 2 of 2 rounds" in watched

        check_export(served, tmp_path / "exported", data.parent / "model")


def check_export(served, exported: Path, kept_model: Path) -> None:
    code, out, err = served.outerstep("run", "export", "demo", "--out", str(exported))
    assert (code, out) == (0, f"the model of run demo is in {exported}\n"), err
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 256
    assert (exported / "model.safetensors").read_bytes() == (kept_model / "model.safetensors").read_bytes()
    code, _, err = served.outerstep("run", "export", "demo", "--out", str(exported))
    assert (code, "not an empty directory" in err) == (2, True)
    code, _, err = served.outerstep("run", "export", "demo", "--out", str(exported / "x"), "--round", "1")
    assert (code, err.startswith("outerstep: not-found: ")) == (3, True)


@pytest.mark.nightly
@pytest.mark.usefixtures("in_the_background")
@pytest.mark.parametrize(
    ("number", "code", "while_training"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 128 + signal.SIGTERM, False)]
)
def test_a_signal_ends_every_process_and_removes_what_was_temporary(
    tmp_path: Path, number: signal.Signals, code: int, while_training: bool
):
    """Ctrl-C in the middle, and SIGTERM while workers start."""
    with demo(tmp_path, "--rounds", "1000") as process:
        if while_training:
            read_until(process, "round 0 ")
        processes = wait_for_family(process, 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, out + err
        assert "Traceback" not in err
        assert_all_gone(processes)
    assert not list((tmp_path / "temporary").glob("outerstep-demo-*"))


@pytest.mark.nightly
def test_no_process_outlives_a_demo_that_is_killed(tmp_path: Path):
    with demo(tmp_path) as process:
        processes = wait_for_family(process, 3)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        assert_all_gone(processes)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["coordinator", "worker-1"])
def test_a_process_that_dies_is_told_with_its_log_and_ends_the_demo(tmp_path: Path, victim: str):
    with demo(tmp_path, "--keep", str(tmp_path / "kept")) as process:
        processes = wait_for_family(process, 3)
        [chosen] = [each for each in processes if victim in command(each)]
        chosen.kill()
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, out + err
        assert f"outerstep: {victim} was ended by SIGKILL; its last log lines:\n" in err
        assert "Traceback" not in err
        assert_all_gone(processes)
    log = (tmp_path / "kept" / "logs" / f"{victim}.log").read_text()
    assert all(f"  {line}\n" in err for line in log.splitlines()[-3:])


@pytest.mark.nightly
def test_files_in_the_working_directory_hide_no_package_from_its_processes(tmp_path: Path):
    """They ended at once, and only their logs said why."""
    directory = tmp_path / "of the user"
    directory.mkdir()
    for name in ("worker", "protocol", "coordinator"):
        (directory / f"{name}.py").write_text("raise RuntimeError('the user\\'s own file was run')\n")
    script = tmp_path / "outerstep"
    script.write_text("from outerstep.cli import main\nmain()\n")  # as installers write it
    with demo(tmp_path, outerstep=[str(script)], directory=directory) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    for expected in ("round 0 ", "round 1 ", "nats per token", "bits per byte", "bit-identical"):
        assert expected in out
