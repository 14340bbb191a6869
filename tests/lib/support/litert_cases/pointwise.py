"""Functions of one and two operands, comparisons, choices and conversions."""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.litert import shared
from support.oracles import (
    CODES,
    FLOAT,
    FLOAT_AND_CODES,
    NUMBERS,
    TYPES,
    Argument,
    Array,
    Builder,
    Case,
    Draw,
    Listed,
    like,
)

COMPARISONS = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")
_TFLITE_TYPES = {"float32": 0, "int32": 2, "uint8": 3}


def unary(name: str) -> Builder:
    """Build a function of one tensor, whose result has the same scale and zero point."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(draw.below(1, 5)), 0.1 if name in ("LOG", "RSQRT", "SQRT") else -4.0)
        rest = [1.0] if name == "ELU" else []
        return shared(name, OperationType[{"RELU_N1_TO_1": "RELU1"}.get(name, name)], [argument], argument[0], rest)

    return build


def quantized_rsqrt(draw: Draw) -> Case:
    """Build quantized RSQRT; TFLite rejects negative numbers."""
    operand, codes = draw.tensor(draw.shape(3))
    positive = np.maximum(codes, operand.zero_point).astype(codes.dtype)
    return shared("RSQRT", OperationType.RSQRT, [(operand, positive)], draw.operand(codes.shape, draw.real(0.01, 0.2)))


def binary(name: str, *, options: bool = True) -> Builder:
    """Build a function of two tensors that are broadcast, with each fused activation where it has one."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        first, second = draw.tensor(shape, 0.5), draw.tensor(shape[1:], 0.5)
        code = draw.below(0, 4) if options and draw.dtype != "int32" else 0
        output = first[0]
        if draw.dtype in CODES:
            output = draw.operand(shape, draw.real(0.05, 0.5))
        return shared(
            name,
            OperationType[name],
            [first, second],
            output,
            [code] * options,
            (),
            f"{name.capitalize()}Options" if options else "",
            {"FusedActivationFunction": code} if options else {},
        )

    return build


def integer_quotient(draw: Draw) -> Case:
    """Build DIV of INT32 of both signs."""
    shape = draw.shape(3)
    first, (operand, divisors) = draw.tensor(shape), draw.tensor(shape[1:])
    divisors[divisors == 0] = 7  # TFLite stops at 0
    data = [first, (operand, divisors)]
    return shared("DIV", OperationType.DIV, data, first[0], [0], (), "DivOptions", {"FusedActivationFunction": 0})


def comparison(name: str) -> Builder:
    """Build a comparison of tensors of one scale and zero point, of which some elements are equal."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        first, (_, second) = draw.tensor(shape), draw.tensor(shape[1:])
        data = [(first[0], _coarse(first[1])), (like(first[0], shape[1:]), _coarse(second))]
        return shared(name, OperationType[name], data, Operand(OperandType.TENSOR_BOOL8, shape))

    return build


def _coarse(numbers: Array) -> Array:
    """Return numbers of which some are equal."""
    return np.asarray(np.round(numbers) if numbers.dtype == np.float32 else numbers // 16 * 16, numbers.dtype)


def unequal_comparison(name: str) -> Builder:
    """Build a comparison of quantized values of which some differ but represent nearly the same number."""

    def build(draw: Draw) -> Case:
        shape, times = draw.shape(4, 8), draw.below(2, 8)
        (first, codes), low = draw.tensor(shape), -128 * (draw.dtype == "int8")
        second = Operand(first.type, shape, float(np.float32(first.scale * times)), first.zero_point)
        steps = (codes.astype(int) - first.zero_point) // times + draw.rng.integers(-1, 2, shape)
        others = np.clip(steps + first.zero_point, low, low + 255).astype(codes.dtype)
        exact = np.clip((others.astype(int) - first.zero_point) * times + first.zero_point, low, low + 255)
        data = [(first, np.where(draw.rng.random(shape) < 0.5, exact, codes).astype(codes.dtype)), (second, others)]
        return shared(name, OperationType[name], data, Operand(OperandType.TENSOR_BOOL8, shape))

    return build


def unequal_choice(name: str) -> Builder:
    """Build MAXIMUM, MINIMUM or SELECT of tensors with different scales and zero points."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        mask = Operand(OperandType.TENSOR_BOOL8, shape), draw.rng.integers(0, 2, shape).astype(np.uint8)
        data = [*([mask] if name == "SELECT" else []), draw.tensor(shape), draw.tensor(shape)]
        return shared(name, OperationType[name], data, draw.operand(shape))

    return build


def logical(name: str) -> Builder:
    """Build LOGICAL_AND, LOGICAL_OR, EQUAL or NOT_EQUAL of truth values."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        data = [draw.tensor(shape), draw.tensor(shape[1:])]
        return shared(name, OperationType[name], data, Operand(OperandType.TENSOR_BOOL8, shape))

    return build


def extremum(name: str) -> Builder:
    """Build MAXIMUM or MINIMUM of two tensors of one scale and zero point."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        first, second = draw.tensor(shape), draw.tensor(shape[1:])
        return shared(name, OperationType[name], [first, (like(first[0], shape[1:]), second[1])], first[0])

    return build


def select(draw: Draw) -> Case:
    """Build SELECT of two tensors of one scale and zero point."""
    shape = draw.shape(3)
    mask = Operand(OperandType.TENSOR_BOOL8, shape), draw.rng.integers(0, 2, shape).astype(np.uint8)
    first, second = draw.tensor(shape), draw.tensor(shape)
    return shared("SELECT", OperationType.SELECT, [mask, first, (first[0], second[1])], first[0])


def quantize(draw: Draw) -> Case:
    """Build QUANTIZE, also of numbers out of range."""
    shape = draw.shape(3)
    output = draw.operand(shape)
    reach = 200 * output.scale
    numbers = draw.rng.uniform(-reach, reach, shape).astype(np.float32)
    return shared("QUANTIZE", OperationType.QUANTIZE, [(Operand(TYPES["float32"], shape), numbers)], output)


def dequantize(draw: Draw) -> Case:
    """Build DEQUANTIZE."""
    argument = draw.tensor(draw.shape(3))
    return shared("DEQUANTIZE", OperationType.DEQUANTIZE, [argument], Operand(TYPES["float32"], argument[1].shape))


def cast(source_type: str, target_type: str, low: float, high: float) -> Builder:
    """Build CAST of numbers in [low, high); floats lose their fraction."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        numbers = draw.rng.uniform(low, high, shape).astype(source_type)
        data = [(Operand(TYPES[source_type], shape, *((0.5, 9) if source_type == "uint8" else ())), numbers)]
        output = Operand(TYPES[target_type], shape, *((0.5, 9) if target_type == "uint8" else ()))
        codes = {"InDataType": _TFLITE_TYPES[source_type], "OutDataType": _TFLITE_TYPES[target_type]}
        return shared("CAST", OperationType.CAST, data, output, (), (), "CastOptions", codes)

    return build


def softmax(draw: Draw) -> Case:
    """Build SOFTMAX over the last axis."""
    argument = draw.tensor(draw.shape(draw.below(1, 5), 9))
    beta = draw.real(0.5, 2)
    unit = Operand(argument[0].type, argument[1].shape, 1 / 256, -128 if draw.dtype == "int8" else 0)
    output = argument[0] if draw.dtype == "float32" else unit
    return shared("SOFTMAX", OperationType.SOFTMAX, [argument], output, [beta], (), "SoftmaxOptions", {"Beta": beta})


def log_softmax(draw: Draw) -> Case:
    """Build LOG_SOFTMAX over the last axis; TFLite's has no beta."""
    argument = draw.tensor(draw.shape(draw.below(1, 5), 9))
    return shared("LOG_SOFTMAX", OperationType.LOG_SOFTMAX, [argument], argument[0], [1.0, -1])


def fill(draw: Draw) -> Case:
    """Build FILL."""
    (_, (number,)), shape = draw.tensor((1,)), draw.shape(3)
    scalar = np.asarray(number)
    held = Operand(TYPES[draw.dtype], ()), scalar.tobytes()
    extents = Operand(OperandType.TENSOR_INT32, (3,)), np.array(shape, np.int32)
    output = Operand(TYPES[draw.dtype], shape)
    return shared("FILL", OperationType.FILL, [extents], output, [scalar.item()], [held], "FillOptions")


def rank(draw: Draw) -> Case:
    """Build RANK."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    return shared("RANK", OperationType.RANK, [argument], Operand(OperandType.INT32))


def embedding_lookup(draw: Draw) -> Case:
    """Build EMBEDDING_LOOKUP."""
    rows, count = draw.below(1, 9), draw.below(1, 9)
    values = draw.tensor((rows, *draw.shape(2)))
    data = [_indexes(draw, rows, count), values]
    output = like(values[0], (count, *values[1].shape[1:]))
    return shared("EMBEDDING_LOOKUP", OperationType.EMBEDDING_LOOKUP, data, output)


def _indexes(draw: Draw, end: int, count: int) -> Argument:
    return Operand(OperandType.TENSOR_INT32, (count,)), draw.rng.integers(0, end, count).astype(np.int32)


def hashtable_lookup(draw: Draw) -> Case:
    """Build HASHTABLE_LOOKUP; some keys are not there."""
    rows, count = draw.below(1, 9), draw.below(1, 9)
    keys = np.sort(draw.rng.permutation(20)[:rows]).astype(np.int32)
    values = draw.tensor((rows, draw.below(1, 6)))
    table = Operand(OperandType.TENSOR_INT32, (rows,)), keys
    hits = Operand(OperandType.TENSOR_QUANT8_ASYMM, (count,), 1.0, 0)
    outputs = [like(values[0], (count, values[1].shape[1])), hits]
    lookups = _indexes(draw, 20, count)
    return shared("HASHTABLE_LOOKUP", OperationType.HASHTABLE_LOOKUP, [lookups, table, values], outputs)


def largest(different: int) -> Builder:
    """Build TOPK_V2 of numbers that all differ, or of few `different` ones."""

    def build(draw: Draw) -> Case:
        rows, count = draw.below(1, 5), draw.below(1, 40)
        operand = draw.operand((rows, count))
        low = -128 if draw.dtype == "int8" else 0
        ranks = np.stack([draw.rng.permutation(200)[:count] for _ in range(rows)])
        numbers = (ranks % different + low).astype(draw.dtype)
        k = draw.below(1, count + 1)
        outputs = [like(operand, (rows, k)), Operand(OperandType.TENSOR_INT32, (rows, k))]
        held = Operand(OperandType.TENSOR_INT32, ()), np.int32(k).tobytes()
        return shared("TOPK_V2", OperationType.TOPK_V2, [(operand, numbers)], outputs, [k], [held], "TopKV2Options")

    return build


def extreme_place(name: str, operation: OperationType) -> Builder:
    """Build ARGMAX or ARGMIN, with equal numbers."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(draw.below(1, 5)))
        numbers = _coarse(argument[1])
        axis = draw.below(-numbers.ndim, numbers.ndim)
        shape = numbers.shape[:axis] + numbers.shape[axis % numbers.ndim + 1 :]
        output = Operand(OperandType.TENSOR_INT32, shape)
        held = Operand(OperandType.TENSOR_INT32, ()), np.int32(axis).tobytes()
        table = "ArgMaxOptions" if operation is OperationType.ARGMAX else "ArgMinOptions"
        return shared(name, operation, [(argument[0], numbers)], output, [axis], [held], table, {"OutputType": 2})

    return build


CASES: list[Listed] = [
    *((name, FLOAT, unary(name)) for name in ("EXP", "FLOOR", "LOG", "RSQRT", "SIN", "SQRT", "ELU")),
    *((name, FLOAT, unary(name)) for name in ("LOGISTIC", "TANH", "HARD_SWISH")),
    *((name, (*FLOAT, "int32"), unary(name)) for name in ("ABS", "NEG")),
    *((name, FLOAT_AND_CODES, unary(name)) for name in ("RELU", "RELU6", "RELU_N1_TO_1")),
    ("RSQRT", CODES[1:], quantized_rsqrt),
    *((name, NUMBERS, binary(name)) for name in ("ADD", "SUB", "MUL")),
    ("DIV", FLOAT, binary("DIV")),
    ("DIV", ("int32",), integer_quotient),
    *((name, FLOAT, binary(name, options=False)) for name in ("POW", "PRELU")),
    *((name, NUMBERS, comparison(name)) for name in COMPARISONS),
    *((name, ("bool",), logical(name)) for name in ("EQUAL", "NOT_EQUAL")),
    *((f"{name}, unequal scales", CODES, unequal_comparison(name)) for name in COMPARISONS),
    *((f"{name}, unequal scales", CODES, unequal_choice(name)) for name in ("MAXIMUM", "MINIMUM", "SELECT")),
    *((name, ("bool",), logical(name)) for name in ("LOGICAL_AND", "LOGICAL_OR")),
    ("LOGICAL_NOT", ("bool",), unary("LOGICAL_NOT")),
    *((name, NUMBERS, extremum(name)) for name in ("MAXIMUM", "MINIMUM")),
    ("SELECT", NUMBERS, select),
    ("QUANTIZE", CODES, quantize),
    ("DEQUANTIZE", CODES, dequantize),
    *(("CAST", (target_type,), cast("float32", target_type, -5e9, 5e9)) for target_type in _TFLITE_TYPES),
    *(("CAST", (target_type,), cast("float32", target_type, -100, 400)) for target_type in ("int32", "uint8")),
    *(("CAST", (target_type,), cast("int32", target_type, -1e5, 1e5)) for target_type in ("float32", "int32")),
    *(("CAST", (target_type,), cast("uint8", target_type, 0, 256)) for target_type in _TFLITE_TYPES),
    ("CAST", ("uint8",), cast("int32", "uint8", 0, 256)),
    ("CAST, from INT32 out of range", ("uint8",), cast("int32", "uint8", -1000, 1000)),
    ("SOFTMAX", FLOAT_AND_CODES, softmax),
    ("LOG_SOFTMAX", FLOAT, log_softmax),
    ("FILL", (*FLOAT, "int32"), fill),
    ("RANK", NUMBERS, rank),
    ("EMBEDDING_LOOKUP", NUMBERS, embedding_lookup),
    ("HASHTABLE_LOOKUP", (*FLOAT, "int32"), hashtable_lookup),
    ("TOPK_V2", NUMBERS, largest(200)),
    ("TOPK_V2, equal numbers", NUMBERS, largest(5)),
    ("ARG_MAX", NUMBERS, extreme_place("ARG_MAX", OperationType.ARGMAX)),
    ("ARG_MIN", NUMBERS, extreme_place("ARG_MIN", OperationType.ARGMIN)),
]
