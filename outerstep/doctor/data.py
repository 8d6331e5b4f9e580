"""The training set on this box: whether it can be opened, and is the run's."""

import threading
from contextlib import closing
from dataclasses import dataclass

from outerstep.common.quantities import count_text, duration_text
from outerstep.doctor.finding import Finding, fine, warning, wrong
from protocol.messages import DataSummary, RunDetail, data_difference
from protocol.spec.run import RunSpec
from worker.box import check_suited, shard_cache
from worker.data.open_training_set import open_training_set
from worker.settings import BoxSettings


@dataclass(frozen=True)
class Data:
    source: str
    summary: DataSummary
    units: int
    vocabulary: int
    held_out_tokens: int


def look(spec: RunSpec, settings: BoxSettings, stop: threading.Event) -> Data:
    """Open the set, prepared if it has to be, until `stop` is set. Raises what `open_training_set` raises."""
    check_suited(spec, 1)
    here = spec.with_source(settings.data)
    with closing(open_training_set(here, stop=stop, shards=shard_cache(settings))) as opened:
        return Data(here.data.source, opened.summary, opened.units_per_epoch, opened.vocabulary, opened.held_out_tokens)


def judge(seen: Data, run: RunDetail) -> list[Finding]:
    spec = run.spec
    tokens = count_text(seen.units * spec.unit_tokens)
    said = f"{seen.source}: {seen.units} units of {spec.unit_tokens} tokens, {tokens} tokens in all"
    if run.data is not None and (difference := data_difference(seen.summary, run.data, spec.data)):
        return [wrong("data", difference, "copy the run's files here, or name them with --data")]
    if spec.data.private:
        said += "; its digest stays here"
    elif run.data is None:
        said += f"; digest {seen.summary.digest}. The first worker's set becomes the run's"
    else:
        said += "; the same as the run's workers have, by its digest"
    return [fine("data", said)]


def judge_lateness(seconds: float) -> Finding:
    said = (
        f"not ready after {duration_text(seconds)}: what was prepared or fetched is kept, and the worker goes on there"
    )
    return warning("data", said, "for much text, `outerstep data prepare` does it beforehand, once for all boxes")
