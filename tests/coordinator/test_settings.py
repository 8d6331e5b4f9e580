"""The coordinator's settings, by argument and by environment."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from coordinator.server import make_server
from coordinator.service import Coordinator
from coordinator.settings import AggregatorSettings, Settings
from harness.coordinator import CoordinatorProcess
from outerstep.rest import connect
from protocol.errors import OuterstepError

PREFIX = "OUTERSTEP_COORDINATOR_"
TOKEN = "ost_" + "a" * 43


def test_defaults_listen_on_this_host_alone() -> None:
    settings = Settings()
    assert (settings.data_dir, settings.host, settings.port) == (Path("outerstep-data"), "127.0.0.1", 8470)


def test_the_environment_sets_what_no_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"DATA_DIR": "/data", "PORT": "80", "ADMIN_TOKEN": TOKEN, "BACKUP_EVERY_S": "600", "LOG_FORMAT": "json"}
    for name, value in given.items():
        monkeypatch.setenv(PREFIX + name, value)
    found = Settings(port=81)
    assert (found.data_dir, found.port, found.admin_token) == (Path("/data"), 81, SecretStr(TOKEN))
    assert (found.backup_every_s, found.log_format) == (600.0, "json")


def test_a_variable_that_is_nearly_a_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have no effect. What Kubernetes sets for a service of this name is none of ours."""
    for name in ("SERVICE_HOST", "PORT_8470_TCP", "PORT_8470_TCP_PORT"):
        monkeypatch.setenv(PREFIX + name, "tcp://10.0.0.1:8470")
    Settings()
    monkeypatch.setenv(PREFIX + "BACKUP_EVERY", "60")
    with pytest.raises(ValidationError, match=f"{PREFIX}BACKUP_EVERY, .* did you mean {PREFIX}BACKUP_EVERY_S"):
        Settings()
    monkeypatch.setenv("OUTERSTEP_AGGREGATOR_BLOB", "s3://bucket")
    with pytest.raises(ValidationError, match="did you mean OUTERSTEP_AGGREGATOR_BLOBS"):
        AggregatorSettings(database="postgresql+psycopg://db")


def test_backups_go_to_a_directory_or_to_the_bucket_of_the_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "BACKUP_DIR", "s3://bucket/prefix")
    with pytest.raises(
        ValueError, match="s3://bucket/prefix is no directory; with --blobs URL backups are in that bucket"
    ):
        Settings()
    monkeypatch.setenv(PREFIX + "BACKUP_DIR", "/backups")
    with pytest.raises(OuterstepError, match="so leave --backup-dir out"):
        Coordinator(Settings(blobs="s3://bucket/prefix"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("upload_idle_s", "0"),
        ("proxies", "nginx"),
    ],
)
def test_wrong_values_are_refused_and_named(monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    monkeypatch.setenv(PREFIX + key.upper(), value)
    with pytest.raises(ValidationError, match=f"(?s){key}.*{value}"):
        Settings()


def no_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return True
    return False


@pytest.mark.system
@pytest.mark.skipif(no_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_stands_in_brackets_in_the_url(tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(tmp_path / "data", host="::1")
    running = coordinator.start()
    try:
        assert running.url == f"http://[::1]:{coordinator.port}"
        with connect(running.url, running.admin_token) as client:
            assert list(client.runs()) == []
        arguments = ["--data-dir", str(tmp_path / "other"), "--host", "::1", "--port", str(coordinator.port)]
        command = [sys.executable, "-m", "outerstep", "coordinator", *arguments]
        refused = subprocess.run(command, check=False, capture_output=True, text=True)
        assert refused.returncode == 2
        assert re.search(rf"cannot serve at \[::1\]:{coordinator.port} from .* in use", refused.stderr)
    finally:
        coordinator.stop()


@contextmanager
def listening_at(settings: Settings) -> Iterator[Any]:
    """A server that does not serve yet; where its socket is bound."""
    server, listening = make_server(settings)
    with closing(server.coordinator), listening:
        yield listening.getsockname()


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("", "0.0.0.0"),
        pytest.param("::", "::", marks=pytest.mark.skipif(no_ipv6(), reason="this machine has no IPv6 loopback")),
    ],
)
def test_a_name_stands_for_its_ipv4_address_and_all_of_ipv6_for_all_of_ipv4_too(
    tmp_path: Path, host: str, bound: str
) -> None:
    with listening_at(Settings(data_dir=tmp_path, host=host, port=0)) as address:
        assert address[0] == bound
        socket.create_connection(("127.0.0.1", address[1])).close()


def test_an_address_that_is_taken_is_an_error_and_leaves_the_directory_free(tmp_path: Path) -> None:
    with listening_at(Settings(data_dir=tmp_path / "a", port=0)) as (_, port), pytest.raises(OSError, match="in use"):
        make_server(Settings(data_dir=tmp_path / "b", port=port))
    with listening_at(Settings(data_dir=tmp_path / "b", port=0)):
        pass
