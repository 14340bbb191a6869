"""tools/trace_bench.py: a short measurement, and the switch of trace points and statistics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest
import trace_bench
from support.places import ROOT
from trace_bench import (
    STATES,
    TraceSwitch,
    client_functions,
    counting_functions,
    driver_functions,
    without_statistics,
    without_trace,
)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command, in a process of its own because `multiprocess` leaves a tracker behind wherever it is used."""
    command = [sys.executable, str(ROOT / "tools" / "trace_bench.py"), *words]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=kept)


def test_the_cost_is_measured_in_each_pair() -> None:
    done = bench("--pairs", "2", "--rounds", "2", "--operations", "3")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["pairs"], report["rounds"], report["operations"], report["device"]) == (2, 2, 3, "reference")
    for state in STATES:
        assert 0 < report[f"{state}_ns"]["low"] <= report[f"{state}_ns"]["high"]
    assert {"off_cost_ns", "on_cost_ns", "statistics_cost_ns"} <= report.keys()


def test_a_pair_that_cannot_be_measured_is_an_error() -> None:
    done = bench("--device", "no such device", "--pairs", "1", "--rounds", "1")
    assert done.returncode == 1
    assert "no such device" in done.stderr


def test_the_interval_of_a_median_ends_at_order_statistics() -> None:
    """Of 100 values 0.98·10 = 9.8 away from the middle."""
    assert trace_bench.interval(range(100)) == {"median": 49.5, "low": 40, "high": 60}
    assert trace_bench.interval([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0}


def test_an_execution_over_a_burst_can_be_left_uncounted() -> None:
    (function,) = counting_functions()
    removed = {*function.__code__.co_names} - {*without_statistics(function).co_names}
    assert removed == {"add"}


@pytest.mark.parametrize("function", [*client_functions(), *driver_functions()], ids=lambda each: each.__qualname__)
def test_trace_points_can_be_removed_from_the_functions_of_the_hot_path(function: FunctionType) -> None:
    names = {*without_trace(function).co_names}
    assert names < {*function.__code__.co_names}
    assert "_in_flight" in names or "_in_flight" not in function.__code__.co_names


def traced(self: Any) -> str:
    recorder = TRACING.recorder
    found = "nothing" if recorder is None else "slices"
    if WORKER_TRACE.switch[0] or TRACING.recorder is not None:
        found += " of a driver"
    if self._trace is not None and found:
        found += " of a client"
    return found


class _Recording:
    recorder, switch, _trace = object(), b"\1", object()


TRACING = WORKER_TRACE = _Recording()


def test_what_depends_on_tracing_is_removed_and_nothing_else() -> None:
    assert traced(_Recording()) == "slices of a driver of a client"
    recorded: list[bool] = []
    switch, found = TraceSwitch([traced], recorded.append), []  # type: ignore[list-item]
    for state in STATES:
        switch.set(state)
        found.append(traced(_Recording()))
    assert found == ["nothing", *["slices of a driver of a client"] * 3]
    assert recorded == [False, False, True, False]


def counting(self: Any) -> int:
    if self.sent:
        self._recorder.add(1, 2)
    else:
        self._recorder.add_failure()
    return len(self._recorder.calls)


class _Counting:
    """What `counting` is a method of; counts its own calls of the recorder."""

    def __init__(self, sent: bool) -> None:
        self.sent, self._recorder, self.calls = sent, self, list[str]()

    def add(self, _driver_ns: int, _engine_ns: int) -> None:
        self.calls.append("add")

    def add_failure(self) -> None:
        self.calls.append("add_failure")


def test_what_counts_executions_is_removed_and_nothing_else() -> None:
    switch = TraceSwitch([], lambda _is_on: None, [counting])  # type: ignore[list-item]
    found = {}
    for state in STATES:
        switch.set(state)
        found[state] = counting(_Counting(True)), counting(_Counting(False))
    assert found == {"absent": (1, 1), "off": (1, 1), "on": (1, 1), "uncounted": (0, 1)}


def untraced() -> int:
    return 1


def test_a_function_without_known_trace_points_is_an_error() -> None:
    with pytest.raises(ValueError, match="untraced: its trace points are not those that this tool knows"):
        without_trace(untraced)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="untraced counts nothing"):
        without_statistics(untraced)  # type: ignore[arg-type]
