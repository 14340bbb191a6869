"""A queue between two processes, on every pair of cores: libfmq's msgq_test_client in short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple

from nnfmq.base.memory import Memory
from nnfmq.queue import MessageQueue
from nnfmq.queue import core as cores

PROGRAM = Path(__file__).with_name("peer_program.py")
CORES = ["python"] if cores.core_name == "python" else list(cores.CORES.available())
PACKET = bytes(range(1, 241))


class Peer:
    """A second process that has attached to our queues, and does `role`."""

    def __init__(self, role: str, core_name: str, queues: tuple[MessageQueue, ...], reset: bool, options: Any) -> None:
        fds = [queue.memory.fileno() for queue in queues]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), role], pass_fds=fds, text=True, env={**os.environ, "NNFMQ_CORE": core_name},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        places = [
            {"fd": fd, "grantors": [astuple(g) for g in queue.descriptor.grantors], "quantum": queue.quantum,
             "reset": reset}
            for fd, queue in zip(fds, queues, strict=True)
        ]  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"queues": places, "options": options}), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "ready\n"

    def reply(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=CORES)
def peer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Start peers on each core; ends them."""
    with ExitStack() as stack:

        def start(role: str, *queues: MessageQueue, reset: bool = True, options: Any = ()) -> Peer:
            return stack.enter_context(closing(Peer(role, request.param, queues, reset, options)))

        yield start


MakeQueue = Callable[..., MessageQueue]
StartPeer = Callable[..., Peer]


@pytest.mark.parametrize("window_ns", [0, 50_000])
def test_packets_are_returned_whole_with_polling_and_with_sleeping(
    make_queue: MakeQueue, peer: StartPeer, limit_ns: int, window_ns: int
) -> None:
    requests, results = make_queue(24, 64), make_queue(24, 64)
    echo = peer("echo", requests, results, options=[window_ns])
    for size in [24, 240, 48] * 300:
        assert requests.send(PACKET[:size])
        assert results.receive(limit_ns, window_ns) == PACKET[:size]
    assert requests.send(bytes(24))
    assert echo.reply() == 900


def test_BlockingReadWrite1_a_full_ring_write_waits_for_the_reader(
    make_queue: MakeQueue, peer: StartPeer, limit_ns: int
) -> None:
    queue = make_queue(4, 1020)
    reader = peer("read_all", queue, options=[1020, 3])
    data = [os.urandom(4 * 1020) for _ in range(3)]
    assert all(queue.write_blocking(part, limit_ns) for part in data)
    assert reader.reply() == sha256(b"".join(data)).hexdigest()


@pytest.mark.parametrize("n", [64, 128, 32])
def test_BlockingReadWriteRepeat_writes_of_64_meet_reads_of(
    make_queue: MakeQueue, peer: StartPeer, limit_ns: int, n: int
) -> None:
    queue = make_queue(4, 1020)
    reader = peer("read_all", queue, options=[n, 64 * 128 // n])
    data = [os.urandom(4 * 64) for _ in range(128)]
    assert all(queue.write_blocking(part, limit_ns) for part in data)
    assert reader.reply() == sha256(b"".join(data)).hexdigest()
    assert queue.available_to_write() == 1020


@pytest.mark.parametrize("window_ns", [0, 2_000, 50_000])
def test_a_stream_arrives_complete_and_in_order(
    make_queue: MakeQueue, peer: StartPeer, limit_ns: int, window_ns: int
) -> None:
    queue = make_queue(8, 37)
    data = os.urandom(8 * 30_000)
    reader = peer("receive_all", queue, options=[len(data), window_ns])
    parts = [data[i : i + 8 * 5] for i in range(0, len(data), 8 * 5)]
    assert all(queue.write_blocking(part, limit_ns) for part in parts)
    assert reader.reply() == sha256(data).hexdigest()


def test_MisalignedWriteCounter_the_other_process_cannot_write(make_queue: MakeQueue, peer: StartPeer) -> None:
    queue = make_queue(4, 1020)
    queue.memory.view[8:16] = (4 * 1020 - 1).to_bytes(8, "little")
    assert peer("write_now", queue, reset=False, options=[4]).reply() is False


def test_a_peer_that_attaches_resets_the_counters(make_queue: MakeQueue, peer: StartPeer) -> None:
    queue = make_queue(4, 1020)
    queue.write(bytes(400))
    assert peer("write_now", queue, options=[8]).reply() is True
    assert queue.read(2) == b"\7" * 8 and queue.available_to_read() == 0


def test_memory_outlives_a_killed_peer(make_queue: MakeQueue, peer: StartPeer) -> None:
    queue = make_queue(8, 4)
    reader = peer("receive_all", queue, options=[10**6, 0])
    reader.close()
    assert queue.send(bytes(16)) and isinstance(queue.memory, Memory)
    queue.drain()
    assert queue.available_to_write() == 4
