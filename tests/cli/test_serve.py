"""`nnfmq serve`: says where it listens, and ends when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_S = 20


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime directory with a short name: a socket's path has few bytes."""
    with tempfile.TemporaryDirectory(prefix="n-") as name:
        yield Path(name)


@pytest.fixture
def environment(runtime: Path) -> dict[str, str]:
    return os.environ | {"XDG_RUNTIME_DIR": str(runtime)}


@pytest.fixture
def driver(environment: dict[str, str], runtime: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver that listens."""
    command = [sys.executable, "-P", "-m", "nnfmq", "serve"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert first_line(process) == f"nnfmq: listening on {runtime / 'nnfmq' / 'nnfmq.sock'}\n"
            yield process
        finally:
            process.kill()


def first_line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline()


def nnfmq(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "nnfmq", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_driver_cleanly(driver: subprocess.Popen[str], runtime: Path, number: signal.Signals) -> None:
    driver.send_signal(number)
    assert driver.wait(LIMIT_S) == 0
    assert driver.stderr is not None
    assert driver.stderr.read() == ""
    assert not (runtime / "nnfmq" / "nnfmq.sock").exists()


@pytest.mark.usefixtures("driver")
def test_clients_connect_to_the_driver_s_path(environment: dict[str, str], runtime: Path) -> None:
    done = nnfmq(environment, "devices", "--json", "--connect", str(runtime / "nnfmq" / "nnfmq.sock"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "reference" in [device["name"] for device in json.loads(done.stdout)["devices"]]


@pytest.mark.usefixtures("driver")
def test_doctor_finds_the_driver_at_the_default_path(environment: dict[str, str], runtime: Path) -> None:
    findings = json.loads(nnfmq(environment, "doctor", "--json").stdout)["findings"]
    (value,) = (finding["value"] for finding in findings if finding["name"] == "running driver")
    assert value.startswith(f"at {runtime / 'nnfmq' / 'nnfmq.sock'}, devices: reference, ")


@pytest.mark.usefixtures("driver")
def test_a_second_driver_at_the_same_path_is_rejected(environment: dict[str, str]) -> None:
    done = nnfmq(environment, "serve")
    assert done.returncode == 1
    assert done.stderr.startswith("nnfmq: error: another driver already listens at ")


def test_commands_that_fail_do_not_stop_the_driver(
    driver: subprocess.Popen[str], environment: dict[str, str], runtime: Path
) -> None:
    (runtime / "model.tflite").write_bytes(b"TFL3 but no more")
    path = ["--connect", str(runtime / "nnfmq" / "nnfmq.sock")]
    done = nnfmq(environment, "run", str(runtime / "model.tflite"), "--input", "x.npy", *path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert nnfmq(environment, "devices", *path).returncode == 0
    assert driver.poll() is None


@pytest.mark.parametrize(("kind", "problem"), [("nothing", "No such file or directory"), ("file", "Not a directory")])
def test_a_directory_of_models_that_is_none_is_reported_at_once(
    environment: dict[str, str], runtime: Path, kind: str, problem: str
) -> None:
    if kind == "file":
        (runtime / "models").write_text("")
    for done in (
        nnfmq(environment, "serve", "--models", str(runtime / "models")),
        nnfmq(environment | {"NNFMQ_MODELS": str(runtime / "models")}, "serve"),
    ):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"nnfmq: error: {runtime / 'models'}: {problem}\n"
    assert not (runtime / "nnfmq" / "nnfmq.sock").exists()


@pytest.mark.parametrize("words", [["--socket", "missing/d.sock"], []])
def test_a_directory_of_the_socket_that_cannot_be_used_is_reported_with_a_remedy(
    environment: dict[str, str], runtime: Path, words: list[str]
) -> None:
    (runtime / "file").write_text("")
    done = nnfmq(environment | {"XDG_RUNTIME_DIR": str(runtime / "file")}, "serve", *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("nnfmq: error: the driver cannot listen at ")
    assert "$XDG_RUNTIME_DIR" in done.stderr


@pytest.mark.parametrize(("words", "allowed"), [
    (("--log-level", "loud"), "debug, info, warning"),
    (("--worker-uids", "0-3"), "FIRST-LAST"),
    (("--runtimes", "litert", "onxruntime"), "onnxruntime"),
])  # fmt: skip
def test_a_value_that_is_not_allowed_is_an_error_of_its_option(
    environment: dict[str, str], words: tuple[str, ...], allowed: str
) -> None:
    done = nnfmq(environment, "serve", *words)
    assert done.returncode == 2
    assert f"argument {words[0]}: " in done.stderr and allowed in done.stderr


def test_the_socket_of_the_models_counts_for_the_length_of_the_path(environment: dict[str, str], runtime: Path) -> None:
    (runtime / "models").mkdir()
    path = runtime / ("s" * (104 - len(str(runtime))))
    done = nnfmq(environment, "serve", "--socket", str(path), "--models", str(runtime / "models"))
    assert done.returncode == 1
    assert f"a driver's socket has at most 107 bytes; {path}.models is longer" in done.stderr
