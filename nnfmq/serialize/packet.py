"""A burst's request or result as one packet of 24-byte records: values in, bytes out, and back.

    request: packetInformation, (input, its dimensions)*, (output, its dimensions)*, poolIdentifier*, measureTiming
    result:  packetInformation, (operand, its dimensions)*, executionTiming

A packet says its own length in records first; the reader is given everything that was in the ring at that moment, and
the two must agree. The decoder is one bounded cursor: a kind out of order, a count larger than the records that are
left, a field outside its range or a record left over makes the whole packet ill-formed (ProtocolError, with the byte
offset); padding is ignored. The encoder packs a whole packet in one call, by a format put together from the same
tables, once for each form. The hot path repeats itself: RequestTemplate keeps a packet ready and patches it, Decoder
knows the last packet again. What a well-formed packet means for a model is judged by `validation` and by the burst's
slots. DataLocation.padding does not exist in HIDL: it is not sent and reads back as 0. This file specifies `_codec`,
which is the same, compiled; `codec` says which of them runs. Spec: HAL 1.2 types.hal and the HAL's burst utils.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.hal.types import NO_TIME, NO_TIMING, DataLocation, MeasureTiming, OutputShape, RequestArgument, Timing
from nnfmq.serialize.datum import (
    DATUM_BYTES,
    EXECUTION_TIMING,
    INPUT_DIMENSION,
    INPUT_OPERAND,
    MEASURE_TIMING,
    OUTPUT_DIMENSION,
    OUTPUT_OPERAND,
    POOL_IDENTIFIER,
    REQUEST_PACKET,
    RESULT_DIMENSION,
    RESULT_OPERAND,
    RESULT_PACKET,
    Variant,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

NO_TIME_US = 2**64 - 1  # HIDL: a duration that is not available
_LAST_HIDL_STATUS = ErrorStatus.INVALID_ARGUMENT  # HAL 1.0 knows 0 to 4; a 1.2 burst sends the later ones as 2
_LAST_RECORD = 1  # measureTiming or executionTiming, which no count includes
REMEMBERED_BYTES = 4096  # a Decoder keeps no packet above this size: the sender chooses it


@dataclass(frozen=True, slots=True)
class RequestPacket:
    """A decoded request; `slots[i]` stands for the memory of pool i, and location.pool_index counts in `slots`."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int, ...]
    measure: MeasureTiming


@dataclass(frozen=True, slots=True)
class ResultPacket:
    """A decoded result, as sent: shapes or timing beside an error status are the reader's to drop."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing


# ---------------------------------------------------------------------------------------------- encode


@lru_cache(maxsize=256)
def _request_form(input_ranks: tuple[int, ...], output_ranks: tuple[int, ...], pools: int) -> struct.Struct:
    """Return the layout of a whole request packet whose arguments have these ranks."""
    runs = [(REQUEST_PACKET, 1)]
    for rank in input_ranks:
        runs += [(INPUT_OPERAND, 1), (INPUT_DIMENSION, rank)]
    for rank in output_ranks:
        runs += [(OUTPUT_OPERAND, 1), (OUTPUT_DIMENSION, rank)]
    return _whole(*runs, (POOL_IDENTIFIER, pools), (MEASURE_TIMING, 1))


@lru_cache(maxsize=256)
def _result_form(ranks: tuple[int, ...]) -> struct.Struct:
    """Return the layout of a whole result packet whose outputs have these ranks."""
    runs = [(RESULT_PACKET, 1)]
    for rank in ranks:
        runs += [(RESULT_OPERAND, 1), (RESULT_DIMENSION, rank)]
    return _whole(*runs, (EXECUTION_TIMING, 1))


def _whole(*runs: tuple[Variant, int]) -> struct.Struct:
    return struct.Struct("<" + "".join(variant.codes * count for variant, count in runs))


def encode_request(
    inputs: Sequence[RequestArgument],
    outputs: Sequence[RequestArgument],
    slots: Sequence[int],
    measure: MeasureTiming = MeasureTiming.NO,
) -> bytes:
    """Return the packet of one request; `slots[i]` names the memory of pool i within the burst.

    Raises InvalidArgument for a number that its field cannot hold (u32; slots i32).
    """
    form = _request_form(_ranks(inputs), _ranks(outputs), len(slots))
    values = [REQUEST_PACKET.discriminator, form.size // DATUM_BYTES, len(inputs), len(outputs), len(slots)]
    for argument in inputs:
        values += _argument_values(argument, INPUT_OPERAND, INPUT_DIMENSION)
    for argument in outputs:
        values += _argument_values(argument, OUTPUT_OPERAND, OUTPUT_DIMENSION)
    for slot in slots:
        values += (POOL_IDENTIFIER.discriminator, slot)
    return _pack(form, *values, MEASURE_TIMING.discriminator, measure)


def _ranks(arguments: Sequence[RequestArgument] | Sequence[OutputShape]) -> tuple[int, ...]:
    return tuple([len(argument.dimensions) for argument in arguments])


def _argument_values(argument: RequestArgument, operand: Variant, dimension: Variant) -> list[int]:
    where = argument.location
    values = [operand.discriminator, argument.has_no_value, where.pool_index, where.offset, where.length]
    return values + _dimension_values(argument.dimensions, dimension)


def _dimension_values(dimensions: tuple[int, ...], variant: Variant) -> list[int]:
    """Return the rank, which ends the operand's own record, and the records of its dimensions."""
    values = [len(dimensions)]
    for extent in dimensions:
        values += (variant.discriminator, extent)
    return values


def encode_result(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing = NO_TIMING) -> bytes:
    """Return the packet of one result; nanoseconds are rounded down to the microseconds of the wire.

    Statuses that HAL 1.0 does not have are sent as GENERAL_FAILURE. Raises InvalidArgument for a number that its
    field cannot hold (dimensions u32, times u64 µs).
    """
    form = _result_form(_ranks(shapes))
    values = [RESULT_PACKET.discriminator, form.size // DATUM_BYTES, _hidl_status(status), len(shapes)]
    for shape in shapes:
        values += (RESULT_OPERAND.discriminator, shape.is_sufficient)
        values += _dimension_values(shape.dimensions, RESULT_DIMENSION)
    on_device, in_driver = _microseconds(timing.time_on_device_ns), _microseconds(timing.time_in_driver_ns)
    return _pack(form, *values, EXECUTION_TIMING.discriminator, on_device, in_driver)


def _hidl_status(status: ErrorStatus) -> int:
    return status if status <= _LAST_HIDL_STATUS else ErrorStatus.GENERAL_FAILURE


def _microseconds(time_ns: int) -> int:
    return NO_TIME_US if time_ns == NO_TIME else time_ns // 1000


def _pack(form: struct.Struct, *values: int) -> bytes:
    try:
        return form.pack(*values)
    except struct.error as error:
        raise InvalidArgument(f"a number does not fit its field in the packet: {error}") from error


def result_packet_for_error(status: ErrorStatus) -> bytes:
    """Return the smallest result packet: `status`, no shapes, no timing (2 records)."""
    return _ERROR_PACKETS[status]


_ERROR_PACKETS = {status: encode_result(status, ()) for status in ErrorStatus}


class RequestTemplate:
    """A request that is sent again and again: its packet lies ready, and what changes is patched in place.

    `packet` is a read-only view of the bytes as they are now, for `MessageQueue.send`. Each change is made whole, or
    refused by InvalidArgument and not at all: an index that is not there, a number that its field cannot hold, or
    another rank, since it would move all that follows (make a new template). Not for two threads at once.
    """

    __slots__ = ("_data", "_inputs", "_outputs", "_slots", "packet")

    def __init__(
        self,
        inputs: Sequence[RequestArgument],
        outputs: Sequence[RequestArgument],
        slots: Sequence[int],
        measure: MeasureTiming = MeasureTiming.NO,
    ) -> None:
        self._data = bytearray(encode_request(inputs, outputs, slots, measure))
        self.packet = memoryview(self._data).toreadonly()
        self._inputs, end = _places(_ranks(inputs), DATUM_BYTES)
        self._outputs, end = _places(_ranks(outputs), end)
        self._slots, _ = _places((0,) * len(slots), end)

    def set_input(self, index: int, argument: RequestArgument) -> None:
        """Let input `index` be `argument` from now on, of the same rank."""
        self._set_argument("input", self._inputs, index, argument, (INPUT_OPERAND, INPUT_DIMENSION))

    def set_output(self, index: int, argument: RequestArgument) -> None:
        """Let output `index` be `argument` from now on, of the same rank."""
        self._set_argument("output", self._outputs, index, argument, (OUTPUT_OPERAND, OUTPUT_DIMENSION))

    def set_slot(self, index: int, slot: int) -> None:
        """Let `slot` name the memory of pool `index` from now on."""
        offset = _place("slot", self._slots, index)
        self._patch(offset, _pack(POOL_IDENTIFIER.layout, POOL_IDENTIFIER.discriminator, slot))

    def set_measure(self, measure: MeasureTiming) -> None:
        """Ask for timing from now on, or no longer."""
        self._patch(len(self._data) - DATUM_BYTES, _pack(MEASURE_TIMING.layout, MEASURE_TIMING.discriminator, measure))

    def _set_argument(
        self, kind: str, places: list[int], index: int, argument: RequestArgument, variants: tuple[Variant, Variant]
    ) -> None:
        offset, given = _place(kind, places, index), len(argument.dimensions)
        rank = variants[0].layout.unpack_from(self._data, offset)[-1]
        if given != rank:
            raise InvalidArgument(f"{kind} {index} has rank {rank} in this template, not {given}: make a new one")
        self._patch(offset, _pack(_argument_form(rank), *_argument_values(argument, *variants)))

    def _patch(self, offset: int, data: bytes) -> None:
        self._data[offset : offset + len(data)] = data


def _places(ranks: tuple[int, ...], offset: int) -> tuple[list[int], int]:
    """Return the offsets of arguments with these ranks that lie one after the other, and where they end."""
    places = []
    for rank in ranks:
        places.append(offset)
        offset += DATUM_BYTES * (1 + rank)
    return places, offset


def _place(kind: str, places: list[int], index: int) -> int:
    if not 0 <= index < len(places):
        raise InvalidArgument(f"there is no {kind} {index} in this template, which has {len(places)}")
    return places[index]


@lru_cache(maxsize=256)
def _argument_form(rank: int) -> struct.Struct:
    """Return the layout of one argument; inputs and outputs differ in their discriminators only."""
    return _whole((INPUT_OPERAND, 1), (INPUT_DIMENSION, rank))


# ---------------------------------------------------------------------------------------------- decode


class _Cursor:
    """Walks the records of one packet, which are all that there are; `offset` is that of the next record."""

    __slots__ = ("_data", "_end", "offset")

    def __init__(self, data: bytes) -> None:
        self._data, self._end, self.offset = data, len(data), 0
        if self._end % DATUM_BYTES:
            raise ProtocolError(
                f"a packet is a whole number of {DATUM_BYTES}-byte records, this one has {self._end} bytes",
                self._end - self._end % DATUM_BYTES,
            )

    def take(self, variant: Variant) -> tuple[Any, ...]:
        """Return the next record's discriminator and fields; it must be of this variant."""
        offset = self.offset
        if offset == self._end:
            raise ProtocolError(f"the packet ends where a {variant.name} is due", offset)
        values = variant.layout.unpack_from(self._data, offset)
        if values[0] != variant.discriminator:
            raise ProtocolError(f"kind {variant.discriminator} ({variant.name}) is due, got kind {values[0]}", offset)
        self.offset = offset + DATUM_BYTES
        return values

    def wrong(self, variant: Variant, field: str, got: int, allowed: str) -> ProtocolError:
        """Return the error for `field` of the record just taken."""
        where = self.offset - DATUM_BYTES + variant.offset_of(field)
        return ProtocolError(f"{variant.name}.{field} is {got}, allowed is {allowed}", where)

    def take_whole(self, variant: Variant) -> tuple[Any, ...]:
        """Take the packetInformation: the size it states must be the number of records received."""
        values = self.take(variant)
        if values[1] * DATUM_BYTES != self._end:
            raise self.wrong(variant, "packetSize", values[1], f"the {self._end // DATUM_BYTES} records received")
        return values

    def check_count(self, count: int, records: int, variant: Variant, field: str) -> int:
        """Refuse a count of more records than are left once `records` others are set aside; return how many remain."""
        left = (self._end - self.offset) // DATUM_BYTES - records
        if count > left:
            raise self.wrong(variant, field, count, f"at most the {max(left, 0)} records left for it")
        return records + count

    def take_dimensions(self, rank: int, operand: Variant, dimension: Variant) -> tuple[int, ...]:
        self.check_count(rank, 0, operand, "numberOfDimensions")
        return tuple([self.take(dimension)[1] for _ in range(rank)])

    def finish(self) -> None:
        if self.offset != self._end:
            left = (self._end - self.offset) // DATUM_BYTES
            raise ProtocolError(f"{left} records are left over after the last one", self.offset)


def decode_request(data: Buffer) -> RequestPacket:
    """Return the request in `data`, which is copied first if it can change. Raises ProtocolError, with `offset`."""
    cursor = _Cursor(bytes(data))
    _, _, inputs, outputs, pools = cursor.take_whole(REQUEST_PACKET)
    claimed = cursor.check_count(inputs, _LAST_RECORD, REQUEST_PACKET, "numberOfInputOperands")
    claimed = cursor.check_count(outputs, claimed, REQUEST_PACKET, "numberOfOutputOperands")
    cursor.check_count(pools, claimed, REQUEST_PACKET, "numberOfPools")
    packet = RequestPacket(
        inputs=tuple([_take_argument(cursor, INPUT_OPERAND, INPUT_DIMENSION) for _ in range(inputs)]),
        outputs=tuple([_take_argument(cursor, OUTPUT_OPERAND, OUTPUT_DIMENSION) for _ in range(outputs)]),
        slots=tuple([cursor.take(POOL_IDENTIFIER)[1] for _ in range(pools)]),
        measure=_take_measure(cursor),
    )
    cursor.finish()
    return packet


def _take_argument(cursor: _Cursor, operand: Variant, dimension: Variant) -> RequestArgument:
    _, has_no_value, pool_index, offset, length, rank = cursor.take(operand)
    if has_no_value > 1:
        raise cursor.wrong(operand, "hasNoValue", has_no_value, "0 or 1")
    location = DataLocation(pool_index, offset, length)
    return RequestArgument(has_no_value == 1, location, cursor.take_dimensions(rank, operand, dimension))


def _take_measure(cursor: _Cursor) -> MeasureTiming:
    _, measure = cursor.take(MEASURE_TIMING)
    if not 0 <= measure <= 1:
        raise cursor.wrong(MEASURE_TIMING, "measure", measure, "0 or 1")
    return MeasureTiming(measure)


def decode_result(data: Buffer) -> ResultPacket:
    """Return the result in `data`, which is copied first if it can change. Raises ProtocolError, with `offset`."""
    cursor = _Cursor(bytes(data))
    _, _, status, count = cursor.take_whole(RESULT_PACKET)
    if not 0 <= status <= _LAST_HIDL_STATUS:
        raise cursor.wrong(RESULT_PACKET, "errorStatus", status, "0 to 4")
    cursor.check_count(count, _LAST_RECORD, RESULT_PACKET, "numberOfOperands")
    shapes = tuple([_take_shape(cursor) for _ in range(count)])
    _, on_device, in_driver = cursor.take(EXECUTION_TIMING)
    cursor.finish()
    return ResultPacket(ErrorStatus(status), shapes, Timing(_nanoseconds(on_device), _nanoseconds(in_driver)))


def _take_shape(cursor: _Cursor) -> OutputShape:
    _, is_sufficient, rank = cursor.take(RESULT_OPERAND)
    if is_sufficient > 1:
        raise cursor.wrong(RESULT_OPERAND, "isSufficient", is_sufficient, "0 or 1")
    return OutputShape(cursor.take_dimensions(rank, RESULT_OPERAND, RESULT_DIMENSION), is_sufficient == 1)


def _nanoseconds(time_us: int) -> int:
    return NO_TIME if time_us == NO_TIME_US else time_us * 1000


Packet = TypeVar("Packet")


class Decoder(Generic[Packet]):
    """Decodes by `decode_request` or `decode_result`, and answers with the same object while the bytes are the same.

    It keeps the last well-formed packet, and none above 4 KiB. Not for two threads at once.
    """

    __slots__ = ("_decode", "_last")

    def __init__(self, decode: Callable[[Buffer], Packet]) -> None:
        self._decode = decode
        self._last: tuple[bytes, Packet] | None = None  # in one store: a signal cannot leave them unequal

    def decode(self, data: Buffer) -> Packet:
        """Return what `data` says; it is copied first if it can change. Raises ProtocolError, with `offset`."""
        copied, last = bytes(data), self._last
        if last is not None and copied == last[0]:
            return last[1]
        packet = self._decode(copied)
        if len(copied) <= REMEMBERED_BYTES:
            self._last = (copied, packet)
        return packet
