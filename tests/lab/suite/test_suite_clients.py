"""Measured clients: their schedule, the comparison of outputs, and functions of the user, with a real driver."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import Pipe

import nnfmq
from nnfmq.hal.client_class import ClientClass
from nnfmq.lab.bench.loops import intended_starts
from nnfmq.lab.bench.runner import Load, RunnerJob, Trial
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.listening_driver import Daemon, started_daemon
from nnfmq.lab.suite import clients
from nnfmq.lab.suite.clients import OutputComparison, OwnClient, SuiteJob, SuiteRequests, started_suite_clients

DIGITS = nnfmq.example_path("digits.tflite")
ONES = [np.ones((1, 8, 8, 1), np.float32)]
LOAD = Load(0.2, rate=100.0)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with started_daemon(tmp_path_factory.mktemp("driver")) as started:
        yield started


def requests(daemon: Daemon, own: OwnClient | None = None, count: int = 1, load: Load = LOAD) -> SuiteRequests:
    job = SuiteJob(RunnerJob("burst", DIGITS, {}, None, [ONES], "reference", None, daemon.socket), own)
    with started_suite_clients(job, count) as started:
        started.begin(load, time.monotonic_ns() + 10_000_000)
        return started.finish(load.seconds, lambda: None)


# ---- outputs


def wrong(*outputs: Any, is_compared: bool = True) -> int | None:
    """Return how many of the outputs after the first ones are found to differ."""
    following = iter(outputs)
    comparison = OutputComparison(lambda inputs: next(following), [], is_compared=is_compared)
    for _, inputs in zip(outputs[1:], comparison.inputs(lambda: False), strict=False):
        comparison.step(inputs)
    comparison.finish()
    return comparison.wrong


def array(*values: float, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.array(values, dtype)


def test_outputs_are_compared_bit_for_bit_with_the_first_ones() -> None:
    first = [array(1, 2), array(3)]
    assert wrong(first, first, [array(1, 2), array(3)]) == 0
    assert wrong(first, [array(1, 2), array(3.0000002)], first, [array(1, 2)]) == 2
    assert wrong(first, [array(1, 2, dtype="float64"), array(3)]) == 1
    assert wrong(first, [array(1, 2).reshape(2, 1), array(3)]) == 1


def test_a_value_that_is_no_number_is_equal_to_itself() -> None:
    assert wrong([array(np.nan)], [array(np.nan)]) == 0
    assert wrong([array(np.nan)], [array(1)]) == 1


def test_the_first_outputs_are_kept_if_their_memory_is_used_again() -> None:
    buffer = array(1)

    def reused(value: float) -> list[np.ndarray[Any, Any]]:
        buffer[...] = value
        return [buffer]

    values = iter((1, 2))
    comparison = OutputComparison(lambda inputs: reused(next(values)), [], is_compared=True)
    comparison.step([])
    comparison.finish()
    assert comparison.wrong == 1


def test_one_array_or_a_dict_of_arrays_is_compared_too() -> None:
    assert wrong(array(1, 2), array(1, 2), array(1, 3)) == 1
    assert wrong({"a": array(1)}, {"a": array(1)}, {"a": array(2)}) == 1


def test_what_cannot_be_compared_is_not() -> None:
    assert wrong(None, None) is None
    assert wrong([array(1)], [array(2)], is_compared=False) is None


# ---- the schedule


def test_each_intended_request_is_executed(daemon: Daemon) -> None:
    found = requests(daemon)
    np.testing.assert_array_equal(found.intended, intended_starts(100.0, 0.2, "constant"))
    assert found.latencies.min() > 0
    assert (found.unsent, found.wrong) == (0, 0)


def test_several_clients_share_the_requests(daemon: Daemon) -> None:
    found = requests(daemon, count=2)
    np.testing.assert_array_equal(found.intended, intended_starts(100.0, 0.2, "constant"))


def test_the_latency_of_a_request_that_waits_for_an_earlier_one_counts_from_its_intended_start() -> None:
    """The 6th request, at 50 ms, takes 100 ms. So those at 60, 70, ... 140 ms wait for 90, 80, ... 10 ms at least."""
    calls: list[int] = []

    def request(inputs: Sequence[Any]) -> None:
        calls.append(time.monotonic_ns())
        while len(calls) == 7 and time.monotonic_ns() < calls[-1] + 100_000_000:  # the first one is not of the load
            pass

    connection, other = Pipe()
    with connection, other:
        comparison = OutputComparison(request, [], is_compared=True)
        found = clients._requests_of(connection, comparison, Trial(time.monotonic_ns() + 10_000_000, LOAD))
    assert (found.latencies[5:15] >= np.arange(100, 0, -10) * 1_000_000).all()


def test_the_measured_clients_have_the_class_that_is_asked_for(daemon: Daemon) -> None:
    job = SuiteJob(RunnerJob("burst", DIGITS, {}, None, [ONES], "reference", None, daemon.socket), client_class="batch")
    with started_suite_clients(job, 1) as started, nnfmq.connect(daemon.socket, monitor=True) as monitor:
        classes = {client.pid: client.client_class for client in monitor.statistics().clients}
        assert [ClientClass(classes[pid]).name for pid in started.pids if pid in classes] == ["BATCH"]


def test_requests_that_are_due_when_the_load_is_stopped_count_as_long_as_they_have_waited(daemon: Daemon) -> None:
    job = SuiteJob(RunnerJob("burst", DIGITS, {}, None, [ONES], "reference", None, daemon.socket))
    with started_suite_clients(job, 1) as started:
        started.begin(Load(600.0, rate=100.0), time.monotonic_ns() - 1_000_000_000)
        found = started.stop()
    assert found.latencies.size >= 100
    np.testing.assert_array_equal(found.intended, np.arange(found.latencies.size) * 10_000_000)
    assert (np.diff(found.latencies[found.latencies.size - found.unsent :]) == -10_000_000).all()


# ---- functions of the user


def test_a_closure_of_the_user_is_called_for_each_request_with_a_client_of_the_driver(daemon: Daemon) -> None:
    factor = 3

    def own(client: nnfmq.Client, path: Path) -> Any:
        if client.driver_pid != daemon.pid or path != DIGITS:
            raise ValueError(f"{client.driver_pid} {path}")
        burst, calls = client.device("reference").prepare(path).burst(), []

        def request(inputs: Sequence[Any]) -> Any:
            calls.append(0)
            (scores,) = burst.execute(*inputs)
            return [scores * factor, np.array([1 + len(calls) % 2])]  # every second one differs

        return request

    found = requests(daemon, own)
    assert found.latencies.size == 20
    assert found.wrong == 10


def test_an_exception_of_the_function_is_reported_and_its_traceback_is_printed(
    daemon: Daemon, capfd: pytest.CaptureFixture[str]
) -> None:
    def own(client: nnfmq.Client, path: Path) -> Any:
        labels: dict[str, str] = {}
        return lambda inputs: labels["no such label"]

    with pytest.raises(
        BenchmarkFailed, match="a measured client: the client function raised KeyError: 'no such label'"
    ):
        requests(daemon, own)
    assert 'return lambda inputs: labels["no such label"]' in capfd.readouterr().err


def test_a_function_that_returns_none_to_call_is_reported(daemon: Daemon) -> None:
    with pytest.raises(BenchmarkFailed, match="the client function returned 3, not a function to call"):
        requests(daemon, lambda client, path: 3)  # type: ignore[arg-type, return-value]
