"""Results of compile processes, and how a preparation uses them. tests/end_to_end tests real processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

pytest.importorskip("llvmlite", exc_type=ImportError)

from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.driver.compilation import jobs, server
from nnfmq.driver.compilation.jobs import (
    PrepareContext,
    _Process,
    compile_in_processes,
    current_prepare_context,
    prepare_context,
)
from nnfmq.driver.compilation.process import OUT_OF_MEMORY, CompileResult, compile_description, describe_death
from nnfmq.driver.memory.quota import MemoryQuota
from nnfmq.engines.compiled import code_generator
from nnfmq.engines.compiled.kernel_compilation import encode_kernels
from nnfmq.engines.compiled.kernels import symbol_name
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseKernel
from nnfmq.engines.compiled.kernels.float_ops import FloatUnary
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.target import host_target
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    ResourceExhausted,
    ResourceExhaustedTransient,
)


def kernel(length: int = 8, steps: tuple[int, ...] = (1,)) -> ElementwiseKernel:
    return ElementwiseKernel(FloatUnary("floor", -np.inf), (), ((),), length, steps, 4, 1, length, 1, (False,))


def test_a_description_is_compiled_to_object_code() -> None:
    result = compile_description(bytearray(encode_kernels([kernel()], host_target())))
    assert result.status is ErrorStatus.NONE
    assert LoadedCode(result.codes).address(symbol_name(kernel())) != 0


def test_LIFE_8_an_error_while_compiling_is_returned() -> None:
    result = compile_description(bytearray(encode_kernels([kernel(steps=(1, 1))], host_target())))
    assert result.status is ErrorStatus.GENERAL_FAILURE
    assert "compiling failed: ValueError" in result.message


def test_a_memory_error_while_compiling_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(code_generator, "compile_kernels", exhausted)
    result = compile_description(bytearray(encode_kernels([kernel()], host_target())))
    assert result.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


@pytest.fixture
def server_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Return the compile server's end of this process's connection to it."""
    worker_end, end = Channel.pair()
    with worker_end, end:
        monkeypatch.setattr(jobs, "_server", worker_end)
        yield end


class Pair(NamedTuple):
    """A process object of the worker, the process's end of the connection, and the server's end for its status."""

    process: _Process
    process_end: Channel
    server_end: Channel


@pytest.fixture
def pair() -> Iterator[Pair]:
    worker_end, process_end = Channel.pair()
    status, status_end = Channel.pair()
    with _Process(worker_end, status) as process, process_end, status_end:
        yield Pair(process, process_end, status_end)


LIMITLESS = PrepareContext()


def test_object_code_and_errors_of_a_process_are_returned_or_raised(pair: Pair) -> None:
    pair.process_end.send(msgspec.msgpack.encode(CompileResult(ErrorStatus.NONE, codes=(b"x" * 100_000,))))
    assert pair.process.receive(LIMITLESS) == (b"x" * 100_000,)
    pair.process_end.send(msgspec.msgpack.encode(CompileResult(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, "no memory")))
    with pytest.raises(ResourceExhaustedTransient, match="no memory"):
        pair.process.receive(LIMITLESS)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (b"-9", GeneralFailure, r"was ended by SIGKILL \(is there enough memory\?\)"),
        (b"-11", GeneralFailure, "was ended by SIGSEGV;"),
        (b"-35", GeneralFailure, "was ended by signal 35;"),
        (b"70", GeneralFailure, "ended with status 70"),
        (b"-24", ResourceExhaustedTransient, "more than 120 s of CPU time .* that \\$NNFMQ_COMPILE_TIME_S"),
        (b"memory", ResourceExhaustedTransient, "may take 1024 MiB, .* that \\$NNFMQ_COMPILE_MEMORY_MIB"),
        (b"0", DeadObject, "turn of the compile process is over"),
    ],
    ids=["SIGKILL", "SIGSEGV", "signal 35", "status 70", "SIGXCPU", "memory", "status 0"],
)
def test_LIFE_8_the_message_says_how_a_process_ended(
    pair: Pair, status: bytes, error: type[Exception], text: str
) -> None:
    pair.server_end.send(status)
    pair.process_end.close()
    with pytest.raises(error, match=text):
        pair.process.receive(LIMITLESS)


@pytest.mark.parametrize(
    "last_words",
    [
        b"terminate called after throwing an instance of 'std::bad_alloc'",
        b"LLVM ERROR: out of memory\nAllocation failed",
    ],
)
def test_a_process_that_could_not_allocate_is_known_by_its_last_words(last_words: bytes) -> None:
    assert describe_death(-6, last_words) == OUT_OF_MEMORY
    assert describe_death(-6, b"LLVM ERROR: Cannot select") == "-6"
    assert describe_death(0, last_words) == "0"


def test_a_process_whose_status_is_not_reported_has_ended(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_STATUS_TIMEOUT_S", 0.001)
    pair.process_end.close()
    with pytest.raises(GeneralFailure, match="has ended; prepare it again"):
        pair.process.receive(LIMITLESS)


def test_the_client_is_charged_with_the_most_that_a_process_has_taken(pair: Pair) -> None:
    quota = MemoryQuota(100)
    context = PrepareContext(charge=quota.charge)
    for taken, charged in ((40, 40), (30, 40), (90, 90)):
        pair.process_end.send(
            msgspec.msgpack.encode(CompileResult(ErrorStatus.NONE, codes=(b"x",), memory_bytes=taken))
        )
        pair.process.receive(context)
        assert quota.charged_bytes == charged
    pair.process_end.send(msgspec.msgpack.encode(CompileResult(ErrorStatus.NONE, codes=(b"x",), memory_bytes=101)))
    with pytest.raises(ResourceExhausted, match="NNFMQ_CLIENT_MEMORY_MIB"):
        pair.process.receive(context)
    pair.process.close()
    assert quota.charged_bytes == 0


def test_PREP_6_compiling_in_the_worker_ends_at_the_deadline() -> None:
    late = PrepareContext(time.monotonic_ns() - 1)
    with prepare_context(late), pytest.raises(MissedDeadlineTransient, match="while the model was compiled"):
        compile_in_processes([kernel()], host_target())
    assert current_prepare_context() == PrepareContext()


def test_without_a_server_the_worker_compiles_and_reports_progress() -> None:
    progress: list[tuple[int, int]] = []
    kernels = [kernel(length) for length in range(8, 16)]
    with prepare_context(PrepareContext(on_progress=lambda *values: progress.append(values))):
        linker = LoadedCode(compile_in_processes(kernels, host_target()))
    assert all(linker.address(symbol_name(each)) for each in kernels)
    assert progress[0] == (0, 8) and progress[-1] == (8, 8)


def test_without_a_server_what_else_is_to_be_done_is_done_once() -> None:
    done: list[int] = []
    compile_in_processes([kernel()], host_target(), lambda: done.append(1))
    assert done == [1]


def test_processes_have_two_parts_each_before_the_worker_does_something_else(
    server_end: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compile while it does, and their results are read afterwards; then they get the other parts."""
    monkeypatch.setattr(jobs, "processes_max", lambda: 1)
    processes: list[Channel] = []
    meanwhile: list[int] = []

    def answer_what_has_arrived() -> None:
        with server_end.receive() as frame:
            processes.extend(map(Channel.adopt, frame.detach_fds()))
        process = processes[0]
        process.send(b"ready")
        with suppress(MissedDeadlineTransient):
            while True:
                with process.receive(NO_WAIT) as frame:
                    process.send(msgspec.msgpack.encode(compile_description(frame.data)))
                    meanwhile.append(1)

    kernels = [kernel(length) for length in range(8, 10)]
    codes = compile_in_processes(kernels, host_target(), answer_what_has_arrived)
    assert len(meanwhile) == 2
    loaded = LoadedCode(codes)
    assert all(loaded.address(symbol_name(each)) for each in kernels)
    for process in processes:
        process.close()


def test_an_error_meanwhile_ends_the_processes(server_end: Channel) -> None:
    def fail() -> None:
        raise GeneralFailure("a constant cannot be packed")

    with pytest.raises(GeneralFailure, match="cannot be packed"):
        compile_in_processes([kernel()], host_target(), fail)
    with server_end.receive() as frame, Channel.adopt(os.dup(frame.fds[0])) as process:
        process.receive().close()  # the part
        with pytest.raises(DeadObject):
            process.receive(NO_WAIT)


def test_a_process_with_several_threads_forks_no_server() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(GeneralFailure, match="threads starts no child processes"):
            server.fork_compile_server()
    finally:
        end.set()
        thread.join()


def test_a_process_ends_without_a_status_if_its_server_died(pair: Pair) -> None:
    pair.process_end.close()
    pair.server_end.close()
    with pytest.raises(jobs._ServerDiedError):
        pair.process.receive(LIMITLESS)


class Server:
    """A compile server whose processes the test plays: it decides which of them run, and when their turn is over."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.processes: list[tuple[Channel, Channel]] = []

    def accept(self) -> Channel:
        """Return the process's end of the next request."""
        with self._channel.receive() as frame:
            connection, status = map(Channel.adopt, frame.detach_fds())
        self.processes.append((connection, status))
        return connection

    def compile_next(self, process: Channel) -> None:
        with process.receive(NO_WAIT) as frame:
            process.send(msgspec.msgpack.encode(compile_description(frame.data)))

    def end(self, number: int) -> None:
        """End a process whose turn is over."""
        connection, status = self.processes[number]
        connection.close()
        status.send(b"0")

    def close(self) -> None:
        for channels in self.processes:
            for channel in channels:
                channel.close()


@pytest.fixture
def server_of_two(server_end: Channel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server that is asked for two processes for each model."""
    monkeypatch.setattr(jobs, "processes_max", lambda: 2)
    playing = Server(server_end)
    yield playing
    playing.close()


KERNELS = [kernel(length) for length in range(8, 24)]


def run_job(job: jobs._Job, *steps: Callable[[], object]) -> Mapping[int, bytes] | None:
    """Run a job; each of `steps` is done before it looks at its processes the next time."""
    remaining = list(steps)
    poll = job._poll

    class Steps:
        def __getattr__(self, name: str) -> object:
            return getattr(poll, name)

        def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
            if remaining:
                remaining.pop(0)()
            return poll.poll(timeout_ms)

    job._poll = Steps()  # type: ignore[assignment]
    codes = job.run()
    assert not remaining
    return codes


def test_the_parts_of_a_process_that_waits_go_to_one_that_runs(server_of_two: Server) -> None:
    parts = [[each] for each in KERNELS[:4]]
    assert jobs._server is not None
    with jobs._Job(jobs._server, parts, host_target(), PrepareContext()) as job:
        assert job.start(2)
        running, waiting = server_of_two.accept(), server_of_two.accept()
        running.send(b"ready")
        waiting.send(b"queued")
        compile_one = partial(server_of_two.compile_next, running)
        codes = run_job(job, lambda: None, *[compile_one] * 4)
    assert codes is not None
    loaded = LoadedCode(codes.values())
    assert all(loaded.address(symbol_name(each)) for each in KERNELS[:4])
    parts_sent = [waiting.receive().data for _ in range(2)]
    assert len(parts_sent) == 2
    with pytest.raises(DeadObject):
        waiting.receive()


def test_the_parts_of_a_process_whose_turn_is_over_go_to_another_one(server_of_two: Server) -> None:
    parts = [[each] for each in KERNELS[:2]]
    assert jobs._server is not None
    with jobs._Job(jobs._server, parts, host_target(), PrepareContext()) as job:
        assert job.start(1)
        first = server_of_two.accept()
        first.send(b"ready")

        def end_first_after_one_part() -> None:
            server_of_two.compile_next(first)
            server_of_two.end(0)

        def compile_the_rest() -> None:
            second = server_of_two.accept()
            second.send(b"ready")
            server_of_two.compile_next(second)

        codes = run_job(job, lambda: None, end_first_after_one_part, lambda: None, compile_the_rest, lambda: None)
    assert codes is not None
    loaded = LoadedCode(codes.values())
    assert all(loaded.address(symbol_name(each)) for each in KERNELS[:2])


def test_the_worker_compiles_if_no_request_is_answered(server_of_two: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_START_TIMEOUT_S", 0.0)
    loaded = LoadedCode(compile_in_processes(KERNELS, host_target()))
    assert all(loaded.address(symbol_name(each)) for each in KERNELS)


def test_a_process_that_waits_is_waited_for_longer_than_for_a_server_that_does_not_answer(
    server_of_two: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_START_TIMEOUT_S", 3600.0)
    assert jobs._server is not None
    with jobs._Job(jobs._server, [[KERNELS[0]]], host_target(), PrepareContext()) as job:
        assert job.start(1)
        assert len(job._reply_times()) == 1
        process = server_of_two.accept()
        process.send(b"queued")
        codes = run_job(job, lambda: None, lambda: process.send(b"ready"), lambda: server_of_two.compile_next(process))
        assert codes is not None and job._reply_times() == []


def test_the_object_code_of_a_kernel_is_in_its_place_whatever_part_it_came_in(server_of_two: Server) -> None:
    kernels = [kernel(length) for length in range(8, 11)]
    parts = [[kernels[2], kernels[0]], [kernels[1]]]
    assert jobs._server is not None
    with jobs._Job(jobs._server, parts, host_target(), PrepareContext()) as job:
        assert job.start(1)
        process = server_of_two.accept()
        process.send(b"ready")
        compile_one = partial(server_of_two.compile_next, process)
        codes = run_job(job, lambda: None, compile_one, compile_one)
    assert codes is not None
    for each in kernels:
        assert LoadedCode([codes[id(each)]]).address(symbol_name(each))


@pytest.mark.parametrize("count", [0, 2])
def test_a_compile_process_that_returns_object_code_for_other_kernels_is_an_error(
    count: int, server_of_two: Server
) -> None:
    assert jobs._server is not None
    with jobs._Job(jobs._server, [[KERNELS[0]]], host_target(), PrepareContext()) as job:
        assert job.start(1)
        process = server_of_two.accept()
        process.send(b"ready")
        process.send(msgspec.msgpack.encode(CompileResult(ErrorStatus.NONE, codes=(b"",) * count)))
        with pytest.raises(GeneralFailure, match=f"{count} object files for 1 kernels"):
            job.run()
