"""Conversations in sequences of fixed length, and packing: several whole ones in each sequence.

First-fit decreasing: the longest conversation first, each into the first sequence that has room for it. It needs at
most 11/9 of the fewest possible sequences, plus 6/9 (Dósa, "The tight bound of first fit decreasing bin-packing
algorithm is FFD(I) ≤ 11/9 OPT(I) + 6/9", 2007).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from worker.data.sources.documents import Piece
from worker.data.tokens.answers import TrainOn
from worker.data.tokens.conversations import ChatTemplate, conversation_encoder
from worker.data.tokens.index import DtypeName, LeftOut
from worker.data.tokens.marks import BEGINS, TRAINED
from worker.data.tokens.rendering import BadConversation
from worker.data.tokens.tokenising import Encoder, TaskTokens, TokenisedText
from worker.data.tokens.tokenizer import Ids, Tokenizer
from worker.errors import DataError

_RULES = 2  # changes whenever the same conversation gets other ids or marks
_FAULT_CHARACTERS = 500


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
    dtype: DtypeName = field(default="uint32", init=False)  # of ids with marks

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sequence."""
        return self.sequence_length + 1

    def identity(self) -> list[Any]:
        """See `Encoding`."""
        template = None if self.template is None else asdict(self.template) | {"tokenizer": None}
        return [_RULES, self.train_on, template, self.sequence_length, self.packing, self.skip]

    def encoder(self) -> Encoder:
        """See `Encoding`."""
        encode = conversation_encoder(self.tokenizer, self.template, self.train_on)

        def tokenise(pieces: Iterable[Piece]) -> TaskTokens:
            training, held_out = _Sequences(self), _Sequences(self)
            for piece in pieces:
                part, ignored = held_out if piece.held_out else training, Counter[str]()
                try:
                    if piece.fault is not None:
                        raise BadConversation(piece.fault)
                    ids = encode(piece.text, ignored)
                except BadConversation as error:
                    fault = f"{piece.where}: {error}"
                    if not self.skip:
                        raise DataError(fault) from error
                    part.left_out += LeftOut(skipped=1, faults=(fault[:_FAULT_CHARACTERS],))
                else:
                    part.add(piece, ids, ignored)
            return TaskTokens(training.text(), held_out.text())

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
        starts = []
        for row, members in enumerate(sequences):
            at = 0
            for i in members:
                ids[row, at : at + lengths[i]] = self._conversations[i]
                starts.append(row * self._row + at)
                at += lengths[i]
        counts = [self._counts[i] for members in sequences for i in members]
        sizes, documents = np.array(counts, np.int64).reshape(-1, 2).T
        return TokenisedText(ids.reshape(-1), np.array(starts, np.int64), sizes, documents, self.left_out)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return for each sequence the indices of its conversations, in order. Every length is at most `capacity`. Equal
    lengths are placed in order, so the result is a function of the arguments."""
    sequences: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)  # of each sequence, the empty ones last
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = room[: len(sequences)] >= lengths[index]
        place = int(fits.argmax()) if fits.any() else len(sequences)
        if place == len(sequences):
            sequences.append([])
            room[place] = capacity
        sequences[place].append(index)
        room[place] -= lengths[index]
    return sequences
