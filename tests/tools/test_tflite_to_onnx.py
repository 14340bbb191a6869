"""ONNX exports of the benchmark's models: ONNX Runtime fuses them and computes what the original models do.

ONNX Runtime rounds once where the HAL rounds twice, and averages in float: quantized values may differ by one after an
operation. The differences allowed for whole models, below, are twice those observed. LiteRT's reference kernels return
the interpreter's values for the uint8 models. For the int8 model, LiteRT differs by 9 from the interpreter and by 8
from the export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.litert_models import reference
from support.oracles import Array
from support.small_models import F32, I32, Q8, Q8S, one_operation

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import ChannelQuant, Model, Operand, OperandType, OperationType
from nnfmq.lab.bench.steps import random_input
from nnfmq.operations.declaration import NUMPY_TYPES

onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed")
runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
import tflite_to_onnx  # noqa: E402  it imports onnx

from nnfmq.lab.bench.onnx_export import OnnxExport, export_to_onnx  # noqa: E402

FLOAT_TOLERANCE = 1e-4
MAX_DIFFERENCE = {  # of quantized values, over a whole model, on the inputs below
    "mobilenet_v1_0.25_128": 0,
    "mobilenet_v1_0.25_128_quant": 4,
    "mobilenet_v1_0.75_192_quant": 16,
    "mobilenet_v2_1.0_224_quant": 10,
    "micro/mobilenet_v2_int8_per_channel_224": 22,
    "tts_float": 0,
}
_LOG_ERRORS_ONLY = 3


def session(exported: OnnxExport, optimized: Path | None = None) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_ERRORS_ONLY
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return runtime.InferenceSession(exported.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_export(exported: OnnxExport, inputs: Sequence[Array], optimized: Path | None = None) -> list[Array]:
    onnx_session = session(exported, optimized)
    names = [info.name for info in onnx_session.get_inputs()]
    feeds = {name: exported.to_onnx_input(array) for name, array in zip(names, inputs, strict=True)}
    return [exported.from_onnx_output(found) for found in onnx_session.run(None, feeds)]


def interpreted(model: Model, inputs: Sequence[Array]) -> list[Array]:
    operands = [model.main.operands[index] for index in model.main.output_indexes]
    outputs = [np.empty(o.dimensions, NUMPY_TYPES[o.type]) for o in operands]
    interpreter.prepare(model).execute(inputs, outputs)
    return outputs


def max_difference(found: Array, expected: Array) -> int:
    return int(np.abs(found.astype(np.int64) - expected).max())


def assert_close(found: Sequence[Array], expected: Sequence[Array], tolerance: int) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        if actual.dtype == np.float32:
            np.testing.assert_allclose(
                actual, wanted, rtol=FLOAT_TOLERANCE, atol=FLOAT_TOLERANCE * np.abs(wanted).max()
            )
        else:
            assert max_difference(actual, wanted) <= tolerance


def inputs_of(loaded: nnfmq.LoadedModel, folder: Path) -> list[Array]:
    """Return the photo among the golden inputs that has the model's type and size; random values if there is none."""
    first, *others = loaded.inputs
    states = [state.tensor for state in loaded.states]
    random = np.random.default_rng(11)
    names = {"uint8": "mobilenet_quantized", "float32": "mobilenet_float"}
    golden = folder / names.get(first.dtype, "") / f"cup_{first.shape[1]}.input"
    image = np.fromfile(golden, first.dtype).reshape(first.shape) if golden.is_file() else random_input(first, random)
    return [image, *(random_input(info, random) for info in (*others, *states))]


@pytest.mark.parametrize("name", MAX_DIFFERENCE)
def test_an_export_agrees_with_the_interpreter(name: str, data_dir: Path) -> None:
    folder = data_dir / "models"
    loaded = nnfmq.load(folder / f"{name}.tflite")
    inputs = inputs_of(loaded, folder)
    found = run_export(export_to_onnx(loaded.model), inputs)
    assert_close(found, interpreted(loaded.model, inputs), MAX_DIFFERENCE[name])


@pytest.mark.parametrize("name", [name for name in MAX_DIFFERENCE if name != "tts_float"])
def test_an_export_agrees_with_tflite(name: str, data_dir: Path) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    folder = data_dir / "models"
    content = (folder / f"{name}.tflite").read_bytes()
    loaded = nnfmq.load(content)
    inputs = inputs_of(loaded, folder)
    expected = reference(litert, content)(inputs[0])
    assert_close(run_export(export_to_onnx(loaded.model), inputs), expected, MAX_DIFFERENCE[name])


@pytest.mark.parametrize("name", [name for name in MAX_DIFFERENCE if MAX_DIFFERENCE[name]])
def test_onnx_runtime_fuses_all_quantized_operations(name: str, data_dir: Path, tmp_path: Path) -> None:
    exported = export_to_onnx(nnfmq.load(data_dir / "models" / f"{name}.tflite").model)
    session(exported, tmp_path / "optimized.onnx")
    written = Counter(node.op_type for node in exported.proto.graph.node)
    fused = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert not {"Conv", "QuantizeLinear", "DequantizeLinear", "Add", "Gemm", "Softmax", "Pad"} & set(fused)
    assert fused["QLinearConv"] == written["Conv"]
    assert fused["Transpose"] <= 2


# ---- single operations


def weights_of(kind: OperandType, shape: Sequence[int], channel_axis: int) -> tuple[Operand, bytes]:
    random = np.random.default_rng(3)
    if kind == F32:
        return Operand(F32, tuple(shape)), random.normal(size=shape).astype(np.float32).tobytes()
    if kind == Q8:
        return Operand(Q8, tuple(shape), 0.02, 119), random.integers(0, 256, shape).astype(np.uint8).tobytes()
    scales = tuple(0.01 + 0.01 * number for number in range(shape[channel_axis]))
    operand = Operand(
        OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, tuple(shape), channel_quant=ChannelQuant(scales, channel_axis)
    )
    return operand, random.integers(-127, 128, shape).astype(np.int8).tobytes()


def value(kind: OperandType, shape: Sequence[int], scale: float = 0.05, zero_point: int = 7) -> Operand:
    return Operand(kind, tuple(shape)) if kind == F32 else Operand(kind, tuple(shape), scale, zero_point)


def bias_of(kind: OperandType, count: int) -> tuple[Operand, bytes]:
    numbers = np.arange(count) * 17 - 20
    if kind == F32:
        return Operand(F32, (count,)), (numbers / 50).astype(np.float32).tobytes()
    return Operand(I32, (count,), 0.05 * 0.02 if kind == Q8 else 0.0), numbers.astype(np.int32).tobytes()


def assert_export_agrees(model: Model, tolerance: int = 1, weight_type: Any = np.uint8) -> None:
    operands = [model.main.operands[index] for index in model.main.input_indexes]
    random = np.random.default_rng(5)
    inputs = [_random(random, operand) for operand in operands]
    expected = interpreted(model, inputs)
    assert all(np.unique(array).size > 1 for array in expected), (
        "all elements of an output are equal: the comparison would not detect an error"
    )
    assert_close(run_export(export_to_onnx(model, weight_type), inputs), expected, tolerance)


def _random(random: np.random.Generator, operand: Operand) -> Array:
    dtype = NUMPY_TYPES[operand.type]
    if dtype.kind == "f":
        return np.asarray(random.normal(size=operand.dimensions), dtype)
    low = np.iinfo(dtype).min
    return random.integers(low, low + 256, operand.dimensions).astype(dtype)


@pytest.mark.parametrize("kind", [F32, Q8, Q8S])
@pytest.mark.parametrize("activation", [0, 1, 2, 3])
@pytest.mark.parametrize("scheme", [1, 2])
def test_convolution(kind: OperandType, activation: int, scheme: int) -> None:
    out = (1, 4, 5, 4) if scheme == 1 else (1, 3, 4, 4)
    arguments = [
        value(kind, (1, 8, 9, 3)), weights_of(kind, (4, 3, 2, 3), 0), bias_of(kind, 4), scheme, 2, 2, activation,
    ]  # fmt: skip
    assert_export_agrees(one_operation(OperationType.CONV_2D, arguments, value(kind, out, 0.06, 30)))


@pytest.mark.parametrize("kind", [F32, Q8, Q8S])
def test_depthwise_convolution_with_explicit_padding_and_a_multiplier(kind: OperandType) -> None:
    arguments = [
        value(kind, (1, 7, 6, 2)), weights_of(kind, (1, 3, 3, 6), 3), bias_of(kind, 6), 1, 0, 2, 1, 1, 2, 3, 3,
    ]  # fmt: skip
    output = value(kind, (1, 4, 5, 6), 0.06, -20 if kind == Q8S else 20)
    assert_export_agrees(one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, output))


@pytest.mark.parametrize("kind", [F32, Q8, Q8S])
@pytest.mark.parametrize("window", [(5, 4), (2, 3)])
def test_average_pooling(kind: OperandType, window: tuple[int, int]) -> None:
    height, width = window
    out = (1, 1, 1, 3) if window == (5, 4) else (1, 4, 2, 3)
    arguments = [value(kind, (1, 5, 4, 3)), 2, 1, 1, width, height, 0]
    assert_export_agrees(one_operation(OperationType.AVERAGE_POOL_2D, arguments, value(kind, out)))


@pytest.mark.parametrize("kind", [F32, Q8, Q8S])
def test_addition_with_an_activation(kind: OperandType) -> None:
    arguments = [value(kind, (1, 3, 4, 5)), value(kind, (1, 3, 4, 5), 0.03, 11), 3]
    assert_export_agrees(one_operation(OperationType.ADD, arguments, value(kind, (1, 3, 4, 5), 0.07, 20)))


@pytest.mark.parametrize("kind", [F32, Q8])
def test_fully_connected(kind: OperandType) -> None:
    arguments = [value(kind, (2, 6)), weights_of(kind, (5, 6), 0), bias_of(kind, 5), 1]
    assert_export_agrees(one_operation(OperationType.FULLY_CONNECTED, arguments, value(kind, (2, 5), 0.06, 0)))


@pytest.mark.parametrize("kind", [F32, Q8])
def test_softmax_with_a_beta(kind: OperandType) -> None:
    arguments = [value(kind, (2, 9)), 0.5]
    output = value(kind, (2, 9), 1 / 256, 0)
    assert_export_agrees(one_operation(OperationType.SOFTMAX, arguments, output))


@pytest.mark.parametrize("kind", [F32, Q8S])
@pytest.mark.parametrize("adjoint", [(False, False), (True, False), (False, True)])
def test_products_of_batches(kind: OperandType, adjoint: tuple[bool, bool]) -> None:
    left = (2, 4, 3) if adjoint[0] else (2, 3, 4)
    right = (2, 6, 4) if adjoint[1] else (2, 4, 6)
    model = one_operation(
        OperationType.BATCH_MATMUL,
        [value(kind, left), value(kind, right, 0.03, -9), *adjoint],
        value(kind, (2, 3, 6), 0.2, 3),
    )
    assert_export_agrees(model)


def test_weights_can_be_signed() -> None:
    arguments = [value(Q8, (1, 5, 5, 3)), weights_of(Q8, (4, 3, 3, 3), 0), bias_of(Q8, 4), 1, 1, 1, 0]
    model = one_operation(OperationType.CONV_2D, arguments, value(Q8, (1, 5, 5, 4), 0.5, 128))
    assert {i.data_type for i in export_to_onnx(model, np.int8).proto.graph.initializer} >= {onnx.TensorProto.INT8}
    assert not {
        i.data_type for i in export_to_onnx(model).proto.graph.initializer
    } & {onnx.TensorProto.INT8}  # fmt: skip


def test_an_unsupported_operation_is_named() -> None:
    model = one_operation(OperationType.FLOOR, [value(F32, (2, 3))], value(F32, (2, 3)))
    with pytest.raises(InvalidArgument, match="FLOOR cannot be exported; supported operations: ADD, "):
        export_to_onnx(model)


def test_the_command_writes_a_file_that_onnx_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "digits.onnx"
    assert tflite_to_onnx.main([str(nnfmq.example_path("digits_quant.tflite")), str(target)]) == 0
    onnx.checker.check_model(onnx.load(target))
    assert "uint8" in capsys.readouterr().out
    assert tflite_to_onnx.main([str(tmp_path / "none.tflite"), str(target)]) == 1
    assert "tflite_to_onnx: error: " in capsys.readouterr().err
