"""The calls about traces, in a session of this process: rings of a client, and who may trace the driver. (OBS-7)"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.protocol import ProtocolPeer
from support.sessions import Running, prepare

from nnfmq.base.memory import Memory
from nnfmq.driver.process.trace import OWNER, WORKER_TRACE, TraceArea
from nnfmq.hal.errors import ErrorStatus
from nnfmq.observe.trace_files import RingReader
from nnfmq.observe.trace_layout import ring_bytes
from nnfmq.serialize import messages


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    WORKER_TRACE.stop()


def test_a_session_records_in_the_ring_of_its_client(greeted: ProtocolPeer) -> None:
    with Memory.create(ring_bytes(64)) as ring:
        greeted.send(messages.StartTrace(1), [ring.fileno()])
        assert greeted.receive(messages.Reply).status is ErrorStatus.NONE
        prepare(greeted, call=500)
        greeted.send(messages.GetCapabilities(2, "reference"))  # its reply is sent before its slice is recorded
        greeted.receive(messages.DeviceCapabilities)
        reader = RingReader(ring.view)
        reader.poll()
        trace = reader.trace()
        reader.release()
    slices = {one.name: one.request % (1 << 24) for one in trace.slices}
    assert slices["[NN_LD_PC]PrepareModel"] == 500
    assert trace.processes == {os.getpid(): f"driver of pid {os.getpid()}"}


def test_memory_that_is_too_small_is_an_invalid_argument(greeted: ProtocolPeer) -> None:
    with Memory.create(4096) as ring:
        greeted.send(messages.StartTrace(1), [ring.fileno()])
        reply = greeted.receive(messages.Reply)
    assert (reply.status, reply.message) == (
        ErrorStatus.INVALID_ARGUMENT,
        "a trace ring is writable and has at least 32800 bytes",
    )


def test_who_administers_the_driver_gets_its_area(running: Running, greeted: ProtocolPeer) -> None:
    with TraceArea(2) as area:
        WORKER_TRACE.use_area(area.memory, 1)
        greeted.send(messages.TraceDriver(1))
        reply, (fd,) = greeted.receive_with_fds(messages.DriverTraced)
        try:
            assert reply.status is ErrorStatus.NONE
            assert os.fstat(fd).st_ino == os.fstat(area.memory.fileno()).st_ino
            assert area.memory.view[OWNER] == 1
        finally:
            os.close(fd)
        WORKER_TRACE.stop()


def test_another_user_may_not_trace_the_driver(running: Running, greeted: ProtocolPeer) -> None:
    running.session.client_uid = os.getuid() + 1
    greeted.send(messages.TraceDriver(1))
    reply = greeted.receive(messages.DriverTraced)
    assert reply.status is ErrorStatus.GENERAL_FAILURE
    assert f"uid {os.getuid() + 1} does not administer this driver, which runs as {os.getuid()}" in reply.message


def test_an_embedded_driver_has_no_area(greeted: ProtocolPeer) -> None:
    greeted.send(messages.TraceDriver(1))
    reply = greeted.receive(messages.DriverTraced)
    assert reply.status is ErrorStatus.GENERAL_FAILURE
    assert "an embedded driver has one client" in reply.message
