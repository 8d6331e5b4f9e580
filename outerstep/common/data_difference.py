"""Whether a worker's training set is the run's, in words: by them the coordinator refuses, and a worker is warned."""

from protocol.messages import DataSummary
from protocol.spec.sections import DataSpec


def data_difference(worker: DataSummary | None, run: DataSummary | None, spec: DataSpec) -> str | None:
    """Say in what a worker's training set differs from the run's; None if it does not. The tokenizer's name may, and
    with private data all but the tokenizer: the same ids mean the same text everywhere."""
    if worker is not None and run is not None and worker.tokenizer_digest != run.tokenizer_digest:
        return (
            f"this worker's training set was made by the tokenizer {_tokenizer(worker)}, the run's by "
            f"{_tokenizer(run)}; give this worker the run's"
        )
    if spec.private or _identity(worker) == _identity(run):
        return None
    return (
        f"this worker's training set ({_data(worker)}) is not the run's ({_data(run)}); "
        f"make data.source = {spec.source!r} hold the same files everywhere; of token sets, `outerstep data show DIR` "
        "tells the digest and what they are made of"
    )


def _identity(data: DataSummary | None) -> object:
    return data and (data.digest, data.units)


def _tokenizer(data: DataSummary) -> str:
    if data.tokenizer_digest is None:
        return data.tokenizer or "bytes"
    return f"{data.tokenizer} (BLAKE3 {data.tokenizer_digest})"


def _data(data: DataSummary | None) -> str:
    return "none" if data is None else f"digest={data.digest} units={data.units}"
