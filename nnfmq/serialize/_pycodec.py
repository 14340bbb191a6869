"""The packet codec in Python: it specifies the compiled one (`_codec`) and replaces it if that is not built.

A packet states its own length in records. The receiver passes all records that were in the ring at once, and their
number must equal that length. The decoder is one cursor over these records: a record of an unexpected kind, a count
above the number of records left, a field out of its range or a surplus record makes the whole packet malformed
(ProtocolError, with the byte offset). Padding is ignored. Whether a well-formed packet fits a model is decided by
`validation` and by the burst's slots.

The encoder packs a whole packet in one call of `struct`, with a format that is built from the tables of `packets` once
for each combination of ranks. `DataLocation.padding` does not exist in HIDL: it is not sent, and decodes as 0.

Callers import `codec`, which selects one of the two implementations.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.hal.timing import NO_TIMING, Timing, from_packet_duration, to_packet_duration
from nnfmq.hal.types import DataLocation, MeasureTiming, OutputShape, RequestArgument
from nnfmq.serialize.packets import (
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
    BytesLike,
    DatumVariant,
    RequestPacket,
    ResultPacket,
)

LAST_PACKET_STATUS = ErrorStatus.INVALID_ARGUMENT  # HAL 1.0 has 0 to 4; a HIDL 1.2 burst sends later ones as 2
_LAST_RECORD = 1  # measureTiming or executionTiming: no count of the packet includes it


# ---------------------------------------------------------------------------------------------- encode


def encode_request(
    inputs: Sequence[RequestArgument],
    outputs: Sequence[RequestArgument],
    slots: Sequence[int],
    measure: MeasureTiming = MeasureTiming.NO,
) -> bytes:
    """Return the packet of one request; `slots[i]` names the memory of pool i within the burst.

    Raises:
        InvalidArgument: If a number does not fit its field (u32; slots i32).
    """
    layout = _request_layout(_ranks(inputs), _ranks(outputs), len(slots))
    values = [REQUEST_PACKET.discriminator, layout.size // DATUM_BYTES, len(inputs), len(outputs), len(slots)]
    for arguments, operand, dimension in (
        (inputs, INPUT_OPERAND, INPUT_DIMENSION),
        (outputs, OUTPUT_OPERAND, OUTPUT_DIMENSION),
    ):
        for argument in arguments:
            location = argument.location
            values += (operand.discriminator, argument.has_no_value)
            values += (location.pool_index, location.offset, location.length)
            values += _dimension_values(argument.dimensions, dimension)
    for slot in slots:
        values += (POOL_IDENTIFIER.discriminator, slot)
    return _pack(layout, *values, MEASURE_TIMING.discriminator, measure)


def encode_result(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing = NO_TIMING) -> bytes:
    """Return the packet of one result; durations are rounded down to the unit of the packet.

    Statuses that HAL 1.0 does not have are sent as GENERAL_FAILURE.

    Raises:
        InvalidArgument: If a number does not fit its field (dimensions u32, times u64).
    """
    layout = _result_layout(_ranks(shapes))
    sent_status = status if status <= LAST_PACKET_STATUS else ErrorStatus.GENERAL_FAILURE
    values = [RESULT_PACKET.discriminator, layout.size // DATUM_BYTES, sent_status, len(shapes)]
    for shape in shapes:
        values += (RESULT_OPERAND.discriminator, shape.is_sufficient)
        values += _dimension_values(shape.dimensions, RESULT_DIMENSION)
    times = to_packet_duration(timing.time_on_device_ns), to_packet_duration(timing.time_in_driver_ns)
    return _pack(layout, *values, EXECUTION_TIMING.discriminator, *times)


@lru_cache(maxsize=256)
def _request_layout(input_ranks: tuple[int, ...], output_ranks: tuple[int, ...], pool_count: int) -> struct.Struct:
    """Return the layout of a whole request packet whose arguments have these ranks."""
    runs = [(REQUEST_PACKET, 1)]
    for rank in input_ranks:
        runs += [(INPUT_OPERAND, 1), (INPUT_DIMENSION, rank)]
    for rank in output_ranks:
        runs += [(OUTPUT_OPERAND, 1), (OUTPUT_DIMENSION, rank)]
    return _layout(*runs, (POOL_IDENTIFIER, pool_count), (MEASURE_TIMING, 1))


@lru_cache(maxsize=256)
def _result_layout(ranks: tuple[int, ...]) -> struct.Struct:
    """Return the layout of a whole result packet whose outputs have these ranks."""
    runs = [(RESULT_PACKET, 1)]
    for rank in ranks:
        runs += [(RESULT_OPERAND, 1), (RESULT_DIMENSION, rank)]
    return _layout(*runs, (EXECUTION_TIMING, 1))


def _layout(*runs: tuple[DatumVariant, int]) -> struct.Struct:
    return struct.Struct("<" + "".join(variant.codes * count for variant, count in runs))


def _ranks(arguments: Sequence[RequestArgument] | Sequence[OutputShape]) -> tuple[int, ...]:
    return tuple([len(argument.dimensions) for argument in arguments])


def _dimension_values(dimensions: tuple[int, ...], variant: DatumVariant) -> list[int]:
    """Return the rank, the last field of the operand's own record, and the values of the dimension records."""
    values = [len(dimensions)]
    for dimension in dimensions:
        values += (variant.discriminator, dimension)
    return values


def _pack(layout: struct.Struct, *values: int) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise InvalidArgument(f"a number does not fit its field in the packet: {error}") from error


# ---------------------------------------------------------------------------------------------- decode


def decode_request(data: BytesLike) -> RequestPacket:
    """Return the request in `data`, which is copied first if it is mutable.

    Raises:
        ProtocolError: If the packet is malformed; `offset` is that of the wrong byte.
    """
    cursor = _Cursor(bytes(data))
    _, _, inputs, outputs, pools = cursor.read_packet_information(REQUEST_PACKET)
    claimed = cursor.check_count(inputs, _LAST_RECORD, REQUEST_PACKET, "numberOfInputOperands")
    claimed = cursor.check_count(outputs, claimed, REQUEST_PACKET, "numberOfOutputOperands")
    cursor.check_count(pools, claimed, REQUEST_PACKET, "numberOfPools")
    packet = RequestPacket(
        inputs=tuple([_read_argument(cursor, INPUT_OPERAND, INPUT_DIMENSION) for _ in range(inputs)]),
        outputs=tuple([_read_argument(cursor, OUTPUT_OPERAND, OUTPUT_DIMENSION) for _ in range(outputs)]),
        slots=tuple([cursor.read(POOL_IDENTIFIER)[1] for _ in range(pools)]),
        measure=_read_measure(cursor),
    )
    cursor.check_end()
    return packet


def decode_result(data: BytesLike) -> ResultPacket:
    """Return the result in `data`, which is copied first if it is mutable.

    Raises:
        ProtocolError: If the packet is malformed; `offset` is that of the wrong byte.
    """
    cursor = _Cursor(bytes(data))
    _, _, status, count = cursor.read_packet_information(RESULT_PACKET)
    if not 0 <= status <= LAST_PACKET_STATUS:
        raise cursor.error(RESULT_PACKET, "errorStatus", status, "0 to 4")
    cursor.check_count(count, _LAST_RECORD, RESULT_PACKET, "numberOfOperands")
    shapes = tuple([_read_shape(cursor) for _ in range(count)])
    _, on_device, in_driver = cursor.read(EXECUTION_TIMING)
    cursor.check_end()
    timing = Timing(from_packet_duration(on_device), from_packet_duration(in_driver))
    return ResultPacket(ErrorStatus(status), shapes, timing)


class _Cursor:
    """Reads the records of one packet in order; `offset` is that of the next record."""

    __slots__ = ("_data", "_end", "offset")

    def __init__(self, data: bytes) -> None:
        self._data, self._end, self.offset = data, len(data), 0
        if self._end % DATUM_BYTES:
            raise ProtocolError(
                f"a packet is a whole number of {DATUM_BYTES}-byte records, this one has {self._end} bytes",
                self._end - self._end % DATUM_BYTES,
            )

    def read(self, variant: DatumVariant) -> tuple[Any, ...]:
        """Return the discriminator and fields of the next record, which must be of this variant."""
        offset = self.offset
        if offset == self._end:
            raise ProtocolError(f"the packet ends where a {variant.name} is due", offset)
        values = variant.layout.unpack_from(self._data, offset)
        if values[0] != variant.discriminator:
            raise ProtocolError(f"kind {variant.discriminator} ({variant.name}) is due, got kind {values[0]}", offset)
        self.offset = offset + DATUM_BYTES
        return values

    def read_packet_information(self, variant: DatumVariant) -> tuple[Any, ...]:
        """Read the first record; the packet size that it states must be the number of records received."""
        values = self.read(variant)
        if values[1] * DATUM_BYTES != self._end:
            raise self.error(variant, "packetSize", values[1], f"the {self._end // DATUM_BYTES} records received")
        return values

    def read_dimensions(self, rank: int, operand: DatumVariant, dimension: DatumVariant) -> tuple[int, ...]:
        self.check_count(rank, 0, operand, "numberOfDimensions")
        return tuple([self.read(dimension)[1] for _ in range(rank)])

    def check_count(self, count: int, claimed: int, variant: DatumVariant, field: str) -> int:
        """Reject a count of more records than are left, `claimed` of which belong to others; return all claimed.

        The check comes before anything is allocated, so that a count alone cannot make the decoder use memory.
        """
        left = (self._end - self.offset) // DATUM_BYTES - claimed
        if count > left:
            raise self.error(variant, field, count, f"at most the {max(left, 0)} records left for it")
        return claimed + count

    def check_end(self) -> None:
        if self.offset != self._end:
            left = (self._end - self.offset) // DATUM_BYTES
            raise ProtocolError(f"{left} records are left over after the last one", self.offset)

    def error(self, variant: DatumVariant, field: str, value: int, allowed: str) -> ProtocolError:
        """Return the error for `field` of the record that was read last."""
        offset = self.offset - DATUM_BYTES + variant.offset_of(field)
        return ProtocolError(f"{variant.name}.{field} is {value}, allowed is {allowed}", offset)


def _read_argument(cursor: _Cursor, operand: DatumVariant, dimension: DatumVariant) -> RequestArgument:
    _, has_no_value, pool_index, offset, length, rank = cursor.read(operand)
    if has_no_value > 1:
        raise cursor.error(operand, "hasNoValue", has_no_value, "0 or 1")
    location = DataLocation(pool_index, offset, length)
    return RequestArgument(has_no_value == 1, location, cursor.read_dimensions(rank, operand, dimension))


def _read_measure(cursor: _Cursor) -> MeasureTiming:
    _, measure = cursor.read(MEASURE_TIMING)
    if not 0 <= measure <= 1:
        raise cursor.error(MEASURE_TIMING, "measure", measure, "0 or 1")
    return MeasureTiming(measure)


def _read_shape(cursor: _Cursor) -> OutputShape:
    _, is_sufficient, rank = cursor.read(RESULT_OPERAND)
    if is_sufficient > 1:
        raise cursor.error(RESULT_OPERAND, "isSufficient", is_sufficient, "0 or 1")
    return OutputShape(cursor.read_dimensions(rank, RESULT_OPERAND, RESULT_DIMENSION), is_sufficient == 1)
