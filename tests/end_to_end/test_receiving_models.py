"""While the driver copies or decodes a large model, it serves the same client's bursts and checks the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, InThread, until
from support.protocol import ProtocolPeer
from support.sessions import HELLO, assert_alive, prepare_message
from support.small_models import two_adds, with_constants, with_unused_operands

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.messages.common import memory_to_data
from nnfmq.serialize.models import encode_model

SIZE = 256 << 20
TRIES = 10
GAP_PARTS = 5  # a copy that holds the GIL stops a burst for at least a third of the preparation


@pytest.fixture
def pool() -> Iterator[nnfmq.Memory]:
    """Return 256 MiB for a model's constants."""
    with nnfmq.Memory.create(SIZE) as memory:
        yield memory


@pytest.fixture(scope="module")
def many() -> bytes:
    """Return an encoded model of 200,000 operands: 5 MiB."""
    return encode_model(with_unused_operands(200_000))[0]


def resident_bytes(client: nnfmq.Client) -> int:
    status = Path(f"/proc/{client.worker_pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_burst_goes_on_while_the_same_client_prepares_a_large_model(client: nnfmq.Client, pool: nnfmq.Memory) -> None:
    model = with_constants(pool)
    assert goes_on(client, lambda: client.device("reference").prepare(model).close())


def test_a_burst_goes_on_while_the_driver_decodes_many_operands(client: nnfmq.Client, many: bytes) -> None:
    connection = client.connection

    def send() -> None:
        message = messages.GetSupportedOperations(connection.next_call_id(), "reference", many)
        reply = connection.exchange(message, messages.SupportedOperations)
        assert reply.status is ErrorStatus.INVALID_ARGUMENT

    assert goes_on(client, send)


def goes_on(client: nnfmq.Client, call: Callable[[], object]) -> bool:
    """Return whether a burst goes on during `call`, at least once in some tries: the CPUs may be anybody's."""
    return any(longest_gap(client, call) < 1 / GAP_PARTS for _ in range(TRIES))


def longest_gap(client: nnfmq.Client, call: Callable[[], object]) -> float:
    """Return the longest time without a result of a burst during `call`, as a part of the time that `call` takes."""
    ones, ends = np.ones((2, 2), np.float32), []
    begun, ended = threading.Event(), threading.Event()
    with client.device("reference").prepare(two_adds()) as small, small.burst() as burst:

        def execute() -> None:
            while not ended.is_set():
                burst.execute(ones, ones)
                ends.append(time.monotonic_ns())
                begun.set()

        bursts = InThread.start(execute)
        assert begun.wait(30)
        begin_ns = time.monotonic_ns()
        try:
            call()
        finally:
            end_ns = time.monotonic_ns()
            ended.set()
        assert bursts.wait().error is None
    during = [begin_ns, *(end for end in ends if begin_ns < end < end_ns), end_ns]
    return max(later - earlier for earlier, later in pairwise(during)) / (end_ns - begin_ns)


def test_a_pool_of_constants_costs_the_driver_one_copy(client: nnfmq.Client, pool: nnfmq.Memory) -> None:
    before = resident_bytes(client)
    with client.device("reference").prepare(with_constants(pool)):
        assert resident_bytes(client) - before < SIZE * 5 // 4


PERSISTENT, TRANSIENT = ErrorStatus.MISSED_DEADLINE_PERSISTENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT
SOON_NS = 10_000_000  # to copy or decode takes far longer; on a busy machine the message may take as long


@pytest.mark.parametrize(
    ("after_ns", "statuses"),
    [(-1, {PERSISTENT}), (SOON_NS, {TRANSIENT, PERSISTENT})],
    ids=["passed before", "passes meanwhile"],
)
def test_a_deadline_ends_the_copy(
    daemon: Daemon, pool: nnfmq.Memory, after_ns: int, statuses: set[ErrorStatus]
) -> None:
    with speaking(daemon) as raw:
        data, _ = encode_model(with_constants(pool))
        deadline_ns = time.monotonic_ns() + after_ns
        raw.send(prepare_message(1, data, deadline_ns=deadline_ns, pools=(memory_to_data(pool),)), [pool.fileno()])
        status = raw.receive(messages.PreparedModelReady).status
        assert status in statuses
        assert raw.receive(messages.Reply).status is status
        assert_alive(raw)


def test_a_deadline_ends_the_decoding(daemon: Daemon, many: bytes) -> None:
    with speaking(daemon) as raw:
        raw.send(prepare_message(1, many, deadline_ns=time.monotonic_ns() + SOON_NS))
        status = raw.receive(messages.PreparedModelReady).status
        assert status in {TRANSIENT, PERSISTENT}  # without a deadline it is INVALID_ARGUMENT
        assert raw.receive(messages.Reply).status is status
        assert_alive(raw)


def speaking(daemon: Daemon) -> ProtocolPeer:
    raw = ProtocolPeer(Channel.connect(daemon.path, time.monotonic_ns() + 30_000_000_000), PeerRole.CLIENT)
    raw.send(HELLO)
    raw.receive(messages.HelloReply)
    return raw


def test_the_driver_frees_what_it_copied_for_a_client_that_has_left(client: nnfmq.Client, pool: nnfmq.Memory) -> None:
    worker = Path(f"/proc/{client.worker_pid}/statm")
    pages = SIZE // 4096
    with client.device("reference").prepare(with_constants(pool)):
        assert int(worker.read_text().split()[1]) > pages
    until(lambda: int(worker.read_text().split()[1]) < pages, "the copy is freed")
