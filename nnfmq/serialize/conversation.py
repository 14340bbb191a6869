"""What has been said on one control connection: its state, and the calls without an answer, in both directions.

Both ends keep a Conversation and tell it of every message, their own and the peer's; it compares them with the tables
of `control` and does not know which side it runs on. It sends, stores and waits for nothing: who waits for an answer
keeps that under the call's number.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.serialize.control import REPLIES, TRANSITIONS, Call, Message, Reply, Role, State


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call and the types of the answers it still misses."""

    call: Call
    missing: tuple[type[Call], ...]

    def without(self, answer: Call) -> _Pending:
        """Return this with `answer` given; raises ProtocolError if the call misses none of its type."""
        kind = type(answer)
        if kind not in self.missing:
            raise ProtocolError(f"{_name(answer)} does not answer {_name(self.call)} (call {answer.call}) now")
        missing = tuple(other for other in self.missing if other is not kind)
        if missing and isinstance(answer, Reply) and answer.status is not ErrorStatus.NONE:
            raise ProtocolError(f"{_name(self.call)} (call {answer.call}) failed before its {missing[0].__name__} came")
        return _Pending(self.call, missing)


class Conversation:
    """One connection's state and its unanswered calls in both directions; both ends keep one, and it is thread-safe.

    Tell it of every message, of the own ones *before* they are sent (the answer may overtake the note otherwise).
    """

    def __init__(self) -> None:
        self.state = State.NEW
        self._lock = threading.Lock()
        self._last_call = dict.fromkeys(Role, 0)
        self._pending: dict[Role, dict[int, _Pending]] = {role: {} for role in Role}

    def new_call(self, caller: Role) -> int:
        """Return a number for a call by `caller`: 1, 2, 3, ... and never one twice."""
        with self._lock:
            self._last_call[caller] += 1
            return self._last_call[caller]

    def note(self, message: Message, sender: Role) -> Call | None:
        """Record that `sender` sent `message`, and return the call that it answers (None if it answers none).

        Raises ProtocolError, and changes nothing, if the tables do not allow it now: wrong state, a call number in
        use, an answer to an unknown call or of the wrong type.
        """
        with self._lock:
            next_state = TRANSITIONS[sender].get(self.state, {}).get(type(message))
            if next_state is None:
                state = self.state.value
                raise ProtocolError(f"the {sender.value} may not send {_name(message)} while the connection is {state}")
            answered = self._note_call(message, sender) if isinstance(message, Call) else None
            self.state = next_state
            return answered

    def _note_call(self, message: Call, sender: Role) -> Call | None:
        if type(message) not in REPLIES:
            return self._note_answer(message, self._pending[sender.peer])
        if message.call in self._pending[sender]:
            raise ProtocolError(f"{_name(message)} uses call number {message.call}, which is not answered yet")
        self._pending[sender][message.call] = _Pending(message, REPLIES[type(message)])
        return None

    def _note_answer(self, answer: Call, pending: dict[int, _Pending]) -> Call:
        entry = pending.get(answer.call)
        if entry is None:
            raise ProtocolError(f"{_name(answer)} answers call {answer.call}, which is not open")
        left = entry.without(answer)
        if left.missing:
            pending[answer.call] = left
        else:
            del pending[answer.call]
        return entry.call

    def is_pending(self, caller: Role, call: int) -> bool:
        """Return True while `caller`'s call still misses an answer."""
        with self._lock:
            return call in self._pending[caller]

    def pending(self, caller: Role) -> tuple[Call, ...]:
        """Return the calls of `caller` that still miss an answer, oldest first: on hang-up, all of them fail."""
        with self._lock:
            return tuple(entry.call for entry in self._pending[caller].values())


def _name(message: Message) -> str:
    return type(message).__name__
