"""Random requests and results for hypothesis, of values that a packet can hold; and the outcome of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from nnfmq.hal.errors import ErrorStatus, NnfmqError, ProtocolError
from nnfmq.hal.timing import Timing, from_packet_duration
from nnfmq.hal.types import DataLocation, MeasureTiming, OutputShape, RequestArgument
from nnfmq.serialize.packets import RequestPacket, ResultPacket

u32 = st.integers(0, 2**32 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
times_ns = st.just(-1) | st.integers(0, 2**64 - 2).map(from_packet_duration)
dimensions = st.lists(u32, max_size=8).map(tuple)
arguments = st.builds(RequestArgument, st.booleans(), st.builds(DataLocation, u32, u32, u32), dimensions)
shapes = st.lists(st.builds(OutputShape, dimensions, st.booleans()), max_size=5).map(tuple)
requests = st.builds(
    RequestPacket,
    st.lists(arguments, max_size=4).map(tuple),
    st.lists(arguments, max_size=4).map(tuple),
    st.lists(i32, max_size=4).map(tuple),
    st.sampled_from(MeasureTiming),
)
results = st.builds(
    ResultPacket, st.sampled_from([ErrorStatus(n) for n in range(5)]), shapes, st.builds(Timing, times_ns, times_ns)
)


def outcome(call: Callable[..., Any], *given: Any) -> tuple[Any, ...]:
    """Return the value's type and the value, or the error's type, text and offset."""
    try:
        value = call(*given)
    except (NnfmqError, AttributeError, OverflowError, TypeError, ValueError) as error:
        return type(error), str(error), error.offset if isinstance(error, ProtocolError) else None
    return type(value), value


def parts(packet: RequestPacket) -> tuple[Any, ...]:
    """Return the arguments from which `packet` is encoded."""
    return packet.inputs, packet.outputs, packet.slots, packet.measure
