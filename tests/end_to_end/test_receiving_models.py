"""While the driver copies a large model, it serves the same client's bursts and checks the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, InThread, until
from support.protocol import ProtocolPeer
from support.sessions import HELLO, assert_alive, prepare_message
from support.small_models import two_adds, with_constants

import nnfmq
from nnfmq.channel import Channel
from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.messages.common import memory_to_data
from nnfmq.serialize.model_codec import encode_model

SIZE = 256 << 20
GAP_PARTS = 5  # a copy that holds the GIL stops a burst for at least a third of the preparation


@pytest.fixture
def pool() -> Iterator[nnfmq.Memory]:
    """Return 256 MiB for a model's constants."""
    with nnfmq.Memory.create(SIZE) as memory:
        yield memory


def resident_bytes(client: nnfmq.Client) -> int:
    status = Path(f"/proc/{client.worker_pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_burst_goes_on_while_the_same_client_prepares_a_large_model(client: nnfmq.Client, pool: nnfmq.Memory) -> None:
    device, ones, ends = client.device("reference"), np.ones((2, 2), np.float32), []
    begun, prepared = threading.Event(), threading.Event()
    with device.prepare(two_adds()) as small, small.burst() as burst:

        def execute() -> None:
            while not prepared.is_set():
                burst.execute(ones, ones)
                ends.append(time.monotonic_ns())
                begun.set()

        bursts = InThread.start(execute)
        assert begun.wait(30)
        begin_ns = time.monotonic_ns()
        try:
            model = device.prepare(with_constants(pool))
        finally:
            prepared_ns = time.monotonic_ns()
            prepared.set()
        model.close()
        assert bursts.wait().error is None
    during = [begin_ns, *(end for end in ends if begin_ns < end < prepared_ns), prepared_ns]
    assert max(end - begin for begin, end in pairwise(during)) < (prepared_ns - begin_ns) / GAP_PARTS


def test_a_pool_of_constants_costs_the_driver_one_copy(client: nnfmq.Client, pool: nnfmq.Memory) -> None:
    before = resident_bytes(client)
    with client.device("reference").prepare(with_constants(pool)):
        assert resident_bytes(client) - before < SIZE * 5 // 4


@pytest.mark.parametrize(
    ("after_ns", "status"),
    [(-1, ErrorStatus.MISSED_DEADLINE_PERSISTENT), (10_000_000, ErrorStatus.MISSED_DEADLINE_TRANSIENT)],
    ids=["passed before", "passes meanwhile"],
)
def test_a_deadline_ends_the_copy(daemon: Daemon, pool: nnfmq.Memory, after_ns: int, status: ErrorStatus) -> None:
    with speaking(daemon) as raw:
        data, _ = encode_model(with_constants(pool))
        deadline_ns = time.monotonic_ns() + after_ns  # 256 MiB take far longer than 10 ms, a message far less
        raw.send(prepare_message(1, data, deadline_ns=deadline_ns, pools=(memory_to_data(pool),)), [pool.fileno()])
        assert raw.receive(messages.PreparedModelReady).status is status
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
