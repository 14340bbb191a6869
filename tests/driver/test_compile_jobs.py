"""Results of compile processes, and how a preparation uses them. tests/end_to_end tests real processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

pytest.importorskip("llvmlite", exc_type=ImportError)

from nnfmq.base.channel import Channel
from nnfmq.driver.compilation import jobs, server
from nnfmq.driver.compilation.jobs import (
    PrepareContext,
    _Process,
    compile_in_processes,
    current_prepare_context,
    prepare_context,
)
from nnfmq.driver.compilation.server import CompileResult, _compile
from nnfmq.engines.compiled import code_generator
from nnfmq.engines.compiled.kernel_compilation import encode_kernels
from nnfmq.engines.compiled.kernels import symbol_name
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseKernel
from nnfmq.engines.compiled.kernels.float_ops import FloatUnary
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.target import host_target
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, MissedDeadlineTransient, ResourceExhaustedTransient


def kernel(length: int = 8, steps: tuple[int, ...] = (1,)) -> ElementwiseKernel:
    return ElementwiseKernel(FloatUnary("floor", -np.inf), (), ((),), length, steps, 4, 1, length, 1, (False,))


def test_a_description_is_compiled_to_object_code() -> None:
    result = _compile(bytearray(encode_kernels([kernel()], host_target())))
    assert result.status is ErrorStatus.NONE
    assert LoadedCode([result.code]).address(symbol_name(kernel())) != 0


def test_LIFE_8_an_error_while_compiling_is_returned() -> None:
    result = _compile(bytearray(encode_kernels([kernel(steps=(1, 1))], host_target())))
    assert result.status is ErrorStatus.GENERAL_FAILURE
    assert "compiling failed: ValueError" in result.message


def test_a_memory_error_while_compiling_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(code_generator, "compile_kernels", exhausted)
    result = _compile(bytearray(encode_kernels([kernel()], host_target())))
    assert result.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


@pytest.fixture
def pair() -> Iterator[tuple[_Process, Channel, int]]:
    """Return a process object of the worker, the process's end of the connection, and the pipe for its status."""
    worker_end, process_end = Channel.pair()
    reading, writing = os.pipe()
    with _Process(worker_end, reading) as process, process_end:
        yield process, process_end, writing
        os.close(writing)


def test_object_code_and_errors_of_a_process_are_returned_or_raised(pair: tuple[_Process, Channel, int]) -> None:
    process, process_end, _ = pair
    process_end.send(msgspec.msgpack.encode(CompileResult(ErrorStatus.NONE, code=b"x" * 100_000)))
    assert process.result() == b"x" * 100_000
    process_end.send(msgspec.msgpack.encode(CompileResult(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, "no memory")))
    with pytest.raises(ResourceExhaustedTransient, match="no memory"):
        process.result()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (b"-9", r"was ended by SIGKILL \(is there enough memory\?\)"),
        (b"-11", "was ended by SIGSEGV;"),
        (b"-35", "was ended by signal 35;"),
        (b"70", "ended with status 70"),
    ],
    ids=["SIGKILL", "SIGSEGV", "signal 35", "status 70"],
)
def test_LIFE_8_the_message_says_how_a_process_died(
    pair: tuple[_Process, Channel, int], status: bytes, text: str
) -> None:
    process, process_end, writing = pair
    os.write(writing, status)
    process_end.close()
    with pytest.raises(GeneralFailure, match=text):
        process.result()


def test_a_process_whose_status_is_not_reported_has_ended(
    pair: tuple[_Process, Channel, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_STATUS_TIMEOUT_S", 0.001)
    process, process_end, _ = pair
    process_end.close()
    with pytest.raises(GeneralFailure, match="has ended; prepare it again"):
        process.result()


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


def test_a_process_ends_without_a_status_if_its_server_died() -> None:
    worker_end, process_end = Channel.pair()
    reading, writing = os.pipe()
    with _Process(worker_end, reading) as process:
        process_end.close()
        os.close(writing)
        with pytest.raises(jobs._ServerDiedError):
            process.result()
