"""The processes of one worker, its ranks: one per GPU of a box, as torchrun starts them.

To the run they are one worker. They train one model (DistributedDataParallel, fully_shard), and go through the rounds
in lockstep. So what only one process can find out (the coordinator's answer, a failed upload, a signal) becomes the
same result or the same exception in all of them before any acts on it; rank 0 makes the requests that are needed once.
This uses a separate gloo group, which needs no device and waits as long as necessary: a coordinator may be away for
hours.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import OuterstepError
from worker.errors import RankLost, Stopped

T = TypeVar("T")

# A dead process is noticed by its connections. If others wait, that is no error, however long it takes.
_TIMEOUT = timedelta(days=365)

LOST = (
    "another process of this worker has died; its own log says why. The same command resumes the worker, with any "
    "number of processes"
)


class Ranks:
    """All processes of this worker, seen from one of them. All must call each method, in the same order, from their
    main threads. Raises RankLost if one of them has died."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Ranks":
        """Return the ranks of torch.distributed's default group; a single one if there is no group.

        Raises RuntimeError if torchrun has started several processes and the group does not exist yet: each of them
        would become a separate worker.
        """
        if dist.is_available() and dist.is_initialized():
            if dist.get_world_size() == 1:
                return cls()
            with _raising_rank_lost():
                return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_TIMEOUT))
        size = environment.get("WORLD_SIZE", "1")
        if size != "1" and "RANK" in environment:
            raise RuntimeError(
                f"torchrun has started {size} processes for one worker: call "
                "torch.distributed.init_process_group() before DiLoCo is made"
            )
        return cls()

    @property
    def is_first(self) -> bool:
        """True in the process that acts for the worker."""
        return self.rank == 0

    def all(self, value: T) -> list[T]:
        """Return the `value` of each process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _raising_rank_lost():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def agreed(self, value: T) -> T | None:
        """Return the value that all processes have passed; None if they differ."""
        values = self.all(value)
        return value if all(each == values[0] for each in values) else None

    def on(self, rank: int, act: Callable[[], T]) -> T:
        """Return what `act` returns in process `rank`, or raise what it raises there. The others do not call it."""
        if self.size == 1:
            return act()
        error: Exception | None = None
        outcome: list[Any] = [None]  # the result, and the error
        if rank == self.rank:
            try:
                outcome = [(act(), None)]
            except Exception as raised:  # noqa: BLE001, whatever it is: the others wait for it
                error, outcome = raised, [(None, _portable(raised))]
        with _raising_rank_lost():
            dist.broadcast_object_list(outcome, src=rank, group=self._group)
        result: T
        result, theirs = outcome[0]
        if theirs is not None:
            raise error or theirs
        return result

    def on_first(self, act: Callable[[], T]) -> T:
        """`on(0, act)`."""
        return self.on(0, act)

    def together(self, act: Callable[[], T]) -> T:
        """Return what `act` returns here. If it raises in some processes, all raise the first of these errors, and
        Stopped only if there is no other. `act` must not wait for another rank."""
        if self.size == 1:
            return act()
        error: Exception | None = None
        try:
            result = act()
        except Exception as raised:  # noqa: BLE001, as above
            error = raised
        errors = self.all(None if error is None else _portable(error))
        failed = sorted((each is None, isinstance(each, Stopped), rank) for rank, each in enumerate(errors))
        _, _, rank = failed[0]
        first = error if rank == self.rank else errors[rank]
        if first is not None:
            raise first
        return result

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a scalar on the device over the default group, without waiting for the device."""
        if self.size == 1:
            return value
        mean = value.detach() / self.size
        with _raising_rank_lost():
            dist.all_reduce(mean)
        return mean

    def flags(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is True in any process. The fastest of these methods, for every inner
        step."""
        if self.size == 1:
            return list(flags)
        combined = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        with _raising_rank_lost():
            dist.all_reduce(combined, dist.ReduceOp.MAX, group=self._group)
        return [bool(each) for each in combined]

    def send_receive(self, sent: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> None:
        """Send each vector to the rank that is its key, and fill each expected vector from its rank. Uses the default
        group, whose backend fits their device."""
        operations = [dist.P2POp(dist.isend, vector, rank) for rank, vector in sent.items()]
        operations += [dist.P2POp(dist.irecv, vector, rank) for rank, vector in expected.items()]
        if not operations:
            return
        with _raising_rank_lost():
            for each in dist.batch_isend_irecv(operations):
                each.wait()

    def store(self) -> Any:
        """Return a torch.distributed.Store shared by all of them, for any of their threads. It ends with rank 0."""
        host = os.environ.get("MASTER_ADDR", "localhost")
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        served: list[Any] = []

        def serve() -> int:
            served.append(tcp_store(host, 0, is_master=True, wait_for_workers=False))
            port: int = served[0].port
            return port

        port = self.on_first(serve)
        return served[0] if served else tcp_store(host, port, is_master=False)


ALONE = Ranks()


def _portable(error: Exception) -> Exception:
    """Return the same error, or a description of it if it cannot be pickled."""
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))  # noqa: S301, its own # nosec B301
    except Exception:  # noqa: BLE001, an exception's constructor may require anything
        return OuterstepError(f"{type(error).__name__}: {error}")
    return copy


def is_of_a_lost_rank(error: BaseException | None) -> bool:
    """Return True if `error` is what torch.distributed raises when another process has died."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


@contextmanager
def _raising_rank_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankLost(f"{LOST} ({reason})") from error
