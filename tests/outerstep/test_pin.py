"""A run whose spec was pinned: a real worker brings what `outerstep run pin` found, and one with another text does not."""

from pathlib import Path

import pytest

from harness.coordinator import coordinator_thread
from outerstep.common.exit_codes import Exit
from tests.outerstep.conftest import outerstep
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.workers import worker_settings
from worker.agent import run_worker

pytestmark = pytest.mark.slow


def test_workers_bring_what_was_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, other = write_text(tmp_path / "text", seed=2), write_text(tmp_path / "other", seed=3)
    spec = tmp_path / "spec.toml"
    spec.write_text(tiny_spec("pinned", text, rounds=1, min_workers=1, seed=3), encoding="utf-8")
    code, printed, err = outerstep("run", "pin", spec, "--data-root", tmp_path)
    assert code == 0, err
    assert [line.partition(" ")[0] for line in printed.split("\n") if "=" in line] == ["layout", "data", "state"]
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(spec.read_text(encoding="utf-8") + printed)
        stranger = worker_settings(running, "pinned", tmp_path / "b", name="b", data=str(other))
        assert run_worker(stranger) == Exit.REFUSED
        assert "pin-mismatch: the spec pins pins.data" in caplog.text
        assert run_worker(worker_settings(running, "pinned", tmp_path / "a")) == Exit.DONE
        with running.client() as client:
            shown = client.get("/v1/runs/pinned").json()
    assert (shown["state"], shown["round"]) == ("finished", 1)


def test_it_reads_only_what_is_allowed(tmp_path: Path) -> None:
    """A spec may be somebody else's."""
    spec = tmp_path / "spec.toml"
    text = write_text(tmp_path / "text", seed=2)
    spec.write_text(tiny_spec("pinned", text, rounds=1, min_workers=1, seed=3), encoding="utf-8")
    _, out, err = outerstep("run", "pin", spec)
    assert (out, "--data-root" in err) == ("", True), err
