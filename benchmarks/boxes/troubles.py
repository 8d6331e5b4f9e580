"""What happens to the second of two boxes in the middle of a run, or to the coordinator."""

import time
from dataclasses import replace

from benchmarks.boxes.real import HANG, SPOIL, Scene, Trouble
from benchmarks.boxes.rows import LINES, NEAR

BOX, CUT_ROUNDS, PERIOD = "box-1", 2, 3


def killed(scene: Scene, round_: int) -> None:
    """SIGKILL, and it never returns."""
    scene.processes[BOX].kill()


def hangs(scene: Scene, round_: int) -> None:
    """Its training thread stops; its heartbeats go on."""
    scene.pace(BOX, HANG)


def line_cut(scene: Scene, round_: int) -> None:
    """Its line carries nothing for two rounds."""
    shape = LINES[NEAR]
    assert shape is not None
    scene.shape(BOX, replace(shape, loss=1.0))
    time.sleep(CUT_ROUNDS * scene.size.round_s)
    scene.shape(BOX, shape)


def comes_and_goes(scene: Scene, round_: int) -> None:
    """It is killed in every third round, and started again a round later."""
    while scene.await_round(round_):
        scene.processes[BOX].kill()
        scene.processes[BOX].wait()
        time.sleep(scene.size.round_s)
        scene.processes[BOX] = scene.start(BOX)
        round_ += PERIOD


def refused(scene: Scene, round_: int) -> None:
    """Everything that it contributes is far too large, and left out."""
    scene.pace(BOX, SPOIL)


def disk_full(scene: Scene, round_: int) -> None:
    """The disk of its state directory fills up."""
    filler = scene.disk(BOX) / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


def coordinator_away(scene: Scene, round_: int) -> None:
    """The coordinator is killed, and started again a round later."""
    scene.coordinator.kill()
    time.sleep(scene.size.round_s)
    scene.coordinator.start()


TROUBLES: dict[str, Trouble] = {
    "killed": killed,
    "hangs": hangs,
    "line cut for 2 rounds": line_cut,
    "comes and goes": comes_and_goes,
    "refused": refused,
    "disk full": disk_full,
    "coordinator away": coordinator_away,
}
