"""The driver validates a client's memory: it rejects bad memory with a status, and the connection continues.

Sealed memory is mapped; files without seals are read and written, and never mapped; all other fds are rejected.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.drivers import Process, one, until
from support.models import null_model, place

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.client.execution.synchronous import execute_request
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Protection, Request
from nnfmq.serialize import messages

NEEDED_BYTES = 4  # of the null model's input, and of its output


@dataclass
class AnnouncedMemory:
    """An fd with the size, offset and protection that the client announces: the part of Memory that requests use."""

    fd: int
    size_bytes: int
    offset: int = 0
    protection: Protection = Protection.READ_WRITE

    def fileno(self) -> int:
        return self.fd


def unsealed() -> int:
    return sized(os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def never_sealable() -> int:
    return sized(os.memfd_create("never-sealable", os.MFD_CLOEXEC))


def sealed_against_shrinking_only() -> int:
    fd = unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def ordinary_file() -> int:
    return sized(os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC))


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def sized(fd: int) -> int:
    os.ftruncate(fd, NEEDED_BYTES)
    return fd


def sealed() -> int:
    with Memory.create(NEEDED_BYTES) as memory:
        return os.dup(memory.fileno())


def huge_pages() -> int:
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    os.ftruncate(fd, 2 << 20)
    return fd


def folder() -> int:
    return os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)


def device() -> int:
    return os.open("/dev/zero", os.O_RDWR)


UNSEALED = [unsealed, never_sealable, sealed_against_shrinking_only, ordinary_file]
BAD_MEMORY = [pipe, folder, device]


@pytest.fixture(params=UNSEALED, ids=lambda make: make.__name__)
def loose(request: pytest.FixtureRequest) -> Iterator[AnnouncedMemory]:
    """Yield memory that can be read and written, but must not be mapped."""
    yield from _announced(request)


@pytest.fixture(params=BAD_MEMORY, ids=lambda make: make.__name__)
def bad(request: pytest.FixtureRequest) -> Iterator[AnnouncedMemory]:
    """Yield an fd that is not memory."""
    yield from _announced(request)


def _announced(request: pytest.FixtureRequest) -> Iterator[AnnouncedMemory]:
    make: Callable[[], int] = request.param
    fd = make()
    yield AnnouncedMemory(fd, NEEDED_BYTES)
    os.close(fd)


@pytest.fixture
def good() -> Iterator[Memory]:
    with Memory.create(NEEDED_BYTES) as memory:
        yield memory


@pytest.fixture
def short() -> Iterator[Memory]:
    """Yield memory of fewer bytes than the model needs, in good order otherwise."""
    with Memory.create(NEEDED_BYTES - 1) as memory:
        yield memory


def null_request(*pools: Memory | AnnouncedMemory) -> Request:
    """Return the request with the input in the first pool and the output in the second."""
    main = null_model().main
    inputs, _ = place([main.operands[index] for index in main.input_indexes], 0)
    outputs, _ = place([main.operands[index] for index in main.output_indexes], 1)
    return Request(tuple(inputs), tuple(outputs), pools)  # type: ignore[arg-type]


def execute_over(client: nnfmq.Client, model: nnfmq.PreparedModel, *pools: Memory | AnnouncedMemory) -> None:
    """Execute that request on the synchronous path."""
    execute_request(model.handle, null_request(*pools), ExecutionConfig(), None)


def floats_in(fd: int) -> bytes:
    return os.pread(fd, NEEDED_BYTES, 0)


def test_MEM_1_an_input_in_unsealed_memory_is_read(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, loose: AnnouncedMemory
) -> None:
    os.pwrite(loose.fd, one(7).tobytes(), 0)
    execute_over(client, model, loose, good)
    assert bytes(good.view) == one(7).tobytes()


def test_MEM_1_an_output_in_unsealed_memory_is_written(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, loose: AnnouncedMemory
) -> None:
    good.view[:] = one(8).tobytes()
    execute_over(client, model, good, loose)
    assert floats_in(loose.fd) == one(8).tobytes()


def test_unsealed_memory_is_never_mapped_and_leaks_nothing(
    client: nnfmq.Client, model: nnfmq.PreparedModel, loose: AnnouncedMemory
) -> None:
    with Process(client.worker_pid) as worker:
        execute_over(client, model, loose, AnnouncedMemory(loose.fd, NEEDED_BYTES))
        before = worker.descriptors(), worker.shared_mappings()
        for _ in range(20):
            execute_over(client, model, loose, AnnouncedMemory(loose.fd, NEEDED_BYTES))
        until(lambda: (worker.descriptors(), worker.shared_mappings()) == before, "the worker has closed what came")
        with model.request_burst() as burst:
            mapped = worker.shared_mappings()
            burst.execute_request(null_request(loose, AnnouncedMemory(loose.fd, NEEDED_BYTES)))
            assert worker.shared_mappings() == mapped


@pytest.mark.parametrize("position", [0, 1], ids=["input", "output"])
def test_N_RQX_16_a_truncated_file_is_rejected_and_the_worker_survives(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, position: int
) -> None:
    fd = unsealed()
    pools: list[Memory | AnnouncedMemory] = [good, good]
    pools[position] = AnnouncedMemory(fd, NEEDED_BYTES)
    with model.request_burst() as burst:
        burst.execute_request(null_request(*pools))  # the slot keeps it
        os.ftruncate(fd, NEEDED_BYTES - 1)
        with pytest.raises(nnfmq.InvalidArgument, match="ends"):
            burst.execute_request(null_request(*pools))
        assert os.fstat(fd).st_size == NEEDED_BYTES - 1  # a result does not make it longer
        os.ftruncate(fd, NEEDED_BYTES)
        burst.execute_request(null_request(*pools))
    os.close(fd)


def test_BUR_21_a_file_is_not_used_after_its_slot_was_freed(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory
) -> None:
    fds = unsealed(), unsealed()
    with model.burst() as burst:
        for number, fd in enumerate(fds):
            announced = AnnouncedMemory(fd, NEEDED_BYTES)  # a slot does not keep it
            put_in_slot(client, burst, announced)
            burst.execute(one(number + 1))
        put_in_slot(client, burst, burst._arrays.memories[1])
    assert [floats_in(fd) for fd in fds] == [one(1).tobytes(), one(2).tobytes()]
    for fd in fds:
        os.close(fd)


def test_sealed_huge_pages_are_read_and_not_mapped(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory
) -> None:
    try:
        fd = huge_pages()
        os.pread(fd, 1, 0)
    except OSError as error:
        pytest.skip(f"this machine has no huge pages: {error}")
    execute_over(client, model, AnnouncedMemory(fd, NEEDED_BYTES), good)
    assert bytes(good.view) == one(0).tobytes()
    os.close(fd)


OPENED = [("reading", os.O_RDONLY, 0), ("writing", os.O_WRONLY, 1), ("appending", os.O_RDWR | os.O_APPEND, 0)]


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW], ids=["unsealed", "sealed"])
@pytest.mark.parametrize(("flags", "right"), [row[1:] for row in OPENED], ids=[row[0] for row in OPENED])
def test_N_RQX_12_memory_is_used_only_with_the_access_mode_of_its_fd(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, flags: int, right: int, seals: int
) -> None:
    whole = unsealed()
    fcntl.fcntl(whole, fcntl.F_ADD_SEALS, seals)
    fd = os.open(f"/proc/self/fd/{whole}", flags)
    pools: list[Memory | AnnouncedMemory] = [good, good]
    pools[right] = AnnouncedMemory(fd, NEEDED_BYTES)
    execute_over(client, model, *pools)
    if not (seals and flags & os.O_APPEND):  # a mapping does not append
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-12"):
            execute_over(client, model, *reversed(pools))
    os.close(fd)
    os.close(whole)


@pytest.mark.parametrize("make", [unsealed, sealed], ids=["unsealed", "sealed"])
@pytest.mark.parametrize(("protection", "allowed"), [(1, [0]), (2, [1]), (0, []), (3, [0, 1])])
def test_MEM_4_memory_is_used_only_as_its_protection_allows(
    client: nnfmq.Client,
    model: nnfmq.PreparedModel,
    good: Memory,
    make: Callable[[], int],
    protection: int,
    allowed: list[int],
) -> None:
    fd = make()
    for position in (0, 1):
        pools: list[Memory | AnnouncedMemory] = [good, good]
        pools[position] = AnnouncedMemory(fd, NEEDED_BYTES, 0, Protection(protection))
        if position in allowed:
            execute_over(client, model, *pools)
        else:
            with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-12"):
                execute_over(client, model, *pools)
    os.close(fd)


def test_N_VAL_13_unknown_protection_bits_are_rejected(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory
) -> None:
    announced = AnnouncedMemory(good.fileno(), NEEDED_BYTES, 0, Protection(7))
    with pytest.raises(nnfmq.InvalidArgument, match=r"protection 0x7 .*\(N-VAL-13\)"):
        execute_over(client, model, announced, good)
    assert model.execute(one(2)) == (one(2),)


@pytest.mark.parametrize("offset", [4, 4096, 5000])
@pytest.mark.parametrize("is_sealed", [False, True], ids=["unsealed", "sealed"])
def test_MEM_1_memory_may_begin_anywhere_in_its_file(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, offset: int, is_sealed: bool
) -> None:
    fd = os.memfd_create("offset", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 10_000)
    os.pwrite(fd, one(9).tobytes(), offset)
    if is_sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    execute_over(client, model, AnnouncedMemory(fd, NEEDED_BYTES, offset), good)
    assert bytes(good.view) == one(9).tobytes()
    execute_over(client, model, good, AnnouncedMemory(fd, NEEDED_BYTES, offset + 8))
    assert os.pread(fd, NEEDED_BYTES, offset + 8) == one(9).tobytes()
    with pytest.raises(nnfmq.InvalidArgument, match=r"10000 bytes, announced are 4 from byte 9997 on"):
        execute_over(client, model, good, AnnouncedMemory(fd, NEEDED_BYTES, 9997))
    os.close(fd)


@pytest.mark.parametrize("position", [0, 1], ids=["input", "output"])
def test_N_VAL_13_fds_that_are_not_memory_are_rejected_on_the_synchronous_path(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, bad: AnnouncedMemory, position: int
) -> None:
    pools: list[Memory | AnnouncedMemory] = [good, good]
    pools[position] = bad
    with pytest.raises(nnfmq.InvalidArgument, match="received memory"):
        execute_over(client, model, *pools)
    assert model.execute(one(2)) == (one(2),)


@pytest.mark.parametrize("announced", [NEEDED_BYTES, 1 << 40, 0], ids=["needed", "huge", "none"])
def test_memory_that_is_shorter_than_announced_is_rejected_on_the_synchronous_path(
    client: nnfmq.Client, model: nnfmq.PreparedModel, short: Memory, good: Memory, announced: int
) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="received memory has 3 bytes"):
        execute_over(client, model, AnnouncedMemory(short.fileno(), announced), good)
    assert model.execute(one(2)) == (one(2),)


def test_a_request_beyond_its_memory_is_rejected_on_the_synchronous_path(
    client: nnfmq.Client, model: nnfmq.PreparedModel, short: Memory, good: Memory
) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        execute_over(client, model, good, short)
    assert model.execute(one(2)) == (one(2),)


def test_LIFE_9_rejected_memory_leaks_nothing_in_the_worker(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, bad: AnnouncedMemory
) -> None:
    with Process(client.worker_pid) as worker:
        model.execute(one(1))
        before = worker.descriptors(), worker.shared_mappings()
        with pytest.raises(nnfmq.InvalidArgument):
            execute_over(client, model, good, bad)
        until(lambda: (worker.descriptors(), worker.shared_mappings()) == before, "the worker has closed what came")


# ---------------------------------------------------------------------------------------------------- over a burst


OUTPUT_SLOT = 1  # a burst numbers its memories as it makes them: inputs, outputs


def put_in_slot(client: nnfmq.Client, burst: nnfmq.Burst, memory: Memory | AnnouncedMemory) -> None:
    """Free the slot of the outputs on both sides and give its number to `memory`."""
    burst._slots.free(OUTPUT_SLOT)
    client._connection._send(messages.FreeMemory(burst.channel.burst_id, OUTPUT_SLOT), (), None)
    client.devices()  # replied to in order: the slot is free by now
    assert burst._slots.add(memory) == OUTPUT_SLOT  # type: ignore[arg-type]


def test_the_same_packet_is_rejected_when_its_slot_names_smaller_memory(
    client: nnfmq.Client, burst: nnfmq.Burst, short: Memory
) -> None:
    packet = burst._arrays.prepared[MeasureTiming.NO].packet
    put_in_slot(client, burst, short)
    with pytest.raises(nnfmq.InvalidArgument):
        burst.execute(one(2))
    assert burst._arrays.prepared[MeasureTiming.NO].packet is packet
    put_in_slot(client, burst, burst._arrays.memories[1])
    assert burst.execute(one(3)) == (one(3),)


def test_the_same_packet_writes_to_the_memory_that_its_slot_names_now(
    client: nnfmq.Client, burst: nnfmq.Burst, good: Memory
) -> None:
    put_in_slot(client, burst, good)
    burst.execute(one(2), out=burst.outputs)
    assert bytes(good.view) == one(2).tobytes()
    assert burst.outputs == (one(1),)


def test_N_BUX_5_fds_that_are_not_memory_are_rejected_over_a_burst(
    client: nnfmq.Client, burst: nnfmq.Burst, bad: AnnouncedMemory
) -> None:
    put_in_slot(client, burst, bad)
    with pytest.raises(nnfmq.GeneralFailure, match="received memory"):
        burst.execute(one(2))
    put_in_slot(client, burst, burst._arrays.memories[1])
    assert burst.execute(one(3)) == (one(3),)


def test_a_slot_that_the_client_did_not_assign_is_rejected(client: nnfmq.Client, burst: nnfmq.Burst) -> None:
    burst._slots.free(OUTPUT_SLOT)
    client._connection._send(messages.FreeMemory(burst.channel.burst_id, OUTPUT_SLOT), (), None)
    client.devices()
    with pytest.raises(nnfmq.InvalidArgument, match="slot 1"):
        burst.execute(one(2))
    assert burst._slots.add(burst._arrays.memories[1]) == OUTPUT_SLOT
    assert burst.execute(one(3)) == (one(3),)


@pytest.mark.parametrize("times", [1, 3])
def test_freeing_slots_repeatedly_does_not_change_results(client: nnfmq.Client, burst: nnfmq.Burst, times: int) -> None:
    for value in range(times):
        put_in_slot(client, burst, burst._arrays.memories[1])
        assert burst.execute(one(value)) == (one(value),)


def test_read_only_memory_is_rejected_for_outputs(client: nnfmq.Client, burst: nnfmq.Burst) -> None:
    with Memory.create(NEEDED_BYTES, one_writer=True) as memory:
        put_in_slot(client, burst, memory)
        with pytest.raises(nnfmq.InvalidArgument, match="is read-only"):
            burst.execute(one(2))
        put_in_slot(client, burst, burst._arrays.memories[1])
    assert burst.execute(one(3)) == (one(3),)


def test_queues_in_unsealed_memory_are_rejected(
    client: nnfmq.Client, model: nnfmq.PreparedModel, loose: AnnouncedMemory
) -> None:
    with model.burst() as burst:
        described = messages.MQDescriptorData(
            tuple(
                messages.GrantorData(g.fd_index, g.offset, g.extent) for g in burst.channel.requests.descriptor.grantors
            ),
            burst.channel.requests.quantum,
            burst.channel.requests.descriptor.flags,
        )
    message = messages.ConfigureBurst(client._connection.next_call_id(), model.model_id, described, described)
    with pytest.raises(nnfmq.InvalidArgument, match="received memory"):
        client._connection.call(message, messages.BurstConfigured, [loose.fd, loose.fd])
    assert model.execute(one(2)) == (one(2),)


def test_the_worker_maps_only_the_memory_that_a_burst_shares(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    with Process(client.worker_pid) as worker:
        before = worker.shared_mappings()
        with model.burst() as burst:
            burst.execute(one(1))
            assert len(worker.shared_mappings()) == len(before) + 4  # two queues, inputs, outputs
        until(lambda: worker.shared_mappings() == before, "the worker has unmapped the burst's memory")


def test_no_shared_memory_has_a_name(model: nnfmq.PreparedModel) -> None:
    before = set(Path("/dev/shm").iterdir())
    with model.burst() as burst:
        burst.execute(one(1))
        assert set(Path("/dev/shm").iterdir()) == before
