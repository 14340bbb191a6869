"""Memory that a client shares with a driver process, as a pool of a model, of a request, or of both."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import LIMIT_S, Daemon, Process, until
from support.models import add_model, null_model, pool_bytes, request_for
from support.small_models import with_main, with_operand

import nnfmq
from nnfmq.base.fence import Fence
from nnfmq.base.memory import Memory
from nnfmq.hal.types import DataLocation, LifeTime, Model, Protection, Request, RequestArgument

TEN, AT = [10, 20, 30, 40], 4096
BYTES = 16


class AnnouncedMemory:
    """An fd with the size and offset that the client announces, right or wrong."""

    def __init__(self, fd: int, size_bytes: int = BYTES, offset: int = 0) -> None:
        self._fd = fd
        self.size_bytes = size_bytes
        self.offset = offset
        self.protection = Protection.READ_WRITE

    def fileno(self) -> int:
        return self._fd


def weighted(pool: object, offset: int = 0) -> Model:
    """Return x + 16 bytes of a pool."""
    model = add_model()
    place = DataLocation(0, offset, BYTES)
    constant = with_operand(model, 1, lifetime=LifeTime.CONSTANT_REFERENCE, location=place)
    return replace(with_main(constant, input_indexes=(0,)), pools=(pool,))  # type: ignore[arg-type]


def filled(stack: ExitStack, values: list[int], offset: int = 0) -> Memory:
    """Return anonymous shared memory with floats at `offset`, and space behind them."""
    memory: Memory = stack.enter_context(Memory.create(2 * AT))
    np.frombuffer(memory.view, np.float32, 4, offset)[:] = values
    return memory


def floats(memory: Memory, offset: int = 0) -> list[float]:
    found: list[float] = np.frombuffer(memory.view, np.float32, 4, offset).tolist()
    return found


def still_serves(client: nnfmq.Client) -> bool:
    """Return whether a valid request of the same client succeeds."""
    with client.device("reference").prepare(null_model()) as model:
        return model.execute(np.array([5], np.float32), timeout=LIMIT_S)[0].tolist() == [5]


# ------------------------------------------------------------------------------------------------ anonymous memory


def test_MEM_2_API_10_one_anonymous_memory_may_hold_a_model_s_constants_and_a_request_s_tensors(
    client: nnfmq.Client, resources: ExitStack
) -> None:
    memory = filled(resources, TEN)
    np.frombuffer(memory.view, np.float32, 4, 64)[:] = [1, 2, 3, 4]
    with client.device("reference").prepare(weighted(memory)) as model:
        places = [RequestArgument(location=DataLocation(0, offset, BYTES)) for offset in (64, 128)]
        model.execute_request(Request((places[0],), (places[1],), (memory,)))
        assert floats(memory, 128) == [11, 22, 33, 44]
        over_the_constants = RequestArgument(location=DataLocation(0, 8, BYTES))
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-13"):
            model.execute_request(Request((places[0],), (over_the_constants,), (memory,)))
        assert floats(memory) == TEN


def test_MEM_2_shared_memory_is_mapped_by_the_driver_and_has_no_name(
    client: nnfmq.Client, resources: ExitStack
) -> None:
    model = add_model()
    pools = [resources.enter_context(Memory.create(size)) for size in pool_bytes(model)]
    with Process(client.worker_pid) as worker, client.device("reference").prepare(model) as prepared:
        before = worker.shared_mappings()
        with prepared.create_reusable_request(request_for(model, pools)) as execution:
            execution.compute()
            new = [line for line in worker.shared_mappings() if line not in before]
            assert len(new) == 2 and all("/memfd:" in line and "(deleted)" in line for line in new)
        until(lambda: worker.shared_mappings() == before, "the driver has unmapped them")


# ------------------------------------------------------------------------------------------------ hardware buffers


@pytest.mark.parametrize("offset", [0, 64, AT, AT + 64])
def test_MEM_3_API_10_a_buffer_of_format_BLOB_is_used_as_an_ordinary_pool(
    client: nnfmq.Client, resources: ExitStack, offset: int
) -> None:
    """BLOB: a descriptor whose bytes can be mapped, and where in it they begin."""
    whole = filled(resources, TEN, offset)
    blob = AnnouncedMemory(whole.fileno(), AT - 64, offset)
    with client.device("reference").prepare(weighted(blob)) as model:
        places = [RequestArgument(location=DataLocation(0, at, BYTES)) for at in (0, 64)]
        model.execute_request(Request((places[0],), (places[1],), (blob,)))  # type: ignore[arg-type]
    assert floats(whole, offset + 64) == [20, 40, 60, 80]


def opaque_buffer(stack: ExitStack, what: str) -> AnnouncedMemory:
    """Return an fd such as hardware drivers export: a handle of an object whose bytes cannot be read."""
    makers: dict[str, Callable[[], int]] = {
        "anonymous inode": lambda: os.eventfd(0),
        "device": lambda: os.open("/dev/null", os.O_RDWR),
        "pidfd": lambda: os.pidfd_open(os.getpid()),
    }
    fd = makers[what]()
    stack.callback(os.close, fd)
    return AnnouncedMemory(fd, 2 * AT)


OPAQUE = pytest.mark.parametrize("what", ["anonymous inode", "device", "pidfd"])


@OPAQUE
def test_MEM_3_an_opaque_buffer_is_rejected_for_constants(
    client: nnfmq.Client, resources: ExitStack, what: str
) -> None:
    device, foreign = client.device("reference"), opaque_buffer(resources, what)
    for call in (device.prepare, device.supported_operations):
        with pytest.raises(nnfmq.InvalidArgument, match="received memory"):
            call(weighted(foreign))
    assert still_serves(client)


@OPAQUE
@pytest.mark.parametrize(
    "place",
    [DataLocation(0, 0, BYTES), DataLocation(0, 64, BYTES), DataLocation(0, 64, 0), DataLocation()],
    ids=["N-RQX-11 length", "N-RQX-11 both", "N-RQX-11 offset", "nothing, as the HAL has it"],
)
def test_MEM_3_an_opaque_buffer_is_rejected_as_input_and_output(
    client: nnfmq.Client, resources: ExitStack, what: str, place: DataLocation
) -> None:
    foreign, memory = opaque_buffer(resources, what), filled(resources, TEN)
    with client.device("reference").prepare(weighted(memory)) as model:
        for places in ((place, DataLocation(1, 64, BYTES)), (DataLocation(1, 64, BYTES), place)):
            given, result = (RequestArgument(location=one) for one in places)
            with pytest.raises(nnfmq.InvalidArgument, match="received memory"):
                model.execute_request(Request((given,), (result,), (foreign, memory)))  # type: ignore[arg-type]
        assert model.execute([1, 2, 3, 4])[0].tolist() == [11, 22, 33, 44]
    assert still_serves(client)


# ------------------------------------------------------------------------------------------------ what is no pool


@pytest.mark.parametrize("size_bytes", [0, -1, -(2**62)])
@pytest.mark.parametrize("is_sealed", [False, True], ids=["file", "memfd"])
def test_MEM_5_an_empty_pool_is_rejected(
    client: nnfmq.Client, resources: ExitStack, size_bytes: int, is_sealed: bool
) -> None:
    memory = filled(resources, TEN)
    fd = memory.fileno() if is_sealed else os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    if not is_sealed:
        resources.callback(os.close, fd)
        os.ftruncate(fd, AT)
    empty = AnnouncedMemory(fd, size_bytes)
    check_rejected(client, resources, empty)


@pytest.mark.parametrize("what", ["a pipe", "a folder", "an empty file"])
def test_MEM_5_a_handle_without_memory_is_rejected(client: nnfmq.Client, resources: ExitStack, what: str) -> None:
    reader, writer = os.pipe()
    fds = {
        "a pipe": reader,
        "a folder": os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY),
        "an empty file": os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    }
    for fd in (*fds.values(), writer):
        resources.callback(os.close, fd)
    check_rejected(client, resources, AnnouncedMemory(fds[what]))


def test_MEM_5_a_closed_handle_is_rejected_before_it_is_sent(client: nnfmq.Client, resources: ExitStack) -> None:
    memory = filled(resources, TEN)
    memory.close()
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        client.device("reference").prepare(weighted(memory))
    with pytest.raises(nnfmq.InvalidArgument, match=r"of the fds .* is not open \(N-VAL-13\)"):
        client.device("reference").prepare(weighted(AnnouncedMemory(1 << 20)))
    assert still_serves(client)


def check_rejected(client: nnfmq.Client, resources: ExitStack, pool: AnnouncedMemory) -> None:
    """Check that it is rejected as a pool of a model and of a request, and that the same client continues."""
    memory = filled(resources, TEN)
    device = client.device("reference")
    with pytest.raises(nnfmq.InvalidArgument):
        device.prepare(weighted(pool))
    with device.prepare(weighted(memory)) as model:
        places = [RequestArgument(location=DataLocation(index, 64 * index, BYTES)) for index in (0, 1)]
        for pools in ((pool, memory), (memory, pool), (memory, memory, pool)):  # the last is not used
            with pytest.raises(nnfmq.InvalidArgument):
                model.execute_request(Request((places[0],), (places[1],), pools))  # type: ignore[arg-type]
        assert model.execute([1, 2, 3, 4])[0].tolist() == [11, 22, 33, 44]


# ------------------------------------------------------------------------------------------------ shared by many


def test_API_10_MEM_7_memory_that_the_application_closed_stays_valid_while_a_request_uses_it(
    client: nnfmq.Client, resources: ExitStack
) -> None:
    model = add_model()
    source, sink = (Memory.create(size) for size in pool_bytes(model))
    kept = [resources.enter_context(Memory.adopt(os.dup(memory.fileno()))) for memory in (source, sink)]
    np.frombuffer(kept[0].view, np.float32, 4)[:] = 1
    np.frombuffer(kept[0].view, np.float32, 4, 64)[:] = TEN
    with Process(client.worker_pid) as worker, client.device("reference").prepare(model) as prepared:
        before = worker.shared_mappings()
        with Fence.create() as first, Fence.create() as second:
            request = request_for(model, (source, sink))
            launched = [
                resources.enter_context(prepared.execute_request_fenced(request, wait_for=[own]))
                for own in (first, second)
            ]
            source.close()
            sink.close()
            assert len(worker.shared_mappings()) > len(before)
            first.signal()
            launched[0].result(LIMIT_S)
            assert np.frombuffer(kept[1].view, np.float32, 4).tolist() == [11, 21, 31, 41]
            assert len(worker.shared_mappings()) > len(before)  # the other still needs it
            np.frombuffer(kept[0].view, np.float32, 4)[:] = 2
            second.signal()
            launched[1].result(LIMIT_S)
            assert np.frombuffer(kept[1].view, np.float32, 4).tolist() == [12, 22, 32, 42]
        until(lambda: worker.shared_mappings() == before, "the driver has unmapped it with its last user")


def test_MEM_7_memory_that_several_drivers_use_outlives_each_of_them(daemon: Daemon, resources: ExitStack) -> None:
    model = add_model()
    pools = [resources.enter_context(Memory.create(size)) for size in pool_bytes(model)]
    request = request_for(model, pools)
    first, second = daemon.connect(), resources.enter_context(daemon.connect())
    executions = []
    for client in (first, second):
        prepared = resources.enter_context(client.device("reference").prepare(model))
        executions.append(resources.enter_context(prepared.create_reusable_request(request)))
    with Process(first.worker_pid) as dying, Process(second.worker_pid) as other:
        mapped = other.shared_mappings()
        for value, execution in enumerate(executions, start=1):
            np.frombuffer(pools[0].view, np.float32, 4)[:] = value
            execution.compute()
            assert np.frombuffer(pools[1].view, np.float32, 4).tolist() == [value] * 4
        dying.kill()
        dying.wait_for_end()
        first.close()
        assert other.shared_mappings() == mapped
        np.frombuffer(pools[0].view, np.float32, 4)[:] = 7
        executions[1].compute()
        assert np.frombuffer(pools[1].view, np.float32, 4).tolist() == [7] * 4
