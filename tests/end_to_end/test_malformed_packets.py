"""Ill-formed packets, made as the HAL's own tests make them, through a real worker: it answers, and serves on.

This is a sample; every record at every place is tried in the tests of `serialize`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
from support.drivers import LIMIT_S, one

import nnfmq
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import MeasureTiming
from nnfmq.serialize.codec import decode_result
from nnfmq.serialize.datum import DATUM_BYTES
from nnfmq.serialize.packet import ResultPacket

# A request of the null model: packet information, input, output, two pools, measure. Dimensions are the model's own.
INFORMATION, INPUT, OUTPUT, FIRST_POOL, SECOND_POOL, MEASURE = range(6)
RECORDS = 6

OTHERS = {
    "packet information": struct.pack("<B3xIIII4x", 0, 10, 10, 10, 10),
    "input": struct.pack("<B3xB3xIIII", 1, 0, 0, 0, 0, 10),
    "input dimension": struct.pack("<B3xI16x", 2, 0),
    "output": struct.pack("<B3xB3xIIII", 3, 0, 0, 0, 0, 10),
    "output dimension": struct.pack("<B3xI16x", 4, 0),
    "measure": struct.pack("<B3xi16x", 6, 1),
    "unknown kind": struct.pack("<B23x", 7),
    "kind 255": b"\xff" * DATUM_BYTES,
}


@pytest.fixture
def burst(model: nnfmq.PreparedModel) -> Iterator[nnfmq.Burst]:
    with model.burst() as made:
        made.execute(one(1))
        yield made


def records_of(burst: nnfmq.Burst) -> list[bytes]:
    packet = burst._packets[MeasureTiming.NO]
    return [packet[at : at + DATUM_BYTES] for at in range(0, len(packet), DATUM_BYTES)]


def answer_to(burst: nnfmq.Burst, records: list[bytes]) -> ResultPacket:
    """Send records as they are, and return the result packet."""
    assert burst._requests.send(b"".join(records))
    answer = burst._results.receive(time.monotonic_ns() + int(LIMIT_S * 1e9), 0)
    assert answer is not None
    return decode_result(answer)


def check_refused(burst: nnfmq.Burst, records: list[bytes], status: ErrorStatus) -> None:
    answer = answer_to(burst, records)
    assert answer.status is status
    assert answer.output_shapes == ()
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


def test_the_packet_is_laid_out_as_this_file_believes(burst: nnfmq.Burst) -> None:
    records = records_of(burst)
    assert [record[0] for record in records] == [0, 1, 3, 5, 5, 6]
    assert answer_to(burst, records).status is ErrorStatus.NONE


@pytest.mark.parametrize("index", range(RECORDS))
@pytest.mark.parametrize("fixed", [False, True], ids=["size as it was", "size as it is"])
def test_N_BUR_1_a_worker_refuses_a_request_without_one_of_its_records(
    burst: nnfmq.Burst, index: int, fixed: bool
) -> None:
    records = records_of(burst)
    del records[index]
    check_refused(burst, resized(records) if fixed else records, ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("index", [0, 2, RECORDS])
def test_N_BUR_2_a_worker_refuses_a_request_with_one_more_record(burst: nnfmq.Burst, index: int, kind: str) -> None:
    records = records_of(burst)
    records.insert(index, OTHERS[kind])
    check_refused(burst, resized(records), ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("index", [INFORMATION, INPUT, SECOND_POOL])
def test_N_BUR_3_a_worker_refuses_a_request_with_another_record_in_its_place(
    burst: nnfmq.Burst, index: int, kind: str
) -> None:
    records = records_of(burst)
    records[index] = OTHERS[kind]
    check_refused(burst, records, ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("offset", [4, 8, 12, 16], ids=["packet size", "inputs", "outputs", "pools"])
@pytest.mark.parametrize("value", [0, 1_000_000, 2**32 - 1])
def test_a_worker_refuses_counts_that_are_not_those_of_the_packet(burst: nnfmq.Burst, offset: int, value: int) -> None:
    records = records_of(burst)
    records[INFORMATION] = poked(records[INFORMATION], offset, "<I", value)
    check_refused(burst, records, ErrorStatus.GENERAL_FAILURE)


@pytest.mark.parametrize("argument", [INPUT, OUTPUT], ids=["input", "output"])
@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 2), (8, 2**32 - 1), (12, 1), (12, 2**32 - 4), (16, 0), (16, 5), (16, 2**32 - 1)],
    ids=["pool 2", "last pool", "offset 1", "last offset", "length 0", "length 5", "greatest length"],
)
def test_a_worker_refuses_a_well_formed_request_that_its_model_or_memory_does_not_allow(
    burst: nnfmq.Burst, argument: int, offset: int, value: int
) -> None:
    records = records_of(burst)
    records[argument] = poked(records[argument], offset, "<I", value)
    check_refused(burst, records, ErrorStatus.INVALID_ARGUMENT)


@pytest.mark.parametrize("slot", [-1, 7, 2**31 - 1])
def test_a_worker_refuses_a_slot_that_the_client_does_not_know(burst: nnfmq.Burst, slot: int) -> None:
    records = records_of(burst)
    records[SECOND_POOL] = poked(records[SECOND_POOL], 4, "<i", slot)
    check_refused(burst, records, ErrorStatus.INVALID_ARGUMENT)


def test_two_requests_at_once_are_refused_as_one(burst: nnfmq.Burst) -> None:
    check_refused(burst, records_of(burst) * 2, ErrorStatus.GENERAL_FAILURE)


def test_a_ring_full_of_noise_is_refused(burst: nnfmq.Burst) -> None:
    check_refused(burst, [OTHERS["kind 255"]] * burst._requests.count, ErrorStatus.GENERAL_FAILURE)


def test_BUR_17_a_packet_for_which_there_is_no_room_goes_the_ordinary_way(burst: nnfmq.Burst) -> None:
    burst._requests.send = lambda _packet: False
    sent = burst._requests.counters()
    assert burst.execute(one(2)) == (one(2),)
    assert burst._requests.counters() == sent


IMPOSSIBLE = {"far ahead": 1 << 40, "no whole record": 25, "negative": 2**64 - DATUM_BYTES}
READ_COUNTER, WRITE_COUNTER = slice(0, 8), slice(8, 16)  # where libfmq has them


@pytest.mark.parametrize("counter", [READ_COUNTER, WRITE_COUNTER], ids=["read", "write"])
@pytest.mark.parametrize("value", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
@pytest.mark.parametrize("ring", ["_requests", "_results"])
def test_N_BUX_3_impossible_counters_end_the_burst_and_not_the_worker(
    model: nnfmq.PreparedModel, ring: str, counter: slice, value: int
) -> None:
    with model.burst() as burst:
        queue = getattr(burst, ring)
        queue.memory.view[counter] = struct.pack("<Q", value)
        queue.wake_all()
        with pytest.raises(nnfmq.NnfmqError):
            burst.execute(one(2), timeout=0.2)
    assert model.execute(one(3)) == (one(3),)
    with model.burst() as another:
        assert another.execute(one(4), timeout=LIMIT_S) == (one(4),)
