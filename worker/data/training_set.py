"""What the training loop, the evaluation and the agent know of a training set, whatever it is made of."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from protocol.messages import DataSummary


class TrainingSet(Protocol):
    """A training set as numbered work units, and the part that is held out. Its methods may be called by any thread."""

    @property
    def summary(self) -> DataSummary:
        """The identity of the set, which the coordinator compares between workers."""

    @property
    def units_per_epoch(self) -> int:
        """Work units of one epoch, at least 1."""

    @property
    def vocabulary(self) -> int:
        """All token ids are below this."""

    @property
    def held_out_tokens(self) -> int:
        """Tokens of the held-out shards that have a whole sequence; 0 if there is none."""

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token of the held-out part; None if nobody knows, or nothing is held out."""

    def unit(self, number: int) -> Tensor:
        """Return work unit `number`, int64[batch_size, sequence_length + 1]: a pure function of the set, the run's seed
        and the number. Raises DataError if the data cannot be read or is not what it was."""

    def expect(self, units: Sequence[int]) -> None:
        """Note that these units are asked for next, in this order; what they need may be fetched ahead, until `close`.
        Does not wait."""

    def close(self) -> None:
        """Have nothing fetched ahead any more, and end the threads that do; those in a request after a little."""

    def held_out_batches(self, max_tokens: int) -> Iterator[Tensor]:
        """Yield at most `max_tokens` held-out tokens in batches, int64[<= batch_size, sequence_length + 1].

        They are whole sequences, at least one, spaced evenly: the first ones would be of one or two documents only.
        """
