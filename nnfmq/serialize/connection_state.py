"""Sans-I/O state machine of one control connection: its phase, and the pending calls in both directions.

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


class _PendingCall(NamedTuple):
    """The type of a call, and the types of the replies that have not arrived."""

    kind: type[Call]
    missing: tuple[type[Call], ...]


class ConnectionState:
    """The phase of one connection, and its pending calls in both directions. Thread-safe.

    A sender passes its message *before* it sends it: otherwise the peer's reply could be processed first.
    """

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self._lock = threading.Lock()
        self._last_call_id = dict.fromkeys(PeerRole, 0)
        self._pending: dict[PeerRole, dict[int, _PendingCall]] = {role: {} for role in PeerRole}

    def next_call_id(self, caller: PeerRole) -> int:
        """Return the id for a new call of `caller`: 1, 2, 3, ...; an id is never reused."""
        with self._lock:
            self._last_call_id[caller] += 1
            return self._last_call_id[caller]

    def process_message(self, message: Message, sender: PeerRole) -> None:
        """Record that `sender` sent `message`. An error changes nothing.

        Raises:
            ProtocolError: If the message is not allowed in this phase, or a call uses the id of a pending call, or a
                reply belongs to no pending call or has the wrong type for it.
        """
        kind = type(message)
        with self._lock:
            next_phase = self._next_phase(kind, sender)
            if isinstance(message, Call):
                if kind in REPLIES:
                    self._begin_call(kind, message.call, sender)
                else:
                    _process_reply(message, self._pending[sender.peer])
            self.phase = next_phase

    def process_call(self, kind: type[Call], call: int, sender: PeerRole) -> None:
        """Record a call of `sender` whose message is not decoded. An error changes nothing.

        Raises:
            ProtocolError: As `process_message`.
        """
        with self._lock:
            self._next_phase(kind, sender)  # which is the same: calls do not change the phase
            self._begin_call(kind, call, sender)

    def _next_phase(self, kind: type[Message], sender: PeerRole) -> Phase:
        next_phase = TRANSITIONS[sender].get(self.phase, {}).get(kind)
        if next_phase is None:
            raise ProtocolError(
                f"the {sender.value} may not send {kind.__name__} while the connection is {self.phase.value}"
            )
        return next_phase

    def _begin_call(self, kind: type[Call], call: int, sender: PeerRole) -> None:
        pending = self._pending[sender]
        if call in pending:
            raise ProtocolError(f"{kind.__name__} uses call id {call}, which is still pending")
        pending[call] = _PendingCall(kind, REPLIES[kind])

    def cancel_call(self, message: Call, sender: PeerRole) -> None:
        """Remove a call that could not be sent after all. Replies, and calls that are not pending, change nothing."""
        if type(message) in REPLIES:
            with self._lock:
                self._pending[sender].pop(message.call, None)

    def pending_calls(self, caller: PeerRole) -> tuple[type[Call], ...]:
        """Return the types of the pending calls of `caller`, oldest first."""
        with self._lock:
            return tuple(pending.kind for pending in self._pending[caller].values())


def _process_reply(reply: Call, pending: dict[int, _PendingCall]) -> None:
    """Record a reply or notification to one of these pending calls, and remove the call after its last reply."""
    call = pending.get(reply.call)
    if call is None:
        raise ProtocolError(f"{_name(reply)} replies to call {reply.call}, which is not pending")
    kind = type(reply)
    if call.missing == (NOTIFICATIONS.get(kind),):
        return
    if kind not in call.missing:
        raise ProtocolError(f"{_name(reply)} is no reply to {call.kind.__name__} (call {reply.call}) now")
    missing = tuple(other for other in call.missing if other is not kind)
    if not missing:
        del pending[reply.call]
    elif isinstance(reply, Reply) and reply.status is not ErrorStatus.NONE:
        failed = call.kind.__name__
        raise ProtocolError(f"{failed} (call {reply.call}) failed before its {missing[0].__name__} came")
    else:
        pending[reply.call] = call._replace(missing=missing)


def _name(message: Message) -> str:
    return type(message).__name__
