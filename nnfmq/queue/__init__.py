"""Fast message queues: libfmq's rings of records in shared memory, and the event flags on which their users wait.

Bytes and records only, nothing of neural networks. `MessageQueue.create` here, `MessageQueue.attach` in the peer, which
got the descriptor and the memory's fd by some other channel.
"""

from nnfmq.queue.core import core_name, core_path, core_reason
from nnfmq.queue.event_flag import NOT_EMPTY, NOT_FULL, EventFlag, PeerDeathFlag
from nnfmq.queue.hybrid_polling import PollingWindow
from nnfmq.queue.layout import SYNCHRONIZED, UNSYNCHRONIZED, Grantor, MQDescriptor
from nnfmq.queue.message_queue import MessageQueue, Overflow, Transaction
from nnfmq.queue.named_queue import create_named, named_queues, open_named, remove_named

__all__ = [
    "NOT_EMPTY",
    "NOT_FULL",
    "SYNCHRONIZED",
    "UNSYNCHRONIZED",
    "EventFlag",
    "Grantor",
    "MQDescriptor",
    "MessageQueue",
    "Overflow",
    "PeerDeathFlag",
    "PollingWindow",
    "Transaction",
    "core_name",
    "core_path",
    "core_reason",
    "create_named",
    "named_queues",
    "open_named",
    "remove_named",
]
