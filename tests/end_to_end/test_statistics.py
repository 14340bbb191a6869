"""Statistics of a real driver: what each mode counts, who may read, and what is left when either side is killed."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, Process, Program, one, running_daemon, until
from support.models import null_model, weighty_model

import nnfmq
from nnfmq.base.deadlines import deadline_after
from nnfmq.base.memory import F_SEAL_FUTURE_WRITE, Memory
from nnfmq.hal.errors import DeviceUnavailable, NnfmqError
from nnfmq.hal.types import DataLocation, DeviceStatus, Request, RequestArgument
from nnfmq.observe.driver_statistics import (
    TIMES,
    ClientCalls,
    ClientStatistics,
    DriverStatistics,
    ModelStatistics,
    client_calls,
)
from nnfmq.serialize import messages

Run = Callable[[], object]
CONNECTED = """
import nnfmq, sys

client = nnfmq.connect(sys.argv[1])
client.devices()
print("connected", flush=True)
input()
"""


def own(client: nnfmq.Client) -> ClientStatistics:
    (found,) = [other for other in client.statistics().clients if other.worker_pid == client.worker_pid]
    return found


def counted(client: nnfmq.Client) -> tuple[int, int]:
    """Return the executions and failures of the only model."""
    (model,) = own(client).models
    return model.executions, model.failures


@contextmanager
def hal_request() -> Iterator[Request]:
    with Memory.create(8) as memory:
        arguments = [(RequestArgument(location=DataLocation(0, offset, 4)),) for offset in (0, 4)]
        yield Request(*arguments, (memory,))


def asynchronously(model: nnfmq.PreparedModel, _stack: ExitStack) -> Run:
    return lambda: model.execute_async(one(1)).result(LIMIT_S)


def fenced(model: nnfmq.PreparedModel, _stack: ExitStack) -> Run:
    def run() -> None:
        with model.execute_fenced(one(1)) as launched:
            launched.result(LIMIT_S)

    return run


def reusably(model: nnfmq.PreparedModel, stack: ExitStack) -> Run:
    execution = stack.enter_context(model.create_reusable_execution())
    return lambda: execution.compute(one(1), timeout=LIMIT_S)


def reusably_and_fenced(model: nnfmq.PreparedModel, stack: ExitStack) -> Run:
    execution = stack.enter_context(model.create_reusable_execution())

    def run() -> None:
        with execution.compute_fenced(one(1)) as launched:
            launched.result(LIMIT_S)

    return run


def in_a_burst(model: nnfmq.PreparedModel, stack: ExitStack) -> Run:
    burst = stack.enter_context(model.burst())
    return lambda: burst.execute(one(1), timeout=LIMIT_S)


def in_an_aidl_burst(model: nnfmq.PreparedModel, stack: ExitStack) -> Run:
    burst, request = stack.enter_context(model.aidl_burst()), stack.enter_context(hal_request())
    return lambda: burst.execute_synchronously(request, timeout=LIMIT_S)


MODES: dict[str, Callable[[nnfmq.PreparedModel, ExitStack], Run]] = {
    "synchronous": lambda model, _stack: lambda: model.execute(one(1), timeout=LIMIT_S),
    "asynchronous": asynchronously,
    "fenced": fenced,
    "reusable": reusably,
    "reusable and fenced": reusably_and_fenced,
    "burst": in_a_burst,
    "AIDL burst": in_an_aidl_burst,
}
in_every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@in_every_mode
def test_executions_of_every_mode_count(client: nnfmq.Client, model: nnfmq.PreparedModel, mode: Any) -> None:
    with ExitStack() as stack:
        run = mode(model, stack)
        for _ in range(3):
            run()
        until(lambda: counted(client) == (3, 0), "three executions are counted")
        found = own(client)
        counts = found.models[0].counts
        assert [getattr(counts, name).total for name in TIMES if name != "queue"] == [3, 3, 3]
        assert counts.queue.total <= (0 if "fenced" in mode.__name__ else 3)  # a burst's executions are sampled
        assert counts.queue.total == 3 or mode is not reusably
        assert 0 < counts.engine_ns <= counts.driver_ns <= counts.client_ns
        assert counts.queue_ns <= counts.client_ns - counts.driver_ns
        assert (found.executions, found.failures) == (3, 0)


@in_every_mode
def test_an_execution_that_fails_counts_once_in_every_mode(
    client: nnfmq.Client, model: nnfmq.PreparedModel, mode: Any
) -> None:
    with ExitStack() as stack:
        run = mode(model, stack)
        run()
        client.set_device_status("reference", DeviceStatus.OFFLINE)
        stack.callback(client.set_device_status, "reference", DeviceStatus.AVAILABLE)
        with pytest.raises(NnfmqError):
            run()
        until(lambda: counted(client) == (1, 1), "one failure is counted")
        assert own(client).failures == 1


def test_a_fenced_execution_that_never_began_counts_as_failed(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    fence = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        with model.execute_fenced(one(1), wait_for=[fence], timeout=0.02) as launched, pytest.raises(NnfmqError):
            launched.result(LIMIT_S)
    finally:
        os.close(fence)
    assert counted(client) == (0, 1)


def test_a_model_is_called_by_its_name_and_device(client: nnfmq.Client) -> None:
    with client.device("reference").prepare(null_model(), name="smallest") as named:
        (found,) = own(client).models
        assert (found.id, found.name, found.device) == (named.model_id, "smallest", "reference")
    until(lambda: own(client).models == (), "the row of a released model ends")


def test_a_model_of_a_file_is_called_by_the_file(client: nnfmq.Client) -> None:
    path, device = Path(nnfmq.example_path("digits.tflite")), client.device("reference")
    with device.prepare(path), device.prepare(nnfmq.load(path)), device.prepare(nnfmq.load(path.read_bytes())) as last:
        names = sorted(found.name for found in own(client).models)
        assert names == ["digits.tflite", "digits.tflite", f"model {last.model_id}"]


def test_a_burst_counts_its_packets_and_waits(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    with model.burst() as burst:
        for _ in range(5):
            burst.execute(one(1))
        until(lambda: own(client).bursts[0].executions == 5, "five executions are counted")
        (found,) = own(client).bursts
        assert (found.model_id, found.received, found.failures, found.in_flight) == (model.model_id, 5, 0, 0)
        until(lambda: own(client).bursts[0].slept > 0, "the listener sleeps after its polling window")
    until(lambda: own(client).bursts == (), "the row of a closed burst ends")


def test_all_clients_of_a_driver_are_seen(daemon: Daemon, client: nnfmq.Client) -> None:
    with daemon.connect() as other:
        found = client.statistics()
        assert {row.worker_pid for row in found.clients} == {client.worker_pid, other.worker_pid}
        assert {row.pid for row in found.clients} == {os.getpid()}
        assert (found.pid, found.memory_limit_bytes > 0) == (daemon.process.pid, True)
    until(lambda: len(client.statistics().clients) == 1, "the slot of a client that has left is free")


def test_LIFE_a_killed_client_leaves_no_slot(daemon: Daemon, client: nnfmq.Client) -> None:
    with Program.start(["-P", "-c", CONNECTED, daemon.path]) as program:
        assert program.line() == "connected"
        until(lambda: len(client.statistics().clients) == 2, "the other client is counted")
        program.popen.kill()
        until(lambda: len(client.statistics().clients) == 1, "its slot is free")
    assert own(client).pid == os.getpid()


def test_LIFE_a_killed_worker_leaves_no_slot(daemon: Daemon, client: nnfmq.Client) -> None:
    with daemon.connect() as other, other.device("reference").prepare(null_model()) as model:
        model.execute(one(1))
        with Process(other.worker_pid) as worker:
            worker.kill()
        until(lambda: len(client.statistics().clients) == 1, "its slot is free")
    with daemon.connect() as again:
        assert (own(again).executions, own(again).models) == (0, ())


def test_a_client_that_reads_while_its_driver_is_killed_gets_dead_object(folder: Any) -> None:
    with (
        Daemon.start(folder / "d.sock") as daemon,
        daemon.connect() as client,
        Process(client.worker_pid) as worker,
    ):
        assert client.statistics().pid == daemon.process.pid
        worker.kill()
        daemon.kill()
        with pytest.raises(nnfmq.DeadObject):
            client.statistics()


def received_fd(client: nnfmq.Client) -> int:
    fds: list[int] = []
    call = messages.GetStatistics(client.connection.next_call_id())
    client.connection.call(call, messages.StatisticsMemory, (), deadline_after(LIMIT_S), on_fds=fds.extend)
    (fd,) = fds
    return fd


def test_a_client_cannot_write_to_the_statistics(client: nnfmq.Client) -> None:
    fd = received_fd(client)
    try:
        size = os.fstat(fd).st_size
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # the same user may open the file again
        try:
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE
            for opened in (fd, again):
                with pytest.raises(PermissionError):
                    os.pwrite(opened, b"x", 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(opened, size).close()
                with pytest.raises(PermissionError):
                    os.ftruncate(opened, 0)
        finally:
            os.close(again)
    finally:
        os.close(fd)


def test_the_memory_of_a_driver_with_a_supervisor_stays_current(client: nnfmq.Client, model: Any) -> None:
    from nnfmq.observe.driver_statistics import read_statistics

    with client.statistics_memory() as memory:
        assert not memory.is_writable

        def found() -> list[ModelStatistics]:
            return [row for other in read_statistics(memory.view).clients for row in other.models]

        before = [row.executions for row in found()]
        model.execute(one(1))
        assert (before, [row.executions for row in found()]) == ([0], [1])


def test_the_memory_outlives_its_client_and_has_the_open_calls_of_the_others(daemon: Daemon) -> None:
    with daemon.connect() as reader:
        memory = reader.statistics_memory()
    with memory, daemon.connect() as other:
        until(lambda: len(client_calls(memory.view)) == 1, "the reader has left")
        assert client_calls(memory.view) == [ClientCalls(os.getpid(), other.worker_pid, 0)]


def test_the_memory_is_readable_after_its_driver_was_killed(folder: Any) -> None:
    with Daemon.start(folder / "d.sock") as daemon:
        with daemon.connect() as client:
            memory = client.statistics_memory()
            daemon.kill()
        with memory:
            assert [each.pid for each in client_calls(memory.view)] == [os.getpid()]


def test_an_embedded_driver_counts_for_its_only_client() -> None:
    with nnfmq.connect(embedded=True) as client:
        with closing(client.device("reference").prepare(null_model())) as model:
            np.testing.assert_array_equal(model.execute(one(3))[0], one(3))
            found: DriverStatistics = client.statistics()
            assert (found.pid, found.version, found.memory_limit_bytes) == (client.driver_pid, "", 0)
            assert [(row.pid, row.executions) for row in found.clients] == [(os.getpid(), 1)]
            assert found.clients[0].charged_bytes > 0
        assert client.statistics().read_ns > found.read_ns


def test_an_unavailable_device_counts_no_execution_of_a_burst_that_does_not_begin(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    client.set_device_status("reference", DeviceStatus.OFFLINE)
    try:
        with pytest.raises(DeviceUnavailable):
            model.burst()
    finally:
        client.set_device_status("reference", DeviceStatus.AVAILABLE)
    assert counted(client) == (0, 0)
    assert own(client).bursts == ()


def test_programs_that_clients_share_and_the_compile_server_are_counted(folder: Any) -> None:
    pytest.importorskip("llvmlite")
    environment = {"NNFMQ_CACHE_MIB": "64", "XDG_CACHE_HOME": str(folder)}
    with running_daemon(folder / "d.sock", environment=environment) as daemon, ExitStack() as stack:
        client, other = (stack.enter_context(daemon.connect()) for _ in range(2))
        before = client.statistics()
        assert (before.compile_server_pid, before.compile_requests, before.cache.programs) == (0, 0, 0)
        assert before.cache.limit_bytes == 64 << 20
        for each in (client, other):
            model = each.device("compiled").prepare(weighty_model(1.0, 256), preference="sustained_speed")
            stack.enter_context(model)
        until(lambda: client.statistics().cache.hits > 0, "the second client found the program of the first")
        found = client.statistics()
        assert found.compile_server_pid in (0, *daemon.compile_servers())
        assert found.compile_requests > 0
        assert found.cache.programs > 0
        assert 0 < found.cache.size_bytes <= found.cache.limit_bytes
        assert found.cache.hits < found.cache.lookups  # the first client's failed
