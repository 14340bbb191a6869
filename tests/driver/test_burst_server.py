"""The driver's end of a burst: valid and malformed packets, results, slots, and the listener's end.

The client's end is `support.bursts`, in the same process. Expected packets are packed by hand from the specification.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
from support import bursts, models
from support.bursts import BAD_RECORDS, RECORD_BYTES, BurstClient, packet_for, server_end, split
from support.drivers import aborting
from support.executors import LIMIT_S, Held, Summing, floats, prepared, until

from nnfmq.base import watcher
from nnfmq.base.memory import Memory
from nnfmq.driver.execution.burst import BurstServer, CachingBurstExecutor
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.memory.quota import MemoryQuota
from nnfmq.engines import memory as process_memory
from nnfmq.hal.errors import DeadObject, ErrorStatus, GeneralFailure, InvalidArgument, QueueCorrupted, error_for_status
from nnfmq.hal.timing import HIDL_NO_TIME, NO_TIME, NO_TIMING
from nnfmq.hal.types import DataLocation, MeasureTiming, OutputShape, RequestArgument
from nnfmq.queue import MessageQueue
from nnfmq.queue.layout import READ_COUNTER, WRITE_COUNTER
from nnfmq.serialize.codec import decode_result, encode_request, encode_result
from nnfmq.serialize.execution_stats import StatsArea
from nnfmq.serialize.packets import RequestPacket, ResultPacket

ADD = models.add_model()
ADD_PACKET = packet_for(ADD)
SUM = [11.0, 22.0, 33.0, 44.0]
FAILURE = ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)

Form = Callable[[DriverPreparedModel], Any]
Serve = Callable[..., BurstServer]


def assert_failed(result: ResultPacket) -> None:
    assert result.status is not ErrorStatus.NONE
    assert result.output_shapes == ()
    assert result.timing == NO_TIMING


def assert_usable(client: BurstClient, outputs: Memory) -> None:
    outputs.view[:] = bytes(outputs.size_bytes)
    assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
    assert floats(outputs) == SUM


# ------------------------------------------------------------------------------------------------ executing


def test_BUR_13_UTL_7_a_burst_executes_with_a_model_or_an_executor(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    result = client.execute(ADD_PACKET)
    assert result == ResultPacket(ErrorStatus.NONE, (OutputShape((4,)),), NO_TIMING)
    assert floats(adding[1]) == SUM


class Mistaken(Summing):
    """An executor that raises an unexpected exception."""

    def run(self, request: RequestPacket) -> tuple[OutputShape, ...]:
        raise ValueError("a mistake")


def test_an_exception_of_the_executor_fails_each_execution(
    client: BurstClient, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    bursts.give_pools(client, ADD)
    server = serve(client, Mistaken())
    for sent in (1, 2):
        assert_failed(client.execute(ADD_PACKET))
        assert server.last_failure.sequence == sent
        assert "the executor failed: ValueError('a mistake')" in server.last_failure.message
    caplog.clear()


def test_BUR_13_UTL_7_a_burst_executes_with_a_custom_executor(client: BurstClient, serve: Serve) -> None:
    numbers, total = client.give(3, 12), client.give(5, 4)
    np.frombuffer(numbers.view, np.float32)[:] = [1, 2, 4]
    serve(client, Summing())
    assert client.execute(encode_request((), (), [3, 5])).output_shapes == (OutputShape((1,)),)
    assert floats(total, 1) == [7.0]


@pytest.mark.parametrize("window_us", [0, 1000], ids=["asleep", "polling"])
def test_each_execution_reads_the_current_content_of_its_memory(
    window_us: int, client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)), polling_window_us=window_us)
    first = np.frombuffer(adding[0].view, np.float32, 4)
    for number in range(50):
        first[:] = number
        assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
        assert floats(adding[1]) == [number + 10, number + 20, number + 30, number + 40]


def test_different_requests_alternate_on_one_burst(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    other = client.give(7, 16)
    serve(client, form(prepared(ADD)))
    for slot, sink in [(1, adding[1]), (7, other), (1, adding[1])]:
        sink.view[:] = bytes(sink.size_bytes)
        assert client.execute(packet_for(ADD, (0, slot))).status is ErrorStatus.NONE
        assert floats(sink) == SUM


class Counting(CachingBurstExecutor):
    """Counts the requests that it binds."""

    count = 0

    def bind(self, request: RequestPacket) -> Any:
        self.count += 1
        return super().bind(request)


@pytest.mark.parametrize(("memories", "binds"), [(8, 7), (9, 27)])
def test_requests_over_eight_memories_in_turn_are_bound_once(
    memories: int, binds: int, client: BurstClient, serve: Serve, adding: tuple[Memory, Memory]
) -> None:
    counting = Counting(prepared(ADD))
    serve(client, counting)
    outputs = [client.give(10 + number, 16) for number in range(memories)]
    for number in range(memories):  # a memory that comes later changes the version of the earlier ones
        client.execute(packet_for(ADD, (0, 10 + number)))
    counting.count = 0
    for _ in range(3):
        for number, output in enumerate(outputs):
            output.view[:] = bytes(16)
            assert client.execute(packet_for(ADD, (0, 10 + number))).status is ErrorStatus.NONE
            assert floats(output) == SUM
    assert counting.count == binds


def test_only_the_last_request_stays_bound_if_memory_is_scarce(
    client: BurstClient, serve: Serve, adding: tuple[Memory, Memory]
) -> None:
    quota = MemoryQuota(1 << 20)
    counting = Counting(prepared(ADD))
    client.give(7, 16)
    process_memory.use_budget(quota)
    try:
        serve(client, counting)
        with closing(quota.charge((1 << 19) + 1)):
            for slots in [(0, 1), (0, 7)] * 3 + [(0, 7)]:
                assert client.execute(packet_for(ADD, slots)).status is ErrorStatus.NONE
        assert counting.count == 6
    finally:
        process_memory.use_budget(None)


def test_a_request_may_name_one_slot_twice(client: BurstClient, serve: Serve, form: Form) -> None:
    both = client.give(2, 128 + 16)
    np.frombuffer(both.view, np.float32, 4)[:] = [1, 2, 3, 4]
    inputs = tuple(RequestArgument(location=DataLocation(0, offset, 16)) for offset in (0, 0))
    outputs = (RequestArgument(location=DataLocation(1, 128, 16)),)
    serve(client, form(prepared(ADD)))
    assert client.execute(encode_request(inputs, outputs, [2, 2])).status is ErrorStatus.NONE
    assert np.frombuffer(both.view, np.float32, 4, offset=128).tolist() == [2, 4, 6, 8]
    assert client.requested_slots == [[2]]


def test_a_request_may_omit_a_dimension_that_the_model_specifies(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    """A dimension of 0 is unspecified; the model specifies it."""
    inputs = tuple(RequestArgument(location=DataLocation(0, offset, 16), dimensions=(0,)) for offset in (0, 64))
    outputs = (RequestArgument(location=DataLocation(1, 0, 16), dimensions=(0,)),)
    serve(client, form(prepared(ADD)))
    result = client.execute(encode_request(inputs, outputs, [0, 1]))
    assert result == ResultPacket(ErrorStatus.NONE, (OutputShape((4,)),), NO_TIMING)
    assert floats(adding[1]) == SUM


def test_BUR_8_a_result_has_exactly_the_specified_bytes(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert split(client.call(ADD_PACKET)) == [
        struct.pack("<B7xIiI4x", 0, 4, 0, 1),
        struct.pack("<B7xB3xI8x", 1, 1, 1),
        struct.pack("<B7xI12x", 2, 4),
        struct.pack("<B7xQQ", 3, HIDL_NO_TIME, HIDL_NO_TIME),
    ]


def test_BUR_8_an_error_is_two_records(client: BurstClient, serve: Serve, form: Form) -> None:
    serve(client, form(prepared(ADD)))
    assert split(client.call(BAD_RECORDS[6])) == [
        struct.pack("<B7xIiI4x", 0, 2, 2, 0),
        struct.pack("<B7xQQ", 3, HIDL_NO_TIME, HIDL_NO_TIME),
    ]


def test_BUR_5_a_result_of_the_queue_s_size_is_sent(resources: ExitStack, serve: Serve, form: Form) -> None:
    model = models.relus_model(3)
    with BurstClient.create(result_records=8) as client:  # packetInformation, 3 x (operand, dimension), timing
        bursts.give_pools(client, model)
        server = serve(client, form(prepared(model)))
        assert len(client.call(packet_for(model))) == 8 * RECORD_BYTES
        server.close()


def test_a_short_output_is_reported_with_the_needed_shape(client: BurstClient, serve: Serve, form: Form) -> None:
    model = models.unsized_relu_model((4,))
    client.give(0, 16), client.give(1, 8)
    inputs = (RequestArgument(location=DataLocation(0, 0, 16)),)
    outputs = (RequestArgument(location=DataLocation(1, 0, 8)),)
    serve(client, form(prepared(model)))
    result = client.execute(encode_request(inputs, outputs, [0, 1], MeasureTiming.YES))
    assert result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    assert result.output_shapes == (OutputShape((4,), is_sufficient=False),)
    assert result.timing == NO_TIMING


def test_an_invalid_request_is_an_invalid_argument(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    outputs = (RequestArgument(location=DataLocation(1, 8, 16)),)  # ends 8 bytes after the pool
    request = models.request_for(ADD, ())
    result = client.execute(encode_request(request.inputs, outputs, [0, 1], MeasureTiming.YES))
    assert result == ResultPacket(ErrorStatus.INVALID_ARGUMENT, (), NO_TIMING)
    assert "N-RQX-3" in server.last_failure.message
    assert_usable(client, adding[1])


# ------------------------------------------------------------------------------------------------ queues


@pytest.mark.parametrize("lacking", [0, 1], ids=["requests", "results"])
def test_BUR_6_a_queue_without_an_event_flag_is_rejected(
    lacking: int, resources: ExitStack, client: BurstClient
) -> None:
    queues = [
        resources.enter_context(MessageQueue.create(RECORD_BYTES, 8, event_flag=number != lacking))
        for number in range(2)
    ]
    with pytest.raises(GeneralFailure, match="event flag word"):
        BurstServer.create(client.get_memories, *queues, Summing())


@pytest.mark.parametrize("quantum", [1, 8, 23, 48])
def test_a_queue_with_another_record_size_is_rejected(quantum: int, resources: ExitStack, client: BurstClient) -> None:
    other = resources.enter_context(MessageQueue.create(quantum, 8))
    with pytest.raises(GeneralFailure, match=f"24 bytes, not {quantum}"):
        BurstServer.create(client.get_memories, other, other, Summing())


# ------------------------------------------------------------------------------------------------ malformed packets


def with_dropped() -> list[bytes]:
    records = split(ADD_PACKET)
    return [b"".join(records[:i] + records[i + 1 :]) for i in range(len(records))]


def with_inserted() -> list[bytes]:
    records = split(ADD_PACKET)
    places = range(len(records) + 1)
    return [b"".join([*records[:i], bad, *records[i:]]) for i in places for bad in BAD_RECORDS]


def with_replaced() -> list[bytes]:
    """Replace every record by every kind, and a slot by an unknown one, which does not make a packet malformed."""
    records = split(packet_for(ADD, measure=MeasureTiming.YES))
    mutations = [(i, bad) for i in range(len(records)) for bad in BAD_RECORDS if bad != records[i]]
    return [b"".join([*records[:i], bad, *records[i + 1 :]]) for i, bad in mutations]


@pytest.mark.parametrize(
    "packets",
    [with_dropped(), with_inserted(), with_replaced()],
    ids=["N_BUR_1 a record dropped", "N_BUR_2 a record inserted", "N_BUR_3 a record replaced"],
)
def test_BUR_9_every_malformed_packet_gets_one_error_and_the_burst_continues(
    packets: list[bytes], client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    client.on_get_memories = lambda slots: (
        client.known(slots) if set(slots) <= {0, 1} else raise_error(InvalidArgument("unknown"))
    )
    serve(client, form(prepared(ADD)))
    for packet in packets:
        assert_failed(client.execute(packet))
    assert client.results.available_to_read() == 0
    assert_usable(client, adding[1])


def raise_error(error: Exception) -> list[Memory]:
    raise error


def counts(size: int, inputs: int, outputs: int, pools: int) -> bytes:
    """Return a request with these counts, followed by the records of ADD."""
    return struct.pack("<B3xIIII4x", 0, size, inputs, outputs, pools) + ADD_PACKET[RECORD_BYTES:]


RECORDS = len(split(ADD_PACKET))
BEYOND = 2**32 - 1


@pytest.mark.parametrize("size", [0, 1, RECORDS - 1, RECORDS + 1, 1025, BEYOND])
def test_N_BUX_1_a_packet_size_other_than_received_is_rejected(
    size: int, client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert client.execute(counts(size, 2, 1, 2)) == FAILURE
    assert_usable(client, adding[1])


@pytest.mark.parametrize(
    ("inputs", "outputs", "pools"),
    [
        (BEYOND, 1, 2), (2, BEYOND, 2), (2, 1, BEYOND), (BEYOND, BEYOND, BEYOND), (2**31, 2**31, 5),
        (2**32 - 2, 4, 3), (RECORDS, 0, 0), (0, 0, RECORDS - 1),
    ],
)  # fmt: skip
def test_N_BUX_2_counts_beyond_the_packet_are_rejected(
    inputs: int, outputs: int, pools: int, client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert client.execute(counts(RECORDS, inputs, outputs, pools)) == FAILURE
    assert_usable(client, adding[1])


@pytest.mark.parametrize("rank", [RECORDS, 2**31, BEYOND])
def test_N_BUX_2_more_dimensions_than_the_packet_has_are_rejected(
    rank: int, client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    records = split(ADD_PACKET)
    records[1] = records[1][:20] + struct.pack("<I", rank)
    assert client.execute(b"".join(records)) == FAILURE
    assert_usable(client, adding[1])


def test_two_packets_received_together_are_one_malformed_packet(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert client.execute(ADD_PACKET + ADD_PACKET) == FAILURE
    assert client.results.available_to_read() == 0
    assert_usable(client, adding[1])


def test_the_last_failure_has_its_text_and_sequence_number(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    assert server.last_failure.sequence == 0
    client.execute(ADD_PACKET)
    client.execute(BAD_RECORDS[1])
    client.execute(ADD_PACKET)
    assert server.last_failure.status is ErrorStatus.GENERAL_FAILURE
    assert "at byte 0" in server.last_failure.message
    assert server.last_failure.sequence == 2


# ------------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("measure", MeasureTiming)
def test_N_BUR_4_BUR_10_a_result_longer_than_its_queue_is_an_error_without_shapes_and_times(
    measure: MeasureTiming, serve: Serve, form: Form
) -> None:
    model = models.relus_model(4)  # 10 records
    with BurstClient.create(result_records=8) as client:
        bursts.give_pools(client, model)
        server = serve(client, form(prepared(model)))
        assert client.execute(packet_for(model, measure=measure)) == FAILURE
        assert client.execute(packet_for(model, measure=measure)) == FAILURE
        assert "10 records does not fit" in server.last_failure.message
        server.close()


def test_N_BUR_4_the_same_result_fits_into_a_longer_queue(client: BurstClient, serve: Serve, form: Form) -> None:
    model = models.relus_model(4)
    bursts.give_pools(client, model)
    serve(client, form(prepared(model)))
    result = client.execute(packet_for(model))
    assert result.status is ErrorStatus.NONE
    assert result.output_shapes == (OutputShape((1,)),) * 4


def test_N_BUR_4_BUR_10_a_result_that_does_not_fit_beside_an_unread_one_is_an_error(serve: Serve) -> None:
    with BurstClient.create(result_records=6) as client:
        bursts.give_pools(client, ADD)
        server = serve(client, prepared(ADD))
        assert client.requests.send(ADD_PACKET)
        until(lambda: client.results.available_to_read() == 4)
        assert client.requests.send(ADD_PACKET)
        until(lambda: client.results.available_to_read() == 6)
        assert split(client.receive())[4:] == split(encode_result(ErrorStatus.GENERAL_FAILURE, ()))
        server.close()


def test_a_client_that_reads_no_results_loses_them_and_can_continue(serve: Serve) -> None:
    with BurstClient.create(result_records=4) as client:
        bursts.give_pools(client, ADD)
        server = serve(client, prepared(ADD))
        slots = StatsArea.over(client.results.stats_view)
        for sent in range(1, 4):
            assert client.requests.send(ADD_PACKET)
            until(lambda sent=sent: slots.read().executions + slots.read().failures == sent)
        assert client.results.available_to_read() == 4
        client.results.drain()
        assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
        slots.close()
        server.close()


def padding(record: bytes) -> bytes:
    """Return the padding bytes of a result record, by its kind."""
    used = {0: [(0, 1), (8, 20)], 1: [(0, 1), (8, 9), (12, 16)], 2: [(0, 1), (8, 12)], 3: [(0, 1), (8, 24)]}
    kept = {i for start, end in used[record[0]] for i in range(start, end)}
    return bytes(byte for i, byte in enumerate(record) if i not in kept)


def test_N_BUR_5_the_padding_of_every_result_record_is_zero(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    """A result contains no byte of the driver's memory, whatever the ring contained before (BUR-11)."""
    dirt = bytes([0xFF]) * (RECORD_BYTES * 1024)
    assert client.results.write(dirt)
    assert client.results.drain() == 1024
    serve_again = serve(client, form(prepared(ADD)))
    records = split(client.call(packet_for(ADD, measure=MeasureTiming.YES))) + split(client.call(BAD_RECORDS[0]))
    assert len(records) == 4 + 2
    assert [padding(record).strip(b"\0") for record in records] == [b""] * 6
    assert serve_again.last_failure.sequence == 2


# ------------------------------------------------------------------------------------------------ times


def test_TIM_3_times_that_were_not_requested_are_not_available(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert client.execute(packet_for(ADD, measure=MeasureTiming.NO)).timing == NO_TIMING


def test_TIM_4_requested_times_are_reported_and_the_driver_s_includes_the_device_s(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    begin = time.monotonic_ns()
    timing = client.execute(packet_for(ADD, measure=MeasureTiming.YES)).timing
    assert 0 <= timing.time_on_device_ns <= timing.time_in_driver_ns <= time.monotonic_ns() - begin


def test_TIM_4_requesting_times_occasionally_changes_no_other_result(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    requested = [MeasureTiming.NO, MeasureTiming.YES, MeasureTiming.NO, MeasureTiming.YES]
    results = [client.execute(packet_for(ADD, measure=measure)) for measure in requested]
    assert [result.timing != NO_TIMING for result in results] == [False, True, False, True]
    assert {result.output_shapes for result in results} == {(OutputShape((4,)),)}


def test_TIM_3_a_failed_execution_has_no_times(client: BurstClient, serve: Serve, form: Form) -> None:
    serve(client, form(prepared(ADD)))
    client.on_get_memories = lambda _slots: raise_error(InvalidArgument("no such slot"))
    assert_failed(client.execute(packet_for(ADD, measure=MeasureTiming.YES)))


def test_TIM_6_the_driver_s_time_begins_when_the_request_is_dequeued(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    fetched: list[int] = []

    def slowly(slots: Sequence[int]) -> list[Memory]:
        begin = time.monotonic_ns()
        while time.monotonic_ns() - begin < 2_000_000:
            pass
        fetched.append(time.monotonic_ns() - begin)
        return client.known(slots)

    client.on_get_memories = slowly
    serve(client, form(prepared(ADD)))
    timing = client.execute(packet_for(ADD, measure=MeasureTiming.YES)).timing
    assert timing.time_in_driver_ns >= fetched[0]
    assert timing.time_on_device_ns < fetched[0] + timing.time_in_driver_ns


def test_the_stages_of_an_execution_are_in_the_statistics_in_order(
    client: BurstClient, serve: Serve, adding: tuple[Memory, Memory], resources: ExitStack
) -> None:
    serve(client, prepared(ADD))
    slots = StatsArea.over(client.results.stats_view)
    resources.callback(slots.close)
    client.execute(BAD_RECORDS[0])
    client.execute(packet_for(ADD, measure=MeasureTiming.YES))
    told = slots.read()
    assert (told.sequence, told.executions, told.failures) == (2, 1, 1)
    times = [
        told.request_received_ns,
        told.memory_ready_ns,
        told.engine_begin_ns,
        told.engine_end_ns,
        told.result_sent_ns,
    ]
    assert times == sorted(times)
    assert 0 < told.timing.time_on_device_ns <= told.timing.time_in_driver_ns
    client.execute(ADD_PACKET)
    assert slots.read().timing.time_on_device_ns == NO_TIME


# ------------------------------------------------------------------------------------------------ memory slots


def test_BUR_12_unknown_slots_are_requested_once_and_known_ones_never_again(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    client.give(2, 16)
    serve(client, form(prepared(ADD)))
    for slots in [(0, 1), (0, 1), (0, 2), (0, 1)]:
        assert client.execute(packet_for(ADD, slots)).status is ErrorStatus.NONE
    assert client.requested_slots == [[0, 1], [2]]


def test_BUR_12_a_freed_slot_is_requested_again(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    client.execute(ADD_PACKET)
    server.free_memory(1)
    assert_usable(client, adding[1])
    assert client.requested_slots == [[0, 1], [1]]


def test_BUR_12_N_REQ_4_freeing_an_unknown_slot_or_one_twice_has_no_effect(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    client.execute(ADD_PACKET)
    for slot in (1, 1, 99, -1, 2**31 - 1):
        server.free_memory(slot)
    assert_usable(client, adding[1])


def test_a_reused_slot_is_read_from_its_new_memory(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    client.execute(ADD_PACKET)
    server.free_memory(0)
    fresh = client.give(0, 80)
    np.frombuffer(fresh.view, np.float32)[:] = 3
    assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
    assert floats(adding[1]) == [6.0] * 4


def test_a_slot_whose_memory_was_replaced_is_bound_again(
    client: BurstClient, serve: Serve, adding: tuple[Memory, Memory], resources: ExitStack
) -> None:
    executor = CachingBurstExecutor(prepared(ADD))
    serve(client, executor)
    assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
    other = resources.enter_context(Memory.create(models.pool_bytes(ADD)[1]))
    executor.add_cache_entry(Memory.adopt(os.dup(other.fileno())), 1)  # slot 1 is the output's
    assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
    assert floats(other) == floats(adding[1])


@pytest.mark.parametrize("slot", [0, 1], ids=["input", "output"])
def test_a_slot_that_is_reused_for_smaller_memory_is_rejected(
    slot: int, client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    """A cached request is validated again after a slot has changed."""
    server = serve(client, form(prepared(ADD)))
    assert client.execute(ADD_PACKET).status is ErrorStatus.NONE
    server.free_memory(slot)
    client.give(slot, 8)
    assert client.execute(ADD_PACKET) == ResultPacket(ErrorStatus.INVALID_ARGUMENT, (), NO_TIMING)
    assert "N-RQX-3" in server.last_failure.message


def test_an_output_slot_of_read_only_memory_is_rejected(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    client.give(4, 16, one_writer=True)
    assert client.execute(packet_for(ADD, (0, 4))).status is ErrorStatus.INVALID_ARGUMENT
    assert_usable(client, adding[1])


def test_N_BUX_6_a_slot_that_is_freed_while_others_are_fetched_is_requested_again(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    """The client frees slots over another channel, so this may happen at any step of a request (N-BUX-6)."""
    server = serve(client, form(prepared(ADD)))
    client.execute(packet_for(ADD, (0, 1)))
    client.give(2, 16)

    def free_the_other(slots: Sequence[int]) -> list[Memory]:
        server.free_memory(0)
        return client.known(slots)

    client.on_get_memories = free_the_other
    assert_failed(client.execute(packet_for(ADD, (0, 2))))
    client.on_get_memories = client.known
    assert client.execute(packet_for(ADD, (0, 2))).status is ErrorStatus.NONE
    assert client.requested_slots == [[0, 1], [2], [0]]


@pytest.fixture
def held() -> Held:
    return Held(ADD)


def test_BUR_21_N_BUX_6_memory_that_is_freed_while_an_execution_uses_it_stays_mapped_for_it(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory], held: Held
) -> None:
    server = serve(client, form(DriverPreparedModel(ADD, held)))
    assert client.requests.send(ADD_PACKET)
    assert held.begun.wait(LIMIT_S)
    server.free_memory(0)
    server.free_memory(1)
    held.go.set()
    assert client.receive()[12:16] == bytes(4)  # status NONE
    assert floats(adding[1]) == SUM
    assert_usable(client, adding[1])
    assert client.requested_slots == [[0, 1], [0, 1]]


def test_N_BUX_6_slots_that_are_freed_continuously_change_no_result(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory], start: Callable[..., Future[Any]]
) -> None:
    server = serve(client, form(prepared(ADD)))
    together = threading.Barrier(2, timeout=LIMIT_S)

    def free() -> None:
        for _ in range(100):
            together.wait()
            server.free_memory(0)
            server.free_memory(1)
            together.wait()

    freeing = start(free)
    with aborting(together):
        for _ in range(100):
            adding[1].view[:] = bytes(adding[1].size_bytes)
            together.wait()
            result = client.execute(ADD_PACKET)
            together.wait()
            if result.status is ErrorStatus.NONE:
                assert floats(adding[1]) == SUM
            else:
                assert result == ResultPacket(ErrorStatus.INVALID_ARGUMENT, (), NO_TIMING)
                assert floats(adding[1]) == [0.0] * 4
    assert freeing.result(LIMIT_S) is None
    assert (
        len(client.requested_slots) >= 50
    )  # of two executions, one begins without a slot, or loses one before it looks
    assert_usable(client, adding[1])


@pytest.mark.parametrize("status", [s for s in ErrorStatus if s not in (ErrorStatus.NONE, ErrorStatus.DEAD_OBJECT)])
def test_N_BUX_5_the_result_has_the_client_s_error_and_no_memory_is_kept(
    status: ErrorStatus, client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    client.on_get_memories = lambda _slots: raise_error(error_for_status(status, "says the client"))
    result = client.execute(ADD_PACKET)
    assert_failed(result)
    assert result.status == (status if status <= 4 else ErrorStatus.GENERAL_FAILURE)  # HIDL has no later ones
    assert server.last_failure.status is status
    assert server.last_failure.message == "says the client"
    client.on_get_memories = client.known
    assert_usable(client, adding[1])
    assert client.requested_slots == [[0, 1], [0, 1]]


@pytest.mark.parametrize("given", [[], [0], [0, 1, 1]], ids=["none", "fewer", "more"])
def test_N_BUX_5_a_wrong_number_of_memories_is_a_failure_and_none_is_kept(
    given: list[int], client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    made: list[Memory] = []

    def reply(_slots: Sequence[int]) -> list[Memory]:
        made.extend(client.known(given))
        return list(made)

    client.on_get_memories = reply
    server = serve(client, form(prepared(ADD)))
    assert client.execute(ADD_PACKET) == FAILURE
    assert f"the client gave {len(given)}" in server.last_failure.message
    assert all(memory.closed for memory in made)
    client.on_get_memories = client.known
    assert_usable(client, adding[1])
    assert client.requested_slots == [[0, 1], [0, 1]]


# ------------------------------------------------------------------------------------------------ closing


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nnfmq-burst"]


def test_BUR_14_a_burst_has_one_listener_thread_which_ends_with_it(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    client.execute(ADD_PACKET)
    assert len(listeners()) == 1
    server.close()
    assert listeners() == []


@pytest.mark.parametrize("window_us", [0, 60_000_000], ids=["asleep", "polling"])
def test_closing_ends_a_listener_that_waits(window_us: int, client: BurstClient, serve: Serve) -> None:
    server = serve(client, Summing(), polling_window_us=window_us)
    begin = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - begin < 5
    assert listeners() == []


def test_a_burst_is_closed_at_the_end_of_its_with_block(client: BurstClient) -> None:
    with BurstServer.create(client.get_memories, *client.server_ends(), Summing()):
        assert len(listeners()) == 1
    assert listeners() == []


def test_closing_waits_for_a_running_execution_and_its_result_is_sent(
    client: BurstClient,
    serve: Serve,
    form: Form,
    adding: tuple[Memory, Memory],
    held: Held,
    start: Callable[..., Future[Any]],
) -> None:
    server = serve(client, form(DriverPreparedModel(ADD, held)))
    assert client.requests.send(ADD_PACKET)
    assert held.begun.wait(LIMIT_S)
    closing = start(server.close)
    until(server._peer_death.is_set)
    assert not closing.done()
    held.go.set()
    assert closing.result(LIMIT_S) is None
    assert client.receive()[12:16] == bytes(4)
    assert floats(adding[1]) == SUM


def test_closing_releases_every_cached_memory(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    given: list[Memory] = []

    def remembered(slots: Sequence[int]) -> list[Memory]:
        given.extend(client.known(slots))
        return list(given)

    client.on_get_memories = remembered
    server = serve(client, form(prepared(ADD)))
    client.execute(ADD_PACKET)
    assert [memory.closed for memory in given] == [False, False]
    server.close()
    assert [memory.closed for memory in given] == [True, True]


@pytest.mark.parametrize("window_us", [0, 60_000_000], ids=["asleep", "polling"])
def test_N_BUX_4_a_peer_that_dies_before_a_request_ends_the_listener(
    window_us: int, client: BurstClient, serve: Serve
) -> None:
    server = serve(client, Summing(), polling_window_us=window_us)
    watcher.notify_peer_death(server.peer)
    until(lambda: not listeners())


def test_N_BUX_4_a_peer_that_dies_during_its_execution_ends_the_listener_after_it(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory], held: Held
) -> None:
    server = serve(client, form(DriverPreparedModel(ADD, held)))
    assert client.requests.send(ADD_PACKET)
    assert held.begun.wait(LIMIT_S)
    watcher.notify_peer_death(server.peer)
    held.go.set()
    until(lambda: not listeners())


def test_N_BUX_4_a_peer_that_dies_during_get_memories_ends_the_listener(
    client: BurstClient, serve: Serve, form: Form
) -> None:
    client.on_get_memories = lambda _slots: raise_error(DeadObject("the client is gone"))
    serve(client, form(prepared(ADD)))
    assert client.requests.send(ADD_PACKET)
    until(lambda: not listeners())
    assert client.results.available_to_read() == 0


def test_N_BUX_4_part_of_a_packet_is_a_malformed_packet_and_does_not_block(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert client.execute(ADD_PACKET[: 3 * RECORD_BYTES]) == FAILURE
    assert_usable(client, adding[1])


def impossible(queue: MessageQueue, counter: int) -> None:
    """Write a counter that no reader or writer can reach."""
    queue.memory.view[counter * 8 : counter * 8 + 8] = struct.pack("<Q", 2**40 + 1)


def test_N_BUX_3_invalid_request_counters_are_an_error_until_they_are_restored(
    client: BurstClient, serve: Serve, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, prepared(ADD))
    impossible(client.requests, WRITE_COUNTER)
    for number in range(1, 4):
        client.requests.wake_all()
        assert client.receive() == encode_result(ErrorStatus.GENERAL_FAILURE, ())
        assert server.last_failure.sequence == number
        assert "impossible" in server.last_failure.message
        until(lambda: server._requests.waiters == 1)
    client.requests.memory.view[:16] = bytes(16)
    assert_usable(client, adding[1])


def test_N_BUX_3_a_burst_with_invalid_counters_can_be_closed(client: BurstClient, serve: Serve) -> None:
    server = serve(client, Summing())
    impossible(client.requests, WRITE_COUNTER)
    client.requests.wake_all()
    client.receive()
    server.close()
    assert listeners() == []


@pytest.mark.parametrize(
    ("overlay", "published"),
    [(BAD_RECORDS[1] * 2, len(split(ADD_PACKET))), (ADD_PACKET[RECORD_BYTES:], 3), (b"\xff" * 240, 10)],
    ids=["its first records", "another packet's end, cut short", "noise"],
)
def test_N_BUX_7_two_concurrent_writers_are_detected_by_both_ends_and_the_burst_continues(
    overlay: bytes,
    published: int,
    client: BurstClient,
    serve: Serve,
    adding: tuple[Memory, Memory],
    resources: ExitStack,
) -> None:
    serve(client, prepared(ADD))
    second = resources.enter_context(server_end(client.requests))
    for queue, packet in ((client.requests, ADD_PACKET), (second, overlay)):
        begun = queue.begin_write(
            max(published, len(packet) // RECORD_BYTES)
        )  # at the same position: neither has committed
        assert begun is not None
        begun.copy_to(packet)
    client.requests.commit_write(published)
    with pytest.raises(QueueCorrupted, match="write counter"):
        second.commit_write(len(overlay) // RECORD_BYTES)
    client.requests.wake_all()
    assert_failed(decode_result(client.receive()))
    assert_usable(client, adding[1])


def test_N_BUX_7_a_write_counter_that_another_writer_sets_back_is_an_error(
    client: BurstClient, serve: Serve, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, prepared(ADD))
    assert_usable(client, adding[1])
    until(lambda: server._requests.waiters == 1)
    client.requests.memory.view[8:16] = struct.pack("<Q", RECORD_BYTES)  # where the other's first record ended
    client.requests.wake_all()
    assert_failed(decode_result(client.receive()))
    until(lambda: server._requests.waiters == 1)
    assert_usable(client, adding[1])


def test_N_BUX_7_two_threads_that_write_without_a_lock_do_not_end_the_server(
    client: BurstClient, serve: Serve, adding: tuple[Memory, Memory], resources: ExitStack, start: Callable[..., Any]
) -> None:
    server = serve(client, prepared(ADD))
    second = resources.enter_context(server_end(client.requests))

    def scribble(queue: MessageQueue) -> None:
        for _ in range(300):
            with suppress(QueueCorrupted):
                queue.send(ADD_PACKET)
            client.results.drain()

    for running in [start(scribble, queue) for queue in (client.requests, second)]:
        running.result(LIMIT_S)
    until(lambda: server._requests.waiters == 1)
    for queue in (client.requests, client.results):
        queue.memory.view[:16] = bytes(16)
    assert_usable(client, adding[1])


@pytest.mark.parametrize("also", [False, True], ids=["alone", "and of the requests"])
def test_N_BUX_3_a_client_does_not_wait_for_a_result_that_cannot_be_written(
    also: bool, client: BurstClient, serve: Serve, adding: tuple[Memory, Memory], start: Callable[..., Future[Any]]
) -> None:
    server = serve(client, prepared(ADD))
    waiting = start(client.receive)
    until(lambda: client.results.waiters)
    impossible(client.results, READ_COUNTER)
    if also:
        impossible(client.requests, WRITE_COUNTER)
        client.requests.wake_all()
    else:
        assert client.requests.send(ADD_PACKET)
    assert isinstance(waiting.exception(LIMIT_S), QueueCorrupted)  # by itself, or woken by the server
    until(lambda: "read counter" in server.last_failure.message)
    until(lambda: server._requests.waiters == 1)
    for queue in (client.requests, client.results):
        queue.memory.view[:16] = bytes(16)
    assert_usable(client, adding[1])


def test_N_BUX_7_two_writers_at_one_position_leave_one_malformed_packet(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    server = serve(client, form(prepared(ADD)))
    ours, theirs = split(ADD_PACKET), split(packet_for(models.relus_model(4)))
    for cut in range(1, len(ours)):  # one writer overtook the other there; the counter is that of the last one
        for mixed in (ours[:cut] + theirs[cut:], theirs[:cut] + ours[cut:]):
            assert client.execute(b"".join(mixed)) == FAILURE
            assert server.last_failure.status is ErrorStatus.GENERAL_FAILURE
    assert_usable(client, adding[1])


def test_N_BUX_7_a_counter_that_two_writers_have_moved_is_one_malformed_packet(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    serve(client, form(prepared(ADD)))
    assert_usable(client, adding[1])
    place = slice(WRITE_COUNTER * 8, WRITE_COUNTER * 8 + 8)
    (count,) = struct.unpack("<Q", client.requests.memory.view[place])
    client.requests.memory.view[place] = struct.pack("<Q", count + 2 * len(ADD_PACKET))  # over what neither has written
    client.requests.wake_all()
    assert client.receive() == encode_result(ErrorStatus.GENERAL_FAILURE, ())
    assert_usable(client, adding[1])


def test_N_BUX_7_packets_of_two_alternating_writers_are_each_executed_or_rejected(
    client: BurstClient, serve: Serve, form: Form, adding: tuple[Memory, Memory]
) -> None:
    rival = bursts.server_end(client.requests)  # attached before the server, so it writes at the same positions
    with rival:
        server = serve(client, form(prepared(ADD)))
        for _ in range(50):
            assert client.requests.send(ADD_PACKET)
            assert rival.send(ADD_PACKET)
            until(lambda: client.requests.available_to_read() == 0)
            until(lambda: client.results.available_to_read() > 0)
            # Two results if the server read between the writes, else one for both packets.
            assert len(client.receive()) >= 2 * RECORD_BYTES
        until(lambda: server._requests.waiters == 1)
        client.results.drain()
        assert_usable(client, adding[1])


class Broken(Summing):
    """An executor with a bug."""

    def run(self, *_: object) -> Any:
        raise RuntimeError("a bug")


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """Exceptions that ended threads; in a driver process each would end the process."""
    caught: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: caught.append(arguments.exc_value))
    return caught


def test_a_bug_of_an_executor_is_not_hidden_and_the_burst_can_be_closed(
    client: BurstClient, serve: Serve, uncaught: list[BaseException | None]
) -> None:
    server = serve(client, Broken())
    assert client.requests.send(encode_request((), (), []))
    until(lambda: uncaught)
    assert isinstance(uncaught[0], RuntimeError)
    server.close()
    assert listeners() == []
