"""Certificates that nobody has signed, made by openssl."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """PEM files."""

    file: Path
    key: Path


def make_certificate(directory: Path, *, host: str = "IP:127.0.0.1", days: int = 1) -> Certificate:
    """Make a self-signed certificate for `host` (as openssl has it: IP:… or DNS:…) in a new `directory`; with negative
    `days` it has expired."""
    directory.mkdir()
    made = Certificate(directory / "certificate.pem", directory / "key.pem")
    request, extensions = directory / "request", directory / "extensions"
    extensions.write_text(f"subjectAltName={host}")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-new", *kind, "-keyout", str(made.key), "-out", str(request), "-subj", "/CN=coordinator")
    signed = ["-signkey", str(made.key), "-days", str(days), "-extfile", str(extensions)]
    _openssl("x509", "-req", "-in", str(request), *signed, "-out", str(made.file))
    return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
