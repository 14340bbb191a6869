"""IBurst and IBurstContext: HIDL's bursts, over the caller's queues and with the caller's callback (BUR-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfmq import watcher
from nnfmq.hal.errors import ErrorStatus, error_for_status
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import Pool
from nnfmq.queue import MessageQueue, PeerDeathFlag
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.hidl.methods import NONE, ModelReference, status_at
from nnfmq.runtime.wire_values import to_wire_descriptor
from nnfmq.serialize import messages
from nnfmq.uncopyable import Uncopyable


class BurstContext(Uncopyable):
    """IBurstContext: a burst over two queues, which it borrows. Close it before them."""

    def __init__(self, connection: Connection, callback: Any, queues: tuple[MessageQueue, MessageQueue]) -> None:
        self._connection = connection
        self._callback = callback
        self._queues = queues
        self._burst_id = 0
        self.peer = watcher.DeathRecipients(flag := PeerDeathFlag())
        for queue in queues:
            queue.peer_death = flag  # ends all waits when the driver dies
        self.peer.add(*queues)

    def on_configured(self, reply: messages.BurstConfigured) -> None:
        """Store the id, and serve the driver's GetMemories calls from now on."""
        self._burst_id = reply.burst_id
        if reply.status is NONE:
            self._connection.add_burst(reply.burst_id, self)

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories that the callback returns. Runs on the connection's thread."""
        status, memories = self._callback.getMemories(list(slots))
        if status is not NONE:
            raise error_for_status(status, "returned by the callback's getMemories")
        return list(memories)

    def freeMemory(self, slot: int) -> None:
        """Make the driver unmap the memory of a slot; blocks until it has. An unknown slot has no effect."""
        self._connection.send(messages.FreeMemory(self._burst_id, slot))
        # FreeMemory has no reply. The driver handles messages in order, so a later call's reply follows it.
        message = messages.ListDevices(self._connection.next_call_id())
        self._connection.exchange(message, messages.DeviceList)

    def close(self) -> None:
        """Drop the reference: the burst ends in the driver. Idempotent."""
        if self._burst_id and self._connection.is_open:
            message = messages.CloseBurst(self._connection.next_call_id(), self._burst_id)
            self._connection.exchange(message, messages.Reply)
        self._connection.discard_burst(self._burst_id, self.peer)
        self.peer.discard(*self._queues)
        self._burst_id = 0


def configure_burst(
    model: ModelReference,
    level: FeatureLevel,
    callback: Any,
    requests: MessageQueue,
    results: MessageQueue,
) -> tuple[ErrorStatus, BurstContext | None]:
    """Return a status and a burst over two queues, or a status and None.

    Borrows the queues until the burst is closed. `callback.getMemories(slots)` returns a status and a memory for each
    slot; the thread of the client's connection calls it.
    """
    connection = model.connection
    context = BurstContext(connection, callback, (requests, results))
    connection.add_peer(context.peer)
    descriptors = to_wire_descriptor(requests), to_wire_descriptor(results)
    message = messages.ConfigureBurst(connection.next_call_id(), model.model_id, *descriptors)
    fds = [requests.memory.fileno(), results.memory.fileno()]
    reply = connection.exchange(message, messages.BurstConfigured, fds, on_reply=context.on_configured)
    if reply.status is not NONE:
        context.close()
        return status_at(level, reply.status), None
    return NONE, context
