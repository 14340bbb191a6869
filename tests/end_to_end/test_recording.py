"""Recordings of real executions: all modes, their inputs and outputs, failures and states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import one
from support.models import (
    add_model,
    gather_model,
    pool_bytes,
    request_for,
    slow_model,
    unsized_relu_model,
)
from support.recordings import arrays
from support.stateful_models import two_rnns

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.client.burst.burst import Burst
from nnfmq.client.observation import ObservedModel, RequestObservation
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import DataLocation, HalExecutionMode, Request, RequestArgument
from nnfmq.observe.executions import ObservedExecution, observers
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

ONE, TEN, SUM = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [11.0, 22.0, 33.0, 44.0]
Mode = HalExecutionMode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.nnrec"


@pytest.fixture
def recorder(path: Path) -> Iterator[ExecutionRecorder]:
    with ExecutionRecorder.start(path) as started:
        yield started


def execute_fenced(model: nnfmq.PreparedModel, *inputs: Any) -> None:
    with model.execute_fenced(*inputs, measure=True) as launched:
        launched.result()
        launched.result()  # a second time: it is recorded once


def compute(model: nnfmq.PreparedModel, *inputs: Any) -> None:
    with model.create_reusable_execution() as execution:
        execution.compute(*inputs)


def compute_fenced(model: nnfmq.PreparedModel, *inputs: Any) -> None:
    with model.create_reusable_execution() as execution, execution.compute_fenced(*inputs) as launched:
        launched.result()


def execute_burst(model: nnfmq.PreparedModel, *inputs: Any) -> None:
    with model.burst() as burst:
        burst.execute(*inputs)


def execute_pool(model: nnfmq.PreparedModel, *inputs: Any) -> None:
    with model.burst_pool(1) as pool, pool.acquire() as burst:
        burst.execute(*inputs)


ARRAY_CALLS: dict[str, tuple[Mode, Callable[..., object]]] = {
    "synchronous": (Mode.SYNCHRONOUS, lambda model, *inputs: model.execute(*inputs)),
    "asynchronous": (Mode.ASYNCHRONOUS, lambda model, *inputs: model.execute_async(*inputs).result()),
    "fenced": (Mode.FENCED, execute_fenced),
    "reusable": (Mode.REUSABLE, compute),
    "reusable, fenced": (Mode.FENCED, compute_fenced),
    "burst": (Mode.BURST, execute_burst),
    "burst of a pool": (Mode.BURST, execute_pool),
}
array_calls = pytest.mark.parametrize(("mode", "call"), ARRAY_CALLS.values(), ids=ARRAY_CALLS.keys())


@array_calls
def test_every_mode_is_recorded_with_its_arrays(
    recorder: ExecutionRecorder, client: nnfmq.Client, mode: Mode, call: Callable[..., object]
) -> None:
    with client.device("reference").prepare(add_model()) as model:
        call(model, ONE, TEN)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        (execution,) = recording.executions
        row = execution.row
        assert (row.mode, row.status, row.deadline_ns) == (mode, ErrorStatus.NONE, -1)
        assert 0 < row.intended_ns <= row.begin_ns < row.end_ns
        assert arrays(recording, 0, "inputs") == [ONE, TEN]
        assert arrays(recording, 0, "outputs") == [SUM]
        assert recording.models[0].device == "reference"


def execute_request_burst(model: nnfmq.PreparedModel, request: Request) -> None:
    with model.request_burst() as burst:
        burst.execute_request(request)


def execute_aidl_burst(model: nnfmq.PreparedModel, request: Request) -> None:
    with model.aidl_burst() as burst:
        burst.execute_synchronously(request)


def compute_request(model: nnfmq.PreparedModel, request: Request) -> None:
    with model.create_reusable_request(request) as execution:
        execution.compute()


def execute_request_fenced(model: nnfmq.PreparedModel, request: Request) -> None:
    with model.execute_request_fenced(request) as launched:
        launched.result()


REQUEST_CALLS: dict[str, tuple[Mode, Callable[..., object]]] = {
    "synchronous": (Mode.SYNCHRONOUS, lambda model, request: model.execute_request(request)),
    "asynchronous": (Mode.ASYNCHRONOUS, lambda model, request: model.execute_request_async(request).result()),
    "fenced": (Mode.FENCED, execute_request_fenced),
    "reusable": (Mode.REUSABLE, compute_request),
    "burst": (Mode.BURST, execute_request_burst),
    "AIDL burst": (Mode.AIDL_BURST, execute_aidl_burst),
}


@pytest.mark.parametrize(("mode", "call"), REQUEST_CALLS.values(), ids=REQUEST_CALLS.keys())
def test_every_mode_is_recorded_with_the_content_of_a_request(
    recorder: ExecutionRecorder, client: nnfmq.Client, mode: Mode, call: Callable[..., object]
) -> None:
    sizes = pool_bytes(add_model())
    with (
        client.device("reference").prepare(add_model()) as model,
        Memory.create(sizes[0]) as source,
        Memory.create(sizes[1]) as sink,
    ):
        request = request_for(add_model(), (source, sink))
        for argument, values in zip(request.inputs, (ONE, TEN), strict=True):
            location = argument.location
            source.view[location.offset : location.offset + location.length] = np.float32(values).tobytes()
        call(model, request)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert [execution.row.mode for execution in recording.executions] == [mode]
        assert arrays(recording, 0, "inputs") == [ONE, TEN]
        assert arrays(recording, 0, "outputs") == [SUM]


@array_calls
def test_a_failed_execution_is_recorded_with_its_status(
    recorder: ExecutionRecorder, client: nnfmq.Client, mode: Mode, call: Callable[..., object]
) -> None:
    with client.device("reference").prepare(gather_model()) as model, pytest.raises(nnfmq.NnfmqError) as raised:
        call(model, ONE, np.int32([9]))
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        (execution,) = recording.executions
        assert (execution.row.mode, execution.row.status) == (mode, raised.value.status)
        assert execution.row.outputs is None
        assert arrays(recording, 0, "inputs") == [ONE, [9]]


def test_an_execution_that_nothing_sent_is_not_recorded(recorder: ExecutionRecorder, client: nnfmq.Client) -> None:
    with client.device("reference").prepare(add_model()) as model, model.burst() as burst:
        with pytest.raises(nnfmq.InvalidArgument):
            burst.execute(ONE)
        with pytest.raises(nnfmq.InvalidArgument):
            burst.execute()
        with model.request_burst() as without_memory, pytest.raises(nnfmq.InvalidArgument):
            without_memory.execute(ONE, TEN)
        with pytest.raises(nnfmq.InvalidArgument):
            model.execute(ONE)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert (len(recording.models), recording.executions) == (1, ())


def test_a_deadline_is_recorded_with_the_execution_that_missed_it(
    recorder: ExecutionRecorder, client: nnfmq.Client
) -> None:
    with (
        client.device("reference").prepare(slow_model(operations=60)) as model,
        model.burst() as burst,
        pytest.raises(nnfmq.MissedDeadline),
    ):
        burst.execute(np.zeros(model.inputs[0].shape, np.float32), timeout=0.05)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        row = recording.executions[0].row
        assert row.status in (ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT)
        assert row.intended_ns + 50_000_000 <= row.deadline_ns <= row.begin_ns + 50_000_000
        assert row.end_ns >= row.deadline_ns


def test_an_output_of_unknown_shape_is_recorded_in_its_actual_one(
    recorder: ExecutionRecorder, client: nnfmq.Client
) -> None:
    with client.device("reference").prepare(unsized_relu_model()) as model:
        model.execute([-1.0, 2.0, -3.0, 4.0])
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        statuses = [execution.row.status for execution in recording.executions]
        assert statuses == [ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, ErrorStatus.NONE]  # the client asks for the size
        assert arrays(recording, 1, "outputs") == [[0.0, 2.0, 0.0, 4.0]]


@pytest.mark.parametrize("with_burst", [False, True])
def test_states_are_recorded_as_inputs_and_outputs(
    recorder: ExecutionRecorder, client: nnfmq.Client, tmp_path: Path, with_burst: bool
) -> None:
    (tmp_path / "m.tflite").write_bytes(two_rnns())
    with client.device("reference").prepare(tmp_path / "m.tflite") as model, model.burst() as burst:
        execute = burst.execute if with_burst else model.execute
        for value in (1.0, 2.0):
            execute([[value, value]])
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert recording.models[0].state_count == 2
        first, second = (arrays(recording, i, "inputs") for i in (0, 1))
        assert (first[0], second[0]) == ([[1.0, 1.0]], [[2.0, 2.0]])
        assert first[1:] == [[[0.0, 0.0]], [[0.0, 0.0]]]
        assert second[1:] == arrays(recording, 0, "outputs")[1:] != first[1:]


def test_without_tensors_only_models_and_times_are_recorded(path: Path, client: nnfmq.Client) -> None:
    with ExecutionRecorder.start(path, tensors=False), client.device("reference").prepare(add_model()) as model:
        for _, call in ARRAY_CALLS.values():
            call(model, ONE, TEN)
    with RecordingFile(path) as recording:
        assert not recording.session.has_tensors
        assert len(recording.executions) == len(ARRAY_CALLS)
        assert {(e.row.inputs, e.row.outputs) for e in recording.executions} == {(None, None)}


def test_inputs_in_a_managed_buffer_are_not_recorded(recorder: ExecutionRecorder, client: nnfmq.Client) -> None:
    with (
        client.device("reference").prepare(add_model()) as model,
        client.device("reference").allocate(inputs=[(model, 0)]) as buffer,
    ):
        buffer.copy_from(np.float32(ONE))
        model.execute(buffer, np.float32(TEN))
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert recording.executions[0].row.inputs is None
        assert arrays(recording, 0, "outputs") == [SUM]


def test_a_reusable_request_over_closed_memory_is_recorded_without_tensors(
    recorder: ExecutionRecorder, client: nnfmq.Client
) -> None:
    source, sink = (Memory.create(size) for size in pool_bytes(add_model()))
    request = request_for(add_model(), (source, sink))
    with (
        client.device("reference").prepare(add_model()) as model,
        model.create_reusable_request(request) as execution,
    ):
        source.close(), sink.close()  # the driver has its own mappings
        execution.compute()
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        row = recording.executions[0].row
        assert (row.status, row.inputs, row.outputs) == (ErrorStatus.NONE, None, None)


def test_a_burst_execution_that_cannot_be_sent_is_recorded_once_as_synchronous(
    recorder: ExecutionRecorder, client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.device("reference").prepare(add_model()) as model, model.burst() as burst:
        monkeypatch.setattr(burst.channel, "requests", Unsendable(burst.channel.requests))
        assert burst.execute(ONE, TEN)[0].tolist() == SUM
        monkeypatch.undo()
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert [execution.row.mode for execution in recording.executions] == [Mode.SYNCHRONOUS]


class Unsendable:
    """A request queue that takes no packet."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def send(self, packet: bytes) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def test_a_second_thread_is_rejected_and_not_recorded(recorder: ExecutionRecorder, client: nnfmq.Client) -> None:
    with client.device("reference").prepare(add_model()) as model, model.burst() as burst:
        burst._claims[0] = object()  # as if another thread were executing
        with pytest.raises(nnfmq.BadState):
            burst.execute(ONE, TEN)
        with Memory.create(64) as source, Memory.create(64) as sink, pytest.raises(nnfmq.BadState):
            burst.execute_request(request_for(add_model(), (source, sink)))
        burst._claims.clear()
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        assert recording.executions == ()


def test_a_model_prepared_from_a_cache_signature_is_recorded_without_its_content(
    recorder: ExecutionRecorder, client: nnfmq.Client, tmp_path: Path
) -> None:
    device = client.device("reference")
    with device.prepare(add_model()) as model:
        signature = model
        files = [tmp_path / f"{i}" for i in range(device.info.model_cache_files + device.info.data_cache_files)]
        fds = [os.open(file, os.O_RDWR | os.O_CREAT, 0o600) for file in files]
        try:
            caches = fds[: device.info.model_cache_files], fds[device.info.model_cache_files :]
            device.prepare(add_model(), token=bytes(32), model_cache=caches[0], data_cache=caches[1]).close()
            with device.prepare_from_cache(bytes(32), *caches, model=signature) as cached:
                cached.execute(ONE, TEN)
        finally:
            for fd in fds:
                os.close(fd)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        row = recording.executions[0].row
        assert recording.models[row.model].data == -1
        assert arrays(recording, 0, "outputs") == [SUM]


def test_a_model_that_nothing_observes_has_an_ordinary_burst(model: nnfmq.PreparedModel, path: Path) -> None:
    with ExecutionRecorder.start(path), model.burst() as burst:  # prepared before
        assert type(burst) is Burst
        assert model.handle.observed is None
        burst.execute(one(1))
    assert observers() == ()
    with RecordingFile(path) as recording:
        assert recording.models == ()


def request_in(source: Memory, sink: Memory, **changes: Any) -> Request:
    return replace(request_for(gather_model(), (source, sink)), **changes)


@pytest.mark.parametrize("kind", ["failed", "too few inputs", "beyond the pool", "no such pool"])
def test_a_request_that_fails_in_a_burst_is_recorded_with_what_can_be_read(
    recorder: ExecutionRecorder, client: nnfmq.Client, kind: str
) -> None:
    with (
        client.device("reference").prepare(gather_model()) as model,
        Memory.create(4096) as source,
        Memory.create(64) as sink,
        model.request_burst() as burst,
    ):
        request = request_in(source, sink)
        values, index = request.inputs
        location = index.location
        source.view[location.offset : location.offset + 4] = np.int32(9).tobytes()
        if kind == "too few inputs":
            request = request_in(source, sink, inputs=(values,))
        elif kind == "beyond the pool":
            request = request_in(source, sink, inputs=(values, RequestArgument(False, DataLocation(0, 4096, 4))))
        elif kind == "no such pool":
            request = request_in(source, sink, inputs=(values, RequestArgument(False, DataLocation(7, 0, 4))))
        with pytest.raises(nnfmq.NnfmqError) as raised:
            burst.execute_request(request)
    recorder.close()
    with RecordingFile(recorder.path) as recording:
        (execution,) = recording.executions
        assert (execution.row.mode, execution.row.status) == (Mode.BURST, raised.value.status)
        if kind == "failed":
            assert arrays(recording, 0, "inputs") == [[0.0] * 4, [9]]
        else:
            assert execution.row.inputs is None


class Reported:
    """An observer that keeps what it gets."""

    needs_tensors = False

    def __init__(self) -> None:
        self.executions: list[ObservedExecution] = []

    def executed(self, execution: ObservedExecution) -> None:
        self.executions.append(execution)


def test_an_execution_is_reported_once() -> None:
    reported = Reported()
    observed = ObservedModel([reported], (), ())
    observation = RequestObservation(observed, Request((), ()), Mode.ASYNCHRONOUS, None)
    for _ in range(2):
        observation.fail(nnfmq.DeadObject("gone"))
    observation.finish((), NO_TIMING)
    assert [execution.status for execution in reported.executions] == [ErrorStatus.DEAD_OBJECT]
