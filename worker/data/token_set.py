"""A token set as a training set, wherever its shards are."""

from protocol.spec.run import RunSpec
from worker.data.sequences import Ahead, Sequences
from worker.data.tokens.index import Index
from worker.data.tokens.token_files import TokenFiles
from worker.errors import DataError


def token_sequences(
    spec: RunSpec, index: Index, training: TokenFiles, held_out: TokenFiles, ahead: Ahead | None = None
) -> Sequences:
    """Return the token set of an index, whose parts are read by `training` and `held_out`. Raises DataError."""
    if spec.data.private and index.tokenizer is None:
        raise DataError(
            f"data.source = {spec.data.source!r}: nobody knows which tokenizer made these ids, and with data.private "
            "that is all by which workers know that the same ids mean the same text: name it by data.tokenizer"
        )
    return Sequences(
        spec,
        training,
        held_out,
        digest=index.digest(),
        vocabulary=index.vocabulary,
        bytes_per_token=index.bytes_per_token,
        tokenizer=index.tokenizer,
        tokenizer_digest=index.tokenizer_digest,
        ahead=ahead,
    )
