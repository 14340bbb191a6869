"""The measurement of isolation: small runs of the real command. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from isolation_actions import PHASES, write_message
from support import commands
from support.drivers import short_folder, until
from support.places import ROOT

from nnfmq.measure import cpu_pinning
from nnfmq.observe import process_usage
from nnfmq.serialize.model_codec import decode_model

LIMIT_S = 200
DIGITS = ROOT / "nnfmq" / "data" / "digits_quant.tflite"
SMALL = ("--rounds", "1", "--pool-mib", "8", "--message-mib", "1", "--model", str(DIGITS))


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder for the tool's files; its path is short enough for a socket."""
    with short_folder() as path:
        yield path


def command(*words: str) -> tuple[list[str], dict[str, str]]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return [sys.executable, str(ROOT / "tools" / "isolation_bench.py"), *SMALL, *words], kept


def reported(folder: Path, *words: str) -> Any:
    asked, environment = command(*words, "--json")
    environment["TMPDIR"] = str(folder)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def test_every_phase_is_killed_and_each_exit_is_measured(folder: Path) -> None:
    rows = reported(folder, "--sections", "kills", "--kills", "1")["kills"]
    assert [row["phase"] for row in rows] == list(PHASES)
    for row in rows:
        assert row["exit_ms"]["count"] == 1 and row["exit_ms"]["max"] > 0
        assert row["targets"][0]["value"] == row["exit_ms"]["p99"]
        assert row["work_s"] > 0


def test_connects_are_measured_alone_and_beside_silent_connections(folder: Path) -> None:
    found = reported(folder, "--sections", "connections", "--silent", "20", "--connects", "3")["connections"]
    assert found["opened"] == [20]
    assert found["alone_ms"]["count"] == 3
    assert found["failed"] + found["beside_ms"]["count"] == 3


@pytest.mark.skipif(cpu_pinning.two_cpus() is None, reason="needs two CPUs")
def test_a_neighbour_is_measured_alone_and_beside_a_phase(folder: Path) -> None:
    words = ("--sections", "neighbour", "--phases", "copying,idle", "--seconds", "0.2")
    (row,) = reported(folder, *words)["neighbour"]
    assert (row["phase"], row["status"]) == ("copying", "NONE")
    assert row["alone_us"]["count"] > 0 and row["beside_us"]["count"] > 0
    assert row["repetitions"] > 0
    assert row["targets"][0]["value"] == pytest.approx(row["beside_us"]["p99"] / row["alone_us"]["p99"])


@pytest.mark.parametrize(
    ("number", "by_nohup"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_an_interrupt_ends_all_processes_and_removes_all_files(
    folder: Path, number: signal.Signals, by_nohup: bool
) -> None:
    words, environment = command("--sections", "kills", "--phases", "computing", "--kills", "1000")
    environment["TMPDIR"] = str(folder)
    if by_nohup:
        words[1:] = commands.ignoring_signals(*words[1:])
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        until(lambda: len(process_usage.descendants(process.pid)) > 3, "the driver and a client start")
        pids = process_usage.descendants(process.pid)
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(LIMIT_S) == 130
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert list(folder.iterdir()) == []


def test_the_large_message_is_one_encoded_model(tmp_path: Path) -> None:
    write_message(tmp_path / "message", 100_000)
    data = (tmp_path / "message").read_bytes()
    assert 100_000 <= len(data) < 101_000
    assert len(decode_model(data, ()).main.operands) > 1000
