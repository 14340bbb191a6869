"""SUP-5 through a driver process: what a device computes for unsigned codes, it computes for signed ones, 128 lower.

One model has all operations, so each form of it is prepared once on each device. The expected value of an operation
is its other form; the values themselves are tested in `tests/operations`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.small_models import F32, I32, INPUT, OUTPUT, Q8, Q8S, graph, scalar, vector

import nnfmq
from nnfmq.hal.types import ExecutionPreference, LifeTime, Model, Operand, OperandType, Operation, OperationType

IMAGE = (1, 4, 4, 2)
X, Y = Operand(Q8, IMAGE, 0.5, 131, INPUT), Operand(Q8, IMAGE, 0.25, 120, INPUT)
WINDOW = [0, 0, 0, 0, 2, 2, 2, 2]  # padding, strides, size
NO_ACTIVATION, RELU = 0, 1
RANDOM = np.random.default_rng(5)


def codes(*shape: int, scale: float = 0.25, zero_point: int = 125) -> tuple[Operand, bytes]:
    """Return a constant of unsigned codes."""
    return Operand(Q8, shape, scale, zero_point), RANDOM.integers(0, 256, shape, np.uint8).tobytes()


def bias(count: int, scale: float) -> tuple[Operand, bytes]:
    content = RANDOM.integers(-500, 500, count).astype(np.int32).tobytes()
    return Operand(I32, (count,), scale), content


def q8(*shape: int, scale: float = 0.5, zero_point: int = 100) -> Operand:
    return Operand(Q8, shape, scale, zero_point, OUTPUT)


X_, Y_ = "x", "y"  # the inputs of the model
FILTER, WEIGHTS = codes(3, 2, 2, 2), codes(3, 32)
SAME = {"scale": 0.5, "zero_point": 131}  # the quantization of x
CASES: dict[str, tuple[list[Any], Operand]] = {
    "ADD": ([X_, Y_, RELU], q8(*IMAGE)),
    "SUB": ([X_, Y_, NO_ACTIVATION], q8(*IMAGE)),
    "MUL": ([X_, Y_, NO_ACTIVATION], q8(*IMAGE, scale=4.0)),
    "MAXIMUM": ([X_, Y_], q8(*IMAGE)),
    "MINIMUM": ([X_, Y_], q8(*IMAGE)),
    "CONCATENATION": ([X_, Y_, 3], q8(1, 4, 4, 4)),
    "CONV_2D": ([X_, FILTER, bias(3, 0.125), 0, 0, 0, 0, 1, 1, RELU], q8(1, 3, 3, 3, scale=16.0)),
    "DEPTHWISE_CONV_2D": (
        [X_, codes(1, 2, 2, 2), bias(2, 0.125), 0, 0, 0, 0, 1, 1, 1, NO_ACTIVATION],
        q8(1, 3, 3, 2, scale=16.0),
    ),
    "FULLY_CONNECTED": ([X_, WEIGHTS, bias(3, 0.125), NO_ACTIVATION], q8(1, 3, scale=64.0)),
    "AVERAGE_POOL_2D": ([X_, *WINDOW, NO_ACTIVATION], q8(1, 2, 2, 2, **SAME)),
    "MAX_POOL_2D": ([X_, *WINDOW, NO_ACTIVATION], q8(1, 2, 2, 2, **SAME)),
    "MEAN": ([X_, vector([1, 2]), 1], q8(1, 1, 1, 2, **SAME)),
    "REDUCE_MAX": ([X_, vector([3]), False], q8(1, 4, 4, **SAME)),
    "RELU": ([X_], q8(*IMAGE, **SAME)),
    "RELU6": ([X_], q8(*IMAGE, **SAME)),
    "HARD_SWISH": ([X_], q8(*IMAGE)),
    "PRELU": ([X_, codes(2)], q8(*IMAGE, scale=4.0)),
    "LOGISTIC": ([X_], q8(*IMAGE, scale=1 / 256, zero_point=0)),
    "TANH": ([X_], q8(*IMAGE, scale=1 / 128, zero_point=128)),
    "SOFTMAX": ([X_, 0.5], q8(*IMAGE, scale=1 / 256, zero_point=0)),
    "RESIZE_BILINEAR": ([X_, 7, 5], q8(1, 5, 7, 2, **SAME)),
    "TRANSPOSE": ([X_, vector([0, 2, 1, 3])], q8(*IMAGE, **SAME)),
    "RESHAPE": ([X_, vector([8, 4])], q8(8, 4, **SAME)),
    "SPACE_TO_DEPTH": ([X_, 2], q8(1, 2, 2, 8, **SAME)),
    "GATHER": ([X_, 1, vector([3, 0])], q8(1, 2, 4, 2, **SAME)),
    "QUANTIZE": ([(Operand(F32, (4,)), np.float32([-60, -0.5, 3, 90]).tobytes())], q8(4)),
    "DEQUANTIZE": ([X_], Operand(F32, IMAGE, lifetime=OUTPUT)),
    "LESS": ([X_, Y_], Operand(OperandType.TENSOR_BOOL8, IMAGE, lifetime=OUTPUT)),
    "ARGMAX": ([X_, 3], Operand(I32, (1, 4, 4), lifetime=OUTPUT)),
}


def model_of(cases: dict[str, tuple[list[Any], Operand]]) -> Model:
    """Return a model of x and y, with the operations of `cases` side by side; output i is that of case i."""
    operands, constants, operations = [X, Y], {}, []
    for name, (arguments, output) in cases.items():
        read = []
        for argument in arguments:
            if argument in (X_, Y_):
                read.append(0 if argument == X_ else 1)
                continue
            operand, constants[len(operands)] = argument if isinstance(argument, tuple) else scalar(argument)
            read.append(len(operands))
            operands.append(operand)
        operations.append(Operation(OperationType[name], tuple(read), (len(operands),)))
        operands.append(output)
    return graph(operands, operations, constants)


def signed(model: Model) -> Model:
    """Return the model with int8 instead of uint8: zero points and constants are 128 lower."""
    content = bytearray(model.operand_values)
    operands = []
    for operand in model.main.operands:
        if operand.type is Q8:
            if operand.lifetime is LifeTime.CONSTANT_COPY:
                place = slice(operand.location.offset, operand.location.offset + operand.location.length)
                content[place] = bytes(byte ^ 0x80 for byte in content[place])
            operand = replace(operand, type=Q8S, zero_point=operand.zero_point - 128)
        operands.append(operand)
    return replace(model, main=replace(model.main, operands=tuple(operands)), operand_values=bytes(content))


Results = list[dict[str, Any]]


def executed(device: nnfmq.Device, model: Model, *inputs: Any) -> dict[str, Any]:
    """Return the results by the names of their cases."""
    assert device.supported_operations(model) == [True] * len(CASES)
    with device.prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED) as prepared:
        return dict(zip(CASES, prepared.execute(*inputs), strict=True))


@pytest.fixture(scope="module", params=["reference", "compiled"])
def results(request: pytest.FixtureRequest, shared_client: nnfmq.Client) -> Results:
    """Return the results of the unsigned and of the signed model, for random codes."""
    device, unsigned = shared_client.device(request.param), model_of(CASES)
    x, y = (RANDOM.integers(0, 256, IMAGE, np.uint8) for _ in range(2))
    given = [code ^ 0x80 for code in (x, y)]
    return [executed(device, unsigned, x, y), executed(device, signed(unsigned), *(c.view(np.int8) for c in given))]


@pytest.mark.parametrize("operation", CASES)
def test_SUP_5_signed_codes_are_supported_and_their_result_is_128_lower(operation: str, results: Results) -> None:
    first, second = (found[operation] for found in results)
    if CASES[operation][1].type is not Q8:
        np.testing.assert_array_equal(second, first, strict=True)
        return
    assert (first.dtype, second.dtype) == (np.uint8, np.int8)
    np.testing.assert_array_equal(second.astype(np.int16) + 128, first)
    assert len(set(first.flat)) > 1  # it depends on the input
