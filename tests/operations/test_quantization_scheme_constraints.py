"""Every constraint of the extension's operations on 16 bits, on rows to be quantized and on integer cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.small_models import one_operation, vector

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.extensions import NAME, PREFIX, TfliteOperation, operation_code
from nnfmq.hal.types import ChannelQuant, ExtensionNameAndPrefix, Operand, OperandType
from nnfmq.operations.lstm import TENSOR_COUNT
from nnfmq.operations.tflite_extension.recurrent import lstm_shape, svdf_shape

F32, I32, Q8, Q8S, Q16S = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_QUANT16_SYMM,
)


def wide(*shape: int, scale: float = 0.5) -> Operand:
    return Operand(Q16S, shape, scale)


def narrow(*shape: int, scale: float = 0.5) -> Operand:
    return Operand(Q8S, shape, scale)


def weights(zero_point: int) -> list[Any]:
    """Weights (2, 3) and a bias, which follow an input of three elements."""
    return [(Operand(Q8S, (2, 3), 0.5, zero_point), bytes(6)), (Operand(I32, (2,)), bytes(8)), 0]


def in_blocks(**changes: Any) -> list[Any]:
    """Rows of 30 elements, two units of two blocks of 16 numbers of 4 bits, scales, zero points and a bias."""
    shapes = {"input": (3, 30), "weights": (2, 2, 8), "scales": (2, 2), "zero_points": (2, 2), "bias": (2,)}
    options = {"bits": 4, "rounds_input": False, "zero_type": F32} | changes
    kinds = {"weights": (Q8, 1.0), "zero_points": (options["zero_type"], 1.0 if options["zero_type"] == Q8 else 0.0)}
    found: list[Any] = [Operand(F32, changes.get("input", shapes.pop("input")))]
    for name, usual in shapes.items():
        kind, scale = kinds.get(name, (F32, 0.0))
        operand = Operand(kind, changes.get(name, usual), scale)
        found.append((operand, bytes(int(np.prod(operand.dimensions)) * (1 if kind == Q8 else 4))))
    return [*found, options["bits"], options["rounds_input"]]


def per_channel(dimension: int, *shape: int) -> Any:
    quantization = ChannelQuant((0.5,) * shape[dimension], dimension)
    return Operand(OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, shape, channel_quant=quantization), bytes(np.prod(shape))


def convolved(filter: Any, *numbers: int, zero_point: int = 0) -> list[Any]:
    """An image, a filter of two output channels, a bias, padding, strides, further numbers and no activation."""
    bias = (Operand(I32, (2,), 0.0, zero_point), bytes(8))
    return [wide(1, 4, 4, 2), filter, bias, 1, 1, 1, *numbers, 0]


IMAGE = wide(1, 4, 4, 2)

VIOLATIONS = [
    ("Q16_CONV_2D", "C3", convolved(per_channel(3, 2, 1, 1, 2)), IMAGE),
    ("Q16_CONV_2D", "C7", convolved(per_channel(0, 2, 1, 1, 2), zero_point=1), IMAGE),
    ("Q16_CONV_2D", "C7", convolved((Operand(Q8S, (2, 1, 1, 2), 0.5, 1), bytes(4)), zero_point=1), IMAGE),
    ("Q16_CONV_2D", "C7", convolved((Operand(Q8S, (2, 1, 1, 2), 0.5, 1), bytes(4))), IMAGE),
    ("Q16_DEPTHWISE_CONV_2D", "C3", convolved(per_channel(0, 1, 1, 1, 2), 1), IMAGE),
    ("Q16_GROUPED_CONV_2D", "C3", [*convolved(per_channel(3, 2, 1, 1, 1), 2), False], IMAGE),
    (
        "Q16_TRANSPOSE_CONV_2D",
        "C3",
        [IMAGE, per_channel(3, 2, 1, 1, 2), (Operand(I32, (2,)), bytes(8)), vector([1, 4, 4, 2]), 1, 1, 1, 0, False],
        IMAGE,
    ),
    ("Q16_FULLY_CONNECTED", "C3", [wide(1, 3), per_channel(1, 2, 3), *weights(0)[1:]], wide(1, 2)),
    ("Q8_FULLY_CONNECTED", "C3", [narrow(1, 3), per_channel(1, 2, 3), *weights(0)[1:]], narrow(1, 2)),
    ("Q16_ADD", "C1", [wide(4, scale=0.25), wide(4, scale=0.25), 0, True], wide(4)),
    ("Q16_SUB", "C1", [wide(4, scale=0.5), wide(4, scale=1.0), 0, True], wide(4)),
    ("Q16_ADD", "B1", [wide(4), wide(3), 0, False], wide(4)),
    ("Q16_ADD", "Q2", [wide(4), wide(4), 0, False], wide(4, scale=1e-9)),
    ("Q16_MUL", "Q5", [wide(4), wide(4), 7], wide(4)),
    ("Q16_FULLY_CONNECTED", "C7", [wide(1, 3), *weights(1)], wide(1, 2)),
    ("REQUANTIZE", "C2", [wide(4), 0.0, 0, 1.0, 0], wide(4)),
    ("REQUANTIZE", "C2", [wide(4), 1.0, 0, 0.0, 0], wide(4)),
    ("Q8_SQUARED_DIFFERENCE", "Q2", [narrow(4), narrow(4)], narrow(4, scale=1e-6)),
    ("Q8_LOG_SOFTMAX", "Q6", [narrow(2, 4)], narrow(2, 4)),
    ("Q8_LOG_SOFTMAX", "Q3", [narrow(2, 4, scale=1e-9)], replace(narrow(2, 4, scale=1 / 16), zero_point=127)),
    ("Q8_LESS", "Q2", [narrow(4, scale=1.5), narrow(4)], Operand(OperandType.TENSOR_BOOL8, (4,))),
    ("Q8_MAXIMUM", "B1", [narrow(4), narrow(3)], narrow(4)),
    ("Q8_SELECT", "C1", [Operand(OperandType.TENSOR_BOOL8, (4,)), narrow(3), narrow(4)], narrow(4)),
    ("Q8_L2_NORMALIZATION", "Q6", [narrow(2, 4)], narrow(2, 4)),
    ("Q8_DIV", "Q5", [narrow(4), narrow(4), 7], narrow(4)),
    ("Q8_DIV", "B1", [narrow(4), narrow(3), 0], narrow(4)),
    ("Q8_REDUCE_PROD", "C3", [narrow(4, scale=300.0), vector([0]), False], narrow(1, scale=1.0)),
    ("Q8_REDUCE_SUM", "C1", [narrow(4), (Operand(I32, (1, 1)), bytes(4)), False], narrow(1)),
    ("Q8_ABS", "Q1", [narrow(4, scale=1e6)], narrow(4, scale=1e-6)),
    ("DYNAMIC_QUANTIZE", "C1", [Operand(F32, (2, 3)), 4, False], Operand(F32, (2, 3))),
    ("DYNAMIC_QUANTIZE", "C1", [Operand(F32, (2, 3)), -1, False], Operand(F32, (2, 3))),
    *(
        ("BLOCKWISE_MATMUL", constraint, in_blocks(**changes), Operand(F32, (3, 2)))
        for constraint, changes in (
            ("C1", {"bits": 3}),
            ("C1", {"bits": 0}),
            ("C2", {"weights": (2, 16)}),
            ("C2", {"weights": (2, 2, 4)}),
            ("C2", {"weights": (2, 2, 12)}),
            ("C3", {"input": (3, 33)}),
            ("C3", {"input": (3, 16)}),
            ("C4", {"scales": (2, 3)}),
            ("C4", {"zero_points": (4,)}),
            ("C5", {"bias": (3,)}),
            ("C6", {"rounds_input": True}),
            ("C6", {"rounds_input": True, "zero_type": Q8, "input": (3, 600), "weights": (2, 2, 256)}),
        )
    ),
]


@pytest.mark.parametrize(("name", "constraint", "arguments", "output"), VIOLATIONS)
def test_a_violated_constraint_is_named(name: str, constraint: str, arguments: list[Any], output: Operand) -> None:
    model = one_operation(operation_code(TfliteOperation[name]), arguments, output)
    declared = replace(model, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))
    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        interpreter.prepare(declared)


def svdf(**changes: Any) -> Callable[[], Any]:
    """Return the shape rule of an SVDF of six filters and a memory of four."""
    shapes = {"input": (2, 5), "features": (6, 5), "times": (6, 4), "bias": (3,), "state": (2, 24), "rank": 2} | changes
    return lambda: svdf_shape(*list(shapes.values())[:5], rank=shapes["rank"])


def lstm(input: tuple[int, ...] = (2, 5), outputs: int = 4, **changes: Any) -> Callable[[], Any]:
    """Return the shape rule of an LSTM of four cells with peepholes, and a projection if it has other outputs."""
    cell: list[Any] = [(4, 5)] * 4 + [(4, outputs)] * 4 + [(4,)] * 7 + [None, None]
    cell[15] = (outputs, 4) if outputs != 4 else None
    assert len(cell) == TENSOR_COUNT
    attributes = {"cell_clip": 0.0, "projection_clip": 0.0, "time_major": False} | changes
    return lambda: lstm_shape(input, *cell, (2, outputs), (2, 4), **attributes)


@pytest.mark.parametrize(
    ("rule", "constraint"),
    [
        (svdf(features=(6, 4)), "C11"),
        (svdf(state=(2, 23)), "C11"),
        (svdf(bias=(2,)), "C11"),
        (svdf(input=(5,)), "C11"),
        (svdf(rank=4), "C12"),
        (svdf(rank=0), "C12"),
        (lstm(input=(5,)), "C1"),
        (lstm(cell_clip=-1.0), "C9"),
        (lstm(projection_clip=-1.0), "C9"),
        (lstm(outputs=3), "C10"),
        (lstm(input=(2, 6)), "C2"),
    ],
)
def test_shapes_that_do_not_fit_name_the_constraint(rule: Callable[[], Any], constraint: str) -> None:
    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        rule()


def test_shapes_that_fit_are_accepted() -> None:
    assert svdf()() == ((2, 3), (2, 24))
    assert lstm()() == ((2, 4), (2, 4), (2, 4))
    assert np.all(np.array(lstm(input=(2, 7, 5))()[0]) == (2, 7, 4))
