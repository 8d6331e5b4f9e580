"""The settings of `outerstep worker`."""

import platform
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from protocol.spec import NAME_PATTERN, Name


def default_name() -> str:
    """Return the host's name as a worker's name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", platform.node().lower()).strip("._-")[:63]
    return name if re.match(NAME_PATTERN, name) else "worker"


class WorkerSettings(BaseModel):
    """The settings of one worker of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="the coordinator's address, for example https://coordinator.example.org")
    run: Name = Field(description="the run to join")
    token: Annotated[str, Field(min_length=1, repr=False)] = Field(description="a worker token")
    name: Name = Field(default_factory=default_name, description="this worker's name in the run; default: the host's")
    state_dir: Path | None = Field(
        None, description="for snapshot and member token; default: ~/.local/state/outerstep/RUN/NAME"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps …; auto is the fastest there is")
    data: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="where this machine has the training set; default: the run's data.source"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; default: torch's own choice")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address; it looks like https://coordinator.example.org")
        return url.rstrip("/")

    @property
    def directory(self) -> Path:
        """The directory of this worker's state."""
        return self.state_dir or Path.home() / ".local/state/outerstep" / self.run / self.name
