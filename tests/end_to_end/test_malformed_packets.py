"""Malformed packets, made as the HAL's tests make them, through a worker: it replies with an error and continues.

Every kind of record is inserted and put in the place of another at every position of a request of the null model; the
tests of `serialize` do the same with longer ones.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from support.bursts import BurstClient, give_pools, packet_for, server_end, split
from support.drivers import LIMIT_S, Daemon, InThread, aborting, one, running_daemon, until
from support.models import add_model, gather_model, relus_model, request_for
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import MeasureTiming, Model, OutputShape
from nnfmq.lab import hidl
from nnfmq.serialize import messages
from nnfmq.serialize.codec import decode_result
from nnfmq.serialize.packets import DATUM_BYTES, ResultPacket

# A request of the null model: packet information, input, output, two pools, measure. Dimensions are the model's own.
INFORMATION, INPUT, OUTPUT, FIRST_POOL, SECOND_POOL, MEASURE = range(6)
RECORDS = 6

F32 = np.dtype(np.float32)
ONE, TEN = np.array([1, 2, 3, 4], F32), np.array([10, 20, 30, 40], F32)

OTHERS = {
    "packet information": struct.pack("<B3xIIII4x", 0, 10, 10, 10, 10),
    "input": struct.pack("<B3xB3xIIII", 1, 0, 0, 0, 0, 10),
    "input dimension": struct.pack("<B3xI16x", 2, 0),
    "output": struct.pack("<B3xB3xIIII", 3, 0, 0, 0, 0, 10),
    "output dimension": struct.pack("<B3xI16x", 4, 0),
    "pool": struct.pack("<B3xi16x", 5, 10),
    "measure": struct.pack("<B3xi16x", 6, 1),
    "unknown kind": struct.pack("<B23x", 7),
    "kind 255": b"\xff" * DATUM_BYTES,
}


def records_of(burst: nnfmq.Burst) -> list[bytes]:
    packet = burst._arrays.prepared[MeasureTiming.NO].packet
    return [packet[at : at + DATUM_BYTES] for at in range(0, len(packet), DATUM_BYTES)]


def result_of(burst: nnfmq.Burst, records: list[bytes]) -> ResultPacket:
    """Send records as they are, and return the result packet."""
    assert burst.channel.requests.send(b"".join(records))
    result = burst.channel.results.receive(time.monotonic_ns() + int(LIMIT_S * 1e9), 0)
    assert result is not None
    return decode_result(result)


def check_rejected(burst: nnfmq.Burst, records: list[bytes], status: ErrorStatus) -> None:
    result = result_of(burst, records)
    assert result.status is status
    assert result.output_shapes == ()
    assert burst.execute(one(2), timeout=LIMIT_S) == (one(2),)


def resized(records: list[bytes]) -> list[bytes]:
    """Return the records with the packet size that they should have."""
    first = bytearray(records[0])
    struct.pack_into("<I", first, 4, len(records))
    return [bytes(first), *records[1:]]


def poked(record: bytes, offset: int, code: str, value: int) -> bytes:
    changed = bytearray(record)
    struct.pack_into(code, changed, offset, value)
    return bytes(changed)


def test_the_packet_has_the_layout_that_these_tests_assume(burst: nnfmq.Burst) -> None:
    records = records_of(burst)
    assert [record[0] for record in records] == [0, 1, 3, 5, 5, 6]
    assert result_of(burst, records).status is ErrorStatus.NONE


@pytest.mark.parametrize("index", range(RECORDS))
@pytest.mark.parametrize("fixed", [False, True], ids=["size as it was", "size as it is"])
def test_N_BUR_1_a_worker_rejects_a_request_without_one_of_its_records(
    burst: nnfmq.Burst, index: int, fixed: bool
) -> None:
    records = records_of(burst)
    del records[index]
    check_rejected(burst, resized(records) if fixed else records, ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("index", range(RECORDS + 1))
def test_N_BUR_2_a_worker_rejects_a_request_with_one_more_record(burst: nnfmq.Burst, index: int) -> None:
    good = records_of(burst)
    for inserted in OTHERS.values():
        check_rejected(burst, resized([*good[:index], inserted, *good[index:]]), ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("index", range(RECORDS))
def test_N_BUR_3_a_worker_rejects_a_request_with_another_record_in_its_place(burst: nnfmq.Burst, index: int) -> None:
    good = records_of(burst)
    for replaced in OTHERS.values():
        if replaced[0] != good[index][0]:
            check_rejected(burst, [*good[:index], replaced, *good[index + 1 :]], ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize(
    "offset", [4, 8, 12, 16], ids=["N-BUX-1 packet size", "N-BUX-2 inputs", "N-BUX-2 outputs", "N-BUX-2 pools"]
)
@pytest.mark.parametrize("value", [0, 1_000_000, 2**32 - 1])
def test_a_worker_rejects_counts_that_do_not_match_the_packet(burst: nnfmq.Burst, offset: int, value: int) -> None:
    records = records_of(burst)
    records[INFORMATION] = poked(records[INFORMATION], offset, "<I", value)
    check_rejected(burst, records, ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("argument", [INPUT, OUTPUT], ids=["input", "output"])
@pytest.mark.parametrize("count", [1, 5, 2**32 - 1])
def test_N_BUX_2_a_worker_rejects_more_dimensions_than_the_packet_has(
    burst: nnfmq.Burst, argument: int, count: int
) -> None:
    records = records_of(burst)
    records[argument] = poked(records[argument], 20, "<I", count)
    check_rejected(burst, records, ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("argument", [INPUT, OUTPUT], ids=["input", "output"])
@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 2), (8, 2**32 - 1), (12, 1), (12, 2**32 - 4), (16, 0), (16, 5), (16, 2**32 - 1)],
    ids=["pool 2", "last pool", "offset 1", "last offset", "length 0", "length 5", "maximum length"],
)
def test_a_worker_rejects_a_well_formed_request_that_its_model_or_memory_does_not_allow(
    burst: nnfmq.Burst, argument: int, offset: int, value: int
) -> None:
    records = records_of(burst)
    records[argument] = poked(records[argument], offset, "<I", value)
    check_rejected(burst, records, ErrorStatus.INVALID_ARGUMENT)


@pytest.mark.parametrize("slot", [-1, 7, 2**31 - 1])
def test_a_worker_rejects_a_slot_that_the_client_did_not_assign(burst: nnfmq.Burst, slot: int) -> None:
    records = records_of(burst)
    records[SECOND_POOL] = poked(records[SECOND_POOL], 4, "<i", slot)
    check_rejected(burst, records, ErrorStatus.INVALID_ARGUMENT)


def test_two_requests_in_the_ring_together_are_rejected_as_one(burst: nnfmq.Burst) -> None:
    check_rejected(burst, records_of(burst) * 2, ErrorStatus.GENERAL_FAILURE)


def test_a_ring_full_of_random_bytes_is_rejected(burst: nnfmq.Burst) -> None:
    check_rejected(burst, [OTHERS["kind 255"]] * burst.channel.requests.count, ErrorStatus.GENERAL_FAILURE)


def test_BUR_17_a_packet_that_does_not_fit_in_the_ring_uses_the_synchronous_path(burst: nnfmq.Burst) -> None:
    burst.channel.requests.send = lambda _packet: False
    sent = burst.channel.requests.counters()
    assert burst.execute(one(2)) == (one(2),)
    assert burst.channel.requests.counters() == sent


IMPOSSIBLE = {"far ahead": 1 << 40, "no whole record": 25, "negative": 2**64 - DATUM_BYTES}
CORRUPTED = (nnfmq.QueueCorrupted, nnfmq.GeneralFailure, nnfmq.ProtocolError)
READ_COUNTER, WRITE_COUNTER = slice(0, 8), slice(8, 16)  # where libfmq has them


@pytest.mark.parametrize("counter", [READ_COUNTER, WRITE_COUNTER], ids=["read", "write"])
@pytest.mark.parametrize("value", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
@pytest.mark.parametrize("ring", ["requests", "results"])
def test_N_BUX_3_impossible_counters_end_only_the_burst(
    model: nnfmq.PreparedModel, ring: str, counter: slice, value: int
) -> None:
    for executed_before in (0, 1):
        with model.burst() as burst:
            for _ in range(executed_before):
                burst.execute(one(1))
            queue = getattr(burst.channel, ring)
            queue.memory.view[counter] = struct.pack("<Q", value)
            queue.wake_all()
            for _ in range(2):  # found by the client, or reported by the driver, and never a missed deadline
                # A driver that was awake reports the counters before the request, and once more after it: two packets.
                with pytest.raises(CORRUPTED, match=r"impossible in a ring|the 4 records received"):
                    burst.execute(one(2), timeout=LIMIT_S)
    assert model.execute(one(3)) == (one(3),)
    with model.burst() as another:
        assert another.execute(one(4), timeout=LIMIT_S) == (one(4),)


# ------------------------------------------------------------------------------------------------ the caller's queues


def sent(status: ErrorStatus, *shapes: OutputShape) -> ResultPacket:
    return ResultPacket(status, shapes, NO_TIMING)


class Hidl:
    """A burst over queues that this test creates, as HIDL configures it. `requested` has the driver's requests."""

    def __init__(
        self, daemon: Daemon, model: Model, result_records: int, stack: ExitStack, name: str = "reference"
    ) -> None:
        self.client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.2"))
        self.requested: list[list[int]] = []
        self.before_reply: Callable[[], object] = lambda: None
        self.queues = stack.enter_context(BurstClient.create(result_records=result_records))
        self.model, self.pools = model, give_pools(self.queues, model)
        calls: Queue[tuple[ErrorStatus, Any]] = Queue()
        device = hidl.IDevice(self.client, name)
        device.prepareModel_1_2(model, 1, [], [], bytes(32), lambda *given: calls.put(given))
        status, self._prepared = calls.get(timeout=LIMIT_S)
        assert status is ErrorStatus.NONE
        stack.callback(self._prepared.close)

    def getMemories(self, slots: list[int]) -> tuple[ErrorStatus, list[Memory]]:
        """Return the memories of slots that the driver requests (IBurstCallback)."""
        self.requested.append(slots)
        self.before_reply()
        return ErrorStatus.NONE, [self.pools[slot] for slot in slots]

    def floats(self) -> list[Any]:
        """Return both inputs and the output of an ADD of four floats, in the memory of its slots."""
        source, sink = (pool.view for pool in self.pools)
        return [np.frombuffer(*place) for place in ((source, F32, 4), (source, F32, 4, 64), (sink, F32, 4))]

    def begin(self, stack: ExitStack) -> Any:
        """Configure the burst, and return what HIDL has of it."""
        status, context = self._prepared.configureExecutionBurst(self, self.queues.requests, self.queues.results)
        assert status is ErrorStatus.NONE
        stack.callback(context.close)
        return context


@pytest.mark.parametrize("measure", MeasureTiming)
def test_N_BUR_4_a_result_longer_than_its_queue_is_an_error_without_shapes_and_times(
    daemon: Daemon, resources: ExitStack, measure: MeasureTiming
) -> None:
    model = relus_model(4)  # 10 records
    made = Hidl(daemon, model, 8, resources)
    made.begin(resources)
    for _ in range(2):
        result = made.queues.execute(packet_for(model, measure=measure))
        assert (result.status, result.output_shapes, result.timing) == (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)
    long = Hidl(daemon, model, 1024, resources)
    long.begin(resources)
    assert long.queues.execute(packet_for(model, measure=measure)).status is ErrorStatus.NONE


USED = {0: [(0, 1), (8, 20)], 1: [(0, 1), (8, 9), (12, 16)], 2: [(0, 1), (8, 12)], 3: [(0, 1), (8, 24)]}


def test_N_BUR_5_the_padding_of_every_result_record_is_zero(daemon: Daemon, resources: ExitStack) -> None:
    made = Hidl(daemon, add_model(), 1024, resources)
    assert made.queues.results.write(b"\xff" * (DATUM_BYTES * 1024))  # what lay there before
    assert made.queues.results.drain() == 1024
    made.begin(resources)
    records = split(made.queues.call(packet_for(made.model, measure=MeasureTiming.YES)))
    records += split(made.queues.call(OTHERS["unknown kind"]))
    assert [record[0] for record in records] == [0, 1, 2, 3, 0, 3]
    for record in records:
        used = {place for start, end in USED[record[0]] for place in range(start, end)}
        assert not any(byte for place, byte in enumerate(record) if place not in used)
    assert made.queues.execute(packet_for(made.model)).status is ErrorStatus.NONE


def test_TIM_3_a_result_packet_has_times_only_of_a_measured_success(daemon: Daemon, resources: ExitStack) -> None:
    adding, gathering = (Hidl(daemon, model, 1024, resources) for model in (add_model(), gather_model()))
    for made in (adding, gathering):
        made.begin(resources)
    for _ in range(2):
        assert adding.queues.execute(packet_for(adding.model)).timing == NO_TIMING
        measured = adding.queues.execute(packet_for(adding.model, measure=MeasureTiming.YES))
        assert 0 <= measured.timing.time_on_device_ns <= measured.timing.time_in_driver_ns
    indices = request_for(gathering.model, ()).inputs[1].location
    np.frombuffer(gathering.pools[0].view, np.int32, 1, indices.offset)[:] = 9  # of four values
    for measure in MeasureTiming:
        assert gathering.queues.execute(packet_for(gathering.model, measure=measure)) == sent(
            ErrorStatus.GENERAL_FAILURE
        )


def test_N_REQ_4_freeing_a_slot_twice_or_an_unknown_slot_has_no_effect(daemon: Daemon, resources: ExitStack) -> None:
    made = Hidl(daemon, add_model(), 1024, resources)
    context = made.begin(resources)
    for slots in ((), (1, 1), (7, -1, 2**31 - 1), (0, 1, 0, 1)):
        for slot in slots:
            context.freeMemory(slot)
        assert made.queues.execute(packet_for(made.model)).status is ErrorStatus.NONE


# ------------------------------------------------------------------------------------------------ at the same time


WAITING = """
import os
import time

import numpy as np

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure
from nnfmq.driver.devices.device import DeviceBase


class Waiting(DeviceBase):  # writes -1 to its output, and computes when the last float of input 1 is not 0
    name = "test-waiting"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return Program(interpreter.prepare(model))


class Program:
    def __init__(self, program):
        self.program = program

    def bind(self, inputs, outputs):
        return Execution(self.program.bind(inputs, outputs), inputs[1], np.frombuffer(outputs[0], np.float32))


class Execution:
    def __init__(self, execution, gate, begun):
        self.execution, self.gate, self.begun = execution, gate, begun

    def run(self, options):
        self.begun[:] = -1
        end = time.monotonic() + 20
        while not self.gate[-1]:
            os.sched_yield()
            if time.monotonic() > end:
                raise GeneralFailure("nobody has written to input 1")
        return self.execution.run(options)
"""


@pytest.fixture
def waiting(tmp_path: Path, folder: Path) -> Iterator[Daemon]:
    """Return a driver with the device `test-waiting`."""
    add_plugin(tmp_path, "waiting", WAITING, {"test-waiting": "waiting:Waiting"}, "nnfmq.devices")
    with running_daemon(folder / "d.sock", environment=path_with(tmp_path)) as daemon:
        yield daemon


def test_N_BUX_6_slots_that_are_freed_while_an_execution_uses_them_change_no_result_and_are_requested_again(
    waiting: Daemon, resources: ExitStack
) -> None:
    made = Hidl(waiting, add_model(), 1024, resources, "test-waiting")
    context = made.begin(resources)
    first, second, total = made.floats()
    for times in (1, 2, 3):
        first[:], second[:], total[:] = ONE * times, 0, 0
        assert made.queues.requests.send(packet_for(made.model))
        until(lambda: total[0] == -1, "the execution has begun")
        for slot in (0, 1):
            context.freeMemory(slot)
        assert made.requested == [[0, 1]] * times
        second[:3] = TEN[:3]
        second[3] = TEN[3]  # the execution goes on, and reads and writes memory that is in no slot
        assert decode_result(made.queues.receive()) == sent(ErrorStatus.NONE, OutputShape((4,)))
        assert total.tobytes() == (ONE * times + TEN).tobytes()


def test_N_BUX_6_a_slot_that_is_freed_while_another_is_fetched_is_requested_by_the_next_execution(
    daemon: Daemon, resources: ExitStack
) -> None:
    made = Hidl(daemon, add_model(), 1024, resources)
    context = made.begin(resources)
    first, second, total = made.floats()
    first[:], second[:] = ONE, TEN
    packet = packet_for(made.model)
    assert made.queues.execute(packet) == sent(ErrorStatus.NONE, OutputShape((4,)))
    context.freeMemory(1)
    total[:] = 0
    # Sent before the reply with slot 1: the driver has neither when it gets that.
    made.before_reply = lambda: made.client.connection.send(messages.FreeMemory(context._burst_id, 0))
    assert made.queues.execute(packet) == sent(ErrorStatus.INVALID_ARGUMENT)
    assert not total.any()
    made.before_reply = lambda: None
    assert made.queues.execute(packet) == sent(ErrorStatus.NONE, OutputShape((4,)))
    assert total.tobytes() == (ONE + TEN).tobytes()
    assert made.requested == [[0, 1], [1], [0]]


def test_N_BUX_6_slots_that_are_freed_at_any_time_change_no_result(daemon: Daemon, resources: ExitStack) -> None:
    made = Hidl(daemon, add_model(), 1024, resources)
    context = made.begin(resources)
    first, second, total = made.floats()
    second[:] = TEN
    together = threading.Barrier(2, timeout=LIMIT_S)

    def free() -> None:
        for _ in range(100):
            together.wait()
            for slot in (0, 1):
                context.freeMemory(slot)
            together.wait()

    freeing = InThread.start(free)
    with aborting(together):
        for number in range(100):
            first[:], total[:] = ONE * number, 0
            together.wait()
            result = made.queues.execute(packet_for(made.model))
            together.wait()
            if result.status is ErrorStatus.NONE:
                assert total.tobytes() == (ONE * number + TEN).tobytes()
            else:
                assert result == sent(ErrorStatus.INVALID_ARGUMENT) and not total.any()
    assert freeing.wait().error is None
    assert len(made.requested) >= 50  # of two executions, one begins without a slot, or loses one before it looks


def test_N_BUX_7_two_concurrent_writers_are_detected_and_the_burst_continues(
    burst: nnfmq.Burst, resources: ExitStack
) -> None:
    packet = b"".join(records_of(burst))
    second = resources.enter_context(server_end(burst.channel.requests))
    for queue, written in ((burst.channel.requests, packet), (second, OTHERS["kind 255"] * RECORDS)):
        begun = queue.begin_write(RECORDS)  # at the same place: nobody has committed
        assert begun is not None
        begun.copy_to(written)
    burst.channel.requests.commit_write(RECORDS)
    with pytest.raises(nnfmq.QueueCorrupted, match="write counter"):
        second.commit_write(RECORDS)
    burst.channel.requests.wake_all()
    result = burst.channel.results.receive(time.monotonic_ns() + int(LIMIT_S * 1e9), 0)
    assert result is not None and decode_result(result).status is ErrorStatus.GENERAL_FAILURE
    assert burst.execute(one(2), timeout=LIMIT_S) == (one(2),)
