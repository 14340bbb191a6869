"""What a handler of a call is, and how calls are answered.

A handler takes the session, the message, and the descriptors that came with it, which are its own from then on. A plain
one is quick: it runs on the watcher's thread and may not block. A pooled one runs on the session's pool when it is its
turn, is also told when the message was seen, and raises what the HAL answers: `refuse` turns that into the answers of
such a call. A launch only begins what is to run later: it has a thread of its own, so that it is answered at once while
the pool is busy, and may not block either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from nnfmq.hal.errors import ErrorStatus, NnfmqError, status_for_error
from nnfmq.hal.types import Priority
from nnfmq.serialize.messages import BurstConfigured, Executed, Message, Reply
from nnfmq.service.handle_table import NO_ID

if TYPE_CHECKING:
    from nnfmq.service.session import Session

InlineHandler: TypeAlias = "Callable[[Session, Any, list[int]], None]"
Refusal: TypeAlias = Callable[[int, ErrorStatus, str], tuple[Message, ...]]


def _medium(_session: Session, _message: Any) -> int:
    """Return the priority of calls that belong to no model."""
    return Priority.MEDIUM


@dataclass(frozen=True, slots=True)
class BlockingHandler:
    """A handler for the pool: what it does, how its calls are refused, and how important one is."""

    run: Callable[[Session, Any, list[int], int], None]
    refuse: Refusal
    priority: Callable[[Session, Any], int] = _medium
    is_launch: bool = False


def reply(call: int, error: NnfmqError | None = None) -> Reply:
    """Return the answer that only says how a call went."""
    if error is None:
        return Reply(call, ErrorStatus.NONE, "")
    return Reply(call, status_for_error(error), str(error))


def error_as_reply(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Refuse a call that is answered by a Reply alone."""
    return (Reply(call, status, text),)


def error_as_executed(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Refuse a call that executes and waits."""
    return (Executed(call, status, text),)


def error_as_burst_configured(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    """Refuse a call that creates a burst."""
    return (BurstConfigured(call, status, text, NO_ID),)
