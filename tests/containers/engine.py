"""What builds images and runs containers: podman, whose builder is buildah, or docker; the commands are the same.

What pip is told of its index on this machine, a build is told too; what it needs besides, a proxy for example, is for
OUTERSTEP_BUILD_FLAGS, further options of `podman build` or `docker build`.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PACKAGES = "apt install podman runc netavark aardvark-dns iptables catatonit"

# A build in a chroot needs no rights that a container may lack; and images of OCI's own format have no HEALTHCHECK.
ENVIRONMENT = {
    "BUILDAH_ISOLATION": "chroot",
    "BUILDAH_FORMAT": "docker",
    "CONTAINERS_CONF": os.environ.get("CONTAINERS_CONF", str(Path(__file__).parent / "containers.conf")),
}


class Missing(Exception):
    """What these tests need and is not here, in words, with how to get it."""


@dataclass(frozen=True)
class Engine:
    """`podman` or `docker`."""

    name: str

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        """Run a command of it and return what it printed. Raises AssertionError, with its words, if it fails."""
        done = self.run(*arguments, timeout=timeout)
        assert not check or done.returncode == 0, f"{self.name} {shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def run(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        command = [self.name, *arguments]
        environment = os.environ | ENVIRONMENT
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environment)

    def build(self, dockerfile: str | Path, tag: str, folder: Path, *more: str) -> float:
        """Build an image, and return how many seconds it took."""
        started = time.monotonic()
        flags = ["--network=host", *shlex.split(os.environ.get("OUTERSTEP_BUILD_FLAGS", ""))]
        self("build", *flags, *more, "-f", str(dockerfile), "-t", tag, str(folder), timeout=1800)
        return time.monotonic() - started

    def pip(self, folder: Path) -> list[str]:
        """The options with which pip in a build is configured as it is here; `folder` has to stay until then."""
        return mounts_of_pip(folder) if self.name == "podman" else []  # docker's builds mount nothing

    def bytes_of(self, image: str) -> int:
        return int(self("image", "inspect", "--format", "{{.Size}}", image))

    def words_of(self, *containers: str) -> str:
        """The last lines that they wrote, for what fails."""
        logs = {each: self.run("logs", "--tail=20", each) for each in containers}
        return "\n".join(f"{name}:\n{log.stdout}{log.stderr}" for name, log in logs.items())

    def has(self, image: str) -> bool:
        return self.run("image", "inspect", image).returncode == 0


# Programs of podman's that are no commands; where they lie differs by distribution.
HELPERS = ("netavark", "aardvark-dns", "catatonit")
HELPER_FOLDERS = ("/usr/libexec/podman", "/usr/lib/podman", "/usr/local/libexec/podman", "/usr/local/lib/podman")


def absent(name: str) -> list[str]:
    """What the engine needs here and is not installed."""
    if name == "docker":
        return [] if shutil.which("docker") else ["docker"]
    commands = [each for each in ("podman", "runc") if shutil.which(each) is None]
    return commands + [each for each in HELPERS if not any(Path(at, each).exists() for at in HELPER_FOLDERS)]


@cache
def engine() -> Engine:
    """The one that works here. Raises Missing."""
    said = []
    for name in ("podman", "docker"):
        if lacking := absent(name):
            said.append(f"not installed: {', '.join(lacking)}")
            continue
        found = Engine(name)
        done = found.run("info", timeout=PATIENCE_S)
        if done.returncode == 0:
            return found
        said.append(f"{name} does not run: {(done.stderr.strip() or '?').splitlines()[-1]}")
    raise Missing(f"{'; '.join(said)}. On Debian, as root: {PACKAGES}; see CONTRIBUTING.md")


def check_that_containers_run(engine: Engine, image: str) -> None:
    """Raises Missing, with the engine's words, where not even `true` runs in a container with a network."""
    done = engine.run("run", "--rm", image, "true")
    if done.returncode != 0:
        last = (done.stderr.strip() or "?").splitlines()[-1]
        raise Missing(f"{engine.name} runs no container here, as it may not within another one: {last}")


def mounts_of_pip(folder: Path) -> list[str]:
    """Options of a build: pip's configuration, merged into a file in `folder`, and the files and folders that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    sections: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():  # as global.cert='/etc/ssl/own.pem'; what the environment says comes first
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        sections.setdefault("global" if section == ":env:" else section, {}).setdefault(key, ast.literal_eval(value))
    if not sections:
        return []
    merged = folder / "pip.conf"
    merged.write_text(
        "".join(
            f"[{section}]\n" + "".join(f"{key} = {value.replace(chr(10), ' ')}\n" for key, value in keys.items())
            for section, keys in sections.items()
        )
    )
    named = {path for keys in sections.values() for value in keys.values() for path in places_in(value)}
    outer = {path for path in named if not any(other in path.parents for other in named)}
    return [f"--volume={merged}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(outer))]


def places_in(value: str) -> list[Path]:
    """Files and folders that a setting of pip names. An index in a folder, file:///wheels/simple, may lead into the
    folder beside it, so it is the one above them."""
    found = []
    for scheme, text in re.findall(r"(?<!\S)(file://)?(/\S+)", value):
        path = Path(text).parent if scheme else Path(text)
        if path.exists() and path != Path("/"):
            found.append(path)
    return found
