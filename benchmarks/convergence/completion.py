"""Skills beyond loss: a trained model's loss on held-out Python by kind of text, and whether it completes lines.

Equal loss may hide worse skill (arXiv 2511.13761), so rows are compared by this too. It is exact and needs no sampling:
a greedy completion is right if and only if every byte of it is the likeliest one after the true bytes before it.
"""

import io
import math
import tokenize
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from protocol.spec.run import RunSpec
from worker.data.sources.files import held_out_names, source_files
from worker.models.building import logits_of

ENDING = 8  # last bytes of a line to complete, with its newline
MAX_BYTES = 131_072
BATCH = 64

KINDS = ("code", "strings", "comments", "space")
_KIND_OF = {tokenize.STRING: "strings", tokenize.COMMENT: "comments"}
if hasattr(tokenize, "FSTRING_MIDDLE"):  # Python 3.12 and newer tokenize the parts of f-strings
    _KIND_OF[tokenize.FSTRING_MIDDLE] = "strings"


@dataclass(frozen=True)
class Completion:
    """lines      share of lines of held-out files, longer than their ending, whose last bytes are completed exactly
    by_kind    bits per byte of code, strings, comments and white space"""

    lines: float
    by_kind: dict[str, float]


@torch.no_grad()
def completion(model: nn.Module, text: npt.NDArray[np.uint8], kinds: npt.NDArray[np.uint8], length: int) -> Completion:
    """Measure the model, of bytes, on Python text as `held_out` returns it, in sequences of `length`."""
    known, nats = _predicted(model, text, length)
    bits = nats / math.log(2)
    by_kind = {name: float(np.nanmean(bits[kinds == index])) for index, name in enumerate(KINDS)}
    ends = np.flatnonzero(text == ord("\n"))
    starts = np.concatenate([[-1], ends[:-1]])
    long = ends[(ends - starts > 2 * ENDING) & (ends > length)]
    right = np.stack([known[long - back] for back in range(ENDING)]).all(axis=0)
    return Completion(float(right.mean()), by_kind)


def _predicted(
    model: nn.Module, text: npt.NDArray[np.uint8], length: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return for each byte whether it is the likeliest one, and its loss in nats, given at least half a sequence before
    it; NaN for the first bytes."""
    known, nats = np.zeros(len(text), bool), np.full(len(text), np.nan)
    half, device = length // 2, next(model.parameters()).device
    starts = np.arange(0, len(text) - length, half)
    for some in np.array_split(starts, max(len(starts) // BATCH, 1)):
        places = some[:, None] + np.arange(length + 1)
        ids = torch.from_numpy(text[places].astype(np.int64)).to(device)
        logits = logits_of(model, ids[:, :-1]).float()[:, half:]
        targets = ids[:, 1 + half :]
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        at = places[:, 1 + half :]
        nats[at] = losses.view(targets.shape).double().cpu().numpy()
        known[at] = (logits.argmax(-1) == targets).cpu().numpy()
    return known, nats


def held_out(spec: RunSpec) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return held-out bytes of a run on Python's sources, 128 KiB at most, and the kind of each: its index in KINDS."""
    files = dict(source_files(spec.data.source))
    text, kinds = bytearray(), []
    for name in sorted(held_out_names(files, spec.data.holdout)):
        content = files[name].read_bytes()
        text += content
        kinds.append(_kinds(content))
    return np.frombuffer(bytes(text[:MAX_BYTES]), np.uint8), np.concatenate(kinds)[:MAX_BYTES]


def _kinds(content: bytes) -> npt.NDArray[np.uint8]:
    """Return the kind of each byte of a Python source; bytes outside of tokens are white space."""
    kinds = np.full(len(content), KINDS.index("space"), np.uint8)
    lines = content.splitlines(keepends=True)
    offsets = np.concatenate([[0], np.cumsum([len(line) for line in lines])])

    def place(row: int, column: int) -> int:
        if row > len(lines):
            return len(content)
        return int(offsets[row - 1]) + len(lines[row - 1].decode()[:column].encode())

    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type not in (tokenize.ENCODING, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            kind = KINDS.index(_KIND_OF.get(token.type, "code"))
            kinds[place(*token.start) : place(*token.end)] = kind
    return kinds
