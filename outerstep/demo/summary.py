"""The summary of a demo run: figures reported by coordinator and workers, and their text."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from outerstep.common.quantities import bytes_text, duration_text
from outerstep.plan import FP32_BYTES, allreduce_bytes
from protocol.messages import SUCCESSIVE, RoundInfo, RunDetail, Stage, WorkerInfo


@dataclass(frozen=True)
class Summary:
    """The figures of a demo run.

    Losses are held-out losses, in nats per token and in bits per byte. Bytes are the mean over the workers:
    `upload_bytes` and `download_bytes` are payload bytes counted by the workers (contributions and deltas, the initial
    state, and retries), `allreduce_bytes` is what per-step fp32 all-reduce would send, and also receive.
    `stage_seconds` are also means per worker, by `protocol.messages.Stage`.
    """

    workers: int
    rounds: int
    seconds: float
    first_loss: float | None
    final_loss: float | None
    first_bits_per_byte: float | None
    final_bits_per_byte: float | None
    replicas_identical: bool
    upload_bytes: int
    download_bytes: int
    allreduce_bytes: int
    stage_seconds: dict[str, float]
    codec: str
    sample: str


def summarise(
    run: RunDetail, rounds: Sequence[RoundInfo], workers: Sequence[WorkerInfo], *, seconds: float, sample: str
) -> Summary:
    """Return the summary of an ended run; `rounds` are all its rounds, in any order."""
    first = next((item for item in rounds if item.round == 0), None)
    return Summary(
        workers=len(workers),
        rounds=run.round,
        seconds=round(seconds, 1),
        first_loss=None if first is None else first.held_out_loss,
        final_loss=run.held_out_loss,
        first_bits_per_byte=None if first is None else first.held_out_bits_per_byte,
        final_bits_per_byte=run.held_out_bits_per_byte,
        replicas_identical=replicas_identical(run, workers),
        upload_bytes=round(mean(worker.metrics.upload_bytes for worker in workers)),
        download_bytes=round(mean(worker.metrics.download_bytes for worker in workers)),
        allreduce_bytes=allreduce_bytes(len(workers), run.elements or 0, run.round * run.spec.sync.inner_steps),
        stage_seconds={
            stage.value: round(run.account.seconds[stage] / len(workers), 2)
            for stage in Stage
            if stage in run.account.seconds
        },
        codec=run.spec.sync.upload_codec,
        sample=sample,
    )


def replicas_identical(run: RunDetail, workers: Sequence[WorkerInfo]) -> bool:
    """True if the coordinator and every worker, when it left, held the final state with the same digest.

    A worker that sent no digest counts as different.
    """
    return run.state_digest is not None and all(
        worker.state_digest == run.state_digest and worker.state_round == run.rounds for worker in workers
    )


def summary_text(summary: Summary, run: RunDetail, prompt: str) -> str:
    """Return the summary as lines of text."""
    steps = run.round * run.spec.sync.inner_steps
    if summary.replicas_identical:
        replicas = f"{summary.workers} workers and the coordinator are bit-identical (BLAKE3 {run.state_digest})"
    else:
        replicas = "NOT identical: see the workers' logs"
    lines = [
        f"Held-out loss     {_from_to(summary.first_loss, summary.final_loss)} nats per token",
        f"                  {_from_to(summary.first_bits_per_byte, summary.final_bits_per_byte)} bits per byte",
        f"Replicas          {replicas}",
        f"Bytes per worker  {bytes_text(summary.upload_bytes)} up, {bytes_text(summary.download_bytes)} down "
        f"({summary.codec}, {summary.rounds} rounds of {run.spec.sync.inner_steps} inner steps)",
    ]
    if summary.allreduce_bytes and summary.upload_bytes and summary.download_bytes:
        less_up = summary.allreduce_bytes / summary.upload_bytes
        less_down = summary.allreduce_bytes / summary.download_bytes
        lines += [
            f"                  per-step fp32 all-reduce: {bytes_text(summary.allreduce_bytes)} each way, "
            f"{less_up:.0f} times the upload and {less_down:.0f} times the download",
            f"                  (ring: 2·(n−1)/n · {FP32_BYTES} bytes · {run.elements:,} parameters · {steps} steps, "
            f"n = {summary.workers})",
        ]
    lines += [
        f"Time              {duration_text(summary.seconds)}",
        *_time_lines(summary, run.account.total_s / summary.workers),
        f"The model, given {prompt!r}, writes:",
        "",
        *(f"    {line}".rstrip() for line in summary.sample.splitlines()),
    ]
    return "\n".join(lines)


def _from_to(first: float | None, final: float | None) -> str:
    return " → ".join("not measured" if each is None else f"{each:.3f}" for each in (first, final))


def _time_lines(summary: Summary, total_s: float) -> list[str]:
    """Return the lines about the stages of a worker's time."""
    if not total_s:
        return []
    successive = [stage for stage in Stage if stage in SUCCESSIVE and summary.stage_seconds.get(stage)]
    within = [stage for stage in Stage if stage not in SUCCESSIVE and summary.stage_seconds.get(stage)]
    return [
        f"Time per worker   {duration_text(total_s)}: "
        + ", ".join(f"{stage} {summary.stage_seconds[stage] / total_s:.0%}" for stage in successive),
        "                  within these, in parallel: "
        + ", ".join(f"{stage} {duration_text(summary.stage_seconds[stage])}" for stage in within),
    ]
