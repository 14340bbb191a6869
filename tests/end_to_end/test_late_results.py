"""The result of an abandoned call arrives late, and must not be taken for the next call's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, interrupted_after, one, until, wait_until_waiting
from support.models import null_model
from support.sessions import create_endless_request

import nnfmq
from nnfmq.base.deadlines import deadline_after
from nnfmq.serialize import messages

SOON_S = 0.02


@pytest.fixture
def worker(client: nnfmq.Client) -> Iterator[Process]:
    with Process(client.worker_pid) as process:
        yield process


@pytest.mark.parametrize("timeout", [SOON_S, 0])
def test_after_a_timeout_the_next_execution_gets_its_own_result(
    worker: Process, burst: nnfmq.Burst, timeout: float
) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=timeout)
    assert burst.execute(one(3)) == (one(3),)
    assert burst.execute(one(4)) == (one(4),)


def test_after_a_signal_handler_that_raises_the_next_execution_gets_its_own_result(
    worker: Process, burst: nnfmq.Burst
) -> None:
    with worker.stopped(), interrupted_after(SOON_S):
        burst.execute(one(2), timeout=LIMIT_S)
    assert burst.execute(one(3)) == (one(3),)


def test_nothing_is_sent_while_a_result_is_outstanding(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped():
        with pytest.raises(nnfmq.MissedDeadlineTransient):
            burst.execute(one(2), timeout=0)
        sent = burst.channel.requests.counters()[0]
        for value in (3, 4):
            with pytest.raises(nnfmq.MissedDeadlineTransient):
                burst.execute(one(value), timeout=SOON_S)
        assert burst.channel.requests.counters()[0] == sent
        assert burst.inputs[0][0] == 2  # nor is memory touched that the driver may be reading
    assert burst.execute(one(5)) == (one(5),)


def test_a_call_without_timeout_waits_for_the_late_result_and_for_its_own(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped():
        with pytest.raises(nnfmq.MissedDeadlineTransient):
            burst.execute(one(2), timeout=0)
        call = InThread.start(lambda: burst.execute(one(3)))
        wait_until_waiting(burst)
    assert call.wait().value == (one(3),)


def test_a_late_result_is_not_measured_as_the_next_ones(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=0, measure=True)
    burst.execute(one(3))
    assert burst.last.timing == nnfmq.ExecutionInfo(0, 0, 0, 0).timing


def test_timeout_0_returns_a_result_that_has_arrived(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=0)
    until(lambda: burst.channel.results.available_to_read() > 0, "the late result is there")
    with worker.stopped():
        sent = burst.channel.requests.counters()[0]
        with pytest.raises(nnfmq.MissedDeadlineTransient):
            burst.execute(one(3), timeout=0)
        assert burst.channel.requests.counters()[0] > sent
    assert burst.execute(one(4)) == (one(4),)


def driver_error(burst: nnfmq.Burst) -> tuple[int, str]:
    """Return the number of the burst's last failed execution, and its text."""
    connection = burst.channel.connection
    call = messages.GetBurstError(connection.next_call_id(), burst.channel.burst_id)
    reply = connection.exchange(call, messages.BurstError, (), deadline_after(LIMIT_S))
    return reply.sequence, reply.message


def test_BUR_18_the_driver_does_not_begin_an_execution_whose_deadline_has_passed(
    worker: Process, burst: nnfmq.Burst
) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=SOON_S)
    assert burst.execute(one(3)) == (one(3),)
    assert driver_error(burst) == (2, "the deadline had passed before the execution began")
    assert burst.execute(one(4), timeout=LIMIT_S) == (one(4),)


def test_BUR_18_a_timeout_ends_the_wait_alone_where_the_interface_has_no_deadlines(daemon: Daemon) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(daemon.path, interface="HIDL 1.2"))
        model = stack.enter_context(client.device("reference").prepare(null_model()))
        burst, worker = stack.enter_context(model.burst()), stack.enter_context(Process(client.worker_pid))
        burst.execute(one(1))
        with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
            burst.execute(one(2), timeout=SOON_S)
        burst.execute(one(3))
        assert driver_error(burst) == (0, "")


def test_BUR_18_the_driver_ends_an_execution_at_its_deadline(client: nnfmq.Client) -> None:
    """A loop that counts for hours ends by its deadline, long before the default loop timeout of 2 s."""
    with ExitStack() as stack:
        loop, endless = create_endless_request(stack)
        burst = stack.enter_context(stack.enter_context(client.device("reference").prepare(loop)).request_burst())
        for number in (1, 2):
            with pytest.raises(nnfmq.MissedDeadline):
                burst.execute_request(endless.request, timeout=0.3)
            until(lambda expected=number: driver_error(burst)[0] == expected, "the execution has failed")  # type: ignore[misc]
            assert "deadline passed" in driver_error(burst)[1]


def test_a_second_thread_is_rejected_while_one_waits(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped():
        call = InThread.start(lambda: burst.execute(one(2)))
        wait_until_waiting(burst)
        with pytest.raises(nnfmq.BadState, match="another thread"):
            burst.execute(one(3))
    assert call.wait().value == (one(2),)


@pytest.mark.parametrize("timeout", [SOON_S, 0])
def test_after_a_timeout_on_the_synchronous_path_the_next_call_gets_its_own_result(
    worker: Process, model: nnfmq.PreparedModel, timeout: float
) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadline):
        model.execute(one(2), timeout=timeout)
    assert model.execute(one(3)) == (one(3),)


def test_a_preparation_that_timed_out_affects_no_other_call(
    client: nnfmq.Client, model: nnfmq.PreparedModel, worker: Process
) -> None:
    device = client.device("reference")
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadline):
        device.prepare(null_model(), timeout=SOON_S)
    assert model.execute(one(2)) == (one(2),)


CLOSERS: dict[str, Callable[[nnfmq.Client, nnfmq.Burst], Any]] = {
    "burst": lambda client, burst: burst.close(),
    "client": lambda client, burst: client.close(),
}


@pytest.mark.parametrize("close", CLOSERS.values(), ids=CLOSERS.keys())
def test_LIFE_2_a_burst_with_a_result_outstanding_can_be_closed(
    client: nnfmq.Client, worker: Process, burst: nnfmq.Burst, close: Callable[[nnfmq.Client, nnfmq.Burst], Any]
) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=0)
    close(client, burst)
    with pytest.raises((nnfmq.InvalidArgument, nnfmq.DeadObject), match="closed"):
        burst.execute(one(3))


def test_after_closing_a_busy_burst_another_one_of_the_same_model_gets_its_own_results(
    model: nnfmq.PreparedModel, worker: Process, burst: nnfmq.Burst
) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=0)
    burst.close()
    with model.burst() as another:
        assert another.execute(one(3), timeout=LIMIT_S) == (one(3),)


@pytest.mark.parametrize("timeout", [0, 0.0001, 0.001])
def test_a_burst_may_be_closed_while_the_driver_requests_its_memory(
    client: nnfmq.Client, model: nnfmq.PreparedModel, timeout: float
) -> None:
    for _ in range(50):
        with model.burst() as burst, suppress(nnfmq.MissedDeadline):
            burst.execute(one(2), timeout=timeout)
    assert client._connection.is_open
    assert model.execute(one(3)) == (one(3),)


def test_closing_a_burst_in_one_thread_ends_the_wait_of_another(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped():
        call = InThread.start(lambda: burst.execute(one(2)))
        wait_until_waiting(burst)
        closer = InThread.start(burst.close)
        closer.wait_until_asleep()
    closer.wait()
    call.wait()
    assert call.value == (one(2),) or isinstance(call.error, nnfmq.NnfmqError)


def test_results_in_place_are_those_of_the_last_call_that_returned(worker: Process, burst: nnfmq.Burst) -> None:
    with worker.stopped(), pytest.raises(nnfmq.MissedDeadlineTransient):
        burst.execute(one(2), timeout=0)
    burst.execute(one(3), out=burst.outputs)
    np.testing.assert_array_equal(burst.outputs[0], one(3))
