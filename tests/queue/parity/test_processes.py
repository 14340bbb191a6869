"""libfmq's msgq_test_client, test by test: 34 names, 143 instances, each on every core.

The client is this process, the service another, on the same core. The synchronized queue is the client's, of
(page − 16) / 4 records of 4 bytes; the unsynchronized one is the service's, of 1024, which alone writes it: the client
maps it for reading only. In the tests in which libfmq's service reads, too, it does so by the object that writes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
from support.queues import CORES, Setup

from nnfmq.base.memory import Memory
from nnfmq.queue import UNSYNCHRONIZED, MessageQueue, descriptor_formats
from nnfmq.queue import core as cores

PROGRAM = Path(__file__).with_name("service.py")
LIMIT_S = 30
QUANTUM = 4
SYNC_COUNT = (4096 - 16) // QUANTUM
UNSYNC_COUNT = 1024
CUSTOM: dict[str, int] = {"read_notification": 2, "write_notification": 1}


def pattern(count: int) -> bytes:
    return b"".join(i.to_bytes(QUANTUM, "little") for i in range(count))


class Service:
    """The other process; one request at a time, whose reply may be fetched later."""

    def __init__(self, core_name: str, stack: ExitStack) -> None:
        client_end, service_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with service_end:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(service_end.fileno())], pass_fds=[service_end.fileno()],
                env={**os.environ, "NNFMQ_CORE": core_name},
            )  # fmt: skip
        stack.callback(self.process.wait, LIMIT_S)
        self.socket = stack.enter_context(client_end)
        self.socket.settimeout(LIMIT_S)

    def ask(self, *request: Any, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [json.dumps(request).encode()], fds)

    def result(self) -> tuple[Any, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.socket, 65536, 8)
        return json.loads(data), list(fds)

    def call(self, *request: Any, fds: tuple[int, ...] = ()) -> Any:
        self.ask(*request, fds=fds)
        return self.result()[0]


@pytest.fixture(scope="module")
def services() -> Iterator[Callable[[str, int], Service]]:
    """Return service number n on a core; started when first needed, ended with the module."""
    with ExitStack() as stack:
        started = {(name, n): Service(name, stack) for name in CORES for n in range(2)}
        yield lambda core_name, n: started[core_name, n]


class Client:
    """This side of one test: its queue, and the services."""

    def __init__(self, setup: Setup, services: Callable[[str, int], Service]) -> None:
        self.setup = setup
        self.service = services(setup.core_name, 0)
        self.second = services(setup.core_name, 1)

    def sync(self) -> MessageQueue:
        """Create the synchronized queue and hand it over."""
        queue = self.setup.create(QUANTUM, SYNC_COUNT)
        self.service.call("configure_sync", self._text(queue), fds=queue.fds())
        return queue

    def unsync(self) -> MessageQueue:
        """Have the service create the unsynchronized queue, and attach to it."""
        self.service.ask("get_unsync", self.setup.place, UNSYNC_COUNT)
        text, fds = self.service.result()
        return self._join(text, fds)

    def another(self, queue: MessageQueue) -> None:
        """Have the second process attach to the service's queue."""
        self.second.call("attach_unsync", queue.to_json(), fds=queue.fds())

    def _join(self, text: str, fds: list[int]) -> MessageQueue:
        memories = [Memory.adopt(fd) for fd in fds]
        assert not any(memory.is_writable for memory in memories)
        descriptor = descriptor_formats.from_json(text)
        if self.setup.form == "hidl":
            descriptor = descriptor_formats.from_hidl(descriptor_formats.to_hidl(descriptor))
        queue = MessageQueue.attach(
            descriptor, *memories, flavor=UNSYNCHRONIZED, reset_pointers=False, core=self.setup.core
        )
        return self.setup.stack.enter_context(queue)

    def _text(self, queue: MessageQueue) -> str:
        if self.setup.form == "hidl":
            return json.dumps(
                descriptor_formats.hidl_to_aidl(descriptor_formats.to_hidl(queue.descriptor), queue.flavor)
            )
        return queue.to_json()


@pytest.fixture
def client(setup: Setup, services: Callable[[str, int], Service]) -> Iterator[Client]:
    made = Client(setup, services)
    yield made
    made.service.call("end")
    made.second.call("end")


# ---- UnsynchronizedWriteClientMultiProcess ----


def test_UnsynchronizedWriteClientMultiProcess_MultipleReadersAfterOverflow(client: Client) -> None:
    reader, service = client.unsync(), client.service
    assert service.call("write_unsync", UNSYNC_COUNT) and service.call("write_unsync", 1)
    assert reader.read(UNSYNC_COUNT) is None
    assert service.call("write_unsync", 16)
    assert reader.read(16) == pattern(16)
    client.another(reader)
    assert client.second.call("read_unsync", 16) is None
    assert service.call("write_unsync", 16)
    assert client.second.call("read_unsync", 16) is True


# ---- SynchronizedReadWriteClient: blocking ----


def test_SynchronizedReadWriteClient_BlockingReadWrite1(client: Client, limit_ns: int) -> None:
    queue = client.sync()
    client.service.ask("blocking_read", 64, 1, True)
    assert queue.write_blocking(pattern(64), limit_ns, **CUSTOM)
    assert client.service.result()[0] is True
    assert queue.write_blocking(bytes(QUANTUM * SYNC_COUNT), limit_ns, **CUSTOM)


def test_SynchronizedReadWriteClient_BlockingReadWrite2(client: Client, limit_ns: int) -> None:
    queue = client.sync()
    client.service.ask("blocking_read", 64, 1, False)
    assert queue.write_blocking(pattern(64), limit_ns)
    assert client.service.result()[0] is True
    assert queue.write_blocking(bytes(QUANTUM * SYNC_COUNT), limit_ns)


def blocking_repeat(client: Client, count: int, writes: int, limit_ns: int) -> None:
    """Write the pattern of 64 `writes` times, while the service reads `count` at a time; then the ring is empty."""
    queue = client.sync()
    client.service.ask("blocking_read", count, 64 * writes // count, True)
    for _ in range(writes):
        assert queue.write_blocking(pattern(64), limit_ns, **CUSTOM)
    assert client.service.result()[0] is True
    assert queue.write_blocking(bytes(QUANTUM * SYNC_COUNT), limit_ns, **CUSTOM)


def test_SynchronizedReadWriteClient_BlockingReadWriteRepeat1(client: Client, limit_ns: int) -> None:
    blocking_repeat(client, 64, SYNC_COUNT, limit_ns)


def test_SynchronizedReadWriteClient_BlockingReadWriteRepeat2(client: Client, limit_ns: int) -> None:
    blocking_repeat(client, 128, SYNC_COUNT, limit_ns)


def test_SynchronizedReadWriteClient_BlockingReadWriteRepeat3(client: Client, limit_ns: int) -> None:
    blocking_repeat(client, 32, 1024, limit_ns)


def test_SynchronizedReadWriteClient_BlockingReadWriteZeroMessages(client: Client) -> None:
    queue = client.sync()
    assert queue.write_blocking(b"", None, **CUSTOM) is True
    assert queue.read_blocking(0, None, **CUSTOM) == b""


# ---- SynchronizedReadWriteClient: without waiting ----


def test_SynchronizedReadWriteClient_SmallInputReaderTest1(client: Client) -> None:
    queue = client.sync()
    assert client.service.call("write_sync", 16)
    assert queue.read(16) == pattern(16)


def test_SynchronizedReadWriteClient_SmallInputReaderTest2(client: Client) -> None:
    queue = client.sync()
    assert client.service.call("write_sync", 16)
    read = queue.begin_read(16)
    assert read is not None and read.tobytes() == pattern(16)
    assert queue.commit_read(16) is True and queue.available_to_read() == 0


def test_SynchronizedReadWriteClient_SmallInputWriterTest1(client: Client) -> None:
    queue = client.sync()
    before = queue.available_to_write()
    assert queue.write(pattern(16))
    assert client.service.call("read_sync", 16) is True
    assert queue.available_to_write() == before


def test_SynchronizedReadWriteClient_SmallInputWriterTest2(client: Client) -> None:
    queue = client.sync()
    before = queue.available_to_write()
    write = queue.begin_write(16)
    assert write is not None
    write.copy_to(pattern(16))
    queue.commit_write(16)
    assert client.service.call("read_sync", 16) is True
    assert queue.available_to_write() == before


def test_SynchronizedReadWriteClient_MisalignedWriteCounter(client: Client) -> None:
    queue = client.sync()
    assert client.service.call("write_sync", 1)
    assert queue.begin_read(1) is not None
    queue.memory.view[8:16] = struct.pack("<Q", QUANTUM * SYNC_COUNT - 1)
    queue.commit_read(1)
    assert client.service.call("write_sync", 1) is False


def test_SynchronizedReadWriteClient_ReadWhenEmpty(client: Client) -> None:
    queue = client.sync()
    assert (queue.available_to_read(), queue.read(2)) == (0, None)


def test_SynchronizedReadWriteClient_WriteWhenFull(client: Client) -> None:
    queue = client.sync()
    assert queue.write(pattern(SYNC_COUNT))
    assert (queue.available_to_write(), queue.write(bytes(QUANTUM))) == (0, False)
    assert client.service.call("read_sync", SYNC_COUNT) is True


def test_SynchronizedReadWriteClient_LargeInputTest1(client: Client) -> None:
    queue = client.sync()
    assert client.service.call("write_sync", SYNC_COUNT)
    assert queue.read(SYNC_COUNT) == pattern(SYNC_COUNT)


def test_SynchronizedReadWriteClient_LargeInputTest2(client: Client) -> None:
    queue = client.sync()
    assert client.service.call("write_sync", 2048) is False
    assert (queue.available_to_read(), queue.read(1)) == (0, None)


def test_SynchronizedReadWriteClient_LargeInputTest3(client: Client) -> None:
    queue = client.sync()
    assert queue.write(pattern(SYNC_COUNT))
    assert (queue.available_to_write(), queue.write(bytes(QUANTUM))) == (0, False)
    assert client.service.call("read_sync", SYNC_COUNT) is True


def test_SynchronizedReadWriteClient_MultipleRead(client: Client) -> None:
    queue = client.sync()
    assert client.service.call("write_sync", 500)
    assert b"".join(queue.read(100) or b"" for _ in range(5)) == pattern(500)


def test_SynchronizedReadWriteClient_MultipleWrite(client: Client) -> None:
    queue, data = client.sync(), pattern(500)
    for at in range(0, len(data), 100 * QUANTUM):
        assert queue.write(data[at : at + 100 * QUANTUM])
    assert client.service.call("read_sync", 500) is True


def half_a_ring(client: Client, queue: MessageQueue) -> None:
    assert queue.write(pattern(SYNC_COUNT // 2))
    assert client.service.call("read_sync", SYNC_COUNT // 2) is True


def test_SynchronizedReadWriteClient_ReadWriteWrapAround(client: Client) -> None:
    queue = client.sync()
    half_a_ring(client, queue)
    assert queue.write(pattern(SYNC_COUNT))
    assert client.service.call("read_sync", SYNC_COUNT) is True


def test_SynchronizedReadWriteClient_ReadWriteWrapAround2(client: Client) -> None:
    queue = client.sync()
    half_a_ring(client, queue)
    write = queue.begin_write(SYNC_COUNT)
    assert write is not None and len(write.second) > 0
    for i in range(SYNC_COUNT):
        write.get_slot(i)[:] = i.to_bytes(QUANTUM, "little")
    queue.commit_write(SYNC_COUNT)
    assert client.service.call("read_sync", SYNC_COUNT) is True


# ---- UnsynchronizedWriteClient: the service writes ----


def test_UnsynchronizedWriteClient_SmallInputReaderTest1(client: Client) -> None:
    reader = client.unsync()
    assert client.service.call("write_unsync", 16)
    assert reader.read(16) == pattern(16)


def test_UnsynchronizedWriteClient_SmallInputWriterTest1(client: Client) -> None:
    client.unsync()
    assert client.service.call("write_unsync", 16)
    assert client.service.call("read_unsync", 16) is True


def test_UnsynchronizedWriteClient_ReadWhenEmpty(client: Client) -> None:
    reader = client.unsync()
    assert (reader.available_to_read(), reader.read(2)) == (0, None)


def overfill(client: Client) -> None:
    """Have the service write one record more than fit; then its read fails."""
    reader = client.unsync()
    assert client.service.call("write_unsync", UNSYNC_COUNT)
    assert reader.available_to_write() == 0
    assert client.service.call("write_unsync", 1)
    assert client.service.call("read_unsync", UNSYNC_COUNT) is None


def test_UnsynchronizedWriteClient_WriteWhenFull(client: Client) -> None:
    overfill(client)


def test_UnsynchronizedWriteClient_LargeInputTest1(client: Client) -> None:
    reader = client.unsync()
    assert client.service.call("write_unsync", UNSYNC_COUNT)
    assert reader.read(UNSYNC_COUNT) == pattern(UNSYNC_COUNT)


def test_UnsynchronizedWriteClient_LargeInputTest2(client: Client) -> None:
    reader = client.unsync()
    assert client.service.call("write_unsync", UNSYNC_COUNT + 1) is False
    assert (reader.available_to_read(), reader.read(1)) == (0, None)


def test_UnsynchronizedWriteClient_LargeInputTest3(client: Client) -> None:
    overfill(client)
    assert client.service.call("write_unsync", UNSYNC_COUNT)
    assert client.service.call("read_unsync", UNSYNC_COUNT) is True


def test_UnsynchronizedWriteClient_MultipleRead(client: Client) -> None:
    reader = client.unsync()
    assert client.service.call("write_unsync", 500)
    assert b"".join(reader.read(100) or b"" for _ in range(5)) == pattern(500)


def test_UnsynchronizedWriteClient_MultipleWrite(client: Client) -> None:
    reader = client.unsync()
    for _ in range(5):
        assert client.service.call("write_unsync", 100)
    assert (reader.available_to_read(), reader.read(500)) == (500, pattern(100) * 5)


def test_UnsynchronizedWriteClient_ReadWriteWrapAround(client: Client) -> None:
    client.unsync()
    assert client.service.call("write_unsync", UNSYNC_COUNT // 2)
    assert client.service.call("read_unsync", UNSYNC_COUNT // 2) is True
    assert client.service.call("write_unsync", UNSYNC_COUNT)
    assert client.service.call("read_unsync", UNSYNC_COUNT) is True


def test_UnsynchronizedWriteClient_SmallInputMultipleReaderTest(client: Client) -> None:
    reader = client.unsync()
    client.another(reader)
    assert client.service.call("write_unsync", 16)
    assert reader.read(16) == pattern(16)
    assert client.second.call("read_unsync", 16) is True


def test_UnsynchronizedWriteClient_OverflowNotificationTest(client: Client) -> None:
    reader = client.unsync()
    client.another(reader)
    assert client.service.call("write_unsync", UNSYNC_COUNT) and client.service.call("write_unsync", 1)
    assert reader.read(UNSYNC_COUNT) is None
    assert client.second.call("read_unsync", UNSYNC_COUNT) is None


def overflowed(reader: MessageQueue, before: int, batch: int) -> bool:
    """Return whether the writer, with one more batch perhaps half written, may have come round to byte `before`."""
    written = reader.counters()[0] + batch * QUANTUM
    return written - before > UNSYNC_COUNT * QUANTUM


def test_records_read_during_writes_are_whole_and_at_their_positions(client: Client, limit_ns: int) -> None:
    """All but what the documented gap excuses: a reader that is one ring behind to within a batch."""
    reader, batch, compared = client.unsync(), 7, 0
    client.service.ask("stream_unsync", batch)
    while compared < 100 and monotonic_ns() < limit_ns:
        before = reader.counters()[1]
        data = reader.read(min(reader.available_to_read(), 5))
        if data and not overflowed(reader, before, batch):
            first = before // QUANTUM
            numbers = [n for i in range(len(data) // QUANTUM) for n in [(first + i) % 2**16] * 2]
            assert list(struct.unpack(f"<{len(numbers)}H", data)) == numbers
            compared += 1
    client.service.ask("stop")
    assert (client.service.result()[0], client.service.result()[0], compared) == (None, None, 100)


# ---- AidlTypeChecks: records are bytes here; each type in the layout that AIDL gives it ----

TYPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "bool": ("<?", (True,)),
    "int8_t": ("<b", (-7,)),
    "char": ("<c", (b"A",)),
    "char16_t": ("<H", (0x20AC,)),
    "int32_t": ("<i", (-(2**31),)),
    "int64_t": ("<q", (-(2**63),)),
    "float": ("<f", (0.5,)),
    "double": ("<d", (0.1,)),
    "enum EventFlagBits": ("<i", (2,)),
    "FixedParcelable": ("<i4xq", (12, 34)),
    "FixedUnion": ("<B7xq", (1, 56)),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("core_name", CORES)
def test_AidlTypeChecks_FixedSizeParcelableTest(core_name: str, kind: str) -> None:
    form, values = TYPES[kind]
    using = cores.CORES.load(core_name)
    with MessageQueue.create(struct.calcsize(form), 64, flavor=UNSYNCHRONIZED, core=using) as queue:
        assert queue.write(struct.pack(form, *values))
        assert struct.unpack(form, queue.read(1) or b"") == values
