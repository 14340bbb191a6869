"""IBurst and IBurstContext: HIDL's bursts, over the caller's queues and with his callback (REQUIREMENTS BUR-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nnfmq import watcher
from nnfmq.hal.errors import ErrorStatus, error_for_status
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import Pool
from nnfmq.queue import MessageQueue, PeerDeathFlag
from nnfmq.runtime.burst_controller import to_wire_descriptor
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.hidl.methods import NONE, status_of
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.runtime.hidl.iprepared_model import IPreparedModel


class BurstContext:
    """IBurstContext: a burst over the caller's two queues, which stay his. Close it before them."""

    def __init__(self, connection: Connection, callback: Any, queues: tuple[MessageQueue, MessageQueue]) -> None:
        self._connection = connection
        self._callback = callback
        self._queues = queues
        self._burst_id = 0
        self.peer = watcher.DeathRecipients(flag := PeerDeathFlag())
        for queue in queues:
            queue.peer_death = flag  # no wait outlives the driver
        self.peer.add(*queues)

    def open(self, answer: messages.BurstConfigured) -> None:
        """The driver has made it: it may ask for memories from now on."""
        self._burst_id = answer.burst_id
        if answer.status is NONE:
            self._connection.add_burst(answer.burst_id, self)

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Ask the callback, as the driver wants."""
        status, memories = self._callback.getMemories(list(slots))
        if status is not NONE:
            raise error_for_status(status, "the callback answers so")
        return list(memories)

    def freeMemory(self, slot: int) -> None:
        """Let the driver forget a slot; an unknown one is no error. Returns when it has, as calls of HIDL do."""
        self._connection.send(messages.FreeMemory(self._burst_id, slot))
        self._connection.ask(
            messages.ListDevices(self._connection.new_call()), messages.DeviceList
        )  # after it, in order

    def close(self) -> None:
        """Drop the reference: the burst ends in the driver."""
        if self._burst_id and self._connection.is_open:
            self._connection.ask(messages.CloseBurst(self._connection.new_call(), self._burst_id), messages.Reply)
        self._connection.discard_burst(self._burst_id, self.peer)
        self.peer.discard(*self._queues)
        self._burst_id = 0


def configure_burst(
    model: IPreparedModel,
    level: FeatureLevel,
    callback: Any,
    requests: MessageQueue,
    results: MessageQueue,
) -> tuple[ErrorStatus, BurstContext | None]:
    """`callback.getMemories(slots)` answers a status and a memory for each slot; it runs on the connection's thread."""
    connection = model.connection
    context = BurstContext(connection, callback, (requests, results))
    connection.add_peer(context.peer)
    message = messages.ConfigureBurst(
        connection.new_call(), model.model_id, to_wire_descriptor(requests), to_wire_descriptor(results)
    )
    fds = [requests.memory.fileno(), results.memory.fileno()]
    answer = connection.ask(message, messages.BurstConfigured, fds, on_answer=context.open)
    if answer.status is not NONE:
        context.close()
        return status_of(answer.status, level), None
    return NONE, context
