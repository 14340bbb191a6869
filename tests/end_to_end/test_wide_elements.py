"""Elements of 64 bits and UINT32 through a driver: on both devices, and with ONNX Runtime's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon
from support.onnx_files import expected, file_of
from support.onnx_runtime import onnx

import nnfmq
import nnfmq.compat.onnxruntime as ours
from nnfmq.lab.replay import ReplayOptions, ReplaySpeed, replay
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

make = onnx.helper.make_node
FED = {
    "i": np.array([[100_000, -3 << 30], [1 << 40, -(1 << 50) - 1]]),
    "r": np.array([[1e60, np.nan], [-np.inf, 1e9 + 1]]),
    "u": np.array([[4_000_000_000, 7], [0, 2**32 - 1]], np.uint32),
    "v": np.array([[2**64 - 1, 5], [2**63, 3]], np.uint64),
    "f": np.float32([[0.5, -1.5], [2.0, 3.0]]),
}


def mixed_model() -> bytes:
    """Return a model of all wide types in which floats of 32 bits are computed, too."""
    nodes = [
        make("Mul", ["i", "i"], ["products"]),
        make("ReduceSum", ["i"], ["sum"], keepdims=1),
        make("Mul", ["r", "two"], ["doubled"]),
        make("Sub", ["doubled", "r"], ["reals"]),
        make("Add", ["u", "u"], ["wrapped"]),
        make("Mul", ["v", "v"], ["squares"]),
        make("Relu", ["f"], ["positive"]),
        make("Cast", ["positive"], ["wide"], to=int(onnx.TensorProto.DOUBLE)),
        make("Add", ["wide", "two"], ["mixed"]),
        make("Greater", ["i", "limit"], ["above"]),
    ]
    outputs = ["products", "sum", "reals", "wrapped", "squares", "mixed", "above", "positive"]
    return file_of(nodes, FED, outputs, {"two": np.array(2.0), "limit": np.int64(1 << 35)}, opset=18)


def require_same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_a_device_computes_elements_as_they_are(client: nnfmq.Client, device: str) -> None:
    content = mixed_model()
    wanted = expected(content, FED)
    with client.device(device).prepare(nnfmq.load(content)) as model:
        require_same(model.execute(*FED.values()), wanted)
        with model.burst() as burst:
            for _ in range(2):
                require_same(burst.execute(*FED.values()), wanted)


@pytest.fixture
def _daemon_for_sessions(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))


@pytest.mark.usefixtures("_daemon_for_sessions")
def test_a_session_returns_what_onnx_runtime_returns() -> None:
    content = mixed_model()
    found = ours.InferenceSession(content).run(None, FED)
    require_same(found, expected(content, FED))
    assert [array.shape for array in found] == [array.shape for array in expected(content, FED)]


def test_a_runtime_computes_them_on_a_device_that_has_the_extension(daemon: Daemon) -> None:
    content = mixed_model()
    with nnfmq.Runtime([daemon.path]) as runtime, runtime.prepare(nnfmq.load(content)) as model:
        require_same(model.execute(*FED.values()), expected(content, FED))


def test_a_device_without_the_extension_names_the_operations_that_it_lacks() -> None:
    with nnfmq.Runtime([]) as runtime, pytest.raises(nnfmq.InvalidArgument, match=r"MUL of nnfmq.tflite.TENSOR_INT64"):
        runtime.prepare(nnfmq.load(mixed_model()))


def test_a_recording_of_them_is_replayed(client: nnfmq.Client, tmp_path: Path) -> None:
    with ExecutionRecorder.start(tmp_path / "a.nnrec"), client.prepare(nnfmq.load(mixed_model())) as model:
        model.execute(*FED.values())
    with RecordingFile(tmp_path / "a.nnrec") as recording:
        outcome = replay(client, recording, ReplayOptions(ReplaySpeed("max")))
    assert [done.is_equal for done in outcome.executions] == [True]


INT64_MODELS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "inputs that are bound by value": (
        [make("Range", ["a", "b", "c"], ["y"]), make("Mul", ["y", "y"], ["z"])],
        {"a": np.array(1 << 33), "b": np.array((1 << 33) + 5), "c": np.array(2)}, {}, ["y", "z"],
    ),
    "the size of a tensor": (
        [make("Shape", ["f"], ["s"]), make("Mul", ["s", "k"], ["y"])], {"f": FED["f"]},
        {"k": np.int64([1 << 40])}, ["y"],
    ),
    "indices that the model computes": (
        [make("ArgMax", ["f"], ["i"], axis=1), make("Mul", ["i", "k"], ["y"])], {"f": FED["f"]},
        {"k": np.int64(10**15)}, ["i", "y"],
    ),
    "an input that is an index and a number": (
        [make("Gather", ["t", "i"], ["e"]), make("Max", ["i", "k"], ["y"])], {"i": np.array([0, 1, -1])},
        {"t": np.float32([[1], [2]]), "k": np.int64(1 << 40)}, ["e", "y"],
    ),
    "a constant output": (
        [make("Mul", ["k", "k"], ["y"]), make("Identity", ["i"], ["z"])], {"i": np.array([1 << 62])},
        {"k": np.int64([10**9, 3])}, ["y", "z"],
    ),
    "casts there and back": (
        [make("Cast", ["i"], ["r"], to=11), make("Cast", ["r"], ["j"], to=7), make("Cast", ["j"], ["n"], to=6)],
        {"i": np.array([(1 << 53) - 1, -7, (1 << 33) + 5])}, {}, ["r", "j", "n"],
    ),
    "int32, which wraps": (
        [make("Mul", ["n", "n"], ["y"]), make("Cast", ["y"], ["z"], to=7)], {"n": np.int32([100_000, -3])}, {},
        ["y", "z"],
    ),
}  # fmt: skip


@pytest.mark.usefixtures("_daemon_for_sessions")
@pytest.mark.parametrize("name", INT64_MODELS)
def test_a_session_computes_int64_wherever_it_comes_from(name: str) -> None:
    nodes, fed, constants, outputs = INT64_MODELS[name]
    content = file_of(nodes, fed, outputs, constants, opset=18)
    require_same(ours.InferenceSession(content).run(None, fed), expected(content, fed))
