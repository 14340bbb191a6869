"""Sans-I/O state machine of one control connection: its phase, and the calls without a reply, in both directions.

Client and driver each keep a `ConnectionState` and pass it every message that they send or receive. It compares the
message with the tables of `control_protocol` and raises ProtocolError if the message is not allowed in the current
phase. It performs no I/O and stores no payload.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.serialize.control_protocol import NOTIFICATIONS, REPLIES, TRANSITIONS, PeerRole, Phase
from nnfmq.serialize.messages import Call, Message, Reply


class _Pending(NamedTuple):
    """What is kept of a call: its type, not its body, and the types of the answers it still misses."""

    kind: type[Call]
    missing: tuple[type[Call], ...]

    def without(self, answer: Call) -> _Pending:
        """Return this with `answer` given, or as it is for a notice; raises ProtocolError if it misses none such."""
        kind, name = type(answer), self.kind.__name__
        if self.missing == (NOTIFICATIONS.get(kind),):
            return self
        if kind not in self.missing:
            raise ProtocolError(f"{_name(answer)} does not answer {name} (call {answer.call}) now")
        missing = tuple(other for other in self.missing if other is not kind)
        if missing and isinstance(answer, Reply) and answer.status is not ErrorStatus.NONE:
            raise ProtocolError(f"{name} (call {answer.call}) failed before its {missing[0].__name__} came")
        return _Pending(self.kind, missing)


class ConnectionState:
    """One connection's state and its unanswered calls in both directions; both ends keep one, and it is thread-safe.

    Tell it of every message, of the own ones *before* they are sent (the answer may overtake the note otherwise).
    """

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self._lock = threading.Lock()
        self._last_call = dict.fromkeys(PeerRole, 0)
        self._pending: dict[PeerRole, dict[int, _Pending]] = {role: {} for role in PeerRole}

    def next_call_id(self, caller: PeerRole) -> int:
        """Return a number for a call by `caller`: 1, 2, 3, ... and never one twice."""
        with self._lock:
            self._last_call[caller] += 1
            return self._last_call[caller]

    def process_message(self, message: Message, sender: PeerRole) -> None:
        """Record that `sender` sent `message`.

        Raises ProtocolError, and changes nothing, if the tables do not allow it now: wrong state, a call number in
        use, an answer to an unknown call or of the wrong type.
        """
        with self._lock:
            next_state = TRANSITIONS[sender].get(self.phase, {}).get(type(message))
            if next_state is None:
                state = self.phase.value
                raise ProtocolError(f"the {sender.value} may not send {_name(message)} while the connection is {state}")
            if isinstance(message, Call):
                self._note_call(message, sender)
            self.phase = next_state

    def cancel_call(self, message: Call, sender: PeerRole) -> None:
        """Take back the note of a call that could not be sent after all; an answer's note stays."""
        if type(message) in REPLIES:
            with self._lock:
                self._pending[sender].pop(message.call, None)

    def _note_call(self, message: Call, sender: PeerRole) -> None:
        if type(message) not in REPLIES:
            self._note_answer(message, self._pending[sender.peer])
        elif message.call in self._pending[sender]:
            raise ProtocolError(f"{_name(message)} uses call number {message.call}, which is not answered yet")
        else:
            self._pending[sender][message.call] = _Pending(type(message), REPLIES[type(message)])

    def _note_answer(self, answer: Call, pending: dict[int, _Pending]) -> None:
        entry = pending.get(answer.call)
        if entry is None:
            raise ProtocolError(f"{_name(answer)} answers call {answer.call}, which is not open")
        left = entry.without(answer)
        if left.missing:
            pending[answer.call] = left
        else:
            del pending[answer.call]

    def pending_calls(self, caller: PeerRole) -> tuple[type[Call], ...]:
        """Return the types of `caller`'s calls that still miss an answer, oldest first."""
        with self._lock:
            return tuple(entry.kind for entry in self._pending[caller].values())


def _name(message: Message) -> str:
    return type(message).__name__
