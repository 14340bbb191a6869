"""Progress on stderr: which commands report it, when a bar is drawn, and that data on stdout stays data."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnfmq.cli import console, demo, doctor, main, profile, queue_bench, run
from nnfmq.data import example_path

Reports = dict[str, list[tuple[int, int]]]
DIGITS = str(example_path("digits.tflite"))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """What the commands report to their progress bars, by label, as if stderr were a terminal."""
    seen: Reports = {}

    @contextmanager
    def record(label: str, no_color: bool, delay_s: float | None = None) -> Iterator[Callable[[int, int], None]]:
        assert no_color in (True, False)
        yield lambda done, total: seen.setdefault(label, []).append((done, total))

    for module in (demo, doctor, profile, queue_bench, run):
        monkeypatch.setattr(module, "progress_bar", record)
    for module in (demo, profile, run):
        monkeypatch.setattr(module, "compiling", lambda no_color, _model="": record("compiling", no_color))
    return seen


def test_doctor_reports_each_check(reports: Reports) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    assert reports == {"checking": [(done, 11) for done in range(11)]}


def test_profile_reports_compiled_kernels_and_runs(reports: Reports) -> None:
    pytest.importorskip("llvmlite", reason="the device compiled needs it")
    assert main(["profile", DIGITS, "--runs", "3", "--threads", "1", "--json"]) == 0
    assert reports["timing"] == [(1, 3), (2, 3), (3, 3)]
    first, *_, (done, total) = reports["compiling"]
    assert (first, done) == ((0, total), total)


def test_profile_of_the_reference_reports_runs(reports: Reports) -> None:
    assert main(["profile", DIGITS, "--device", "reference", "--runs", "2", "--json"]) == 0
    assert reports == {"timing": [(1, 2), (2, 2)]}


def test_queue_bench_reports_round_trips_and_the_stream(
    reports: Reports, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue_bench, "_TRIPS_BETWEEN_REDRAWS", 10)
    assert main(["queue", "bench", "--round-trips", "25", "--messages", "600", "--json"]) == 0
    assert reports == {"round trips": [(10, 25), (20, 25)], "streaming": [(0, 600)]}
    assert json.loads(capsys.readouterr().out)["conditions"]["round_trips"] == 25


def test_the_round_trip_after_a_report_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_bench, "_TRIPS_BETWEEN_REDRAWS", 2)
    trips: list[int] = []
    monkeypatch.setattr(queue_bench, "_round_trip", lambda *_: trips.append(len(trips)) or trips[-1])
    queue: Any = type("Queue", (), {"quantum": 8})()
    times = queue_bench._round_trips(queue, queue, 5, 0, lambda done, total: None)
    warm_up = queue_bench._WARM_UP
    assert times == [warm_up + index for index in (0, 1, 3, 4, 6)]
    assert len(trips) == warm_up + 5 + queue_bench._untimed(5)


def test_run_reports_each_execution(reports: Reports, fake: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.zeros((1, 2, 2, 3), np.float32))
    assert main(["run", DIGITS, "--input", str(tmp_path / "image.npy"), "--repeat", "3", "--json"]) == 0
    assert reports == {"executing": [(1, 3), (2, 3), (3, 3)]}


def test_demo_reports_each_digit(reports: Reports, fake_digits: int) -> None:
    assert main(["demo", "--json"]) == 0
    assert reports["classifying digits"] == [(done, fake_digits) for done in range(1, fake_digits + 1)]


@pytest.fixture
def fake_digits(monkeypatch: pytest.MonkeyPatch) -> int:
    """Three digits; returns their number."""
    images, labels = demo.load_digits()
    monkeypatch.setattr(demo, "load_digits", lambda: (images[:3], labels[:3]))
    return 3


# ---- the bar ----


def test_a_bar_is_redrawn_at_most_ten_times_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    class Bar:
        task_ids = (0,)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            drawn.append(-1)

        def update(self, task: int, *, completed: int, total: int, refresh: bool) -> None:
            assert (task, total, refresh) == (0, 100, True)
            drawn.append(completed)

    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "_bar", lambda label, no_color: Bar())
    monkeypatch.setattr(sys, "stderr", type("Terminal", (), {"isatty": lambda self: True})())
    with console.progress_bar("x", no_color=True) as show:
        assert show is not None
        for done in range(1, 101):
            now[0] = done / 32  # exact in binary: 0.1 s are between 3 and 4 steps
            show(done, 100)
    # Nothing in the first 0.3 s (9.6 steps), then each fourth step, and the last one.
    assert drawn == [*range(10, 99, 4), 100, -1]


def on_terminal(folder: Path, *arguments: str, **environment: str) -> tuple[bytes, bytes]:
    """Return what a command writes to stdout, a pipe, and to stderr, a terminal."""
    controller, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "nnfmq", *arguments],
            stdout=subprocess.PIPE, stderr=terminal, timeout=120, check=False, cwd=folder,
            env={**os.environ, "TERM": "xterm", "NNFMQ_SOCKET": str(folder / "none.sock"), **environment},
        )  # fmt: skip
        os.write(terminal, b".")
        drawn = b""
        while not drawn.endswith(b"."):
            drawn += os.read(controller, 1 << 16)
    finally:
        os.close(controller)
        os.close(terminal)
    return done.stdout, drawn


def test_stdout_of_a_command_on_a_terminal_has_no_bar(tmp_path: Path) -> None:
    found, drawn = on_terminal(tmp_path, "doctor", "--json")
    assert json.loads(found)["findings"]
    assert b"checking" in drawn


def test_processes_that_are_measured_write_nothing_into_the_progress(tmp_path: Path) -> None:
    """The model is compiled, because the cache is empty, and `Device.prepare` says so on a terminal else."""
    pytest.importorskip("llvmlite", reason="the device compiled needs it")
    arguments = ("bench", DIGITS, "--count", "3", "--warm-up", "0", "--connect", "embedded", "--json")
    found, drawn = on_terminal(tmp_path, *arguments, XDG_CACHE_HOME=str(tmp_path), NNFMQ_COMPILE_NOTICE="1")
    assert json.loads(found)["results"]
    assert b"loading the model" in drawn
    assert b"compiling" not in drawn


def test_a_progress_line_gives_the_environment_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    for before in ("1", None):
        if before is None:
            monkeypatch.delenv("NNFMQ_COMPILE_NOTICE", raising=False)
        else:
            monkeypatch.setenv("NNFMQ_COMPILE_NOTICE", before)
        with console.progress_line(True):
            assert os.environ["NNFMQ_COMPILE_NOTICE"] == "0"
        assert os.environ.get("NNFMQ_COMPILE_NOTICE") == before
