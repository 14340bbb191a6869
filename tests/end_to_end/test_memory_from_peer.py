"""What a client lends is judged by the driver: bad memory is refused with a status, and the connection works on."""

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
from nnfmq.hal.types import MeasureTiming, Request
from nnfmq.memory import Memory
from nnfmq.runtime.prepared_model import execute_once
from nnfmq.serialize import messages

NEEDED_BYTES = 4  # of the null model's input, and of its output


@dataclass
class Lent:
    """An fd and the size that is announced for it: what the client's side asks of a Memory."""

    fd: int
    size_bytes: int

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


BAD_MEMORY = [unsealed, never_sealable, sealed_against_shrinking_only, ordinary_file, pipe]


@pytest.fixture(params=BAD_MEMORY, ids=lambda make: make.__name__)
def bad(request: pytest.FixtureRequest) -> Iterator[Lent]:
    make: Callable[[], int] = request.param
    fd = make()
    yield Lent(fd, NEEDED_BYTES)
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


def execute_over(client: nnfmq.Client, model: nnfmq.PreparedModel, *pools: Memory | Lent) -> None:
    """Execute the ordinary way with the input in the first pool and the output in the second."""
    main = null_model().main
    inputs, _ = place([main.operands[index] for index in main.input_indexes], 0)
    outputs, _ = place([main.operands[index] for index in main.output_indexes], 1)
    request = Request(tuple(inputs), tuple(outputs), pools)  # type: ignore[arg-type]
    execute_once(client._connection, model.model_id, model.outputs, request)


@pytest.mark.parametrize("position", [0, 1], ids=["input", "output"])
def test_memory_that_is_not_sealed_is_refused_on_the_ordinary_path(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, bad: Lent, position: int
) -> None:
    pools: list[Memory | Lent] = [good, good]
    pools[position] = bad
    with pytest.raises(nnfmq.InvalidArgument, match="received memory"):
        execute_over(client, model, *pools)
    assert model.execute(one(2)) == (one(2),)


@pytest.mark.parametrize("announced", [NEEDED_BYTES, 1 << 40, 0], ids=["needed", "huge", "none"])
def test_memory_that_is_shorter_than_announced_is_refused_on_the_ordinary_path(
    client: nnfmq.Client, model: nnfmq.PreparedModel, short: Memory, good: Memory, announced: int
) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="received memory has 3 bytes"):
        execute_over(client, model, Lent(short.fileno(), announced), good)
    assert model.execute(one(2)) == (one(2),)


def test_a_request_beyond_its_memory_is_refused_on_the_ordinary_path(
    client: nnfmq.Client, model: nnfmq.PreparedModel, short: Memory, good: Memory
) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        execute_over(client, model, good, short)
    assert model.execute(one(2)) == (one(2),)


def test_LIFE_9_refused_memory_leaves_nothing_in_the_worker(
    client: nnfmq.Client, model: nnfmq.PreparedModel, good: Memory, bad: Lent
) -> None:
    with Process(client.driver_pid) as worker:
        model.execute(one(1))
        before = worker.descriptors(), worker.shared_mappings()
        with pytest.raises(nnfmq.InvalidArgument):
            execute_over(client, model, good, bad)
        until(lambda: (worker.descriptors(), worker.shared_mappings()) == before, "the worker has closed what came")


# ---------------------------------------------------------------------------------------------------- over a burst


@pytest.fixture
def burst(model: nnfmq.PreparedModel) -> Iterator[nnfmq.Burst]:
    with model.burst() as made:
        made.execute(one(1))
        yield made


OUTPUT_SLOT = 1  # a burst numbers its memories as it makes them: inputs, outputs


def put_in_slot(client: nnfmq.Client, burst: nnfmq.Burst, memory: Memory | Lent) -> None:
    """Free the slot of the outputs on both sides and give its number to `memory`."""
    burst._slots.free(OUTPUT_SLOT)
    client._connection._send(messages.FreeMemory(burst._burst_id, OUTPUT_SLOT), (), None)
    client.devices()  # answered in order: the slot is free by now
    assert burst._slots.add(memory) == OUTPUT_SLOT  # type: ignore[arg-type]


def test_the_same_packet_is_refused_when_its_slot_has_come_to_stand_for_smaller_memory(
    client: nnfmq.Client, burst: nnfmq.Burst, short: Memory
) -> None:
    packet = burst._packets[MeasureTiming.NO]
    put_in_slot(client, burst, short)
    with pytest.raises(nnfmq.InvalidArgument):
        burst.execute(one(2))
    assert burst._packets[MeasureTiming.NO] is packet
    put_in_slot(client, burst, burst._pools[1])
    assert burst.execute(one(3)) == (one(3),)


def test_the_same_packet_writes_to_the_memory_that_its_slot_stands_for_now(
    client: nnfmq.Client, burst: nnfmq.Burst, good: Memory
) -> None:
    put_in_slot(client, burst, good)
    burst.execute(one(2), out=burst.outputs)
    assert bytes(good.view) == one(2).tobytes()
    assert burst.outputs == (one(1),)


def test_N_BUX_5_memory_that_is_not_sealed_is_refused_over_a_burst(
    client: nnfmq.Client, burst: nnfmq.Burst, bad: Lent
) -> None:
    put_in_slot(client, burst, bad)
    with pytest.raises(nnfmq.GeneralFailure, match="received memory"):
        burst.execute(one(2))
    put_in_slot(client, burst, burst._pools[1])
    assert burst.execute(one(3)) == (one(3),)


def test_a_slot_that_the_client_does_not_know_is_refused(client: nnfmq.Client, burst: nnfmq.Burst) -> None:
    burst._slots.free(OUTPUT_SLOT)
    client._connection._send(messages.FreeMemory(burst._burst_id, OUTPUT_SLOT), (), None)
    client.devices()
    with pytest.raises(nnfmq.InvalidArgument, match="slot 1"):
        burst.execute(one(2))
    assert burst._slots.add(burst._pools[1]) == OUTPUT_SLOT
    assert burst.execute(one(3)) == (one(3),)


@pytest.mark.parametrize("times", [1, 3])
def test_freeing_slots_again_and_again_gives_the_same_results(
    client: nnfmq.Client, burst: nnfmq.Burst, times: int
) -> None:
    for value in range(times):
        put_in_slot(client, burst, burst._pools[1])
        assert burst.execute(one(value)) == (one(value),)


def test_memory_that_the_driver_may_only_read_is_refused_for_outputs(client: nnfmq.Client, burst: nnfmq.Burst) -> None:
    with Memory.create(NEEDED_BYTES, one_writer=True) as memory:
        put_in_slot(client, burst, memory)
        with pytest.raises(nnfmq.InvalidArgument, match="sealed read-only"):
            burst.execute(one(2))
        put_in_slot(client, burst, burst._pools[1])
    assert burst.execute(one(3)) == (one(3),)


def test_queues_in_unsealed_memory_are_refused(client: nnfmq.Client, model: nnfmq.PreparedModel, bad: Lent) -> None:
    with model.burst() as burst:
        described = messages.MQDescriptorData(
            tuple(messages.GrantorData(g.fd_index, g.offset, g.extent) for g in burst._requests.descriptor.grantors),
            burst._requests.quantum,
            burst._requests.descriptor.flags,
        )
    message = messages.ConfigureBurst(client._connection.new_call(), model.model_id, described, described)
    with pytest.raises(nnfmq.InvalidArgument, match="received memory"):
        client._connection.call(message, messages.BurstConfigured, [bad.fd, bad.fd])
    assert model.execute(one(2)) == (one(2),)


def test_only_what_a_burst_shares_is_mapped_by_the_worker(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    with Process(client.driver_pid) as worker:
        before = worker.shared_mappings()
        with model.burst() as burst:
            burst.execute(one(1))
            assert len(worker.shared_mappings()) == len(before) + 4  # two queues, inputs, outputs
        until(lambda: worker.shared_mappings() == before, "the worker has let go of the burst's memory")


def test_no_shared_memory_has_a_name(model: nnfmq.PreparedModel) -> None:
    before = set(Path("/dev/shm").iterdir())
    with model.burst() as burst:
        burst.execute(one(1))
        assert set(Path("/dev/shm").iterdir()) == before
