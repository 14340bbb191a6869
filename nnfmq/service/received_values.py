"""Conversion of values that the client sent into the driver's types."""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue import Grantor, MQDescriptor
from nnfmq.serialize.messages import MQDescriptorData

NO_DEADLINE = -1


def deadline_from_wire(deadline_ns: int) -> int | None:
    """Return a message's deadline or duration in ns, or None for -1.

    Raises:
        InvalidArgument: If the value is below -1 (N-VAL-23, N-RQX-14).
    """
    if deadline_ns < NO_DEADLINE:
        raise InvalidArgument(f"a deadline is a time in ns, or -1 for none; got {deadline_ns}")
    return None if deadline_ns == NO_DEADLINE else deadline_ns


def descriptor_from_wire(data: MQDescriptorData) -> MQDescriptor:
    """Return a received queue descriptor in the form that `MessageQueue.attach` takes and checks."""
    grantors = tuple(Grantor(g.fd_index, g.offset, g.extent) for g in data.grantors)
    return MQDescriptor(grantors, data.quantum, data.flags)
