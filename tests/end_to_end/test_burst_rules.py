"""The rules of bursts, at the queues: a driver process, and a client that writes the records itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from queue import Queue
from typing import Any

import numpy as np
import pytest
from support import control_flow_models
from support.bursts import BAD_RECORDS, RECORD_BYTES, BurstClient, give_pools, packet_for, split
from support.drivers import LIMIT_S, InThread, Process, until, wait_until_waiting
from support.models import add_model, pool_bytes, relus_model, request_for, slow_model

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Model, OutputShape
from nnfmq.lab import hidl
from nnfmq.queue import MessageQueue
from nnfmq.serialize import messages
from nnfmq.serialize.codec import decode_result

NONE, FAILED, INVALID = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT
ADD = add_model()
SUM = [11.0, 22.0, 33.0, 44.0]
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)


@pytest.fixture(scope="module")
def old_client() -> Iterator[nnfmq.Client]:
    """Return a client that speaks HIDL 1.2, which introduced bursts."""
    with nnfmq.connect(embedded=True, interface="HIDL 1.2") as made:
        yield made


@pytest.fixture
def adding(shared_client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with shared_client.device("reference").prepare(ADD) as made:
        yield made


class Raw:
    """A burst over queues of this process: it writes requests, reads results and is the driver's IBurstCallback."""

    def __init__(self, client: nnfmq.Client, stack: ExitStack, model: Model = ADD, **sizes: int) -> None:
        self.client, self.model, self.stack = client, model, stack
        self.queues = stack.enter_context(BurstClient.create(**sizes))
        self.source, self.sink = give_pools(self.queues, model)
        self.requested: list[list[int]] = []
        self.status = NONE
        calls: Queue[Any] = Queue()
        device = hidl.IDevice(client, "reference")
        device.prepareModel_1_2(model, 1, [], [], bytes(32), lambda *given: calls.put(given))
        _, self.prepared = calls.get(timeout=LIMIT_S)
        stack.callback(self.prepared.close)
        if model is ADD:
            np.frombuffer(self.source.view, np.float32, 4)[:] = ONE
            np.frombuffer(self.source.view, np.float32, 4, offset=64)[:] = TEN

    def getMemories(self, slots: list[int]) -> tuple[ErrorStatus, list[Memory]]:
        self.requested.append(list(slots))
        return self.status, [self.queues.memories[slot] for slot in slots]

    def begin(self) -> Any:
        status, context = self.prepared.configureExecutionBurst(self, self.queues.requests, self.queues.results)
        assert status is NONE
        self.stack.callback(context.close)
        return context

    def free(self, context: Any, slot: int) -> None:
        """Free a slot and wait until the driver has done it: it handles messages in order."""
        context.freeMemory(slot)
        connection = self.client.connection
        connection.exchange(messages.ListDevices(connection.next_call_id()), messages.DeviceList)

    def sums(self) -> list[float]:
        return np.frombuffer(self.sink.view, np.float32, 4).tolist()  # type: ignore[no-any-return]


@pytest.fixture
def raw(old_client: nnfmq.Client, resources: ExitStack) -> Raw:
    return Raw(old_client, resources)


def test_BUR_2_BUR_3_a_burst_over_the_caller_s_queues_of_1024_records(raw: Raw) -> None:
    assert (raw.queues.requests.count, raw.queues.results.count) == (1024, 1024)
    raw.begin()
    assert raw.queues.execute(packet_for(ADD)).status is NONE
    assert raw.sums() == SUM


def test_BUR_2_a_status_of_the_callback_is_the_execution_s(raw: Raw) -> None:
    raw.begin()
    raw.status = INVALID
    assert raw.queues.execute(packet_for(ADD)).status is INVALID
    raw.status = NONE
    assert raw.queues.execute(packet_for(ADD)).status is NONE


def test_BUR_2_BUR_6_queues_without_an_event_flag_have_no_burst(raw: Raw, resources: ExitStack) -> None:
    for position in range(2):
        queues = [raw.queues.requests, raw.queues.results]
        queues[position] = MessageQueue.create(RECORD_BYTES, 1024, event_flag=False)
        resources.callback(queues[position].close)
        status, context = raw.prepared.configureExecutionBurst(raw, *queues)
        assert (status, context) == (FAILED, None)


def test_BUR_4_a_driver_that_sleeps_is_woken_for_each_request(raw: Raw) -> None:
    raw.begin()
    with Process(raw.client.worker_pid) as driver:
        for _ in range(3):
            until(lambda: set(driver.states()) == {"S"}, "all threads of the driver sleep")
            assert raw.queues.execute(packet_for(ADD)).status is NONE


@pytest.mark.parametrize("window_us", [0, 1_000_000])
def test_BUR_4_a_driver_polls_only_if_its_environment_gives_it_a_window(
    window_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_BURST_SERVER_POLLING_WINDOW", str(window_us))
    with (
        nnfmq.connect(embedded=True) as client,
        client.device("reference").prepare(ADD) as model,
        model.burst() as burst,
    ):

        def polled() -> int:
            burst.execute(ONE, TEN)
            return client.statistics().clients[0].bursts[0].polled

        if window_us:
            until(lambda: polled() > 0, "a request arrives while the driver polls")
        else:
            assert [polled() for _ in range(20)] == [0] * 20


def test_BUR_5_results_of_the_queue_s_length_arrive_whole(old_client: nnfmq.Client, resources: ExitStack) -> None:
    model = relus_model(3)  # information, three outputs of one dimension each, timing: 8 records
    made = Raw(old_client, resources, model, result_records=8)
    made.begin()
    result = made.queues.execute(packet_for(model))
    assert (result.status, result.output_shapes) == (NONE, (OutputShape((1,)),) * 3)


def test_BUR_7_BUR_8_requests_and_results_are_records_in_the_hal_s_order(raw: Raw) -> None:
    raw.begin()
    packet = split(packet_for(ADD, measure=MeasureTiming.YES))
    assert [record[0] for record in packet] == [0, 1, 1, 3, 5, 5, 6]
    result = raw.queues.call(b"".join(packet))
    assert [record[0] for record in split(result)] == [0, 1, 2, 3]
    decoded = decode_result(result)
    assert (decoded.status, decoded.output_shapes) == (NONE, (OutputShape((4,)),))
    assert decoded.timing.time_in_driver_ns > 0


@pytest.mark.parametrize("change", ["shortened", "longer", "swapped", "wrong kind"])
def test_BUR_9_a_request_that_is_not_exactly_a_packet_fails_and_the_next_one_works(change: str, raw: Raw) -> None:
    raw.begin()
    records = split(packet_for(ADD))
    changed = {
        "shortened": records[:-1],
        "longer": [*records, records[-1]],
        "swapped": [records[0], records[3], *records[1:3], *records[4:]],
        "wrong kind": [BAD_RECORDS[6], *records[1:]],
    }[change]
    result = raw.queues.execute(b"".join(changed))
    assert (result.status, result.output_shapes, result.timing) == (FAILED, (), NO_TIMING)
    assert raw.queues.execute(packet_for(ADD)).status is NONE


def test_BUR_10_a_result_that_does_not_fit_is_a_failure_without_shapes(
    old_client: nnfmq.Client, resources: ExitStack
) -> None:
    model = relus_model(3)
    made = Raw(old_client, resources, model, result_records=7)
    made.begin()
    result = made.queues.execute(packet_for(model, measure=MeasureTiming.YES))
    assert (result.status, result.output_shapes, result.timing) == (FAILED, (), NO_TIMING)


def test_BUR_11_no_byte_of_the_driver_s_memory_is_in_the_padding(raw: Raw) -> None:
    assert raw.queues.results.write(b"\xff" * (RECORD_BYTES * 1024))
    assert raw.queues.results.drain() == 1024
    raw.begin()
    used = {0: [(0, 1), (8, 20)], 1: [(0, 1), (8, 9), (12, 16)], 2: [(0, 1), (8, 12)], 3: [(0, 1), (8, 24)]}
    records = split(raw.queues.call(packet_for(ADD)))
    assert [record[0] for record in records] == list(used)
    for record in records:
        padding = bytearray(record)
        for first, end in used[record[0]]:
            padding[first:end] = bytes(end - first)
        assert padding == bytes(RECORD_BYTES)


def test_BUR_12_only_unknown_slots_are_requested_and_freed_ones_again(raw: Raw) -> None:
    context = raw.begin()
    for _ in range(2):
        assert raw.queues.execute(packet_for(ADD)).status is NONE
    assert raw.requested == [[0, 1]]
    for slot in (1, 1, 7, -1):  # used, freed already, and two unknown slots
        raw.free(context, slot)
    assert raw.queues.execute(packet_for(ADD)).status is NONE
    assert raw.requested == [[0, 1], [1]]


def test_BUR_13_BUR_16_UTL_7_both_ways_to_execute_a_request_return_the_same(
    shared_client: nnfmq.Client, adding: nnfmq.PreparedModel
) -> None:
    """The driver's burst caches memories; the AIDL burst executes synchronously, with none (tokens of -1)."""
    with adding.burst() as cached, adding.aidl_burst() as uncached, ExitStack() as stack:
        assert cached.execute(ONE, TEN)[0].tolist() == SUM
        pools = [stack.enter_context(Memory.create(size)) for size in (128, 64)]
        pools[0].view[:16], pools[0].view[64:80] = ONE.tobytes(), TEN.tobytes()
        uncached.execute_synchronously(request_for(ADD, pools), timeout=LIMIT_S)
        assert np.frombuffer(pools[1].view, np.float32, 4).tolist() == SUM


def test_BUR_1_BUR_14_thread_and_memory_of_a_burst_end_with_it(
    shared_client: nnfmq.Client, adding: nnfmq.PreparedModel
) -> None:
    with Process(shared_client.worker_pid) as driver:
        adding.execute(ONE, TEN)
        mappings = len(driver.shared_mappings())
        bursts = [adding.burst() for _ in range(3)]
        for burst in bursts:
            burst.execute(ONE, TEN)
        assert len(driver.shared_mappings()) > mappings
        threads = len(driver.states())
        for closed, burst in enumerate(bursts, 1):
            burst.close()
            until(lambda left=threads - closed: len(driver.states()) == left, "the burst's thread has ended")  # type: ignore[misc]
        until(lambda: len(driver.shared_mappings()) == mappings, "the bursts' memory is unmapped")


def test_BUR_16_API_11_a_second_execution_on_a_busy_burst_is_rejected(shared_client: nnfmq.Client) -> None:
    shape = (1, 128, 128, 32)
    with shared_client.device("reference").prepare(slow_model(40)) as slow, slow.burst() as burst:
        running = InThread.start(lambda: burst.execute(np.ones(shape, np.float32)))
        wait_until_waiting(burst)
        with pytest.raises(nnfmq.BadState, match="is executing in another thread"):
            burst.execute(np.ones(shape, np.float32))
        assert running.wait().error is None


def test_BUR_18_a_loop_timeout_reaches_the_driver_through_a_burst(
    shared_client: nnfmq.Client, resources: ExitStack
) -> None:
    model = control_flow_models.counting()
    pools = [resources.enter_context(Memory.create(size)) for size in pool_bytes(model)]
    request = request_for(model, pools)
    count = request.inputs[1].location
    with shared_client.device("reference").prepare(model) as prepared, prepared.request_burst() as burst:
        for iterations, limit_ns in ((3, 2_000_000_000), (1 << 30, 50_000_000)):
            np.frombuffer(pools[0].view, np.int32, 1, count.offset)[:] = iterations
            config = ExecutionConfig(loop_timeout_ns=limit_ns)
            if iterations == 3:
                assert burst.execute_request(request, config, timeout=LIMIT_S).shapes == (OutputShape((2,)),)
                continue
            with pytest.raises(nnfmq.MissedDeadline):
                burst.execute_request(request, config, timeout=LIMIT_S)


@pytest.mark.parametrize("measure", MeasureTiming)
def test_BUR_20_an_aidl_burst_measures_if_its_configuration_says_so(
    measure: MeasureTiming, adding: nnfmq.PreparedModel, resources: ExitStack
) -> None:
    pools = [resources.enter_context(Memory.create(size)) for size in pool_bytes(ADD)]
    with adding.aidl_burst() as burst:
        result = burst.execute_synchronously(request_for(ADD, pools), ExecutionConfig(measure), timeout=LIMIT_S)
    assert (result.timing.time_in_driver_ns > 0) == (measure is MeasureTiming.YES)
