"""The coordinator's settings: flags of `outerstep coordinator`, or OUTERSTEP_COORDINATOR_* in the environment."""

import base64
import binascii
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator
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
    admin_token: SecretStr | None = Field(
        None,
        repr=False,
        description="the first admin token, ost_ and 43 characters from a source of secrets, heeded at the first start"
        " alone; default: one is made, and written to admin.token in the data directory",
    )
    log_file: Path | None = Field(None, description="file to which the log is appended too, beside stderr")
    tls_certificate: Path | None = Field(None, description="PEM certificate chain, to serve HTTPS without a proxy")
    tls_key: Path | None = Field(None, description="PEM private key of the certificate")
    log_format: Literal["console", "json"] = Field(
        "console", description="lines to read, or a JSON object a line, to stderr and to the log file"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged, to stderr")

    backup_dir: Path | str | None = Field(
        None,
        description="a directory, best on another disk, or a URL (s3://BUCKET/PREFIX, gs://, az://), to which the "
        "coordinator backs itself up while it runs; default: it does not",
    )
    backup_every_s: float = Field(3600.0, gt=0, description="seconds from one such backup to the next")
    backup_keep: int = Field(7, ge=1, description="so many backups, the newest, stay there")

    notify_url: SecretStr | None = Field(
        None,
        repr=False,
        description="the webhook that is notified of what an operator should know, or @FILE that holds its URL; "
        "default: none",
    )
    notify_format: Literal["json", "slack", "discord", "ntfy"] | None = Field(
        None,
        description="what that webhook expects; default: by its host for Slack, Discord and ntfy.sh, otherwise json",
    )
    notify_secret: SecretStr | None = Field(
        None,
        repr=False,
        description="the secret that notifications are signed with, whsec_ and 24 to 64 bytes in base64, or @FILE that "
        "holds it; default: they are not signed",
    )

    # What anybody may take, before a token was looked at.
    max_connections: int | None = Field(
        None,
        ge=1,
        description="connections at once; default: 4,096, or fewer where the limit on open files is below 8,448",
    )
    max_connections_per_address: int = Field(
        512, ge=1, description="connections at once of one address, at most half of all; a worker opens up to 128"
    )
    proxies: str = Field(
        "127.0.0.1,::1",
        description="addresses or networks, with commas, whose connections are not counted per address: proxies in "
        "front of the coordinator, which count their own clients",
    )
    max_head_bytes: int = Field(32_768, ge=1024, description="bytes of a request's line and headers")
    max_head_lines: int = Field(100, ge=10, description="headers of a request")
    head_s: float = Field(20.0, gt=0, description="seconds that a request's line and headers may take to arrive")
    upload_idle_s: float = Field(
        60.0, gt=0, description="a body that sends nothing for so long, or an answer that is not read, is given up"
    )
    min_body_bytes_per_s: float = Field(
        512.0, ge=0, description="a body that brings fewer bytes per second, over upload_idle_s, is given up"
    )

    # What the holder of one token may take. All tokens exchanged for one join token count as one.
    requests_per_s: float = Field(
        200.0,
        gt=0,
        description="requests per second of one token, over five seconds; a listing counts as one for every ten items "
        "that it asks for, a message as one for every 16 KiB; an admin's are not counted",
    )
    streams_per_token: int = Field(16, ge=1, description="streams of events at once of one token")
    polls_per_token: int = Field(
        16, ge=1, description="long polls at once of one token; of a member, for each thing that it waits for"
    )
    message_bytes_per_token: int = Field(
        32 << 20, ge=16 << 20, description="bytes of large messages at once of one token; of all, four times as many"
    )
    parts_bytes_per_member: int = Field(
        4 << 30,
        ge=1,
        description="bytes of payloads of one member that are not all there yet; one of them always may",
    )

    @field_validator("admin_token")
    @classmethod
    def _is_a_token(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not re.fullmatch(r"ost_[A-Za-z0-9_-]{43}", secret.get_secret_value()):
            raise ValueError(
                'a token is ost_ and 43 characters: python3 -c \'import secrets; print("ost_" + '
                "secrets.token_urlsafe(32))' makes one"
            )
        return secret

    @field_validator("notify_url")
    @classmethod
    def _is_a_webhook(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None:
            return None
        text = _read(secret)
        try:
            parts = urlsplit(text)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(
                "a webhook's URL begins with https:// or http:// and a host; @FILE names a file that holds it"
            )
        return SecretStr(text)

    @field_validator("notify_secret")
    @classmethod
    def _is_a_signing_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None:
            return None
        text = _read(secret)
        try:
            size = len(base64.b64decode(text.removeprefix("whsec_"), validate=True))
        except (binascii.Error, ValueError):
            size = 0
        if not text.startswith("whsec_") or not 24 <= size <= 64:
            raise ValueError(
                "a signing secret is whsec_ and 24 to 64 bytes in base64: python3 -c 'import base64, secrets; "
                'print("whsec_" + base64.b64encode(secrets.token_bytes(32)).decode())\' makes one'
            )
        return SecretStr(text)

    @field_validator("backup_dir", mode="before")
    @classmethod
    def _is_directory_or_url(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) and "://" not in value else value

    @field_validator("proxies")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        for each in text.split(","):
            if each.strip():
                ip_network(each.strip())
        return text


def _read(secret: SecretStr) -> str:
    """Return a secret that is given as itself, or as @FILE that holds it. Raises ValueError."""
    text = secret.get_secret_value().strip()
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"{path}: {reason}") from error
