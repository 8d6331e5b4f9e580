"""The section [privacy]: what a worker does to its contributions before they leave it."""

from pydantic import Field

from protocol.codecs import CODECS
from protocol.spec.sections import DataSpec, Norm, Section, SyncSpec


class PrivacySpec(Section):
    """Differential privacy of contributions: each worker clips its pseudo-gradients and adds Gaussian noise, before
    anything leaves its machine; and tells no loss. Without this section nothing is clipped, and no noise added.
    docs/privacy.md says what that holds, and what it costs."""

    clip_norm: Norm = Field(
        ...,
        description=(
            "S, the clipping norm: the largest L2 norm that a worker's pseudo-gradient of a whole round may have; a "
            "longer one is shortened to it"
        ),
    )
    noise_multiplier: float = Field(
        ...,
        ge=0,
        le=1e6,
        description=(
            "z: Gaussian noise of standard deviation z * S is added to every value; 0 clips alone, which holds nothing"
        ),
    )
    delta: float = Field(
        1e-6, gt=0, lt=1, description="delta of the (epsilon, delta) that `outerstep privacy` and `run privacy` tell of"
    )

    @property
    def noise(self) -> float:
        """The standard deviation of the noise on each value, sigma = z * S."""
        return self.noise_multiplier * self.clip_norm


def conflicts(sync: SyncSpec, data: DataSpec) -> list[str]:
    """Return a sentence for each setting with which [privacy] would not hold, or not work."""
    found = []
    if CODECS[sync.upload_codec].error_feedback:
        kept = ", ".join(name for name, codec in CODECS.items() if not codec.error_feedback)
        found.append(
            f'sync.upload_codec = "{sync.upload_codec}" carries over what it leaves out, which is noise next to all of '
            f"it, and would fill the next round's clipping norm; take one of {kept}"
        )
    if data.holdout and data.source != "custom":
        found.append(
            f"data.holdout = {data.holdout} keeps text out of the training for a held-out loss, which would be told "
            "without noise, so that none is measured: give data.holdout = 0, and evaluate what comes out on other text"
        )
    return found
