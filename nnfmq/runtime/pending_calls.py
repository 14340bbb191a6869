"""Pending calls of a connection: handlers of replies, and release of objects whose reply came too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

from nnfmq import watcher
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError, status_for_error
from nnfmq.hal.types import Pool, SharedPool
from nnfmq.serialize import messages


class MemoryProvider(Protocol):
    """A burst as the connection uses it: it resolves its slots, and it is woken when the driver dies."""

    peer: watcher.DeathRecipients

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`, which the burst keeps.

        Raises:
            InvalidArgument: If a slot is unknown.
        """
        ...


class ReplyHandler(Protocol):
    """Receives the reply to one call, or the error that replaces it: exactly one of the methods is called, once.

    Called on the watcher thread, or on the thread that closes the connection. Must not block.
    """

    def set_result(self, result: Any, /) -> None:
        """Receive the reply."""
        ...

    def set_exception(self, error: NnfmqError, /) -> None:
        """Receive the error."""
        ...


class ReplyKey(NamedTuple):
    """The id of a call, and the type of one of its replies: a call with a callback has two."""

    call: int
    reply_type: type[messages.Call]


class PendingCall(NamedTuple):
    """The handler of a reply that has not arrived, and the callbacks that run before it."""

    handler: ReplyHandler
    on_reply: Callable[[Any], None] | None = None
    on_fds: Callable[[list[int]], None] | None = None


_RELEASE_MESSAGES: dict[type[messages.Call], Callable[[int, Any], messages.Call]] = {
    messages.PreparedModelReady: lambda call, reply: messages.ReleaseModel(call, reply.model_id),
    messages.BurstConfigured: lambda call, reply: messages.CloseBurst(call, reply.burst_id),
    messages.FencedLaunched: lambda call, reply: messages.ReleaseCallback(call, reply.callback_id),
    messages.ExecutionCreated: lambda call, reply: messages.ReleaseExecution(call, reply.execution_id),
    messages.Allocated: lambda call, reply: messages.ReleaseBuffer(call, reply.buffer_id),
}


def release_message(next_call_id: Callable[[], int], reply: messages.Call) -> messages.Call | None:
    """Return the call that releases the object that a successful reply names, or None if it names none.

    Sent if the caller timed out before the reply arrived: the object that the driver created then has no owner.
    """
    release = _RELEASE_MESSAGES.get(type(reply))
    if release is None or not isinstance(reply, messages.StatusReply) or reply.status is not ErrorStatus.NONE:
        return None
    return release(next_call_id(), reply)


def memories_reply(burst: MemoryProvider | None, call: messages.GetMemories) -> tuple[messages.Memories, list[int]]:
    """Return the reply to the driver's call for a burst's memories, and the fds to be sent with it; None: closed."""
    try:
        if burst is None:
            raise InvalidArgument(f"burst {call.burst_id} is closed")
        memories = burst.get_memories(call.slots)
        data = tuple(map(messages.memory_to_data, memories))
        fds = [cast(SharedPool, memory).fileno() for memory in memories]
    except NnfmqError as error:
        return messages.Memories(call.call, status_for_error(error), str(error), ()), []
    return messages.Memories(call.call, ErrorStatus.NONE, "", data), fds
