"""What records of a hosted model say: recordings and their replay, telemetry, statistics, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, until
from support.kept_records import Records
from support.onnx_files import file_of
from support.onnx_runtime import onnx

import nnfmq
from nnfmq import telemetry
from nnfmq.cli.trace_collection import traced_driver
from nnfmq.lab.replay import ReplayOptions, ReplaySpeed, replay
from nnfmq.observe.trace_files import Slice
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

FED = {"x": np.array([3, 5], np.int64)}


def tripled(factor: int = 3) -> bytes:
    node = onnx.helper.make_node("Mul", ["x", "factor"], ["y"])
    return file_of([node], FED, ["y"], {"factor": np.array([factor])})


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[nnfmq.Client]:
    with shared_daemon.connect() as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(tripled())
    return path


def test_a_recording_has_the_file_and_is_replayed_without_it(client: nnfmq.Client, file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    with (
        ExecutionRecorder.start(tmp_path / "a.nnrec"),
        client.device("onnxruntime").prepare(file) as model,
        model.burst() as burst,
    ):
        model.execute(FED)
        burst.execute({"x": np.array([-1, 2**40])})
    file.unlink()
    assert content in (tmp_path / "a.nnrec").read_bytes()
    with RecordingFile(tmp_path / "a.nnrec") as recording:
        done = replay(client, recording, ReplayOptions(ReplaySpeed("max"))).executions
    assert [execution.is_equal for execution in done] == [True, True]


def test_telemetry_names_the_device_and_one_architecture_for_other_weights_names_and_options(
    client: nnfmq.Client, file: Path, tmp_path: Path
) -> None:
    retrained = tmp_path / "retrained.onnx"
    retrained.write_bytes(tripled(7))
    records = Records()
    device = client.device("onnxruntime")
    with telemetry.register(records):
        device.prepare(file).close()
        with device.prepare(retrained, runtime_options={"threads": 1}) as model:
            model.execute(FED)
    first, second = records.compilations
    assert first.device_id == f"onnxruntime={device.info.version}"
    assert (first.error_code, first.compilation_time_ns > 0) == (0, True)
    assert first.model_arch_hash == second.model_arch_hash
    assert records.all[-1].error_code == 0


def test_statistics_name_the_file_and_the_device(client: nnfmq.Client, file: Path) -> None:
    with client.device("onnxruntime").prepare(file) as model, model.burst() as burst:
        burst.execute(FED)
        (own,) = (each for each in client.statistics().clients if each.worker_pid == client.worker_pid)
        assert [(each.name, each.device) for each in own.models] == [("net.onnx", "onnxruntime")]


def test_a_trace_has_each_execution_of_the_runtime(client: nnfmq.Client, shared_daemon: Daemon, file: Path) -> None:
    with (
        client.device("onnxruntime").prepare(file) as model,
        model.burst() as burst,
        shared_daemon.connect() as tracer,
        traced_driver(tracer) as traces,
    ):
        for _ in range(3):
            burst.execute(FED)

        def engines() -> list[Slice]:
            traces.read()
            return [found for found in traces.trace().slices if found.name == "[NN_LC_PE]engine"]

        until(lambda: len(engines()) == 3, "the worker has recorded each, which it does after the reply")


def test_another_device_refuses_the_model_by_the_operation_s_name(client: nnfmq.Client, file: Path) -> None:
    with client.device("onnxruntime").prepare(file):
        loaded = client.device("onnxruntime").load(file)
        with pytest.raises(nnfmq.GeneralFailure, match=r"does not support operation 0 \(nnfmq\.hosted\.RUN\)"):
            client.device("reference").prepare(loaded)
