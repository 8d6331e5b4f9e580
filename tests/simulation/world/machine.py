"""One machine: its disk, and the process on it, if one runs. It can crash at many points, lose power there, run out of
disk, be slow, and be cut off from others."""

import errno
import random
from pathlib import Path
from typing import ClassVar, NoReturn

from tests.simulation.world.disk import Disk
from tests.simulation.world.primitives import Event
from tests.simulation.world.scheduler import Group, Killed, Scheduler


class Machine:
    """Its `data_dir` is another directory after each crash.

    full_until, slow_until  until when its disk is
    cut_until               until when it reaches neither the database nor the store; by their names
    freeze_s                for how long it freezes at the beginning of its next transaction that writes
    crash_next              crash at the next point; True: the machine loses power
    crashes                 at which kinds of points it crashed, and how often
    """

    fsync_s: ClassVar = 0.01  # that an fsync takes, at most

    def __init__(self, scheduler: Scheduler, rng: random.Random, root: Path, name: str) -> None:
        self.scheduler, self.rng, self.root, self.name = scheduler, rng, root, name
        self.disk = Disk()
        self.generation = 0
        self.skew_s = 0.0
        self.group = Group(name)
        self.group.dead = True
        self.full_until = self.slow_until = 0.0
        self.cut_until: dict[str, float] = {}
        self.freeze_s = 0.0
        self.crash_next: bool | None = None
        self.crashes: dict[str, int] = {}
        self.crash_chance = 0.0
        self.stopping = Event(scheduler)
        self.data_dir = root / f"{name}-0"
        self.data_dir.mkdir()

    def start(self) -> None:
        """Begin the process that is meant for the machine."""
        self.stopping = Event(self.scheduler)
        self.group = Group(f"{self.name} {self.generation}", self.skew_s)
        self.scheduler.spawn(self.serve, self.group.name, self.group)

    def serve(self) -> None:
        """What the process does. SIGTERM sets `stopping`."""
        raise NotImplementedError

    def stop(self) -> None:
        """SIGTERM."""
        self.stopping.set()

    def crashing(self) -> None:
        """What is known of the process is about to be lost."""

    def crash(self, *, power: bool) -> None:
        """kill -9, or the plug; what is left of the files is in another directory afterwards."""
        self.crashing()
        old, self.generation = self.data_dir, self.generation + 1
        self.data_dir = self.root / f"{self.name}-{self.generation}"
        disk = (
            self.disk.after_power_loss(old, self.data_dir, self.rng)
            if power
            else self.disk.after_kill(old, self.data_dir)
        )
        self.disk.close()
        self.disk = disk
        self.crash_next = None
        self.scheduler.kill(self.group)

    def end(self) -> NoReturn:
        """The process of the running task ends by itself."""
        self.crash(power=False)
        raise Killed

    def calm(self) -> None:
        """No more faults."""
        self.crash_chance, self.crash_next = 0.0, None
        self.full_until = self.slow_until = self.freeze_s = 0.0
        self.cut_until.clear()

    def is_cut(self, other: str) -> bool:
        return self.scheduler.now < self.cut_until.get(other, 0.0)

    def fsync(self, descriptor: int) -> None:
        self.crash_point("before an fsync")
        if self.scheduler.now < self.full_until:
            raise OSError(errno.ENOSPC, "no space left on the simulated device")
        if not self.group.indivisible:
            slow = self.scheduler.now < self.slow_until
            self.scheduler.sleep(self.rng.uniform(0, 3.0 if slow else self.fsync_s))
        self.disk.fsynced(descriptor)
        self.crash_point("after an fsync")

    def crash_point(self, what: str) -> None:
        """Perhaps the process ends here."""
        if self.group.dead:
            raise Killed
        if self.crash_next is None and self.rng.random() < self.crash_chance:
            self.crash_next = self.rng.random() < 0.5
        if self.crash_next is not None:
            self.crashes[what] = self.crashes.get(what, 0) + 1
            self.crash(power=self.crash_next)
            raise Killed
