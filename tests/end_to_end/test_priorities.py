"""The order of a client's executions by priority, as the order of a driver process's replies shows it."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, one
from support.models import add_model, null_model
from support.protocol import ProtocolPeer
from support.sessions import HELLO, NO_LIMIT, create_endless_request, create_request, prepare_message

from nnfmq.base.channel import Channel
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionConfig, Model, Priority
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.models import encode_model

THREADS = 4  # that a driver has for a client's calls
EACH = 8
LOOP_NS = 2_000_000_000  # as long as its threads are busy: until all else waits
LOOPS, LOW, MEDIUM, HIGH = 100, 200, 300, 400  # numbers of calls


@pytest.fixture
def peer(daemon: Daemon, resources: ExitStack) -> ProtocolPeer:
    """Return a client that sends without waiting for replies, and receives them in order."""
    channel = Channel.connect(daemon.path, time.monotonic_ns() + int(LIMIT_S * 1e9))
    client = resources.enter_context(ProtocolPeer(channel, PeerRole.CLIENT))
    client.send(HELLO)
    client.receive(messages.HelloReply)
    return client


def prepared(client: ProtocolPeer, model: Model, priority: Priority) -> int:
    client.send(prepare_message(1, encode_model(model)[0], priority=priority))
    client.receive(messages.Reply)
    return client.receive(messages.PreparedModelReady).model_id


def test_PREP_5_QOS_1_waiting_executions_of_one_client_run_in_order_of_priority(
    peer: ProtocolPeer, daemon: Daemon, resources: ExitStack
) -> None:
    endless, lent_endless = create_endless_request(resources)
    adding = add_model()
    models = {priority: prepared(peer, adding, priority) for priority in Priority}
    loop = prepared(peer, endless, Priority.HIGH)  # nothing overtakes it
    request = create_request(resources, adding, [1, 2, 3, 4], [10, 20, 30, 40])
    for number in range(THREADS):
        config = ExecutionConfig(loop_timeout_ns=LOOP_NS)
        peer.send(
            lent_endless.call(messages.Execute, LOOPS + number, loop, config, deadline_ns=NO_LIMIT), lent_endless.fds
        )
    for number in range(EACH):
        for priority, first in ((Priority.LOW, LOW), (Priority.MEDIUM, MEDIUM), (Priority.HIGH, HIGH)):
            peer.send(
                request.call(messages.Execute, first + number, models[priority], deadline_ns=NO_LIMIT), request.fds
            )
    peer.send(messages.ListDevices(7))
    assert peer.receive(messages.DeviceList).call == 7  # all calls have been read, and none was replied to yet
    with daemon.connect() as other, other.device("reference").prepare(null_model(), priority=Priority.LOW) as model:
        assert model.execute(one(3), timeout=LIMIT_S)[0] == one(3)  # another client's low one waits for nobody
    assert peer.has_no_message()

    results = [peer.receive(messages.Executed) for _ in range(THREADS + 3 * EACH)]
    loops = [result.status for result in results if result.call < LOW]
    sums = [result for result in results if result.call >= LOW]
    assert loops == [ErrorStatus.MISSED_DEADLINE_TRANSIENT] * THREADS
    assert {result.status for result in sums} == {ErrorStatus.NONE}
    order = [result.call // 100 for result in sums]
    for higher, lower in ((HIGH, MEDIUM), (MEDIUM, LOW)):
        # One of the lower begins only when all of the higher have begun; those that still run are on other threads.
        before = order[: order.index(lower // 100)]
        assert before.count(higher // 100) > EACH - THREADS, order
    assert np.frombuffer(request.pools[1].view, np.float32, 4).tolist() == [11, 22, 33, 44]
