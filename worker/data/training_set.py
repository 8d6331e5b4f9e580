"""Training sets: what the training loop, the evaluation and the agent see of one, and its implementation by shards.

Sequence i of a shard is its tokens [i·L, i·L + L]: L inputs, and the L targets that are the same tokens shifted by one.
No sequence continues in the next shard, which may be on another machine. So up to L tokens at a shard's end are unused.

In a set of conversations, sequence i is the L + 1 tokens from i·(L + 1), and the tokens have marks
(worker/data/tokens/marks.py). If each sequence has a single conversation, batches end where the longest one does.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protocol.messages import DataSummary
from protocol.spec.run import RunSpec
from protocol.spec.sections import DataSpec
from worker.data.order import Integers, Order, Places
from worker.data.tokens.index import Conversations, Index
from worker.data.tokens.marks import BEGINS, TRAINED
from worker.data.tokens.token_files import TokenFiles
from worker.data.tokens.tokenizer import BYTES, Tokens
from worker.errors import DataError

_READ_TOKENS = 1 << 20
_COLUMNS = 64  # batches of few widths: each is compiled, and measured by the allocator, anew


class TrainingSet(Protocol):
    """A training set as numbered work units, and its held-out part. Its methods are thread-safe."""

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
        """Tokens of the held-out shards that contain a whole sequence, of conversations those that are trained on; 0 if
        there are none."""

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token of the held-out part; None if unknown, or if nothing is held out."""

    def unit(self, number: int) -> Tensor:
        """Return work unit `number`, int64[batch_size, sequence_length + 1], a pure function of the set, the run's seed
        and the number; of conversations without packing it may have fewer columns. Raises DataError if the data cannot
        be read or has changed."""

    def expect(self, units: Sequence[int]) -> None:
        """Announce the units that are read next, in this order, so that their shards can be prefetched until `close`.
        Does not wait."""

    def close(self) -> None:
        """Stop prefetching and end its threads. Waits briefly for requests that are in progress."""

    def held_out_batches(self, max_tokens: int) -> Iterator[Tensor]:
        """Yield at most `max_tokens` held-out tokens in batches, int64[<= batch_size, sequence_length + 1].

        At least one whole sequence, evenly spaced: the first ones would come from one or two documents only.
        """


class Shards(Protocol):
    """A list of shards to read tokens from. Thread-safe."""

    @property
    def tokens(self) -> Sequence[int]:
        """The number of tokens in each shard."""

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        """Return tokens [len(shards), length]: row i is read from shard shards[i], beginning at token starts[i].

        Raises DataError."""


class InMemory:
    """Shards that are arrays in memory."""

    def __init__(self, *arrays: Tokens) -> None:
        self._arrays = arrays
        self.tokens = [len(array) for array in arrays]

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        out = np.empty((len(shards), length), self._arrays[0].dtype)
        for shard, array in enumerate(self._arrays):
            rows = shards == shard
            out[rows] = array[starts[rows, None] + np.arange(length)]
        return out


class Prefetch(Protocol):
    """Fetches shards ahead of time until it is closed."""

    def __call__(self, order: Order, units: Sequence[int]) -> None:
        """Announce the units that are read next."""

    def close(self) -> None: ...


class Sequences:
    """A `TrainingSet` made of shards. Raises DataError if they are too small for one work unit."""

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
        prefetch: Prefetch | None = None,
        index: Index | None = None,
        held_out_starts: Integers | None = None,
    ) -> None:
        """`held_out_starts`: where the documents of the only held-out shard begin, ascending; None: each ends with the
        index's `end`, or where they begin is unknown."""
        self._prefetch, self._held_out_starts = prefetch, held_out_starts
        self._end = None if index is None else index.end
        self._length, self._batch = spec.data.sequence_length, spec.inner.batch_size
        conversations = None if index is None else index.conversations
        self._stride = self._length if conversations is None else self._length + 1
        self._trims = conversations is not None and not conversations.packing
        self._training, self._held_out = training, held_out
        self.vocabulary, self.bytes_per_token = vocabulary, bytes_per_token
        self.tokens = sum(training.tokens), sum(held_out.tokens)  # to train on, and held out, of any length
        self.held_out_tokens = sum(tokens for tokens in held_out.tokens if tokens > self._length)
        if index is not None and conversations is not None:
            self.held_out_tokens = sum(shard.trained or 0 for shard in index.held_out)
        sequences = self._sequences(training)
        self.order = Order(sequences, self._batch, spec.seed)
        self.units_per_epoch = self.order.units_per_epoch
        if self.units_per_epoch == 0 and conversations is not None:
            raise DataError(
                f"data.source = {spec.data.source!r} has {sum(sequences)} sequences of conversations to train on, too "
                f"few for one work unit of {self._batch}: lower inner.batch_size, hold out less, or add conversations"
            )
        if self.units_per_epoch == 0:
            unit = "bytes" if vocabulary == BYTES else "tokens"
            raise DataError(
                f"data.source = {spec.data.source!r} has {sum(training.tokens)} training {unit}, too few for one work "
                f"unit: {self._batch} sequences of {self._length} {unit} plus one need "
                f"{self._batch * self._length + 1}; add text, or lower batch_size or sequence_length"
            )
        self.summary = DataSummary(
            digest=digest,
            units=self.units_per_epoch,
            tokenizer=tokenizer,
            tokenizer_digest=tokenizer_digest,
            unit_tokens=None if index is None or conversations is None else _unit_tokens(index, self._batch),
        )

    def unit(self, number: int) -> Tensor:
        """See `TrainingSet`."""
        return self._read(self._training, self.order.places(number))

    def expect(self, units: Sequence[int]) -> None:
        """See `TrainingSet`."""
        if self._prefetch is not None:
            self._prefetch(self.order, units)

    def close(self) -> None:
        """See `TrainingSet`."""
        if self._prefetch is not None:
            self._prefetch.close()

    def held_out_batches(self, max_tokens: int) -> Iterator[Tensor]:
        """See `TrainingSet`."""
        for places in self._held_out_places(max_tokens):
            yield self._read(self._held_out, places)

    def held_out_documents(self, max_tokens: int) -> Iterator[Tensor] | None:
        """Yield which document each target of `held_out_batches` belongs to, int64[<= batch_size, sequence_length], in
        the same order; None if that is unknown, or if all of it is one document. Conversations are documents. Reads all
        held-out tokens. Raises DataError."""
        if self._stride > self._length:
            return self._conversations(max_tokens)
        starts = self._document_starts()
        firsts = np.cumsum([0, *(len(each) for each in starts)])
        return None if firsts[-1] < 2 else self._documents(max_tokens, starts, firsts)

    def _documents(self, max_tokens: int, starts: list[Integers], firsts: Integers) -> Iterator[Tensor]:
        for places in self._held_out_places(max_tokens):
            targets = places.rows[:, None] * self._stride + 1 + np.arange(self._length)
            found = [
                firsts[shard] + np.searchsorted(starts[shard], of_row, "right") - 1
                for shard, of_row in zip(places.shards.tolist(), targets, strict=True)
            ]
            yield torch.from_numpy(np.stack(found))

    def _conversations(self, max_tokens: int) -> Iterator[Tensor]:
        seen = 0
        for batch in self.held_out_batches(max_tokens):
            begins = (batch & BEGINS) != 0
            yield seen + begins.flatten().cumsum(0).view(batch.shape)[:, 1:]
            seen += int(begins.sum())

    def _document_starts(self) -> list[Integers]:
        """Return where documents begin in each held-out shard; nowhere if that is unknown. A shard's first token begins
        one."""
        if self._held_out_starts is not None:
            return [self._held_out_starts]
        if self._end is None:
            return []
        found = []
        for shard, tokens in enumerate(self._held_out.tokens):
            starts = [np.zeros(1, np.int64)]
            for at in range(0, tokens, _READ_TOKENS):
                length = min(_READ_TOKENS, tokens - at)
                read = self._held_out.read(np.array([shard]), np.array([at]), length)[0]
                starts.append(at + 1 + np.flatnonzero(read == self._end))
            begins = np.concatenate(starts)
            found.append(begins[begins < tokens])
        return found

    def _held_out_places(self, max_tokens: int) -> Iterator[Places]:
        """Yield the sequences of `held_out_batches`."""
        ends = np.cumsum(self._sequences(self._held_out))
        available = int(ends[-1]) if len(ends) else 0
        count = min(available, max(max_tokens // self._length, 1))
        chosen = np.arange(count) * available // count if count else np.empty(0, np.int64)
        for start in range(0, count, self._batch):
            places = chosen[start : start + self._batch]
            shards = np.searchsorted(ends, places, "right")
            yield Places(shards, places - np.concatenate([[0], ends])[shards])

    def _sequences(self, shards: Shards) -> list[int]:
        if self._stride > self._length:
            return [tokens // self._stride for tokens in shards.tokens]
        return [max(tokens - 1, 0) // self._length for tokens in shards.tokens]

    def _read(self, shards: Shards, places: Places) -> Tensor:
        tokens = shards.read(places.shards, places.rows * self._stride, self._length + 1)
        if self._trims:
            tokens = tokens[:, : _trained_columns(tokens)]
        return torch.from_numpy(tokens.astype(np.int64))


def _unit_tokens(index: Index, batch_size: int) -> int:
    """Return how many tokens of a unit of a set of conversations are trained on, on average, rounded."""
    sequences = sum(shard.tokens for shard in index.training) // index.row_tokens
    trained = sum(shard.trained or 0 for shard in index.training)
    return max(round(trained * batch_size / sequences), 1)


def _trained_columns(tokens: Tokens) -> int:
    """Return how many columns of a batch with marks there are up to the last one that is trained on, rounded up to
    _COLUMNS and one. Later ones change nothing, as no token sees those after it."""
    trained = np.flatnonzero((tokens.astype(np.uint32) & np.uint32(TRAINED)).any(axis=0))
    last = int(trained[-1]) if len(trained) else 1
    return min(-(-last // _COLUMNS) * _COLUMNS + 1, tokens.shape[1])


def _check_conversations(data: DataSpec, found: Conversations | None) -> None:
    """Raise DataError unless the token set is what the spec's [data] describes: text, or such conversations."""
    name = f"data.source = {data.source!r}"
    if found is None:
        if data.format != "text":
            raise DataError(
                f'{name} is a token set of text: set data.format = "text", or prepare a set of conversations with '
                f"`outerstep data prepare --data-format {data.format}`"
            )
        return
    if data.format == "text":
        raise DataError(f'{name} is a token set of conversations: set data.format = "chat" or "completion"')
    wanted = {"sequence_length": data.sequence_length, "train_on": data.trains_on, "packing": data.packing}
    for key, value in wanted.items():
        if (was := getattr(found, key)) != value:
            given, right = (json.dumps(each) for each in (value, was))
            raise DataError(
                f"{name} was prepared with {key} = {right}, but data.{key} is {given}: set data.{key} = {right}, or "
                "prepare the set again"
            )


def token_sequences(
    spec: RunSpec, index: Index, training: TokenFiles, held_out: TokenFiles, prefetch: Prefetch | None = None
) -> Sequences:
    """Return the training set that `index` describes, read through `training` and `held_out`. Raises DataError."""
    if spec.data.private and index.tokenizer is None:
        raise DataError(
            f"data.source = {spec.data.source!r} does not record which tokenizer made its ids. With data.private, the "
            "tokenizer is all that ensures that equal ids mean equal text on every worker: set data.tokenizer"
        )
    _check_conversations(spec.data, index.conversations)
    return Sequences(
        spec,
        training,
        held_out,
        digest=index.digest(),
        vocabulary=index.vocabulary,
        bytes_per_token=index.bytes_per_token,
        tokenizer=index.tokenizer,
        tokenizer_digest=index.tokenizer_digest,
        prefetch=prefetch,
        index=index,
    )
