"""Answers to equal requests: when a responder repeats one, what it writes, what it leaves to the server."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nnfmq.hal.errors import BadState, QueueCorrupted
from nnfmq.queue import MessageQueue
from nnfmq.serialize.packets import SENT_WORD

REQUEST, OTHER, REPLY = b"request.", b"another.", b"reply..."
WINDOW_NS = 0


class Execution:
    """Counts its runs; returns or raises `outcome`."""

    def __init__(self, outcome: Any = "result") -> None:
        self.outcome, self.runs = outcome, 0
        self.engine_begin_ns, self.engine_end_ns = 30, 47

    def run(self) -> object:
        self.runs += 1
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class Server:
    """Notes the calls of a responder over two queues, and its counts."""

    version = 1

    def __init__(self, requests: MessageQueue, results: MessageQueue) -> None:
        self.requests, self.results = requests, results
        self.words = memoryview(bytearray(64)).cast("Q")
        self.calls: list[tuple[Any, ...]] = []
        self.counts: list[tuple[int, int]] = []
        self.is_raising = False
        self.responder = requests.responder(
            results, self.words, self, self, lambda here_ns, ns: self.counts.append((here_ns, ns))
        )

    def encode(self, _request: object, result: object) -> bytes:
        self.calls.append(("encode", result))
        return REPLY if result == "result" else str(result).encode().ljust(8, b".")

    def fail(self, error: Exception, ready_ns: int) -> None:
        self.calls.append(("fail", str(error), ready_ns))
        if self.is_raising:
            raise error

    def send_again(self, reply: bytes, ready_ns: int) -> bool:
        self.calls.append(("send_again", reply, ready_ns))
        return False

    def serve(self, packet: bytes) -> bytes | None:
        assert self.requests.send(packet)
        return self.responder.serve(WINDOW_NS)

    def replies(self) -> bytes:
        return self.results.receive(0, 0) or b""


@pytest.fixture
def server(make_queue: Callable[..., MessageQueue]) -> Iterator[Server]:
    made = Server(make_queue(8, 4), make_queue(8, 4))
    yield made
    made.responder.close()


def repeated(server: Server, execution: Execution, *, is_measured: bool = False) -> Execution:
    """Let the server answer REQUEST once, and repeat it."""
    assert server.serve(REQUEST) == REQUEST
    server.responder.last = server.responder.bind(REQUEST, server.version, execution, is_measured)
    server.responder.answer(server.responder.last, 20)
    return execution


def test_a_request_is_returned_until_it_is_the_last(server: Server) -> None:
    assert server.serve(REQUEST) == REQUEST
    assert server.serve(REQUEST) == REQUEST
    assert (server.calls, server.counts, server.replies()) == ([], [], b"")


def test_equal_requests_are_answered_and_others_returned(server: Server) -> None:
    execution = repeated(server, Execution())
    assert server.serve(REQUEST) is None
    assert server.replies() == REPLY * 2
    assert server.serve(OTHER) == OTHER
    assert server.serve(REQUEST) is None
    assert (execution.runs, server.replies()) == (3, REPLY)
    assert server.calls == [("encode", "result")]
    assert server.responder.received == 4


def test_requests_that_are_kept_are_answered_in_any_order_until_their_version_changes(server: Server) -> None:
    first, second = repeated(server, Execution()), Execution()
    server.responder.kept[OTHER] = server.responder.bind(OTHER, server.version, second)
    for packet in (OTHER, REQUEST, OTHER):
        assert server.serve(packet) is None
    assert (first.runs, second.runs, server.replies()) == (2, 2, REPLY * 4)
    server.version = 2
    assert server.serve(OTHER) == OTHER
    server.version = 1
    server.responder.kept.clear()
    assert server.serve(OTHER) == OTHER
    assert second.runs == 2


def test_when_a_request_was_sent_is_read_only_if_somebody_wants_to_know(server: Server) -> None:
    beside = server.requests.stats_view
    assert beside is not None
    with beside.cast("B") as view, view.cast("Q") as words:
        words[SENT_WORD] = 4711
        server.serve(REQUEST)
        assert server.responder.sent_ns == 0
        server.responder.notes_sent = True
        server.serve(REQUEST)
        assert server.responder.sent_ns == 4711
        server.responder.notes_sent = False
        server.serve(REQUEST)
        assert server.responder.sent_ns == 0


def test_nothing_is_repeated_for_another_version_or_after_the_last_was_forgotten(server: Server) -> None:
    execution = repeated(server, Execution())
    server.version = 2
    assert server.serve(REQUEST) == REQUEST
    server.version = 1
    server.responder.last = None
    assert server.serve(REQUEST) == REQUEST
    assert execution.runs == 1


def test_a_reply_is_encoded_again_for_another_result_and_not_for_an_equal_one(server: Server) -> None:
    execution = repeated(server, Execution([1]))
    for execution.outcome in ([1], [2]):
        assert server.serve(REQUEST) is None
    assert server.calls == [("encode", [1]), ("encode", [2])]
    assert server.replies() == b"[1]....." * 2 + b"[2]....."


def test_the_reply_of_a_measured_request_is_encoded_for_each_run(server: Server) -> None:
    repeated(server, Execution(), is_measured=True)
    assert server.serve(REQUEST) is None
    assert server.calls == [("encode", "result")] * 2


def test_the_words_and_the_count_describe_each_execution(server: Server) -> None:
    begun_ns = time.monotonic_ns()
    repeated(server, Execution())
    received, received_ns, ready_ns, *engine, sent_ns, _, _ = struct.unpack("8q", server.words)
    assert (received, received_ns, ready_ns, engine) == (1, server.responder.received_ns, 20, [30, 47])
    assert begun_ns <= received_ns <= sent_ns <= time.monotonic_ns()
    assert server.counts == [(sent_ns - received_ns, 17)]
    assert server.serve(REQUEST) is None
    received, received_ns, ready_ns, *_ = struct.unpack("8q", server.words)
    assert (received, ready_ns) == (2, received_ns)
    assert len(server.counts) == 2


def test_the_server_replies_to_an_error_of_the_run(server: Server) -> None:
    execution = repeated(server, Execution())
    execution.outcome = ValueError("wrong")
    assert server.serve(REQUEST) is None
    assert server.calls[1:] == [("fail", "wrong", server.responder.received_ns)]
    assert (server.replies(), len(server.counts)) == (REPLY, 1)
    server.is_raising = True
    with pytest.raises(ValueError, match="wrong"):
        server.serve(REQUEST)


@pytest.mark.parametrize("breaks", [False, True], ids=["full", "corrupted"])
def test_the_server_gets_a_reply_that_the_ring_does_not_take(server: Server, breaks: bool) -> None:
    repeated(server, Execution())
    if breaks:
        server.results.memory.view[:8] = b"\xff" * 8  # the read counter
    else:
        assert server.results.write(REPLY * 3)
    assert server.serve(REQUEST) is None
    assert server.calls[1:] == [("send_again", REPLY, server.responder.received_ns)]
    assert len(server.counts) == 1


def test_invalid_counters_of_the_requests_are_reported_and_not_counted(server: Server) -> None:
    server.requests.memory.view[:8] = b"\xff" * 8
    with pytest.raises(QueueCorrupted):
        server.responder.serve(WINDOW_NS)
    assert server.responder.received == 0


def test_a_closed_responder_keeps_nothing_and_its_queue_ends_the_call(server: Server) -> None:
    repeated(server, Execution())
    server.responder.close()
    server.responder.close()
    assert (server.responder.last, server.responder.kept) == (None, {})
    server.requests.close()
    with pytest.raises(BadState):
        server.responder.serve(WINDOW_NS)
