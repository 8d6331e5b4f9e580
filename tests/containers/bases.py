"""The images that ours begin with, and those beside them in docker-compose.yml: pulled, or, where there is no registry to
pull them from, made of Debian's packages under the same names. They stay, for the next time."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.containers.engine import Engine, Missing

SLIM, FULL = "docker.io/library/python:3.11-slim", "docker.io/library/python:3.11"
CADDY, PROMETHEUS = "docker.io/library/caddy:2", "docker.io/prom/prometheus:v3.5.0"
SUITE = "bookworm"  # Debian's, whose Python is 3.11
IN_SLIM = ("python3", "python3-pip", "python3-venv", "python-is-python3", "ca-certificates")

_INSTALL = "RUN apt-get update && apt-get install --yes --no-install-recommends"
STAND_INS = {
    FULL: f"{_INSTALL} gcc libc6-dev python3-dev",
    CADDY: f"""
{_INSTALL} caddy
ENV XDG_CONFIG_HOME=/config XDG_DATA_HOME=/data
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
""",
    PROMETHEUS: f"""
{_INSTALL} prometheus && install -d -o nobody -g nogroup /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
""",
}


def ensure(engine: Engine, image: str, folder: Path) -> None:
    """Have the image here; `folder` is for what is made meanwhile. Raises Missing."""
    if engine.has(image) or engine.run("pull", image, timeout=900).returncode == 0:
        return
    if image == SLIM:
        _make_slim(engine, folder)
        return
    ensure(engine, SLIM, folder)
    dockerfile = folder / "Dockerfile"
    dockerfile.write_text(f"FROM {SLIM}\n{STAND_INS[image]}\n")
    engine.build(dockerfile, image, folder)


def _make_slim(engine: Engine, folder: Path) -> None:
    if shutil.which("mmdebstrap") is None or os.getuid() != 0:
        raise Missing(
            f"{SLIM} is not here, and cannot be pulled. `{engine.name} pull {SLIM}` says why; without a registry, "
            "root with Debian's package mmdebstrap makes one here"
        )
    archive = folder / "slim.tar"
    hook = 'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED'  # as in the image that it stands for, pip may install
    options = ["--variant=minbase", f"--include={','.join(IN_SLIM)}", f"--customize-hook={hook}"]
    done = subprocess.run(["mmdebstrap", *options, SUITE, archive], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Missing(f"mmdebstrap could not make {SLIM}: {done.stderr.strip().splitlines()[-1]}")
    engine("import", str(archive), SLIM)
    archive.unlink()
