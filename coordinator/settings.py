"""The coordinator's settings: flags of `outerstep coordinator`, or OUTERSTEP_COORDINATOR_* in the environment."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Everything else about a run is in its run spec."""

    model_config = SettingsConfigDict(env_prefix="OUTERSTEP_COORDINATOR_", extra="forbid")

    data_dir: Path = Field(
        Path("outerstep-data"), description="contributions, deltas, checkpoints, and the database unless it has a URL"
    )
    database_url: str | None = Field(
        None, description="the database; default: SQLite, the file outerstep.db in the data directory"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all, :: for all of IPv6 too")
    port: int = Field(8470, ge=0, le=65_535, description="port to listen on; 0 for any that is free")
    log_file: Path | None = Field(None, description="file to which the log is appended too, beside stderr")
    tls_certificate: Path | None = Field(None, description="PEM certificate chain, to serve HTTPS without a proxy")
    tls_key: Path | None = Field(None, description="PEM private key of the certificate")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged, to stderr")
    upload_idle_s: float = Field(60.0, gt=0, description="an upload that sends nothing for so long is given up")
