"""The contents of burst packets: a decoded request and a decoded result. `codec` encodes and decodes them.

    request: packetInformation, (input, its dimensions)*, (output, its dimensions)*, poolIdentifier*, measureTiming
    result:  packetInformation, (operand, its dimensions)*, executionTiming

Source: HAL 1.2 types.hal (`FmqRequestDatum`, `FmqResultDatum`) and NNAPI's burst utilities.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import MeasureTiming, OutputShape, RequestArgument

__all__ = ["BytesLike", "RequestPacket", "ResultPacket"]

BytesLike: TypeAlias = bytes | bytearray | memoryview


class RequestPacket(Struct, frozen=True):
    """A decoded request; `slots[i]` names the memory of pool i, and `location.pool_index` is an index of `slots`."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int, ...]
    measure: MeasureTiming


class ResultPacket(Struct, frozen=True):
    """A decoded result, exactly as sent: an error status may come with shapes or timing, which the reader ignores."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing
