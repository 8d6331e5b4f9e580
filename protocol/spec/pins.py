"""What a run spec pins: then it is not the first worker that says what the run is made of."""

from typing import Annotated

from pydantic import Field

from protocol.errors import Problem
from protocol.spec.sections import Section

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PinSpec(Section):
    """BLAKE3 digests of what the first workers would otherwise settle; who brings another is refused.
    `outerstep run pin SPEC.toml` writes this section, where model and data are."""

    layout: _Digest | None = Field(None, description="of the trained tensors' names and shapes, in their fragments")
    frozen: _Digest | None = Field(None, description="of the parameters that are not trained")
    data: _Digest | None = Field(None, description="of the training set")
    state: _Digest | None = Field(
        None,
        description="of state 0. Equal seeds make equal models with the same versions of torch and transformers, on"
        " most machines; pin it where they are known to",
    )


def check_pin(key: str, pinned: str | None, found: str | None) -> None:
    """Raise Problem `pin-mismatch` where the spec pins something else than what was found."""
    if pinned is not None and pinned != found:
        raise Problem(
            "pin-mismatch",
            f"the spec pins pins.{key} = {pinned}, here it is {found or 'none'}: use the versions, files and settings "
            "with which the spec was pinned, or have its owner pin another run anew",
        )
