"""Configuration files of real drivers and clients: what a file sets is in effect, and an invalid one ends the start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, running_daemon
from support.models import relu_model

import nnfmq
from nnfmq.base import settings

TENSOR_BYTES = 4 << 20
DEVICES = '[[device]]\nname = "test-only"\nengine = "reference"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "nnfmq.toml"
    path.write_text(text, encoding="utf-8")
    return path


def serve(*words: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `nnfmq WORDS`, which must end by itself."""
    command = [sys.executable, "-P", "-m", "nnfmq", *map(str, words)]
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=variables)


def buffers_of_4_mib(client: nnfmq.Client) -> int:
    """Return how many buffers of 4 MiB the driver gives this client, up to 12."""
    with ExitStack() as stack:
        device = client.device("reference")
        model = stack.enter_context(device.prepare(relu_model((TENSOR_BYTES // 4,))))
        for count in range(12):
            try:
                stack.enter_context(device.allocate(inputs=[(model, 0)]))
            except nnfmq.ResourceExhausted:
                return count
        return 12


def test_driver_and_client_find_each_other_by_the_socket_in_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = folder / "lab.sock"
    (folder / "devices.toml").write_text(DEVICES, encoding="utf-8")
    path = written(folder, f'socket = "{socket}"\ndevices = "{folder}/devices.toml"\nruntimes = []')
    arguments = ["-P", "-m", "nnfmq", "--config", path, "serve"]
    with running_daemon(socket, arguments=arguments), settings.CONFIG.exported(str(path)):
        monkeypatch.delenv("NNFMQ_SOCKET", raising=False)
        with nnfmq.connect() as client:
            assert not client.is_embedded
            assert [device.name for device in client.devices()] == ["test-only"]


def test_the_user_s_file_limits_what_a_client_may_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CONFIG", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    (folder / "nnfmq").mkdir()
    written(folder / "nnfmq", "client_memory_mib = 10")
    with running_daemon(folder / "d.sock") as daemon, daemon.connect() as client:
        assert buffers_of_4_mib(client) == 2


def test_an_option_wins_over_the_environment_and_that_over_a_file(folder: Path) -> None:
    """The limit of one client is half of memory_mib: 10, 14 or 18 MiB hold 2, 3 or 4 buffers."""
    path = written(folder, "memory_mib = 20")
    environment = {"NNFMQ_CONFIG": str(path)}
    with running_daemon(folder / "a.sock", environment=environment) as daemon, daemon.connect() as client:
        assert buffers_of_4_mib(client) == 2
    environment["NNFMQ_MEMORY_MIB"] = "28"
    with running_daemon(folder / "b.sock", environment=environment) as daemon, daemon.connect() as client:
        assert buffers_of_4_mib(client) == 3
    options = ["--memory", "36"]
    with (
        running_daemon(folder / "c.sock", environment=environment, options=options) as daemon,
        daemon.connect() as client,
    ):
        assert buffers_of_4_mib(client) == 4


def test_an_embedded_driver_reads_the_file_of_its_application(folder: Path) -> None:
    path = written(folder, "client_memory_mib = 10")
    with settings.CONFIG.exported(str(path)), nnfmq.connect(embedded=True) as client:
        assert buffers_of_4_mib(client) == 2


@pytest.mark.parametrize(
    ("text", "variables", "problem"),
    [
        ("memory_mib = 'lots'", {}, "memory_mib in .*nnfmq.toml is 'lots'; allowed: 0 to 1099511627776; "),
        ("memry_mib = 1", {}, "unknown key 'memry_mib'; did you mean 'memory_mib'"),
        ("", {"NNFMQ_CACHE_MIB": "-1"}, r"\$NNFMQ_CACHE_MIB is '-1'; allowed: "),
        ("", {"NNFMQ_CORE": "fast"}, r"\$NNFMQ_CORE is 'fast'; allowed: compiled, python; "),
        ("", {"NNFMQ_BURST_SERVER_POLLING_WINDOW": "often"}, r"POLLING_WINDOW is 'often'; allowed: 0 to 1000000000; "),
    ],
)
def test_a_driver_with_an_invalid_setting_does_not_start_and_reports_it_in_one_line(
    text: str, variables: dict[str, str], problem: str, folder: Path
) -> None:
    done = serve("--config", written(folder, text), "serve", "--socket", folder / "d.sock", environment=variables)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.search(problem, line)
    assert line.startswith("nnfmq: error: ")
    assert not (folder / "d.sock").exists()


def test_a_client_of_an_embedded_driver_with_an_invalid_setting_gets_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "lots")
    with (
        nnfmq.connect(embedded=True) as client,
        pytest.raises(nnfmq.GeneralFailure, match=r"\$NNFMQ_CACHE_MIB is 'lots'; allowed: 0 to "),
    ):
        client.devices()
    assert capfd.readouterr().err == ""


def test_a_client_with_an_invalid_file_gets_the_reason(folder: Path) -> None:
    path = written(folder, "socket = 1")
    with (
        settings.CONFIG.exported(str(path)),
        pytest.raises(nnfmq.InvalidArgument, match=r"socket in .*nnfmq\.toml is 1; allowed: any path; "),
    ):
        nnfmq.connect()
