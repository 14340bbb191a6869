"""Responder: receives the requests of one queue, and answers those that equal an earlier one in another.

A client that executes one model again and again sends equal packets, or a few in turn, one for each of its memories.
What answers these needs no other Python code than the execution itself: the compiled core has this class as one
function from the packet to the result. This module is its specification, and what the Python core runs.

The words in which a responder describes its last execution are those of the stats area beside the ring
(`queue.layout`), which the execution statistics of a burst define.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from nnfmq.hal.errors import QueueCorrupted

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RepeatedRequest", "Responder"]


class _Execution(Protocol):
    """The execution that a request runs, and the times of its last run."""

    @property
    def engine_begin_ns(self) -> int: ...

    @property
    def engine_end_ns(self) -> int: ...

    def run(self) -> object: ...


class _Versioned(Protocol):
    version: int


class _Requests(Protocol):
    """A ring of requests."""

    def receive(self, deadline_ns: int | None, window_ns: int, /) -> bytes | None: ...


class _Results(Protocol):
    """A ring of replies."""

    def send(self, data: bytes, /) -> bool: ...


class _Server(Protocol):
    """The owner of a responder, which does the rest of the work. `ready_ns` is the argument of `answer`."""

    def encode(self, request: RepeatedRequest, result: Any, /) -> bytes:
        """Return the reply for another result than that of the run before."""
        ...

    def fail(self, error: Exception, ready_ns: int, /) -> object:
        """Reply to a request whose run or `encode` has raised `error`; or raise it."""
        ...

    def send_again(self, reply: bytes, ready_ns: int, /) -> bool:
        """Send a reply that the ring has not taken, or another one; return whether it was this one."""
        ...


class RepeatedRequest:
    """A request that was bound, and the reply of its last run.

    Attributes:
        packet: The request: equal ones repeat it.
        version: The version of what it was bound to: it is repeated while that has no other one.
        execution: Runs it.
        is_measured: Whether `encode` makes a reply for each run; otherwise a reply is for all equal results.
    """

    def __init__(self, packet: bytes, version: int, execution: _Execution, is_measured: bool = False, /) -> None:
        self.packet, self.version, self.execution, self.is_measured = packet, version, execution, is_measured
        self._result: object = None
        self._reply = b""

    def run(self, server: _Server) -> bytes:
        """Run it and return the reply."""
        result = self.execution.run()
        if self.is_measured:
            return server.encode(self, result)
        if result is not self._result:  # the first run, or a result of which not all is known before
            if not self._reply or result != self._result:
                self._reply = server.encode(self, result)
            self._result = result
        return self._reply


class Responder:
    """Receives the requests of one ring, and sends replies to another; for one thread at a time. Close it.

    Any thread may set `last` and change `kept`.

    Args:
        requests: The ring of the requests.
        results: The ring of the replies.
        words: Six words of 64 bits or more: `received`, `received_ns`, the `ready_ns` of `answer`, when the execution
            began and ended, and when its reply was sent.
        bound_to: What requests are bound to; its `version` decides whether one may be repeated.
        server: Does the rest.
        count: Called after each reply, with the times of the request here and in its execution, in ns.
        sent: Two words or more beside the ring of the requests, of which the client writes the second: when it sent a
            request. None: it does not say.
    """

    def __init__(
        self, requests: _Requests, results: _Results, words: memoryview, bound_to: _Versioned, server: _Server,
        count: Callable[[int, int], object], sent: memoryview | None = None, /,
    ) -> None:  # fmt: skip
        self.notes_sent = False
        """Whether it reads when requests were sent, which takes long: the client's core has just written that."""
        self.sent_ns = 0
        """When the last request was sent, as the client says; 0: it was not read."""
        self._sent = None if sent is None else sent.cast("B").cast("Q")
        self.last: RepeatedRequest | None = None
        """The request that is compared first; None: none is."""
        self.kept: dict[bytes, RepeatedRequest] = {}
        """The requests that equal ones repeat, by their packets."""
        self.received = 0
        """How many requests were received."""
        self.received_ns = 0
        """When the last one was received."""
        self._receive, self._send = requests.receive, results.send
        self._words, self._bound_to, self._count = words, bound_to, count
        self._server: _Server | None = server

    def bind(self, packet: bytes, version: int, execution: _Execution, is_measured: bool = False, /) -> RepeatedRequest:
        """Return a request for `last`, `kept` and `answer`; the arguments are its attributes."""
        return RepeatedRequest(packet, version, execution, is_measured)

    def serve(self, window_ns: int, /) -> bytes | None:
        """Receive a request, answer it if it equals one of `kept`, and return None; or return it.

        Blocks as `Ring.receive`.
        """
        packet = self._receive(None, window_ns)
        assert packet is not None  # there is no deadline
        self.received_ns = monotonic_ns()
        self.sent_ns = self._sent[1] if self.notes_sent and self._sent is not None else 0
        self.received += 1
        equal = self.last
        if equal is None or packet != equal.packet:  # to compare takes less than to look up
            equal = self.kept.get(packet)
        if equal is None or equal.version != self._bound_to.version:
            return packet
        self.answer(equal, self.received_ns)
        return None

    def answer(self, request: RepeatedRequest, ready_ns: int, /) -> None:
        """Run the request that was received, bound at `ready_ns`, and send the reply. Does not block otherwise."""
        server = self._server
        assert server is not None  # it is not closed
        try:
            reply = request.run(server)
        except Exception as error:  # noqa: BLE001  the server raises what it has no reply for
            server.fail(error, ready_ns)
            return
        begin_ns, end_ns = request.execution.engine_begin_ns, request.execution.engine_end_ns
        words, received_ns = self._words, self.received_ns
        words[0] = self.received  # literal indexes: this runs for every execution, and globals cost more
        words[1] = received_ns
        words[2] = ready_ns
        words[3] = begin_ns
        words[4] = end_ns
        words[5] = sent_ns = monotonic_ns()
        try:
            is_sent = self._send(reply)
        except QueueCorrupted:
            is_sent = False
        if is_sent or server.send_again(reply, ready_ns):
            self._count(sent_ns - received_ns, end_ns - begin_ns)  # while the peer reads the result

    def close(self) -> None:
        """Release the words and the server. Idempotent."""
        self.last = self._server = None
        self.kept.clear()
        self._words.release()
        if self._sent is not None:
            self._sent.release()
