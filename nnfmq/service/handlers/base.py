"""Kinds of call handlers, and error replies that several of them send.

A handler gets the session's context, the message and the fds that came with it, which it owns. An inline handler runs
on the watcher's thread and must not block. A `BlockingHandler` runs on the session's thread pool and may raise any
NnfmqError, which the session turns into the call's error replies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct

from nnfmq.hal.errors import ErrorStatus, NnfmqError, status_for_error
from nnfmq.hal.types import Priority
from nnfmq.serialize.messages import BurstConfigured, Executed, Message, Reply
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.session_context import SessionContext

InlineHandler: TypeAlias = Callable[[SessionContext, Any, list[int]], None]
ErrorReplies: TypeAlias = Callable[[int, ErrorStatus, str], tuple[Message, ...]]


def _medium_priority(_context: SessionContext, _message: Any) -> int:
    return Priority.MEDIUM


class BlockingHandler(Struct, frozen=True):
    """A handler for the thread pool.

    Attributes:
        run: Handles the call; its last argument is the time at which the message was received, in ns. Returns True if
            the call stays open, because `SessionContext.submit_rest` has the rest of it.
        error_replies: Returns the replies to a call that failed, from its id, the status and the text.
        priority: Returns the call's priority; MEDIUM for calls that belong to no model.
        is_launch: Whether `run` only starts work and does not block. Such calls run on a separate thread, so that
            they are replied to immediately while the pool is busy.
    """

    run: Callable[[SessionContext, Any, list[int], int], bool | None]
    error_replies: ErrorReplies
    priority: Callable[[SessionContext, Any], int] = _medium_priority
    is_launch: bool = False


def reply(call: int, error: NnfmqError | None = None) -> Reply:
    """Return the reply that carries only the status of a call."""
    if error is None:
        return Reply(call, ErrorStatus.NONE, "")
    return Reply(call, status_for_error(error), str(error))


def error_as_reply(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Return the error replies to a call whose reply carries only a status."""
    return (Reply(call, status, text),)


def error_as_executed(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Return the error replies to a synchronous execution."""
    return (Executed(call, status, text),)


def error_as_burst_configured(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Return the error replies to a call that creates a burst."""
    return (BurstConfigured(call, status, text, NO_ID),)
