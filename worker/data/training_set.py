"""A training set: what the training loop, the evaluation and the agent see of a token set or of text in memory.

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
from worker.data.fetching.prefetching import Prefetcher
from worker.data.order import Integers, Order, Places
from worker.data.tokens.index import Index, described
from worker.data.tokens.marks import BEGINS, TRAINED
from worker.data.tokens.tokenizer import BYTES, Tokenizer, Tokens
from worker.errors import DataError

_READ_TOKENS = 1 << 20
_COLUMNS = 64  # batches of few widths: each is compiled, and measured by the allocator, anew


class Shards(Protocol):
    """A list of shards to read tokens from. Thread-safe."""

    @property
    def tokens(self) -> Sequence[int]:
        """The number of tokens in each shard."""

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        """Return tokens [len(shards), length]: row i is read from shard shards[i], beginning at token starts[i].

        Raises DataError."""


class InMemory:
    """A shard that is an array in memory."""

    def __init__(self, array: Tokens) -> None:
        self._array = array
        self.tokens = [len(array)]

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        """See `Shards`."""
        return self._array[starts[:, None] + np.arange(length)]


class TrainingSet:
    """A training set as numbered work units, and its held-out part. Its methods are thread-safe.

    summary          the identity of the set, which the coordinator compares between workers
    order            the order of its sequences, with `units_per_epoch`, at least 1
    vocabulary       all token ids are below this
    tokens           tokens to train on, and held-out ones, of any length
    held_out_tokens  tokens of the held-out shards that contain a whole sequence, of conversations those that are
                     trained on; 0 if there are none
    bytes_per_token  bytes of text per token of the held-out part; None if unknown, or if nothing is held out
    """

    def __init__(
        self, spec: RunSpec, index: Index, training: Shards, held_out: Shards, prefetch: Prefetcher | None = None
    ) -> None:
        """Raises DataError if the shards are too small for one work unit."""
        self._training, self._held_out, self._prefetch = training, held_out, prefetch
        self._length, self._batch = spec.data.sequence_length, spec.inner.batch_size
        conversations = index.conversations
        self._stride = self._length if conversations is None else self._length + 1
        self._trims = conversations is not None and not conversations.packing
        self._end = index.end
        self.vocabulary, self.bytes_per_token = index.vocabulary, index.bytes_per_token
        self.tokens = sum(training.tokens), sum(held_out.tokens)
        self.held_out_tokens = sum(tokens for tokens in held_out.tokens if tokens > self._length)
        sequences = self._sequences(training)
        self.order = Order(sequences, self._batch, spec.seed)
        self.units_per_epoch = self.order.units_per_epoch
        if self.units_per_epoch == 0:
            raise _too_few(spec, index, sum(sequences))
        unit_tokens = None
        if conversations is not None:
            self.held_out_tokens = sum(shard.trained or 0 for shard in index.held_out)
            trained = sum(shard.trained or 0 for shard in index.training)
            unit_tokens = max(round(trained * self._batch / sum(sequences)), 1)
        self.summary = DataSummary(
            digest=index.digest(),
            units=self.units_per_epoch,
            tokenizer=index.tokenizer,
            tokenizer_digest=index.tokenizer_digest,
            unit_tokens=unit_tokens,
        )

    def unit(self, number: int) -> Tensor:
        """Return work unit `number`, int64[batch_size, sequence_length + 1], a pure function of the set, the run's seed
        and the number; of conversations without packing it may have fewer columns. Raises DataError if the data cannot
        be read or has changed."""
        return self._read(self._training, self.order.places(number))

    def expect(self, units: Sequence[int]) -> None:
        """Announce the units that are read next, in this order, so that their shards can be prefetched until `close`.
        Does not wait."""
        if self._prefetch is not None:
            self._prefetch(self.order, units)

    def close(self) -> None:
        """Stop prefetching and end its threads. Waits briefly for requests that are in progress."""
        if self._prefetch is not None:
            self._prefetch.close()

    def held_out_batches(self, max_tokens: int) -> Iterator[Tensor]:
        """Yield at most `max_tokens` held-out tokens in batches, int64[<= batch_size, sequence_length + 1].

        At least one whole sequence, evenly spaced: the first ones would come from one or two documents only.
        """
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


def _trained_columns(tokens: Tokens) -> int:
    """Return how many columns of a batch with marks there are up to the last one that is trained on, rounded up to
    _COLUMNS and one. Later ones change nothing, as no token sees those after it."""
    trained = np.flatnonzero((tokens.astype(np.uint32) & np.uint32(TRAINED)).any(axis=0))
    last = int(trained[-1]) if len(trained) else 1
    return min(-(-last // _COLUMNS) * _COLUMNS + 1, tokens.shape[1])


def open_tokens(
    spec: RunSpec,
    index: Index,
    tokenizer: Tokenizer | None,
    training: Shards,
    held_out: Shards,
    prefetch: Prefetcher | None = None,
) -> TrainingSet:
    """Return the training set that `index` describes, read through `training` and `held_out`. Raises DataError if it is
    not what the spec's [data] describes, or was made with another tokenizer than `tokenizer`, unless that is None."""
    name = f"data.source = {spec.data.source!r}"
    if tokenizer is not None:
        _check_tokenizer(name, index, tokenizer)
    if spec.data.private and index.tokenizer is None:
        raise DataError(
            f"{name} does not record which tokenizer made its ids. With data.private, the tokenizer is all that "
            "ensures that equal ids mean equal text on every worker: set data.tokenizer"
        )
    _check_conversations(name, index, spec.data)
    return TrainingSet(spec, index, training, held_out, prefetch)


def _check_tokenizer(name: str, index: Index, tokenizer: Tokenizer) -> None:
    """Raise DataError if the set was made with another tokenizer, as far as its index shows."""
    if index.tokenizer is None:
        if tokenizer.vocabulary < index.vocabulary:
            raise DataError(
                f"{name} has token ids up to {index.vocabulary - 1}, but data.tokenizer = {tokenizer.name!r} only up "
                f"to {tokenizer.vocabulary - 1}: the set was made with another tokenizer; name that one"
            )
    elif (index.tokenizer_digest, index.end) != (tokenizer.digest, tokenizer.end):
        raise DataError(
            f"{name} was made with the tokenizer {described(index.tokenizer, index.tokenizer_digest)}, but "
            f"data.tokenizer is {described(tokenizer.name, tokenizer.digest)}; name the set's tokenizer, or leave "
            "data.tokenizer out, or prepare the set again"
        )


def _check_conversations(name: str, index: Index, data: DataSpec) -> None:
    """Raise DataError unless the set is of text or of conversations, and prepared as `data` says."""
    found = index.conversations
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


def _too_few(spec: RunSpec, index: Index, sequences: int) -> DataError:
    name, batch, length = spec.data.source, spec.inner.batch_size, spec.data.sequence_length
    if index.conversations is not None:
        return DataError(
            f"data.source = {name!r} has {sequences} sequences of conversations to train on, too few for one work unit "
            f"of {batch}: lower inner.batch_size, hold out less, or add conversations"
        )
    unit, found = "bytes" if index.vocabulary == BYTES else "tokens", sum(shard.tokens for shard in index.training)
    return DataError(
        f"data.source = {name!r} has {found} training {unit}, too few for one work unit: {batch} "
        f"sequences of {length} {unit} plus one need {batch * length + 1}; add text, or lower batch_size or "
        "sequence_length"
    )
