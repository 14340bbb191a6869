"""Replays of recordings through a driver process: outputs, latencies, failures, and the driver's death."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import Daemon, InThread, Process, until
from support.models import add_model, slow_model, unsized_relu_model, weighty_model
from support.recordings import execution, preparation, tensors, write_recording
from support.stateful_models import two_rnns

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import HalExecutionMode, LifeTime, Model
from nnfmq.lab.replay import ReplayOptions, ReplayOutcome, ReplaySpeed, Tolerance, replay, replayable
from nnfmq.observe.executions import ObservedExecution
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

FAST = ReplayOptions(ReplaySpeed("max"))


def replayed(client: nnfmq.Client, path: Path, options: ReplayOptions = FAST) -> ReplayOutcome:
    with RecordingFile(path) as recording:
        return replay(client, recording, options)


@pytest.mark.parametrize("mode", list(HalExecutionMode))
def test_an_execution_is_replayed_in_its_mode(
    client: nnfmq.Client, tmp_path: Path, mode: HalExecutionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution(mode=mode)])
    reported: list[ObservedExecution] = []
    monkeypatch.setattr("nnfmq.lab.replay._LastExecution.executed", lambda _self, found: reported.append(found))
    (done,) = replayed(client, path).executions
    assert (done.is_equal, done.status) == (True, ErrorStatus.NONE)
    assert {found.mode for found in reported} == {mode}  # the first one is the warm-up
    assert len(reported) == 2


@pytest.mark.parametrize("mode", list(HalExecutionMode))
def test_another_output_is_a_difference_in_every_mode(
    client: nnfmq.Client, tmp_path: Path, mode: HalExecutionMode
) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution(mode=mode, outputs=tensors([11, 22, 33, 45]))])
    (done,) = replayed(client, path).executions
    assert not done.is_equal
    assert [difference.elements for difference in done.differences] == [1]


def test_a_tolerance_decides(client: nnfmq.Client, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution(outputs=tensors([11, 22, 33, 45]))])
    options = FAST._replace(tolerance=Tolerance(0.03))  # 1 / 45 = 0.022
    assert replayed(client, path, options).executions[0].is_equal


def test_latencies_begin_at_the_intended_start(client: nnfmq.Client, tmp_path: Path) -> None:
    executions = [execution(3_000_000 + number) for number in range(3)]  # overlapping: a lane for each
    executions += [execution(4_000_000 + 200_000 * number) for number in range(20)]
    path = write_recording(tmp_path / "a.nnrec", executions)
    outcome = replayed(client, path, FAST._replace(speed=ReplaySpeed("rate", 1e6)))
    assert outcome.error is None
    assert len(outcome.executions) == 23
    assert all(done.is_equal and done.latency_ns > done.late_ns >= 0 for done in outcome.executions)
    # 20 of them are intended within 20 µs of one lane, and each takes longer than that: most wait for others.
    assert sorted(done.late_ns for done in outcome.executions)[15] > 20_000


def test_a_recording_of_real_executions_is_equal(client: nnfmq.Client, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(two_rnns())
    with (
        ExecutionRecorder.start(tmp_path / "a.nnrec"),
        client.device("reference").prepare(tmp_path / "m.tflite") as model,
        model.burst() as burst,
    ):
        for value in range(5):
            burst.execute([[value, -value]])
        model.execute([[1.0, 2.0]])
    outcome = replayed(client, tmp_path / "a.nnrec", FAST._replace(tolerance=Tolerance(0.0)))
    assert [done.is_equal for done in outcome.executions] == [True] * 6
    assert [len(done.differences) for done in outcome.executions] == [3] * 6  # the output and two states


def test_weights_in_pools_are_part_of_a_recording(client: nnfmq.Client, tmp_path: Path) -> None:
    weighty = weighty_model(2.0)
    with ExecutionRecorder.start(tmp_path / "a.nnrec"), Memory.create(len(weighty.operand_values)) as pool:
        pool.view[:] = weighty.operand_values
        with client.device("reference").prepare(with_constants_in(pool, weighty)) as model:
            assert model.execute(np.ones((1, 256), np.float32))[0][0, 0] == 512.0
    with RecordingFile(tmp_path / "a.nnrec") as recording:
        assert [len(model.pools) for model in recording.models] == [1]
        outcome = replay(client, recording, FAST)
    assert [done.is_equal for done in outcome.executions] == [True]


def with_constants_in(pool: Memory, model: Model) -> Model:
    """Return the model with its constants in a pool, which has its operand_values."""
    operands = tuple(
        replace(operand, lifetime=LifeTime.CONSTANT_REFERENCE)
        if operand.lifetime is LifeTime.CONSTANT_COPY
        else operand
        for operand in model.main.operands
    )
    return Model(replace(model.main, operands=operands), pools=(pool,))


def test_progress_is_shown_until_all_is_done(client: nnfmq.Client, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution(3_000_000 + number) for number in range(5)])
    shown: list[tuple[int, int]] = []
    with RecordingFile(path) as recording:
        replay(client, recording, FAST, lambda done, total: shown.append((done, total)))
    assert shown[-1] == (5, 5)
    assert shown == sorted(shown)


def test_unknown_shapes_are_replayed_with_the_recorded_ones(client: nnfmq.Client, tmp_path: Path) -> None:
    with (
        ExecutionRecorder.start(tmp_path / "a.nnrec"),
        client.device("reference").prepare(unsized_relu_model()) as model,
    ):
        model.execute([-1.0, 2.0, -3.0, 4.0])
    with RecordingFile(tmp_path / "a.nnrec") as recording:
        assert (len(recording.executions), len(replayable(recording))) == (2, 1)
        assert [done.is_equal for done in replay(client, recording, FAST).executions] == [True]


@pytest.mark.parametrize("mode", [HalExecutionMode.BURST, HalExecutionMode.REUSABLE, HalExecutionMode.AIDL_BURST])
def test_unknown_shapes_are_replayed_in_every_mode(
    mode: HalExecutionMode, client: nnfmq.Client, tmp_path: Path
) -> None:
    info = (TensorInfo("x", (4,), "float32"),), (TensorInfo("y", (0,), "float32"),)
    model = replace(preparation(unsized_relu_model()), inputs=info[0], outputs=info[1])
    values = tensors([-1, 2, -3, 4]), tensors([0, 2, 0, 4])
    path = write_recording(tmp_path / "a.nnrec", [execution(mode=mode, inputs=values[0], outputs=values[1])], model)
    assert [done.is_equal for done in replayed(client, path).executions] == [True]


def test_without_tensors_the_inputs_are_zeros_and_nothing_is_compared(client: nnfmq.Client, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution(inputs=None, outputs=None)], has_tensors=False)
    (done,) = replayed(client, path).executions
    assert (done.status, done.differences, done.is_equal) == (ErrorStatus.NONE, (), True)
    assert done.latency_ns > 0


def test_without_tensors_shapes_have_to_be_known(client: nnfmq.Client, tmp_path: Path) -> None:
    unknown = replace(preparation(), inputs=(TensorInfo("x", (0,), "float32"), TensorInfo("y", (4,), "float32")))
    path = write_recording(tmp_path / "a.nnrec", [execution(inputs=None, outputs=None)], unknown, has_tensors=False)
    with pytest.raises(nnfmq.InvalidArgument, match="inputs were not recorded, and those of model 0 have no fixed"):
        replayed(client, path)


def test_a_failure_of_the_replay_has_its_status(client: nnfmq.Client, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution(deadline_ns=2_999_000), execution(4_000_000)])
    outcome = replayed(client, path)  # the first has a deadline of 0 s
    assert outcome.error is None
    missed = (ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT)
    first, second = (done.status for done in outcome.executions)
    assert first in missed and second is ErrorStatus.NONE
    assert [done.is_equal for done in outcome.executions] == [False, True]
    without = replayed(client, path, FAST._replace(has_deadlines=False))
    assert [done.is_equal for done in without.executions] == [True, True]


def test_a_device_that_does_not_exist_is_an_error(client: nnfmq.Client, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution()], preparation(device="gone"))
    with pytest.raises(nnfmq.InvalidArgument, match="there is no device 'gone'"):
        replayed(client, path)
    assert replayed(client, path, FAST._replace(device="reference")).executions[0].is_equal


@pytest.mark.parametrize(
    ("content", "text"),
    [({"model": None}, "was prepared from a cache"), ({"model": add_model((5,))}, "")],
    ids=["no model", "another signature"],
)
def test_a_model_that_cannot_be_used_is_an_error(
    client: nnfmq.Client, tmp_path: Path, content: dict[str, Any], text: str
) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution()], replace(preparation(), **content))
    if text:
        with pytest.raises(nnfmq.InvalidArgument, match=text):
            replayed(client, path)
    else:  # the driver compares the arrays with the model that it has
        (done,) = replayed(client, path).executions
        assert done.status is not ErrorStatus.NONE


def test_bytes_that_are_no_model_are_an_error(client: nnfmq.Client, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nnfmq.recording.writer.encode_model", lambda _model: (b"\x91\xc0", ()))
    path = write_recording(tmp_path / "a.nnrec", [execution()])
    with pytest.raises(nnfmq.InvalidArgument, match=r"a\.nnrec: model 0 cannot be read: 2 bytes are not a model"):
        replayed(client, path)


@pytest.mark.parametrize("mode", [HalExecutionMode.BURST, HalExecutionMode.SYNCHRONOUS, HalExecutionMode.ASYNCHRONOUS])
def test_the_death_of_the_driver_ends_the_replay(daemon: Daemon, tmp_path: Path, mode: HalExecutionMode) -> None:
    # The second lane begins long after the first, so that it waits for its time when the driver dies.
    executions = [execution(3_000_000 + 200_000 * n, mode=mode) for n in range(20_000)]
    executions += [execution(3_000_000, mode=mode), execution(600_000_000_000, mode=mode)]
    path = write_recording(tmp_path / "a.nnrec", executions)
    with daemon.connect() as client, Process(client.worker_pid) as worker:
        call = InThread.start(lambda: replayed(client, path, ReplayOptions()))
        until(lambda: "nnfmq-replay-0" in thread_names(), "it replays")
        worker.kill()
        outcome = call.wait().value
    assert isinstance(outcome.error, nnfmq.DeadObject)
    assert len(outcome.executions) < len(executions)


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_the_death_of_the_driver_while_it_prepares_is_an_error(daemon: Daemon, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.nnrec", [execution()])
    with daemon.connect() as client, Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
        with pytest.raises(nnfmq.DeadObject):
            replayed(client, path)


def test_an_interrupt_ends_the_replay(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = slow_model(operations=400)
    shape = (1, 128, 128, 32)
    info = (TensorInfo("x", shape, "float32"),)
    prepared = replace(preparation(model), inputs=info, outputs=info)
    path = write_recording(tmp_path / "a.nnrec", [execution(inputs=None, outputs=None)], prepared, has_tensors=False)
    monkeypatch.setattr("nnfmq.lab.replay._Lane.warm_up", lambda _self: None)
    with daemon.connect() as client:
        monkeypatch.setattr("nnfmq.lab.replay.threading.Thread", InterruptedThread)
        with pytest.raises(KeyboardInterrupt):
            replayed(client, path)


class InterruptedThread(threading.Thread):
    """A thread whose first `join` is interrupted by Ctrl-C."""

    joins = 0

    def join(self, timeout: float | None = None) -> None:
        self.joins += 1
        if self.joins == 1:
            raise KeyboardInterrupt
        super().join(timeout)
