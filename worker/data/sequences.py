"""Shards of tokens as numbered work units: where `order.py` says that a unit's sequences are, they are read.

Sequence i of a shard is its tokens [i·L, i·L + L], the L targets being the tokens that follow the L inputs. No sequence
reaches into the next shard, which may be on another machine; a shard's last tokens, L at most, are not used.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protocol.messages import DataSummary
from protocol.spec.run import RunSpec
from worker.data.ids import BYTES, Integers, Tokens
from worker.data.order import Order, Places
from worker.errors import DataError


class Shards(Protocol):
    """A sequence of shards that tokens are read from, by any thread."""

    @property
    def tokens(self) -> Sequence[int]:
        """The number of tokens in each shard."""

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        """Return `length` tokens from each place: of shard shards[i], from token starts[i] on; [len(shards), length].

        Raises DataError."""


class InMemory:
    """Shards that are arrays in memory."""

    def __init__(self, *arrays: Tokens) -> None:
        self._arrays = arrays
        self.tokens = [len(array) for array in arrays]

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        out = np.empty((len(shards), length), self._arrays[0].dtype)
        for shard, array in enumerate(self._arrays):
            mine = shards == shard
            out[mine] = array[starts[mine, None] + np.arange(length)]
        return out


class Ahead(Protocol):
    """Has shards fetched ahead, until it is closed."""

    def __call__(self, order: Order, units: Sequence[int]) -> None:
        """Note the units that are asked for next."""

    def close(self) -> None: ...


class Sequences:
    """A training set of shards. Raises DataError if they are too few for one work unit."""

    def __init__(
        self,
        spec: RunSpec,
        training: Shards,
        held_out: Shards,
        *,
        digest: str,
        vocabulary: int,
        bytes_per_token: float | None,
        tokenizer: str | None = None,
        tokenizer_digest: str | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._ahead = ahead
        self._length, self._batch = spec.data.sequence_length, spec.inner.batch_size
        self._training, self._held_out = training, held_out
        self.vocabulary, self.bytes_per_token = vocabulary, bytes_per_token
        self.held_out_tokens = sum(tokens for tokens in held_out.tokens if tokens > self._length)
        sequences = self._sequences(training)
        self.order = Order(sequences, self._batch, spec.seed)
        self.units_per_epoch = self.order.units_per_epoch
        if self.units_per_epoch == 0:
            unit = "bytes" if vocabulary == BYTES else "tokens"
            raise DataError(
                f"data.source = {spec.data.source!r} has {sum(training.tokens)} training {unit}; one work unit needs "
                f"{self._batch} sequences of {self._length} {unit} and one more: "
                f"{self._batch * self._length + 1}; give more text or a smaller batch_size or sequence_length"
            )
        self.summary = DataSummary(
            digest=digest, units=self.units_per_epoch, tokenizer=tokenizer, tokenizer_digest=tokenizer_digest
        )

    def unit(self, number: int) -> Tensor:
        """Return work unit `number`, int64[batch_size, sequence_length + 1]."""
        return self._read(self._training, self.order.places(number))

    def expect(self, units: Sequence[int]) -> None:
        """Have the shards of these units fetched ahead, as `TrainingSet` says."""
        if self._ahead is not None:
            self._ahead(self.order, units)

    def close(self) -> None:
        """Have nothing fetched ahead any more, as `TrainingSet` says."""
        if self._ahead is not None:
            self._ahead.close()

    def held_out_batches(self, max_tokens: int) -> Iterator[Tensor]:
        """Yield at most `max_tokens` held-out tokens, as `TrainingSet` says."""
        ends = np.cumsum(self._sequences(self._held_out))
        available = int(ends[-1]) if len(ends) else 0
        count = min(available, max(max_tokens // self._length, 1))
        chosen = np.arange(count) * available // count if count else np.empty(0, np.int64)
        for start in range(0, count, self._batch):
            places = chosen[start : start + self._batch]
            shards = np.searchsorted(ends, places, "right")
            rows = places - np.concatenate([[0], ends])[shards]
            yield self._read(self._held_out, Places(shards, rows))

    def _sequences(self, shards: Shards) -> list[int]:
        return [max(tokens - 1, 0) // self._length for tokens in shards.tokens]

    def _read(self, shards: Shards, places: Places) -> Tensor:
        tokens = shards.read(places.shards, places.rows * self._length, self._length + 1)
        return torch.from_numpy(tokens.astype(np.int64))
