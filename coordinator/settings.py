"""The coordinator's settings: flags of `outerstep coordinator`, or OUTERSTEP_COORDINATOR_* in the environment."""

import base64
import binascii
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from outerstep.common.environment import EnvironmentSettings
from protocol.text import decoded


class Settings(EnvironmentSettings):
    """The coordinator's settings. The settings of a run are in its run spec."""

    model_config = SettingsConfigDict(env_prefix="OUTERSTEP_COORDINATOR_", extra="forbid")

    data_dir: Path = Field(
        Path("outerstep-data"),
        description="directory of contributions, deltas and checkpoints unless blobs is set, and of the database "
        "unless database is set; created if it is missing",
    )
    database: str | None = Field(
        None,
        repr=False,
        description="URL of the database: postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, which several coordinators "
        "may share, and which needs blobs; or sqlite:////PATH; default: SQLite, outerstep.db in the data directory",
    )
    advertise_url: str | None = Field(
        None,
        description="the address where other coordinators of the same PostgreSQL database reach this one, "
        "http://HOST:PORT; default: host and port, or this machine's address if host is 0.0.0.0 or ::",
    )
    blobs: str | None = Field(
        None,
        description="URL of the bucket for contributions, deltas and checkpoints: s3://BUCKET/PREFIX, gs://, az://, or "
        "s3+https://HOST/BUCKET/PREFIX for another store with the interface of S3; default: the data directory",
    )
    blobs_public_url: str | None = Field(
        None,
        description="address from which everybody can download the objects of blobs, such as a content delivery "
        "network's: https://HOST/PREFIX; default: downloads are signed by the coordinator",
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all, :: for all including IPv6")
    port: int = Field(8470, ge=0, le=65_535, description="port to listen on; 0 for any free port")
    admin_token: SecretStr | None = Field(
        None,
        repr=False,
        description="the first admin token, ost_ and 43 random characters; used only at the first start; default: a new"
        " token, which is written to admin.token in the data directory",
    )
    log_file: Path | None = Field(None, description="file to which the log is appended, in addition to stderr")
    tls_certificate: Path | None = Field(None, description="PEM certificate chain, to serve HTTPS without a proxy")
    tls_key: Path | None = Field(None, description="PEM private key of the certificate")
    log_format: Literal["console", "json"] = Field(
        "console", description="log as plain lines, or as one JSON object per line; applies to stderr and the log file"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")

    backup_dir: Path | None = Field(
        None,
        description="a directory, best on another disk, to which the coordinator backs itself up while it runs; "
        "default: no backups, unless blobs is set: then they are in that bucket, beside the blobs",
    )
    backup_every_s: float = Field(
        3600.0, gt=0, description="seconds between backups; in a bucket there is also one after every checkpoint"
    )
    backup_keep: int = Field(7, ge=1, description="number of backups to keep in backup_dir, the newest ones")

    notify_url: SecretStr | None = Field(
        None,
        repr=False,
        description="URLs to notify, separated by spaces or lines, or @FILE that contains them: https:// and http:// "
        "get signed JSON, all others are Apprise's, such as discord://ID/TOKEN; default: none",
    )
    notify_secret: SecretStr | None = Field(
        None,
        repr=False,
        description="the secret that signs notifications to https:// and http://, whsec_ and 24 to 64 bytes in base64, "
        "or @FILE that contains it; default: no signature",
    )

    # Limits that apply before a token is checked.
    max_connections: int | None = Field(
        None,
        ge=1,
        description="connections at once; default: 4,096, or fewer if the limit on open files is below 8,448",
    )
    max_connections_per_address: int = Field(
        512, ge=1, description="connections at once from one address, at most half of all; a worker opens up to 128"
    )
    proxies: str = Field(
        "127.0.0.1,::1",
        description="comma-separated addresses or networks whose connections are not counted per address: proxies in "
        "front of the coordinator, which count their own clients",
    )
    max_head_bytes: int = Field(32_768, ge=1024, description="bytes of a request's line and headers")
    max_head_lines: int = Field(100, ge=10, description="number of headers of a request")
    head_s: float = Field(20.0, gt=0, description="seconds that a request's line and headers may take to arrive")
    upload_idle_s: float = Field(
        60.0,
        gt=0,
        description="a request is aborted if its body sends nothing, or its response is not read, for this long",
    )
    min_body_bytes_per_s: float = Field(
        512.0,
        ge=0,
        description="a request is aborted if its body sends fewer bytes per second, averaged over upload_idle_s",
    )

    # Limits for the holder of one token. All tokens exchanged for one join token count as one.
    requests_per_s: float = Field(
        200.0,
        gt=0,
        description="requests per second of one token, averaged over five seconds. A listing counts as one per ten "
        "requested items, a message as one per 16 KiB. An admin's requests are not counted",
    )
    streams_per_token: int = Field(16, ge=1, description="event streams of one token at once")
    polls_per_token: int = Field(
        16, ge=1, description="long polls of one token at once; for a member, per assignment or delta that it waits for"
    )
    message_bytes_per_token: int = Field(
        32 << 20,
        ge=16 << 20,
        description="bytes of large messages of one token at once; four times as many for all tokens together",
    )
    parts_bytes_per_member: int = Field(
        4 << 30,
        ge=1,
        description="bytes of one member's incomplete payloads; a single payload is accepted even if it is larger",
    )

    @field_validator("admin_token")
    @classmethod
    def _is_a_token(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not re.fullmatch(r"ost_[A-Za-z0-9_-]{43}", secret.get_secret_value()):
            raise ValueError(
                'a token is ost_ and 43 characters; create one: python3 -c \'import secrets; print("ost_" + '
                "secrets.token_urlsafe(32))'"
            )
        return secret

    @field_validator("notify_url")
    @classmethod
    def _are_receivers(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None:
            return None
        urls = _read(secret).split()
        if not urls or not all(map(_is_receiver, urls)):
            raise ValueError(
                "a receiver's URL begins with https:// or http:// and a host, or is one of Apprise's, such as "
                "discord://ID/TOKEN; @FILE names a file that contains one per line"
            )
        return SecretStr("\n".join(urls))

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
                "a signing secret is whsec_ and 24 to 64 bytes in base64; create one: python3 -c 'import base64, "
                "secrets; "
                'print("whsec_" + base64.b64encode(secrets.token_bytes(32)).decode())\''
            )
        return SecretStr(text)

    @field_validator("advertise_url")
    @classmethod
    def _is_an_address(cls, text: str | None) -> str | None:
        if text is None:
            return None
        parts = urlsplit(text)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
            or parts.username is not None
        ):
            raise ValueError(f"{text} is not an address such as http://10.0.0.2:8470")
        return text.rstrip("/")

    @field_validator("backup_dir", mode="before")
    @classmethod
    def _is_directory(cls, value: object) -> object:
        if isinstance(value, str) and "://" in value:
            raise ValueError(f"{value} is no directory; with --blobs URL backups are in that bucket, without a setting")
        return value

    @field_validator("proxies")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        for each in text.split(","):
            if each.strip():
                ip_network(each.strip())
        return text


class AggregatorSettings(EnvironmentSettings):
    """An aggregator's settings."""

    model_config = SettingsConfigDict(env_prefix="OUTERSTEP_AGGREGATOR_", extra="forbid")

    database: str = Field(
        repr=False,
        description="URL of the coordinators' database: postgresql+psycopg://USER:PASSWORD@HOST/DATABASE",
    )
    blobs: str | None = Field(
        None, description="URL of the coordinators' bucket as it is reached from here; default: as they reach it"
    )
    data_dir: Path = Field(
        Path("outerstep-aggregator"),
        description="a directory of this aggregator's own, for outer states and copies of blobs: a cache, which uses "
        "up to half of the disk's free space",
    )
    log_file: Path | None = Field(None, description="file to which the log is appended, in addition to stderr")
    log_format: Literal["console", "json"] = Field("console", description="as for the coordinator")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")


def _is_receiver(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not url.isascii() or not url.isprintable():
        return False
    if url.startswith(("http:", "https:")):
        return has_host
    return re.match(r"[a-z][a-z0-9+.-]*://", url) is not None  # a token instead of a host is usual


def _read(secret: SecretStr) -> str:
    """Return a secret that is given either literally, or as @FILE with the path of a file that contains it. Raises
    ValueError."""
    text = secret.get_secret_value().strip()
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return decoded(path.read_bytes()).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {reason}") from error
