"""What the run's spec asks of this box, and whether its owner has allowed it."""

from outerstep.doctor.finding import Finding, fine, wrong
from protocol.spec.run import RunSpec
from worker.allowing import Refusal, allowed_by, as_options, not_allowed
from worker.settings import BoxSettings


def look(spec: RunSpec, settings: BoxSettings) -> list[Refusal]:
    """Return what is not allowed. Raises DataError for places that cannot be."""
    return not_allowed(spec, allowed_by(settings))


def judge(seen: list[Refusal]) -> list[Finding]:
    if not seen:
        return [fine("allowed", "the run's spec asks for nothing that is not allowed here")]
    said = "; ".join(each.what for each in seen)
    return [wrong("allowed", said, f"if you trust whoever wrote the spec, add: {as_options(seen)}")]
