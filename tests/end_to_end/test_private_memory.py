"""Whatever a client sends, the private memory of its worker stays below the client's limit and a documented base."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder
from support.protocol import ProtocolPeer
from support.sessions import HELLO, assert_alive, prepare_message
from support.small_models import one_operation, two_adds

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.memory import SHARED_SEALS
from nnfmq.driver.memory.quota import UNCHARGED_BYTES
from nnfmq.hal.errors import ErrorStatus, ResourceExhaustedTransient
from nnfmq.hal.types import Model, Operand, OperandType, OperationType
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole, encode
from nnfmq.serialize.models import encode_model

MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
HUGE_BYTES = 1 << 60
OPERAND = [0, [], 0, 0, 0, [0, 0, 0, 0], None, b""]  # the shortest one
FEW, MANY = 2 * MIB, 64 * MIB
PERSISTENT = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    environment = {"NNFMQ_CLIENT_MEMORY_MIB": str(LIMIT_BYTES // MIB)}
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


class Attacker:
    """A client that speaks the protocol itself."""

    def __init__(self, daemon: Daemon) -> None:
        self.raw = ProtocolPeer(Channel.connect(daemon.path, time.monotonic_ns() + 30_000_000_000), PeerRole.CLIENT)
        self.raw.send(HELLO)
        self.worker_pid = self.raw.receive(messages.HelloReply).worker_pid

    def prepare(self, model: bytes, pools: Sequence[messages.MemoryData] = (), fds: Sequence[int] = ()) -> ErrorStatus:
        """Ask for a preparation, which must fail; return the status."""
        self.raw.send(prepare_message(1, model, pools=tuple(pools)), fds)
        ready, reply = self.raw.receive(messages.PreparedModelReady), self.raw.receive(messages.Reply)
        assert ready.status is reply.status
        return reply.status


@pytest.fixture
def attacker(daemon: Daemon) -> Iterator[Attacker]:
    """Yield a client whose worker must neither exit nor exceed its memory."""
    attacker = Attacker(daemon)
    with attacker.raw, daemon.connect() as neighbour, neighbour.device("reference").prepare(two_adds()) as model:
        before = peak_bytes(attacker.worker_pid)
        yield attacker
        assert_alive(attacker.raw)
        assert peak_bytes(attacker.worker_pid) - before < LIMIT_BYTES + UNCHARGED_BYTES
        ones = np.ones((2, 2), np.float32)
        model.execute(ones, ones)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def records(size_bytes: int) -> bytes:
    """Return a model of `size_bytes` that consists of operands."""
    count = size_bytes // len(msgspec.msgpack.encode(OPERAND))
    return msgspec.msgpack.encode([[[OPERAND] * count, [], [], []], [], b"", [], False, []])


@pytest.mark.parametrize("size", [FEW, MANY], ids=["decoded objects exceed the limit", "the message exceeds the limit"])
def test_records_of_operands_are_refused_before_they_are_decoded(attacker: Attacker, size: int) -> None:
    before = peak_bytes(attacker.worker_pid)
    assert attacker.prepare(records(size)) is PERSISTENT
    assert peak_bytes(attacker.worker_pid) - before < 3 * size


def test_a_large_call_is_refused_before_it_is_decoded(attacker: Attacker) -> None:
    before = peak_bytes(attacker.worker_pid)
    message: dict[str, Any] = msgspec.msgpack.decode(encode(prepare_message(1)))
    message["consumers"] = [[1] * (32 * MIB)]
    attacker.raw.send_bytes(msgspec.msgpack.encode(message))
    for kind in (messages.PreparedModelReady, messages.Reply):
        reply = attacker.raw.receive(kind)
        assert reply.call == 1 and reply.status is PERSISTENT
        assert "NNFMQ_CLIENT_MEMORY_MIB" in reply.message
    assert peak_bytes(attacker.worker_pid) - before < LIMIT_BYTES


@pytest.fixture
def huge_fd() -> Iterator[int]:
    """Yield a sealed memfd of 2^60 bytes, none of which exists."""
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HUGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHARED_SEALS)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_a_pool_larger_than_the_address_space_is_refused(attacker: Attacker, huge_fd: int, device: str) -> None:
    data = encode_model(two_adds())[0]
    pool = messages.MemoryData(HUGE_BYTES)
    attacker.raw.send(prepare_message(1, data, pools=(pool,), device=device), [huge_fd])
    assert attacker.raw.receive(messages.PreparedModelReady).status is PERSISTENT
    reply = attacker.raw.receive(messages.Reply)
    assert f"{HUGE_BYTES} bytes more" in reply.message or f"the limit is {LIMIT_BYTES}" in reply.message


def large_temporaries() -> Model:
    """Return an operation on 28 MiB for which NumPy makes several arrays of that size. Neither engine compiles it."""
    tensor = Operand(OperandType.TENSOR_FLOAT32, (1, 28, MIB // 32, 8))
    return one_operation(OperationType.LOCAL_RESPONSE_NORMALIZATION, [tensor, 2, 1.0, 1e-4, 0.75], tensor)


@pytest.mark.parametrize("in_burst", [False, True], ids=["call", "burst"])
@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_the_kernel_bounds_what_an_operation_allocates(daemon: Daemon, device: str, in_burst: bool) -> None:
    values = np.ones((1, 28, MIB // 32, 8), np.float32)
    with daemon.connect() as client, client.device(device).prepare(large_temporaries()) as large:
        before = peak_bytes(client.worker_pid)
        with ExitStack() as stack:
            execute = stack.enter_context(large.burst()).execute if in_burst else large.execute
            with pytest.raises(ResourceExhaustedTransient, match="memory"):
                execute(values)
        assert peak_bytes(client.worker_pid) - before < LIMIT_BYTES + UNCHARGED_BYTES
        with client.device(device).prepare(two_adds()) as small:
            ones = np.ones((2, 2), np.float32)
            small.execute(ones, ones)


def test_a_small_limit_allows_the_same_number_of_bursts(daemon: Daemon) -> None:
    ones = np.ones((2, 2), np.float32)
    with daemon.connect() as client, client.device("reference").prepare(two_adds()) as model, ExitStack() as stack:
        bursts = [stack.enter_context(model.burst()) for _ in range(settings.CLIENT_BURSTS.default)]
        for burst in bursts:
            burst.execute(ones, ones)
