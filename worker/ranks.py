"""The processes of one worker, its ranks: one for each GPU of a box, as torchrun starts them.

To the run they are one worker. They train one model (DistributedDataParallel, fully_shard), and every one of them takes
the same way through the rounds. So whatever one alone can find out (what the coordinator answers, that an upload
failed, a signal) becomes the same result or the same exception in all of them before any acts upon it; rank 0 asks what
is to be asked once. That goes over a group of its own, of gloo, which needs no device and waits as long as it takes: a
coordinator may be away for hours.
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

# A process that dies is noticed by its connections; that others wait is no fault, however long it takes.
_TIMEOUT = timedelta(days=365)

LOST = (
    "another process of this worker has gone, which its own last words explain; the same command resumes the worker, "
    "with whatever number of processes"
)


class Ranks:
    """All processes of this worker, in one of them. Every method is for all of them to call, in the same order, each
    from its main thread; raises RankLost where one has gone."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Ranks":
        """Return the ranks of torch.distributed's default group; a single one where there is none.

        Raises RuntimeError where torchrun has started several processes and the group is not there yet: each of them
        would be a worker of its own.
        """
        if dist.is_available() and dist.is_initialized():
            if dist.get_world_size() == 1:
                return cls()
            with _raising_rank_lost():
                return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_TIMEOUT))
        size = environment.get("WORLD_SIZE", "1")
        if size != "1" and "RANK" in environment:
            raise RuntimeError(
                f"torchrun has started {size} processes, which are to be one worker: call "
                "torch.distributed.init_process_group() before DiLoCo is made"
            )
        return cls()

    @property
    def is_first(self) -> bool:
        """True in the process that speaks for the worker."""
        return self.rank == 0

    def all(self, value: T) -> list[T]:
        """Return what each of them has called this with, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _raising_rank_lost():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def agreed(self, value: T) -> T | None:
        """Return what all of them have called this with; None where they differ."""
        values = self.all(value)
        return value if all(each == values[0] for each in values) else None

    def on(self, rank: int, act: Callable[[], T]) -> T:
        """Return what `act` returns in process `rank`, the others calling nothing; or raise what it raises there."""
        if self.size == 1:
            return act()
        error: Exception | None = None
        told: list[Any] = [None]  # the result, and the error
        if rank == self.rank:
            try:
                told = [(act(), None)]
            except Exception as raised:  # noqa: BLE001, whatever it is: the others wait for it
                error, told = raised, [(None, _portable(raised))]
        with _raising_rank_lost():
            dist.broadcast_object_list(told, src=rank, group=self._group)
        result: T
        result, theirs = told[0]
        if theirs is not None:
            raise error or theirs
        return result

    def on_first(self, act: Callable[[], T]) -> T:
        """`on(0, act)`."""
        return self.on(0, act)

    def together(self, act: Callable[[], T]) -> T:
        """Return what `act` returns here; where it raises in some of them, all raise the first of these, but anything
        rather than Stopped. Nothing in `act` may wait for another rank."""
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
        """Return the mean of a scalar on the device, over the default group; nothing waits for the device."""
        if self.size == 1:
            return value
        mean = value.detach() / self.size
        with _raising_rank_lost():
            dist.all_reduce(mean)
        return mean

    def flags(self, *flags: bool) -> list[bool]:
        """Return each of the flags, True where it is in any of them. Of all that is asked this is the quickest, for
        every inner step."""
        if self.size == 1:
            return list(flags)
        told = torch.tensor(flags, dtype=torch.uint8)
        with _raising_rank_lost():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return [bool(each) for each in told]

    def send_receive(self, sent: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> None:
        """Send vectors to ranks, and fill those that are expected of ranks: each to, or from, the rank that is its key.
        Over the default group, whose backend is the one for their device."""
        operations = [dist.P2POp(dist.isend, vector, rank) for rank, vector in sent.items()]
        operations += [dist.P2POp(dist.irecv, vector, rank) for rank, vector in expected.items()]
        if not operations:
            return
        with _raising_rank_lost():
            for each in dist.batch_isend_irecv(operations):
                each.wait()

    def store(self) -> Any:
        """Return a torch.distributed.Store that all of them share, for any of their threads. It ends with rank 0."""
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
    """Return the same error, or what can be told of it where it cannot travel to another process."""
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))  # noqa: S301, its own # nosec B301
    except Exception:  # noqa: BLE001, there is no end to what an exception's constructor may want
        return OuterstepError(f"{type(error).__name__}: {error}")
    return copy


def is_of_a_lost_rank(error: BaseException | None) -> bool:
    """Return True if `error` is what torch.distributed raises where another process has gone."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


@contextmanager
def _raising_rank_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankLost(f"{LOST} ({told})") from error
