"""Kernels of products and LSTMs whose inputs are quantized at run time have the interpreter's results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.chains import kernels_of, model_of
from support.compiled import assert_kernels_agree_on, outputs_of
from support.small_models import graph, one_operation, scalar, with_operand

from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.micro_kernels import Amx
from nnfmq.engines.compiled.lowering.dynamic import dynamic_gemm
from nnfmq.engines.compiled.lowering.products import WeightedOp, rows_shape
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.target import TARGETS
from nnfmq.hal.extensions import NAME, PREFIX, Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.types import (
    ChannelQuant,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
)
from nnfmq.operations.declaration import Tensor

pytestmark = pytest.mark.instruction_sets

F32, BYTES = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM
EXTENSIONS = (ExtensionNameAndPrefix(NAME, PREFIX),)
WEIGHTS: dict[str, tuple[OperandType, float, int]] = {
    "uint8 around the middle": (OperandType.TENSOR_QUANT8_ASYMM, 0.02, 128),
    "uint8 beyond int8": (OperandType.TENSOR_QUANT8_ASYMM, 0.02, 90),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 0.02, -7),
    "scales of channels": (OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, 0.0, 0),
}
SYMMETRIC: dict[str, tuple[OperandType, float, int]] = {
    "symmetric int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 0.02, 0),
    "scales of channels": WEIGHTS["scales of channels"],
}
"""Weights of the operations that compute as TFLite does."""
SPECIAL = np.float32([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, 0, -0.0, 1, -2])
"""Numbers that each replace an element of an input in a run of their own."""


def model(name: str, arguments: list[Any], shape: tuple[int, ...]) -> Model:
    found = one_operation(operation_code(TfliteOperation[name]), arguments, Operand(F32, shape))
    for index, argument in enumerate(arguments):
        found = with_operand(found, index, type=F32) if argument is None else found
    return replace(found, extensions=EXTENSIONS)


def floats(random: np.random.Generator, *shape: int) -> Any:
    array = random.normal(0, 1, shape).astype(np.float32)
    return Operand(F32, shape), array.tobytes()


def weights(random: np.random.Generator, kind: str, *shape: int) -> Any:
    """Return constant weights, output channels first."""
    type, scale, zero_point = (WEIGHTS | SYMMETRIC)[kind]
    array, quant = random.integers(0, 256, shape).astype(np.uint8), None
    if type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        array[array == 128] = 129  # no -128
        quant = ChannelQuant(tuple(map(float, np.float32(random.uniform(0.01, 0.03, shape[0])))), 0)
    return Operand(type, shape, scale, zero_point, channel_quant=quant), array.tobytes()


def inputs(random: np.random.Generator, *shape: int) -> list[list[Any]]:
    """Return usual inputs, all zeros, and one with each special number."""
    found = [random.normal(0, 2, shape).astype(np.float32) for _ in range(2 + len(SPECIAL))]
    found[1][...] = 0
    for array, number in zip(found[2:], SPECIAL, strict=True):
        array.reshape(-1)[array.size // 2] = number
    return [[array] for array in found]


@pytest.mark.parametrize("size", [(1, 64, 32), (7, 33, 5), (40, 130, 70), (2, 1, 1)])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_match_the_interpreter(kind: str, size: tuple[int, int, int]) -> None:
    random, (rows, k, units) = np.random.default_rng(1), size
    arguments = [Operand(F32, (rows, k)), weights(random, kind, units, k), floats(random, units), rows % 2]
    found = model("DYNAMIC_FULLY_CONNECTED", arguments, (rows, units))
    assert_kernels_agree_on(found, inputs(random, rows, k), tolerance=0)


def test_products_of_many_rows_are_multiplied_in_tile_registers() -> None:
    random, shape = np.random.default_rng(1), rows_shape(40, 130, 70)
    operands = weights(random, "int8", 70, 130), floats(random, 70)
    filter, bias = (Tensor(o.dimensions, np.dtype(kind), o.scale, o.zero_point, None, np.frombuffer(data, kind).reshape(
        o.dimensions)) for (o, data), kind in zip(operands, ("i1", "<f4"), strict=True))  # fmt: skip
    x, y = (Tensor((40, size), np.dtype("<f4")) for size in (130, 70))
    launch = dynamic_gemm(WeightedOp(shape, x, filter, bias, y, TARGETS["amx"], 0), rounds_bias=False)
    assert isinstance(launch.kernel, GemmKernel)
    assert isinstance(launch.kernel.micro_kernel, Amx)


@pytest.mark.parametrize("rounds_bias", [False, True])
@pytest.mark.parametrize("filter", [(3, 3, 1), (1, 1, 2), (2, 5, 1)])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_convolutions_match_the_interpreter(kind: str, filter: tuple[int, int, int], rounds_bias: bool) -> None:
    random, (height, width, stride) = np.random.default_rng(2), filter
    channels, pads = 5 if width == 5 else 12, (width // 2, 0, height // 2, 0)
    arguments = [Operand(F32, (2, 9, 11, channels)), weights(random, kind, 21, height, width, channels)]
    arguments += [floats(random, 21), *pads, stride, stride, 1, False, 1, 1, rounds_bias]
    counts = [
        (size + pad - window) // stride + 1 for size, pad, window in ((9, height // 2, height), (11, width // 2, width))
    ]
    found = model("DYNAMIC_CONV_2D", arguments, (2, *counts, 21))
    assert_kernels_agree_on(found, inputs(random, 2, 9, 11, channels), tolerance=0)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("size", [(1, 64, 32), (7, 33, 5), (40, 130, 70), (2, 1, 1), (1, 3, 17)])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_products_of_rows_with_own_scales_match_the_interpreter(
    kind: str, size: tuple[int, int, int], asymmetric: bool
) -> None:
    random, (rows, k, units) = np.random.default_rng(4), size
    arguments = [Operand(F32, (rows, k)), weights(random, kind, units, k), floats(random, units), rows % 2, asymmetric]
    found = model("HYBRID_FULLY_CONNECTED", arguments, (rows, units))
    assert_kernels_agree_on(found, inputs(random, rows, k), tolerance=0)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("filter", [(3, 3, 1), (1, 1, 2), (2, 5, 1)])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_convolutions_of_an_image_with_its_own_scale_match_the_interpreter(
    kind: str, filter: tuple[int, int, int], asymmetric: bool
) -> None:
    random, (height, width, stride) = np.random.default_rng(5), filter
    channels = 5 if width == 5 else 12
    arguments = [Operand(F32, (1, 9, 11, channels)), weights(random, kind, 21, height, width, channels)]
    arguments += [floats(random, 21), 1, stride, stride, 1, False, 1, 1, asymmetric]
    found = model("HYBRID_CONV_2D", arguments, (1, -(-9 // stride), -(-11 // stride), 21))
    assert_kernels_agree_on(found, inputs(random, 1, 9, 11, channels), tolerance=0)


@pytest.mark.parametrize("size", [(1, 5, 20, 24), (6, 2, 33, 70)])
@pytest.mark.parametrize("has_peepholes", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_lstms_match_the_interpreter(kind: str, has_peepholes: bool, size: tuple[int, int, int, int]) -> None:
    """Activations differ in their last bits, and so may a byte of a hidden state: few steps are compared."""
    random, (batch, time, elements, units) = np.random.default_rng(3), size
    gates = [weights(random, kind, units, elements) for _ in range(4)]
    gates += [weights(random, kind, units, units) for _ in range(4)]
    none = [None] * 3
    peepholes = [floats(random, units) for _ in range(3)] if has_peepholes else none
    biases = [floats(random, units) for _ in range(4)]
    states = [Operand(F32, (batch, units))] * 2
    tail = [4, 0.0, 0.0, True, *[None] * 4]
    arguments: list[Any] = [
        Operand(F32, (time, batch, elements)),
        *gates,
        *peepholes,
        *biases,
        None,
        None,
        *states,
        *tail,
    ]

    found = model("DYNAMIC_UNIDIRECTIONAL_SEQUENCE_LSTM", arguments, (time, batch, units))
    shapes = ((time, batch, elements), *[(batch, units)] * 2)
    given = [random.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
    assert_kernels_agree_on(found, [given], tolerance=2e-3)


@pytest.mark.parametrize("shape", [(1,), (7, 33), (4, 4097), (2, 16384)])
def test_bytes_scale_and_zero_point_are_the_interpreter_s(shape: tuple[int, ...]) -> None:
    name = "DYNAMIC_QUANTIZE_LINEAR"
    code, outputs = operation_code(TfliteOperation[name]), [Operand(BYTES, shape, 1.0, 0), *[Operand(F32, (1,))] * 2]
    found = replace(one_operation(code, [Operand(F32, shape)], *outputs), extensions=EXTENSIONS)
    assert_kernels_agree_on(found, inputs(np.random.default_rng(6), *shape), tolerance=0)


def test_products_of_one_input_quantize_it_once() -> None:
    random = np.random.default_rng(7)
    constants = [(weights(random, "int8", units, 40), floats(random, units)) for units in (5, 6)]
    given, none = replace(Operand(F32, (3, 40)), lifetime=LifeTime.SUBGRAPH_INPUT), scalar(0)
    operands = [given, none[0], *(operand for pair in constants for operand, _ in pair)]
    operands += [Operand(F32, (3, units), lifetime=LifeTime.SUBGRAPH_OUTPUT) for units in (5, 6)]
    code = operation_code(TfliteOperation.DYNAMIC_FULLY_CONNECTED)
    operations = [Operation(code, (0, first, first + 1, 1), (6 + number,)) for number, first in enumerate((2, 4))]
    content = {1: none[1], **{2 + n: data for n, (_, data) in enumerate(itertools.chain(*constants))}}
    found = replace(graph(operands, operations, content), extensions=EXTENSIONS)
    (step,) = prepare(found).steps
    assert isinstance(step.function, CompiledPartition)
    names = [type(launch.kernel).__name__ for launch in step.function.plan.source_launches]
    assert names == ["RangeKernel", "StepsKernel", "GemmKernel", "GemmKernel"]
    assert_kernels_agree_on(found, inputs(random, 3, 40), tolerance=0)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(
    "form", [(12, 1, 3, 3, 1), (130, 1, 3, 3, 2), (64, 1, 5, 5, 1), (24, 2, 3, 2, 1), (3, 1, 1, 7, 1), (96, 1, 2, 1, 2)]
)
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_depthwise_convolutions_of_an_image_match_the_interpreter(
    kind: str, form: tuple[int, int, int, int, int], asymmetric: bool
) -> None:
    random, (channels, multiplier, height, width, stride) = np.random.default_rng(15), form
    count = channels * multiplier
    filter, data = weights(random, kind, count, height, width, 1)
    data = np.frombuffer(data, np.int8).reshape(count, height, width).transpose(1, 2, 0).tobytes()
    quant = None if filter.channel_quant is None else replace(filter.channel_quant, channel_dim=3)
    filter = replace(filter, dimensions=(1, height, width, count), channel_quant=quant)
    window = [1, stride, stride, multiplier, 1, False, 1, 1, asymmetric]
    arguments = [Operand(F32, (1, 9, 11, channels)), (filter, data), floats(random, count), *window]
    found = model("HYBRID_DEPTHWISE_CONV_2D", arguments, (1, -(-9 // stride), -(-11 // stride), count))
    assert_kernels_agree_on(found, inputs(random, 1, 9, 11, channels), tolerance=0)


def exact(name: str, arguments: list[Any], shape: tuple[int, ...]) -> Model:
    code = operation_code(TfliteOperation[f"EXACT_{name}"])
    return replace(one_operation(code, arguments, Operand(OperandType.TENSOR_INT32, shape)), extensions=EXTENSIONS)


def bytes_of(random: np.random.Generator, *shape: int) -> list[list[Any]]:
    return [[random.integers(0, 256, shape).astype(np.uint8)], *([np.full(shape, end, np.uint8)] for end in (0, 255))]


def integers(random: np.random.Generator, count: int) -> Any:
    array = random.integers(-1000, 1000, count).astype("<i4")
    return Operand(OperandType.TENSOR_INT32, (count,)), array.tobytes()


@pytest.mark.parametrize("zero_point", [0, 3, 255])
@pytest.mark.parametrize("size", [(1, 64, 32), (7, 33, 5), (40, 130, 70), (2, 1, 1)])
@pytest.mark.parametrize("kind", ["uint8 around the middle", "uint8 beyond int8", "int8"])
def test_sums_of_products_of_bytes_are_exact(kind: str, size: tuple[int, int, int], zero_point: int) -> None:
    random, (rows, k, units) = np.random.default_rng(13), size
    x = Operand(BYTES, (rows, k), 1.0, zero_point)
    found = exact("FULLY_CONNECTED", [x, weights(random, kind, units, k), integers(random, units), 0], (rows, units))
    assert_kernels_agree_on(found, bytes_of(random, rows, k), tolerance=0)


@pytest.mark.parametrize("filter", [(3, 3, 1), (1, 1, 2), (2, 5, 1)])
@pytest.mark.parametrize("kind", ["uint8 around the middle", "uint8 beyond int8", "int8"])
def test_convolutions_of_bytes_are_exact(kind: str, filter: tuple[int, int, int]) -> None:
    """Padding is the zero point."""
    random, (height, width, stride) = np.random.default_rng(14), filter
    channels, pads = 5 if width == 5 else 12, (width // 2, 0, height // 2, 0)
    operands = weights(random, kind, 21, height, width, channels), integers(random, 21)
    x = Operand(BYTES, (2, 9, 11, channels), 1.0, 77)
    counts = [
        (size + pad - window) // stride + 1 for size, pad, window in ((9, height // 2, height), (11, width // 2, width))
    ]
    arguments = [x, *operands, *pads, stride, stride, 0, False, 1, 1]
    found = exact("CONV_2D", arguments, (2, *counts, 21))
    assert_kernels_agree_on(found, bytes_of(random, 2, 9, 11, channels), tolerance=0)


def test_bytes_are_the_low_bits_of_integers() -> None:
    values = np.arange(-600, 601, 7, np.int32).reshape(1, -1)
    code, x = extended_code(OperationType.CAST, Scheme.WIDER), Operand(OperandType.TENSOR_INT32, values.shape)
    found = replace(one_operation(code, [x], Operand(BYTES, values.shape, 1.0, 3)), extensions=EXTENSIONS)
    assert_kernels_agree_on(found, [[values]], tolerance=0)
    truth = one_operation(code, [x], Operand(OperandType.TENSOR_BOOL8, values.shape))
    (result,) = outputs_of(prepare(replace(truth, extensions=EXTENSIONS)), truth, [values])
    np.testing.assert_array_equal(result, values != 0)


@pytest.mark.parametrize("scheme", ["DYNAMIC", "HYBRID"])
@pytest.mark.parametrize("second", ["RELU6", "ADD", "MUL"])
def test_an_epilogue_applies_what_follows_a_product(second: str, scheme: str) -> None:
    """A clamp, a residual and a factor: its channels are whole panels."""
    random, x, units = np.random.default_rng(12), Operand(F32, (1, 6, 7, 32)), 32
    filter = weights(random, "symmetric int8", units, 1, 1, 32)
    window: list[Any] = [0, 0, 0, 0, 1, 1] if scheme == "DYNAMIC" else [1, 1, 1]
    conv = [[-1], filter, floats(random, units), *window, 0, False, 1, 1, scheme == "HYBRID"]
    more: list[Any] = {"RELU6": [[0]], "ADD": [[0], [-1], 0], "MUL": [[0], floats(random, 1), 0]}[second]
    code, result = operation_code(TfliteOperation[f"{scheme}_CONV_2D"]), Operand(F32, (1, 6, 7, units))
    found = model_of(x, [(code, conv, result), (OperationType[second], more, result)])
    found = replace(found, extensions=EXTENSIONS)
    assert kernels_of(found) == ["RangeKernel", "StepsKernel", "GemmKernel"]
    assert_kernels_agree_on(found, inputs(random, *x.dimensions))


# -- recurrent operations of rows with scales of their own -------------------------------------------------------------

HIDDEN, CELLS, ELEMENTS = 21, 24, 19  # sizes of an output with a projection, of the cell, and of an input


def lstm_weights(random: np.random.Generator, kind: str, form: str) -> tuple[list[Any], list[Any]]:
    """Return what is between the input and the states of an LSTM, and its weights of normalization."""
    outputs = HIDDEN if "projection" in form else CELLS
    type, scale, zero_point = (WEIGHTS | SYMMETRIC)[kind]
    omitted = Operand(type, (), scale, zero_point, LifeTime.NO_VALUE)
    gates = [weights(random, kind, CELLS, size) for size in (ELEMENTS, outputs) for _ in range(4)]
    peepholes: list[Any] = [floats(random, CELLS) if "peephole" in form else None for _ in range(3)]
    biases, norms = ([floats(random, CELLS) for _ in range(4)] for _ in range(2))
    if "coupled" in form:
        gates[0] = gates[4] = omitted
        peepholes[0] = biases[0] = norms[0] = None
    projection: list[Any] = [omitted, None]
    if "projection" in form:
        projection = [weights(random, kind, HIDDEN, CELLS), floats(random, HIDDEN)]
    return [*gates, *peepholes, *biases, *projection], norms if "normalized" in form else [None] * 4


def assert_recurrent(name: str, arguments: list[Any], *outputs: tuple[int, ...]) -> None:
    code = operation_code(TfliteOperation[f"HYBRID_{name}"])
    found = one_operation(code, arguments, *(Operand(F32, shape) for shape in outputs))
    for index, argument in enumerate(arguments):
        found = with_operand(found, index, type=F32) if argument is None else found
    found = replace(found, extensions=EXTENSIONS)
    random = np.random.default_rng(9)
    given = [
        random.normal(0, 0.5, found.main.operands[index].dimensions).astype(np.float32)
        for index in found.main.input_indexes
    ]
    assert_kernels_agree_on(found, [given], tolerance=2e-3)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("form", ["plain", "coupled peephole", "normalized projection", "projection peephole"])
@pytest.mark.parametrize("kind", ["symmetric int8", "uint8 beyond int8", "scales of channels"])
def test_lstms_of_rows_match_the_interpreter(kind: str, form: str, asymmetric: bool) -> None:
    """As those of one scale: few steps are compared."""
    random, batch, time = np.random.default_rng(8), 3, 4
    cell, norms = lstm_weights(random, kind, form)
    outputs, clips = HIDDEN if "projection" in form else CELLS, [4, 0.7, 0.5]
    states = [Operand(F32, (batch, outputs)), Operand(F32, (batch, CELLS))]
    shapes = (batch, outputs), (batch, CELLS)
    sequence = [Operand(F32, (time, batch, ELEMENTS)), *cell, *states, *clips, True, *norms, asymmetric]
    assert_recurrent("UNIDIRECTIONAL_SEQUENCE_LSTM", sequence, (time, batch, outputs), *shapes)
    step = [Operand(F32, (batch, ELEMENTS)), *cell, *states, *clips, *norms, asymmetric]
    scratch = (batch, CELLS * (3 if "coupled" in form else 4))
    assert_recurrent("LSTM", step, scratch, *shapes, (batch, outputs))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("kind", ["symmetric int8", "uint8 beyond int8"])
def test_rnns_and_svdf_of_rows_match_the_interpreter(kind: str, asymmetric: bool) -> None:
    random, batch, time, state = np.random.default_rng(10), 2, 2, Operand(F32, (2, CELLS))
    x, result = Operand(F32, (batch, time, ELEMENTS)), (batch, time, CELLS)
    cells = [[weights(random, kind, CELLS, ELEMENTS), weights(random, kind, CELLS, CELLS), floats(random, CELLS), state]
             for _ in range(2)]  # fmt: skip
    step = [Operand(F32, (batch, ELEMENTS)), *cells[0], 4, asymmetric]
    assert_recurrent("RNN", step, (batch, CELLS), (batch, CELLS))
    sequence = [x, *cells[0], 4, 0, asymmetric]
    assert_recurrent("UNIDIRECTIONAL_SEQUENCE_RNN", sequence, result, (batch, CELLS))
    # An input that may be omitted is known only if it is a constant.
    aux = [floats(random, batch, time, ELEMENTS), *(weights(random, kind, CELLS, ELEMENTS) for _ in range(2))]
    both = [x, *cells[0], *cells[1], *aux, 4, False, True, asymmetric]
    assert_recurrent("BIDIRECTIONAL_SEQUENCE_RNN", both, (batch, time, 2 * CELLS))
    filters = weights(random, kind, CELLS, ELEMENTS), floats(random, CELLS, 7), floats(random, CELLS // 2)
    svdf = [step[0], *filters, Operand(F32, (batch, CELLS * 7)), 2, 1, asymmetric]
    assert_recurrent("SVDF", svdf, (batch, CELLS * 7), (batch, CELLS // 2))
