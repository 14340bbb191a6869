"""Each constraint of an operation is violated once; its number is in the message, the operation's name as well.

Other files of this folder have lists like this one for other families.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from support.small_models import one_operation, vector

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import ChannelQuant, Operand, OperandType, OperationType
from nnfmq.operations import HAL_DECLARATIONS, REGISTRY

F32, Q8, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_INT32
PC = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL


def f(*dimensions: int) -> Operand:
    return Operand(F32, dimensions)


IMAGE = f(1, 4, 4, 2)


def q(*dimensions: int, scale: float = 1.0, zero_point: int = 0) -> Operand:
    return Operand(Q8, dimensions, scale, zero_point)


def i(*values: int) -> tuple[Operand, bytes]:
    return vector(values)


def floats(*dimensions: int) -> tuple[Operand, bytes]:
    count = 1
    for extent in dimensions:
        count *= extent
    return f(*dimensions), bytes(4 * count)


def conv(
    image: Operand = IMAGE,
    filter: Any = None,
    bias: Any = None,
    padding: tuple[int, ...] = (2,),
    strides: tuple[int, int] = (1, 1),
    activation: int = 0,
    *rest: Any,
) -> list[Any]:
    return [image, filter or floats(3, 3, 3, 2), bias or floats(3), *padding, *strides, activation, *rest]


def depthwise(filter: Any = None, bias: Any = None, multiplier: int = 1, image: Operand = IMAGE) -> list[Any]:
    return [image, filter or floats(1, 3, 3, 2), bias or floats(2), 2, 1, 1, multiplier, 0]


def pool(image: Operand = IMAGE, filter: tuple[int, int] = (2, 2), strides: tuple[int, int] = (1, 1)) -> list[Any]:
    return [image, 2, *strides, *filter, 0]


PER_CHANNEL = (
    Operand(PC, (3, 1, 1, 2), channel_quant=ChannelQuant((1.0, 1.0), 3)),
    bytes(6),
)
ALONG_0 = (Operand(PC, (1, 1, 1, 2), channel_quant=ChannelQuant((1.0,), 0)), bytes(2))
INT_BIAS = (Operand(I32, (3,)), bytes(12))
Q_FILTER = (q(3, 1, 1, 2), bytes(6))

VIOLATIONS = [
    ("CONV_2D", "C1", conv(f(4, 4, 2)), f(1, 2, 2, 3)),
    ("CONV_2D", "C1", conv(filter=floats(3, 3, 2)), f(1, 2, 2, 3)),
    ("CONV_2D", "C2", conv(f(1, 4, 4, 3)), f(1, 2, 2, 3)),
    ("CONV_2D", "C2", conv(bias=floats(2)), f(1, 2, 2, 3)),
    ("CONV_2D", "C3", conv(q(1, 4, 4, 2), PER_CHANNEL, INT_BIAS), q(1, 4, 4, 3)),
    ("CONV_2D", "W1", conv(padding=(3,)), f(1, 2, 2, 3)),
    ("CONV_2D", "W2", conv(strides=(0, 1)), f(1, 2, 2, 3)),
    ("CONV_2D", "W2", conv(f(1, 4, 4, 2), None, None, (2,), (1, 1), 0, False, 0, 1), f(1, 2, 2, 3)),
    ("CONV_2D", "W3", conv(padding=(-1, 0, 0, 0)), f(1, 2, 2, 3)),
    ("CONV_2D", "W3", conv(padding=(0, -1, 0, 0)), f(1, 2, 2, 3)),
    ("CONV_2D", "W4", conv(padding=(3, 0, 0, 0)), f(1, 2, 2, 3)),
    ("CONV_2D", "W5", conv(f(1, 2, 4, 2)), f(1, 2, 2, 3)),
    (
        "CONV_2D",
        "W6",
        conv(IMAGE, None, None, (1 << 20, 1 << 20, 1 << 20, 1 << 20), (1 << 20,) * 2, 0, False, 1 << 20, 1 << 20),
        f(1, 2, 2, 3),
    ),
    ("AVERAGE_POOL_2D", "W6", [IMAGE, *(1 << 20,) * 4, *(1 << 20,) * 2, *((1 << 20) + 1,) * 2, 0], f(1, 2, 2, 2)),
    ("CONV_2D", "Q5", conv(activation=4), f(1, 2, 2, 3)),
    ("CONV_2D", "Q4", conv(q(1, 4, 4, 2), Q_FILTER, (Operand(I32, (3,), 2.0), bytes(12))), q(1, 4, 4, 3)),
    ("CONV_2D", "R4", conv(), f(1, 3, 2, 3)),
    ("DEPTHWISE_CONV_2D", "C1", depthwise(floats(3, 3, 2)), f(1, 2, 2, 2)),
    ("DEPTHWISE_CONV_2D", "C1", depthwise(image=f(4, 4, 2)), f(1, 2, 2, 2)),
    ("DEPTHWISE_CONV_2D", "C2", depthwise(floats(1, 3, 3, 3), floats(3)), f(1, 2, 2, 3)),
    ("DEPTHWISE_CONV_2D", "C2", depthwise(bias=floats(3)), f(1, 2, 2, 2)),
    ("DEPTHWISE_CONV_2D", "C3", depthwise(ALONG_0, (Operand(I32, (2,)), bytes(8)), image=q(1, 4, 4, 2)), q(1, 4, 4, 2)),
    ("DEPTHWISE_CONV_2D", "C4", depthwise(floats(2, 3, 3, 2)), f(1, 2, 2, 2)),
    ("DEPTHWISE_CONV_2D", "C4", depthwise(multiplier=0), f(1, 2, 2, 2)),
    ("FULLY_CONNECTED", "C1", [f(1, 4), floats(2, 2, 2), floats(2), 0], f(1, 2)),
    ("FULLY_CONNECTED", "C2", [f(1, 5), floats(2, 4), floats(2), 0], f(1, 2)),
    ("FULLY_CONNECTED", "C2", [f(4), floats(2, 4), floats(2), 0], f(1, 2)),
    ("FULLY_CONNECTED", "C3", [f(1, 4), floats(2, 4), floats(3), 0], f(1, 2)),
    ("AVERAGE_POOL_2D", "C1", pool(f(4, 4)), f(1, 3, 3, 2)),
    ("AVERAGE_POOL_2D", "W2", pool(filter=(2, 0)), f(1, 3, 3, 2)),
    ("AVERAGE_POOL_2D", "W5", pool(filter=(5, 2)), f(1, 3, 3, 2)),
    ("AVERAGE_POOL_2D", "Q7", pool(q(1, 4, 4, 2)), q(1, 3, 3, 2, zero_point=1)),
    ("MAX_POOL_2D", "C1", pool(f(4, 4)), f(1, 3, 3, 2)),
    ("RESHAPE", "C1", [f(2, 3), i(4)], f(4)),
    ("RESHAPE", "C1", [f(2, 3), i(-1, 4)], f(2, 4)),
    ("RESHAPE", "C1", [f(2, 3), i(-1, 0)], f()),
    ("RESHAPE", "C2", [f(2, 3), i(-1, -1)], f(2, 3)),
    ("RESHAPE", "C2", [f(2, 3), (Operand(I32, (1, 1)), b"\6\0\0\0")], f(6)),
    ("RESHAPE", "C2", [f(2, 3), i(-2, 3)], f(2, 3)),
    ("RESHAPE", "R1", [f(1, 1, 1, 2, 3), i(6)], f(6)),
    ("SQUEEZE", "C3", [f(1, 2), i(1)], f(1)),
    ("SQUEEZE", "A1", [f(1, 2), i(2)], f(2)),
    ("SQUEEZE", "R1", [f(1, 1, 1, 1, 2), i(0)], f(1, 1, 1, 2)),
    ("PAD", "C1", [f(2), (Operand(I32, (1, 2)), b"\xff\xff\xff\xff\0\0\0\0")], f(1)),
    ("PAD", "C1", [f(2), i(1, 1)], f(4)),
    ("PAD", "R2", [f(2), (Operand(I32, (1, 2)), b"\xff\xff\xff\x7f\0\0\0\0")], f(0)),
    ("CONCATENATION", "C5", [f(1, 2), f(2, 2), 1], f(1, 4)),
    ("CONCATENATION", "C5", [f(1, 2), f(1, 2, 3), 1], f(1, 4)),
    ("CONCATENATION", "R1", [f(1, 1, 1, 1, 2), f(1, 1, 1, 1, 2), 4], f(1, 1, 1, 1, 4)),
    ("CONCATENATION", "A1", [f(1, 2), f(1, 2), 2], f(1, 4)),
    ("SOFTMAX", "C1", [f(1, 2), 0.0], f(1, 2)),
    ("SOFTMAX", "A1", [f(1, 2), 1.0, 2], f(1, 2)),
    ("SOFTMAX", "R1", [f(1, 1, 1, 1, 2), 1.0], f(1, 1, 1, 1, 2)),
    ("SOFTMAX", "Q6", [q(1, 2), 1.0], q(1, 2, scale=1 / 128)),
    ("LOGISTIC", "Q6", [q(1, 2)], q(1, 2, scale=1 / 128)),
    ("LOGISTIC", "R1", [f(1, 1, 1, 1, 1)], f(1, 1, 1, 1, 1)),
    ("RELU", "Q7", [q(2)], q(2, scale=2.0)),
    ("RELU1", "Q7", [q(2)], q(2, scale=2.0)),
    ("RELU6", "Q7", [q(2)], q(2, scale=2.0)),
    ("ADD", "B1", [f(2), f(3), 0], f(3)),
    ("ADD", "B2", [f(1, 1, 1, 1, 2), f(2), 0], f(1, 1, 1, 1, 2)),
    ("ADD", "C1", [Operand(I32, (2,)), Operand(I32, (2,)), 1], Operand(I32, (2,))),
    ("ADD", "Q2", [q(2), q(2), 0], q(2, scale=2.0**-20)),
    ("ADD", "Q2", [q(2), q(2), 0], q(2, scale=2.0**-120)),
    ("ADD", "Q5", [f(2), f(2), 4], f(2)),
    ("ADD", "Q5", [q(2), q(2), 4], q(2)),
    ("MUL", "Q2", [q(2), q(2), 0], q(2)),
    ("MEAN", "A1", [f(2, 2), i(2), 1], f(2, 1)),
    ("MEAN", "C1", [f(2, 2), (Operand(I32, (1, 1)), bytes(4)), 1], f(1, 2)),
    ("MEAN", "R4", [f(2, 2), i(1), 1], f(2)),
    ("DEQUANTIZE", "R1", [q(1, 1, 1, 1, 1)], f(1, 1, 1, 1, 1)),
]


def violation_id(code: str, constraint: str, *_: Any) -> str:
    return f"{code.lower()}_{constraint.lower()}"


@pytest.mark.parametrize(
    ("code", "constraint", "arguments", "output"), VIOLATIONS, ids=list(itertools.starmap(violation_id, VIOLATIONS))
)
def test_N_OPF_a_violated_constraint_is_named_when_the_model_is_prepared(
    code: str, constraint: str, arguments: list[Any], output: Operand
) -> None:
    model = one_operation(OperationType[code], arguments, output)

    with pytest.raises(GeneralFailure, match=rf"operation 0 \({code}\): .*\({constraint}\)$"):
        interpreter.prepare(model)


def test_every_constrained_operation_is_named_in_a_test_of_violations() -> None:
    unconstrained = {"QUANTIZE", "RANK"}
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]

    named = {word for text in texts if "operation 0 \\(" in text for word in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text)}
    assert {code.name for code in HAL_DECLARATIONS} - unconstrained - named == set()


@pytest.mark.parametrize("declaration", REGISTRY.values(), ids=lambda d: d.name)
def test_declarations_are_consistent(declaration: Any) -> None:
    columns = {p.type for overload in declaration.overloads for p in overload.parameters if isinstance(p.type, str)}
    columns |= {t for t in declaration.outputs if isinstance(t, str)}

    assert all(set(variant.types) == columns for variant in declaration.variants)
    assert all(variant.level >= declaration.since for variant in declaration.variants)
    assert set(declaration.images) <= {p.name for overload in declaration.overloads for p in overload.parameters}
