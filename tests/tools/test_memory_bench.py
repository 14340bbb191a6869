"""The measurement of memory: a small run of the real command, its readings, and its targets. No size is asserted."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_targets import failed, outcome_text, upper_limit
from memory_models import float_model
from support.drivers import short_folder, until
from support.places import ROOT

import nnfmq
from nnfmq.measure import process_memory
from nnfmq.observe import process_usage

LIMIT_S = 200
MIB = 1 << 20
DIGITS = ROOT / "nnfmq" / "data" / "digits_quant.tflite"


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder for the tool's files; its path is short enough for a socket."""
    with short_folder() as path:
        yield path


def command(*words: str) -> tuple[list[str], dict[str, str]]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return [sys.executable, str(ROOT / "tools" / "memory_bench.py"), *words], kept


def test_a_small_run_measures_every_kind_of_process(folder: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    words, environment = command(
        "--sections", "quantized,busy", "--model", str(DIGITS), "--clients", "2", "--executions", "3", "--busy", "1",
        "--settle", "0.2", "--json",
    )  # fmt: skip
    environment["TMPDIR"] = str(folder)
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    quantized, busy = report["sections"]
    kinds = quantized["nnfmq"]["kinds"]
    assert (kinds["client"]["count"], kinds["worker"]["count"], kinds["supervisor"]["count"]) == (2, 2, 1)
    assert quantized["litert"]["kinds"]["client"]["count"] == 2
    assert set(quantized["idle"]["after the last client"]["kinds"]) <= {"supervisor", "other process of the driver"}
    assert_sums(quantized["nnfmq"])
    assert quantized["arena_bytes"] > 0
    assert [len(section["targets"]) for section in (quantized, busy)] == [4, 2]
    assert all(target["value"] > 0 for target in quantized["targets"] + busy["targets"])
    assert list(folder.iterdir()) == []


def assert_sums(found: dict[str, Any]) -> None:
    pss = [process["pss"] for process in found["processes"]]
    assert sum(pss) == sum(kind["pss"] for kind in found["kinds"].values()) == found["total"]["pss"]
    assert min(pss) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_processes_and_removes_all_files(folder: Path, number: signal.Signals) -> None:
    words, environment = command(
        "--sections", "busy", "--model", str(DIGITS), "--clients", "1", "--busy", "60", "--settle", "0.1"
    )
    environment["TMPDIR"] = str(folder)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert "come and go" in process.stderr.readline()
        until(lambda: len(process_usage.descendants(process.pid)) > 3, "the clients start")
        pids = process_usage.descendants(process.pid)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 130
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert list(folder.iterdir()) == []


# ---- parts


def test_private_memory_is_read_after_it_was_written() -> None:
    before = process_memory.memory_of(os.getpid())
    size = 16 * MIB
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE) as memory:  # malloc could reuse memory that was freed before
        memory.write(b"1" * size)
        after = process_memory.memory_of(os.getpid())
    assert before is not None and after is not None
    assert after.private_dirty - before.private_dirty >= size - MIB
    assert after.pss - before.pss >= size - MIB
    assert after.anonymous + after.file + after.shared == pytest.approx(after.pss, rel=0.01)


def test_a_process_that_has_exited_has_no_memory_and_no_children() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert process_memory.memory_of(process.pid) is None
    assert process_usage.descendants(process.pid) == []
    assert process_memory.command_of(process.pid) == ""


def test_shared_memory_counts_once_mapped_or_not() -> None:
    before = process_memory.open_memfd_bytes([os.getpid()])
    with nnfmq.Memory.create(4 * MIB) as memory:
        memory.view[:] = bytes([1]) * (4 * MIB)
        fd = os.dup(memory.fileno())
        try:
            assert process_memory.open_memfd_bytes([os.getpid(), os.getpid()]) - before == 4 * MIB
        finally:
            os.close(fd)
    assert process_memory.open_memfd_bytes([os.getpid()]) == before


def test_the_float_model_has_the_weights_that_were_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "float.tflite"
    file.write_bytes(float_model(14_000_000))
    assert 14_000_000 <= file.stat().st_size < 20_000_000
    model = nnfmq.load(file)
    assert [info.dtype for info in (*model.inputs, *model.outputs)] == ["float32", "float32"]


@pytest.mark.parametrize(
    ("values", "value", "text"),
    [
        ((1.0, 1.1), 1.05, "met"),
        ((1.4, 1.6), 1.45, "not measured"),
        ((1.4, 1.6), 1.55, "not measured"),
        ((1.9, 2.0), 2.0, "missed"),
        ((), 1.5, "met"),
    ],
)
def test_a_difference_below_the_noise_is_not_measured(values: tuple[float, ...], value: float, text: str) -> None:
    assert outcome_text(upper_limit("", values, value, 1.5, "×")) == text


def test_what_failed_is_missed_without_a_value() -> None:
    assert outcome_text(failed("", 1.5, "×")) == "missed"
