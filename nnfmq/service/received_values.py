"""Conversion of values that the client sent into the driver's types."""

from __future__ import annotations

from nnfmq.queue import Grantor, MQDescriptor
from nnfmq.serialize.messages import MQDescriptorData


def descriptor_from_wire(data: MQDescriptorData) -> MQDescriptor:
    """Return a received queue descriptor in the form that `MessageQueue.attach` takes and checks."""
    grantors = tuple(Grantor(g.fd_index, g.offset, g.extent) for g in data.grantors)
    return MQDescriptor(grantors, data.quantum, data.flags)
