"""How text becomes ids: documents end to end, or conversations in sequences of fixed length.

An encoding can be sent to other processes; its `encoder` loads the tokenizer there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.data.order import Integers
from worker.data.sources.documents import Piece
from worker.data.tokens.answers import TrainOn
from worker.data.tokens.conversations import ChatTemplate, conversation_encoder
from worker.data.tokens.index import DtypeName, LeftOut, dtype_for, item_of
from worker.data.tokens.marks import BEGINS, TRAINED
from worker.data.tokens.packing import pack
from worker.data.tokens.rendering import BadConversation
from worker.data.tokens.tokenizer import Ids, Tokenizer, Tokens
from worker.errors import DataError

_BATCH_BYTES = 1 << 20
_RULES = 2  # changes whenever the same conversation gets other ids or marks
_FAULT_CHARACTERS = 500


@dataclass(frozen=True)
class TokenisedText:
    """Ids of pieces of text, end to end. `pieces`, int64[n, 3], has for each where it begins, its bytes of text, and
    the documents that begin with it, 0 or 1."""

    ids: Tokens
    pieces: Integers
    left_out: LeftOut


Encoder = Callable[[Sequence[Piece]], TokenisedText]  # raises DataError


@dataclass(frozen=True)
class DocumentEncoding:
    """Text as documents, end to end, each followed by the tokenizer's end unless it has none."""

    tokenizer: Tokenizer
    sequence_tokens = 1  # a shard consists of whole sequences: it may begin with any token

    @property
    def dtype(self) -> DtypeName:
        """The smallest that has all ids of the tokenizer."""
        return dtype_for(self.tokenizer.vocabulary)

    def identity(self) -> list[Any]:
        """Return values that determine the ids, beside the sources and the tokenizer."""
        return []

    def encoder(self) -> Encoder:
        """Return a function that tokenises pieces of text."""
        encode, end = self.tokenizer.encoder(), self.tokenizer.end
        dtype: npt.DTypeLike = item_of(self.dtype)

        def tokenise(pieces: Sequence[Piece]) -> TokenisedText:
            found: list[Tokens] = []
            rows, at = [], 0
            for batch in _batches(pieces):
                for piece, ids in zip(batch, encode([each.text for each in batch]), strict=True):
                    ended = np.append(ids, end) if piece.ends and end is not None else ids
                    found.append(ended.astype(dtype))
                    rows.append((at, piece.size, piece.begins))
                    at += len(ended)
            joined: Tokens = np.concatenate([np.empty(0, dtype), *found])
            return TokenisedText(joined, np.array(rows, np.int64).reshape(-1, 3), LeftOut())

        return tokenise


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces, of about _BATCH_BYTES of text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


@dataclass(frozen=True)
class ConversationEncoding:
    """Conversations as sequences of `sequence_length` tokens and the one after them, the last target: several in one
    if `packing`, otherwise one. `skip`: leave out and count conversations that cannot be used, instead of raising
    DataError."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    train_on: TrainOn
    sequence_length: int
    packing: bool
    skip: bool

    @property
    def dtype(self) -> DtypeName:
        """That of ids with marks."""
        return "uint32"

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sequence: a shard consists of whole ones."""
        return self.sequence_length + 1

    def identity(self) -> list[Any]:
        """Return values that determine the ids, beside the sources and the tokenizer."""
        template = None if self.template is None else asdict(self.template) | {"name": None}
        return [_RULES, self.train_on, template, self.sequence_length, self.packing, self.skip]

    def encoder(self) -> Encoder:
        """Return a function that tokenises conversations, as JSON."""
        encode = conversation_encoder(self.tokenizer, self.template, self.train_on)

        def tokenise(pieces: Sequence[Piece]) -> TokenisedText:
            sequences = _Sequences(self)
            for piece in pieces:
                ignored = Counter[str]()
                try:
                    if piece.fault is not None:
                        raise BadConversation(piece.fault)
                    ids = encode(piece.text, ignored)
                except BadConversation as error:
                    fault = f"{piece.where}: {error}"
                    if not self.skip:
                        raise DataError(fault) from error
                    sequences.left_out += LeftOut(skipped=1, faults=(fault[:_FAULT_CHARACTERS],))
                else:
                    sequences.add(piece, ids, ignored)
            return sequences.text()

        return tokenise


class _Sequences:
    """Collects conversations for sequences."""

    def __init__(self, encoding: ConversationEncoding) -> None:
        tokenizer = encoding.tokenizer
        self._row, self._packing = encoding.sequence_tokens, encoding.packing
        self._pad = next(each for each in (tokenizer.pad, tokenizer.end, 0) if each is not None)
        self._conversations: list[Ids] = []
        self._counts: list[tuple[int, int]] = []  # the bytes of text of each, and the documents that it begins, 0 or 1
        self.left_out = LeftOut()

    def add(self, piece: Piece, ids: Ids, ignored: Mapping[str, int]) -> None:
        """Add a conversation, which may have several parts. `ignored`: answers that are not trained on, by reason."""
        parts = np.split(ids, np.flatnonzero(ids & np.uint32(BEGINS))[1:])
        longest = max(map(len, parts))
        kept = [part for part in parts if (part[: self._row] & np.uint32(TRAINED)).any()]
        self._conversations += [part[: self._row] for part in kept]
        self._counts += [(piece.size, 1) if part is kept[0] else (0, 0) for part in kept]
        beyond, ignored, dropped = f"nothing to train on in the first {self._row} tokens", dict(ignored), {}
        if not kept:
            dropped[beyond if (ids & np.uint32(TRAINED)).any() else "nothing to train on"] = 1
        elif len(kept) < len(parts):
            ignored[beyond] = len(parts) - len(kept)
        self.left_out += LeftOut(
            truncated=int(any(len(part) > self._row for part in kept)),
            dropped=dropped,
            longest=longest,
            ignored=ignored,
            split=int(len(parts) > 1),
            repeated=len(ids) - longest,
        )

    def text(self) -> TokenisedText:
        """Return the sequences. The rest of each is filled with the pad token."""
        lengths = [len(ids) for ids in self._conversations]
        sequences = pack(lengths, self._row) if self._packing else [[i] for i in range(len(lengths))]
        ids = np.full((len(sequences), self._row), self._pad, np.uint32)
        pieces = []
        for row, members in enumerate(sequences):
            at = 0
            for i in members:
                ids[row, at : at + lengths[i]] = self._conversations[i]
                pieces.append((row * self._row + at, *self._counts[i]))
                at += lengths[i]
        return TokenisedText(ids.reshape(-1), np.array(pieces, np.int64).reshape(-1, 3), self.left_out)


Encoding = DocumentEncoding | ConversationEncoding
