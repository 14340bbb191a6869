"""The trace of an application: when it begins, what workers get, and what happens if something of it fails. (OBS-7)"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import trace_checks

from nnfmq.base.channel import Listener
from nnfmq.base.memory import Memory
from nnfmq.client.connection import trace
from nnfmq.hal.errors import DeadObject, ErrorStatus, ResourceExhaustedTransient
from nnfmq.observe.trace_points import TRACING, recorded
from nnfmq.serialize import messages

WORKER_PID = 4242


class FakeConnection:
    """A connection to a worker: it keeps what is sent."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[tuple[messages.Call, list[str]]] = []
        self.handler: Any = None
        self._error = error

    def next_call_id(self) -> int:
        return 9

    def wait_until_ready(self) -> messages.HelloReply:
        return messages.HelloReply(1, "AIDL v4", "driver", WORKER_PID, WORKER_PID, "compiled")

    def start_call_nonblocking(
        self, message: messages.Call, _reply: type[messages.Call], handler: Any, fds: Sequence[int] = ()
    ) -> None:
        if self._error is not None:
            raise self._error
        self.sent.append((message, [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]))
        self.handler = handler


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    trace._Process.application = None
    trace._Process.has_failed = False
    TRACING.stop()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NNFMQ_TRACE", str(tmp_path / "out-%p.json"))
    return tmp_path / f"out-{os.getpid()}.json"


def test_nothing_begins_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNFMQ_TRACE", raising=False)
    trace.start()
    connection = FakeConnection()
    trace.trace_worker(connection, WORKER_PID)
    trace.record_call(connection, messages.ListDevices(1), 0)
    assert trace.burst_trace(connection, 1, memoryview(bytes(8)).cast("Q")) is None
    assert (TRACING.recorder, connection.sent) == (None, [])
    trace.finish()


def test_the_file_has_calls_bursts_and_the_whole_application(file: Path) -> None:
    trace.start()
    first = TRACING.recorder
    trace.start()  # of a second connection
    assert TRACING.recorder is first is not None
    connection = FakeConnection()
    trace.record_call(connection, messages.ListDevices(77), 1_000)
    burst = trace.burst_trace(connection, 5, memoryview(bytearray((3).to_bytes(8, "little"))).cast("Q"))
    assert burst is not None
    burst.begin()
    burst.end(time.monotonic_ns(), 0)
    trace.finish()
    events = trace_checks.load(file)
    requests = {event["name"]: event["args"]["request"] for event in events if event.get("args", {}).get("request")}
    assert requests["[NN_LI_PI]ListDevices"] == f"{WORKER_PID}.0.77"
    assert requests["[NN_LR_PE]execute"] == f"{WORKER_PID}.5.3"
    assert len(trace_checks.named(events, "[NN_LA_PO]application")) == 1
    trace.finish()  # idempotent
    assert TRACING.recorder is None


def test_each_worker_gets_a_ring(file: Path) -> None:
    trace.start()
    connection = FakeConnection()
    trace.trace_worker(connection, WORKER_PID)
    ((message, (memory,)),) = connection.sent
    assert message == messages.StartTrace(9)
    assert memory.startswith("/memfd:nnfmq-trace")
    trace.finish()


def test_a_worker_that_does_not_record_is_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace.start()
    connection = FakeConnection()
    trace.trace_worker(connection, WORKER_PID)
    connection.handler.set_result(messages.Reply(9, ErrorStatus.NONE, ""))
    assert not caplog.records
    connection.handler.set_result(messages.Reply(9, ErrorStatus.INVALID_ARGUMENT, "no ring"))
    connection.handler.set_exception(DeadObject("gone"))
    trace.trace_worker(FakeConnection(DeadObject("dead")), WORKER_PID)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"worker {WORKER_PID} is not traced: {reason}" for reason in ("no ring", "gone", "dead")]
    trace.finish()


def test_without_memory_for_a_ring_the_application_is_not_traced(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Memory:
        raise ResourceExhaustedTransient("no memory")

    monkeypatch.setattr(Memory, "create", refuse)
    trace.start()
    trace.start()  # is not tried again
    assert TRACING.recorder is None
    assert [record.getMessage().endswith("no memory") for record in caplog.records] == [True]


def test_a_file_that_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NNFMQ_TRACE", str(tmp_path / "none" / "out.json"))
    trace.start()
    trace.finish()
    assert "the trace was not written" in caplog.text
    assert TRACING.recorder is None


def test_a_collector_gets_the_memory_of_every_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_TRACE", f"socket:{tmp_path}/s")
    with Listener.create(tmp_path / "s") as listener:
        trace.start()
        trace.trace_worker(FakeConnection(), WORKER_PID)
        channel = listener.accept()
        assert channel is not None
        with channel:
            for _ in range(2):
                with channel.receive() as frame:
                    assert bytes(frame.data) == b"ring"
                    Memory.adopt(*frame.detach_fds()).close()
        trace.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.lock"]


def test_an_application_goes_on_after_its_collector_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NNFMQ_TRACE", f"socket:{tmp_path}/s")
    caplog.set_level(logging.INFO, "nnfmq.client")
    with Listener.create(tmp_path / "s") as listener:
        trace.start()
        channel = listener.accept()
        assert channel is not None
        channel.close()
    connection = FakeConnection()
    trace.trace_worker(connection, WORKER_PID)
    assert len(connection.sent) == 1
    assert "the trace is not collected any more" in caplog.text
    with recorded("x"):
        pass
    trace.finish()


def test_a_forked_child_neither_records_nor_writes(file: Path) -> None:
    trace.start()
    child = os.fork()
    if not child:
        connection = FakeConnection()
        trace.trace_worker(connection, WORKER_PID)
        trace.finish()
        os._exit(0 if not connection.sent and not file.exists() else 1)
    assert os.waitpid(child, 0)[1] == 0
    trace.finish()
    assert file.exists()
