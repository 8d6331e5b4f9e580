"""What inner steps on trial say: the micro-batch and its reason, the time of a step and of a round."""

from outerstep.common.quantities import bytes_text, count_text, duration_text, share_text
from outerstep.doctor.finding import Finding, fine, warning, wrong
from outerstep.doctor.trial import Steps
from protocol.spec.run import RunSpec


def judge(seen: Steps, spec: RunSpec, wanted: object) -> list[Finding]:
    found = [warning("step", each) for each in seen.warned]
    return [judge_choice(seen, wanted), *found, fine("step", step_in_words(seen, spec))]


def judge_lateness(seconds: float) -> Finding:
    said = f"no inner step within {duration_text(seconds)}, with the data that they need"
    remedy = "is it the right device (--device)? Data behind a URL are fetched first, and what was fetched is kept"
    return wrong("step", said, remedy)


def judge_choice(seen: Steps, wanted: object) -> Finding:
    """Judge what the worker has chosen; `wanted`: the setting micro_batch."""
    said = "; ".join(seen.reasons)
    if isinstance(wanted, int) and wanted > seen.share:
        remedy = f"--micro-batch {seen.share} says the same, and auto is for what fits"
        return warning("step", f"{said}, which is more than there are: all go at once", remedy)
    if isinstance(wanted, int) and seen.share % wanted:
        rest = seen.share % wanted
        said = f"{said} does not divide them: the last micro-batch has {rest}, and takes nearly as long"
        return warning("step", said, f"give a divisor of {seen.share}")
    if seen.at_once < seen.share and not isinstance(wanted, int):
        return fine("step", f"{said}; here {seen.at_once} at once")
    return fine("step", said)


def step_in_words(seen: Steps, spec: RunSpec) -> str:
    rate = f"{count_text(spec.unit_tokens / seen.step_s)} tokens/s" if seen.step_s else "too fast to measure"
    used = f", {share_text(seen.mfu)} of the peak (MFU)" if seen.mfu is not None else ""
    peak = f", peak memory {bytes_text(seen.peak_bytes)}" if seen.peak_bytes is not None else ""
    each = " of each process" if seen.processes > 1 else ""
    said = (
        f"{duration(seen.step_s)} for {spec.unit_tokens} tokens in {seen.precision}: {rate}{used}{peak}{each}; the "
        f"first one {duration(seen.first_s)}. "
    )
    sync = spec.sync
    if sync.inner_steps == "auto":
        return f"{said}A round is {duration_text(sync.round_s)} of inner steps, as many as fit"
    return f"{said}A round's {sync.inner_steps} take {duration(sync.inner_steps * seen.step_s)}"


def duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration_text(seconds)


def inner_steps(spec: RunSpec, step_s: float) -> int:
    """Return how many a worker takes per round that needs `step_s` for one."""
    sync = spec.sync
    if sync.inner_steps != "auto":
        return sync.inner_steps
    assert sync.round_s is not None
    return min(max(int(sync.round_s / step_s), sync.min_inner_steps), sync.max_inner_steps)
