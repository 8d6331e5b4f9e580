"""The coordinator's settings, by argument and by environment."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from coordinator.server import make_server
from coordinator.service import Coordinator
from coordinator.settings import Settings
from harness.coordinator import CoordinatorProcess
from outerstep.rest import connect
from protocol.errors import OuterstepError

PREFIX = "OUTERSTEP_COORDINATOR_"
TOKEN = "ost_" + "a" * 43
SIGNING = "whsec_" + "A" * 32


def test_defaults_listen_on_this_host_alone() -> None:
    settings = Settings()
    assert (settings.data_dir, settings.host, settings.port) == (Path("outerstep-data"), "127.0.0.1", 8470)


def test_the_environment_sets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "data_dir": "/data",
        "database": "sqlite:////database/run.db",
        "advertise_url": "http://10.0.0.2:8470",
        "blobs": "s3://bucket/prefix",
        "blobs_public_url": "https://cdn.example.org/prefix",
        "host": "0.0.0.0",
        "port": "80",
        "tls_certificate": "/c.pem",
        "tls_key": "/k.pem",
        "log_level": "debug",
        "log_format": "json",
        "log_file": "/c.log",
        "admin_token": TOKEN,
        "backup_dir": "/backups",
        "backup_every_s": "600",
        "backup_keep": "3",
        "notify_url": "https://example.org/hook",
        "notify_secret": SIGNING,
        "max_connections": "99",
        "max_connections_per_address": "9",
        "proxies": "10.0.0.0/8, 127.0.0.1",
        "max_head_bytes": "8192",
        "max_head_lines": "50",
        "head_s": "7",
        "upload_idle_s": "5",
        "min_body_bytes_per_s": "0",
        "requests_per_s": "10",
        "streams_per_token": "3",
        "polls_per_token": "4",
        "message_bytes_per_token": "20000000",
        "parts_bytes_per_member": "1",
    }
    assert set(wanted) == set(Settings.model_fields)
    for key, value in wanted.items():
        monkeypatch.setenv(PREFIX + key.upper(), value)
    assert Settings().model_dump() == {
        "data_dir": Path("/data"),
        "database": "sqlite:////database/run.db",
        "advertise_url": "http://10.0.0.2:8470",
        "blobs": "s3://bucket/prefix",
        "blobs_public_url": "https://cdn.example.org/prefix",
        "host": "0.0.0.0",
        "port": 80,
        "tls_certificate": Path("/c.pem"),
        "tls_key": Path("/k.pem"),
        "log_level": "debug",
        "log_format": "json",
        "log_file": Path("/c.log"),
        "admin_token": SecretStr(TOKEN),
        "backup_dir": Path("/backups"),
        "backup_every_s": 600.0,
        "backup_keep": 3,
        "notify_url": SecretStr("https://example.org/hook"),
        "notify_secret": SecretStr(SIGNING),
        "max_connections": 99,
        "max_connections_per_address": 9,
        "proxies": "10.0.0.0/8, 127.0.0.1",
        "max_head_bytes": 8192,
        "max_head_lines": 50,
        "head_s": 7.0,
        "upload_idle_s": 5.0,
        "min_body_bytes_per_s": 0.0,
        "requests_per_s": 10.0,
        "streams_per_token": 3,
        "polls_per_token": 4,
        "message_bytes_per_token": 20_000_000,
        "parts_bytes_per_member": 1,
    }


def test_backups_go_to_a_directory_or_to_the_bucket_of_the_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "BACKUP_DIR", "s3://bucket/prefix")
    with pytest.raises(
        ValueError, match="s3://bucket/prefix is no directory; with --blobs URL backups are in that bucket"
    ):
        Settings()
    monkeypatch.setenv(PREFIX + "BACKUP_DIR", "/backups")
    with pytest.raises(OuterstepError, match="so leave --backup out"):
        Coordinator(Settings(blobs="s3://bucket/prefix"))


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "PORT", "80")
    assert Settings(port=81).port == 81


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "http"),
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


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        Settings(colour="red")  # type: ignore[call-arg]


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
        arguments = ["--data", str(tmp_path / "other"), "--host", "::1", "--port", str(coordinator.port)]
        command = [sys.executable, "-m", "outerstep", "coordinator", *arguments]
        refused = subprocess.run(command, check=False, capture_output=True, text=True)
        assert refused.returncode == 2
        assert re.search(rf"cannot serve at \[::1\]:{coordinator.port} from .* in use", refused.stderr)
    finally:
        coordinator.stop()


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
    server, listening = make_server(Settings(data_dir=tmp_path, host=host, port=0))
    try:
        assert listening.getsockname()[0] == bound
        socket.create_connection(("127.0.0.1", listening.getsockname()[1])).close()
    finally:
        server.coordinator.close()
        listening.close()


def test_an_address_that_is_taken_is_an_error_and_leaves_the_directory_free(tmp_path: Path) -> None:
    server, listening = make_server(Settings(data_dir=tmp_path / "a", port=0))
    try:
        with pytest.raises(OSError, match="in use"):
            make_server(Settings(data_dir=tmp_path / "b", port=listening.getsockname()[1]))
    finally:
        server.coordinator.close()
        listening.close()
    other, listening = make_server(Settings(data_dir=tmp_path / "b", port=0))
    other.coordinator.close()
    listening.close()
