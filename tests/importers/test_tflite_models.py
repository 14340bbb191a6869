"""The structure of the real models, against what is published of them and against the bytes in their files."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import tflite
from support.places import ROOT
from support.tflite_files import Operator, Tensor, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType
from nnfmq.importers import LoadedModel, load
from nnfmq.importers.tflite.file import BUILTIN_OPERATORS
from nnfmq.importers.tflite.operators import CONVERTERS

Q8 = OperandType.TENSOR_QUANT8_ASYMM
F32 = OperandType.TENSOR_FLOAT32
V1 = {Op.CONV_2D: 15, Op.DEPTHWISE_CONV_2D: 13, Op.AVERAGE_POOL_2D: 1, Op.RESHAPE: 1, Op.SOFTMAX: 1}
V2 = {Op.CONV_2D: 36, Op.DEPTHWISE_CONV_2D: 17, Op.ADD: 10, Op.AVERAGE_POOL_2D: 1, Op.RESHAPE: 1}
V1_STRIDES = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1]  # the depthwise layers in the MobileNet paper, table 1
V2_STRIDES = [1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1]  # the bottlenecks in the MobileNetV2 paper, table 2

MODELS = {
    "mobilenet_v1_0.25_128": (V1, 128, F32, V1_STRIDES),
    "mobilenet_v1_0.25_128_quant": (V1, 128, Q8, V1_STRIDES),
    "mobilenet_v1_0.75_192_quant": (V1, 192, Q8, V1_STRIDES),
    "mobilenet_v2_1.0_224_quant": (V2, 224, Q8, V2_STRIDES),
}
ALL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def models(data_dir: Path) -> dict[str, LoadedModel]:
    return {name: load(data_dir / "models" / f"{name}.tflite") for name in MODELS}


def constant(model: Model, operand: Operand) -> bytes:
    assert operand.lifetime == LifeTime.CONSTANT_COPY
    return model.operand_values[operand.location.offset : operand.location.offset + operand.location.length]


def arguments(model: Model, operation_type: Op, index: int) -> list[Operand]:
    """Return argument `index` of each operation of a type."""
    return [model.main.operands[o.inputs[index]] for o in model.main.operations if o.type == operation_type]


@ALL
def test_a_mobilenet_has_the_published_operations(models: dict[str, LoadedModel], name: str) -> None:
    operations = models[name].model.main.operations
    assert dict(Counter(operation.type for operation in operations)) == MODELS[name][0]


@ALL
def test_a_mobilenet_takes_one_image_and_gives_1001_scores(models: dict[str, LoadedModel], name: str) -> None:
    _, side, operand_type, _ = MODELS[name]
    dtype = "uint8" if operand_type == Q8 else "float32"
    shapes = [(info.shape, info.dtype) for info in (*models[name].inputs, *models[name].outputs)]
    assert shapes == [((1, side, side, 3), dtype), ((1, 1001), dtype)]


@ALL
def test_depthwise_strides_are_those_of_the_paper(models: dict[str, LoadedModel], name: str) -> None:
    model = models[name].model
    for argument in (4, 5):
        values = [
            int.from_bytes(constant(model, o), "little") for o in arguments(model, Op.DEPTHWISE_CONV_2D, argument)
        ]
        assert values == MODELS[name][3]


@ALL
def test_every_convolution_has_a_bias_of_the_right_type_and_scale(models: dict[str, LoadedModel], name: str) -> None:
    model = models[name].model
    for operation_type in (Op.CONV_2D, Op.DEPTHWISE_CONV_2D):
        columns = (arguments(model, operation_type, index) for index in range(3))
        for x, weights, bias in zip(*columns, strict=True):
            if MODELS[name][2] == F32:
                assert (bias.type, bias.scale) == (F32, 0.0)
            else:
                assert (bias.type, bias.zero_point) == (OperandType.TENSOR_INT32, 0)
                assert math.isclose(bias.scale, x.scale * weights.scale, rel_tol=1e-6)


@ALL
def test_every_window_is_padded_same_and_every_hidden_convolution_is_clipped_at_six(
    models: dict[str, LoadedModel], name: str
) -> None:
    # v2's projections (the last 1x1 of each of its 17 bottlenecks) are linear, and so are the logits in both; in
    # quantized files the output's range alone may clip.
    model = models[name].model
    schemes = {constant(model, o) for o in arguments(model, Op.DEPTHWISE_CONV_2D, 3)}
    activations = Counter(int.from_bytes(constant(model, o), "little") for o in arguments(model, Op.CONV_2D, 6))
    linear = 1 if MODELS[name][0] is V1 else 18
    assert schemes == {(1).to_bytes(4, "little")}
    assert activations in ({3: MODELS[name][0][Op.CONV_2D] - linear, 0: linear}, {0: MODELS[name][0][Op.CONV_2D]})


@ALL
def test_weights_are_the_bytes_of_the_file_in_one_copy(
    models: dict[str, LoadedModel], name: str, data_dir: Path
) -> None:
    raw = tflite.Model.GetRootAs((data_dir / "models" / f"{name}.tflite").read_bytes(), 0)
    graph = raw.Subgraphs(0)
    buffers = [raw.Buffers(graph.Tensors(index).Buffer()) for index in range(graph.TensorsLength())]
    in_file = Counter(buffer.DataAsNumpy().tobytes() for buffer in buffers if buffer.DataLength())
    model = models[name].model
    imported = Counter(
        constant(model, operand)
        for operand in model.main.operands
        if operand.lifetime == LifeTime.CONSTANT_COPY and operand.dimensions
    )
    assert imported == in_file
    total = sum(len(data) * count for data, count in in_file.items())
    assert total <= len(model.operand_values) < total + 1024


@ALL
def test_quantization_is_that_of_the_file(models: dict[str, LoadedModel], name: str, data_dir: Path) -> None:
    graph = tflite.Model.GetRootAs((data_dir / "models" / f"{name}.tflite").read_bytes(), 0).Subgraphs(0)
    for infos, indexes in (
        (models[name].inputs, graph.InputsAsNumpy()),
        (models[name].outputs, graph.OutputsAsNumpy()),
    ):
        assert list(infos) == [_info(graph.Tensors(int(index))) for index in indexes]


def _info(tensor: tflite.Tensor) -> TensorInfo:
    quantization = tensor.Quantization()
    is_float = tensor.Type() == tflite.TensorType.FLOAT32
    scale, zero = (0.0, 0) if is_float else (quantization.Scale(0), quantization.ZeroPoint(0))
    shape = tuple(tensor.ShapeAsNumpy().tolist())
    return TensorInfo(tensor.Name().decode(), shape, "float32" if is_float else "uint8", scale, zero)


@ALL
def test_every_operand_that_is_read_was_written_before(models: dict[str, LoadedModel], name: str) -> None:
    main = models[name].model.main
    known = {index for index, o in enumerate(main.operands) if o.lifetime == LifeTime.CONSTANT_COPY}
    known |= set(main.input_indexes)
    for operation in main.operations:
        assert known.issuperset(operation.inputs)
        known.update(operation.outputs)
    assert known == set(range(len(main.operands)))


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("hello_world_float", {Op.FULLY_CONNECTED: 3}),
        ("hello_world_int8", {Op.FULLY_CONNECTED: 3}),
        ("micro_speech_quantized", {Op.RESHAPE: 1, Op.DEPTHWISE_CONV_2D: 1, Op.FULLY_CONNECTED: 1, Op.SOFTMAX: 1}),
        ("trained_lstm", {Op.UNIDIRECTIONAL_SEQUENCE_LSTM: 1, Op.RESHAPE: 1, Op.FULLY_CONNECTED: 1, Op.SOFTMAX: 1}),
        ("person_detect", {Op.DEPTHWISE_CONV_2D: 14, Op.CONV_2D: 14, Op.AVERAGE_POOL_2D: 1, Op.RESHAPE: 1,
            Op.SOFTMAX: 1}),
    ],
)  # fmt: skip
def test_models_of_tensorflow_lite_micro_load(data_dir: Path, name: str, operations: dict[Op, int]) -> None:
    model = load(data_dir / "models" / "micro" / f"{name}.tflite").model
    assert dict(Counter(operation.type for operation in model.main.operations)) == operations


def test_an_operator_without_a_rule_is_named() -> None:
    x = Tensor("x", (2,))
    data = writer.write([x, x, x], [Operator("RELU", (0,), (1,)), Operator("SKIP_GRAM", (1,), (2,))], (0,), (2,))
    with pytest.raises(InvalidArgument, match=r"^operator 1 \(SKIP_GRAM\): is not supported"):
        load(data)


def test_the_documents_list_the_operators_of_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "model-formats.md").read_text()
    listed = page[page.index("| operators | |") : page.index("| tensor types |")]
    cells = re.findall(r"^\| [a-z][^|]* \| ([^|]+) \|$", listed, re.MULTILINE)
    named = {re.sub(r" \(.*\)$", "", entry) for cell in cells for entry in cell.split(", ")}
    assert named == set(CONVERTERS)


def test_the_documents_list_every_other_operator_of_the_schema_as_not_supported() -> None:
    page = (ROOT / "docs" / "reference" / "model-formats.md").read_text()
    listed = page[page.index("| operators | reason |") : page.index("Neither are")]
    cells = re.findall(r"^\| ([A-Z][^|]*) \| [^|]+ \|$", listed, re.MULTILINE)
    named = [entry for cell in cells for entry in cell.split(", ")]
    missing = set(BUILTIN_OPERATORS.values()) - set(CONVERTERS)
    assert sorted(named) == sorted({re.sub(r"^STABLEHLO_.*", "STABLEHLO_*", name) for name in missing})
