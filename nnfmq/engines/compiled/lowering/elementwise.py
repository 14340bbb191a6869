"""Lowering rules of elementwise operations: arithmetic, selection, comparison, conversion and activation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from nnfmq.engines.compiled.kernels import quantized_ops
from nnfmq.engines.compiled.kernels.divisors import CheckedDivisors
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseOperator, plan_elementwise
from nnfmq.engines.compiled.kernels.float_ops import (
    Cast,
    Compare,
    FloatBinary,
    FloatClamp,
    FloatUnary,
    Int32Binary,
    Int32Unary,
    Logical,
    Saturate,
    Select,
)
from nnfmq.engines.compiled.kernels.normalization import RowQuantization, plan_axis_loop
from nnfmq.engines.compiled.kernels.quantized_ops import Lut8, per_tensor_requantization
from nnfmq.engines.compiled.kernels.reduction import PARTIAL_RESULTS, Reducer, RequantizedSumReducer, SignedMeanReducer
from nnfmq.engines.compiled.lowering import (
    Intermediate,
    KernelLaunch,
    KernelSequence,
    LoweringRule,
    ViewOp,
    products,
)
from nnfmq.engines.compiled.lowering.reduction import lower_pool, lower_reduction
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.types import CLAMPS, FusedActivationFunc, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.binary_arithmetic import rescaled_values, sum_multipliers
from nnfmq.operations.declaration import NUMPY_TYPES, Array, Tensor
from nnfmq.operations.fixed_point import quantize_multiplier, quantize_multiplier_of_mean
from nnfmq.operations.quantization import (
    all_quantized_values,
    dtype_range,
    float_activation_range,
    quantized_activation_range,
    quantized_range,
    requantized_values,
)
from nnfmq.operations.tflite_extension.quantization import plan_requantize, product_factor, sum_factors

__all__ = ["RULES", "VIEWS", "lower_arithmetic", "lower_unary"]

_FLOAT, _HALF, _INT32, _BYTE = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<i4"), np.dtype("u1")
_QUANTIZED = (_BYTE, np.dtype("i1"))


def _launch(
    operator: ElementwiseOperator,
    output: Tensor,
    inputs: tuple[Tensor, ...],
    target: Target,
    constants: tuple[bytes, ...] = (),
) -> KernelLaunch:
    kernel = plan_elementwise(operator, output.shape, [tensor.shape for tensor in inputs], target)
    return KernelLaunch(kernel, constants, math.prod(output.shape) // 4)


def _have_dtype(dtype: np.dtype[Any], *tensors: Tensor) -> bool:
    return all(tensor.dtype == dtype for tensor in tensors)


def _are_quantized(*tensors: Tensor) -> bool:
    """Return True if all tensors are 8-bit quantized with one scale each."""
    return all(t.dtype in _QUANTIZED and t.scale > 0 and t.channel_quant is None for t in tensors)


def _is_signed(tensor: Tensor) -> bool:
    return tensor.dtype.kind == "i"


# -- arithmetic -------------------------------------------------------------------------------------------------------


def lower_arithmetic(
    name: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target, activation: int
) -> KernelLaunch | None:
    """Lower ADD, SUB, MUL and DIV."""
    inputs = first, second
    if _have_dtype(_FLOAT, *inputs):
        return _launch(FloatBinary(name, *float_activation_range(activation)), output, inputs, target)
    if _have_dtype(_INT32, *inputs):
        return _launch(Int32Binary(name), output, inputs, target)
    if not _are_quantized(*inputs, output):
        return None  # DIV has no quantized form
    found = (_quantized_mul if name == "mul" else partial(_quantized_add, name == "sub"))(*inputs, output, activation)
    return None if found is None else _launch(found[0], output, inputs, target, found[1])


def _quantized_add(
    is_sub: bool, first: Tensor, second: Tensor, output: Tensor, activation: int
) -> tuple[ElementwiseOperator, tuple[bytes, ...]] | None:
    signs = (1, -1 if is_sub else 1)
    multipliers, output_multiplier = sum_multipliers(first, second, output)
    terms = list(zip((first, second), multipliers, signs, strict=True))
    max_abs_sum = sum(int(np.abs(rescaled_values(*term)).max()) for term in terms)
    found = per_tensor_requantization(output_multiplier, max_abs_sum, activation, output)
    if found is None:
        return None
    requantization, constants = found
    has_half_multiplier = multipliers[0] == (1 << 30, 0), multipliers[1] == (1 << 30, 0)
    input_constants = (
        quantized_ops.QuantizedAdd.input_constants(tensor.zero_point, multiplier, sign)
        for tensor, multiplier, sign in terms
    )
    are_signed = _is_signed(first), _is_signed(second)
    operator = quantized_ops.QuantizedAdd(are_signed, has_half_multiplier, is_sub, requantization)
    return operator, (*input_constants, constants)


def _quantized_mul(
    first: Tensor, second: Tensor, output: Tensor, activation: int
) -> tuple[ElementwiseOperator, tuple[bytes, ...]] | None:
    scale = float(np.float32(first.scale) * np.float32(second.scale)) / output.scale
    found = per_tensor_requantization(quantize_multiplier(scale), 1 << 16, activation, output)
    if found is None:
        return None
    requantization, constants = found
    zero_points = quantized_ops.int32_rows(first.zero_point, second.zero_point)
    operator = quantized_ops.QuantizedMul((_is_signed(first), _is_signed(second)), requantization)
    return operator, (zero_points, constants)


def _pow(base: Tensor, exponent: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower POW of float32."""
    inputs = base, exponent
    return _launch(FloatBinary("pow"), output, inputs, target) if _have_dtype(_FLOAT, *inputs) else None


def _prelu(input: Tensor, alpha: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower PRELU."""
    if _have_dtype(_FLOAT, input, alpha, output):
        return _launch(FloatBinary("prelu"), output, (input, alpha), target)
    if not _are_quantized(input, alpha, output):
        return None
    scales = np.float32(input.scale), np.float32(alpha.scale), np.float32(output.scale)
    positive_scale, negative_scale = float(scales[0] / scales[2]), float(scales[0] * scales[1]) / float(scales[2])
    positive, negative = (
        per_tensor_requantization(quantize_multiplier(scale), max_abs_value, FusedActivationFunc.NONE, output)
        for scale, max_abs_value in ((positive_scale, 255), (negative_scale, 1 << 16))
    )
    if positive is None or negative is None:
        return None
    operator = quantized_ops.QuantizedPrelu((_is_signed(input), _is_signed(alpha)), positive[0], negative[0])
    zero_points = quantized_ops.int32_rows(input.zero_point, alpha.zero_point)
    return _launch(operator, output, (input, alpha), target, (zero_points, positive[1], negative[1]))


def _division(name: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelSequence | None:
    """Lower FLOOR_MOD and TRUNCATED_DIV of INT32, whose divisors are checked before."""
    if not _have_dtype(_INT32, first, second) or 0 in output.shape:
        return None
    count = math.prod(second.shape)
    check = KernelLaunch(CheckedDivisors(count), (), count // 8, ("a divisor is 0 (C1)",))
    checked = Intermediate(check, (1,), _INT32, second.shape)
    return KernelSequence((checked,), _launch(Int32Binary(name), output, (first, second), target), (0, 2))


# -- selection and comparison -----------------------------------------------------------------------------------------


def _min_max(name: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower MAXIMUM and MINIMUM."""
    inputs = first, second
    if _have_dtype(_FLOAT, *inputs):
        return _launch(FloatBinary(name), output, inputs, target)
    if _have_dtype(_INT32, *inputs):
        return _launch(Int32Binary(name), output, inputs, target)
    if not _are_quantized(*inputs, output):
        return None
    needs_lut, tables = _requantization_tables(inputs, output)
    operator = quantized_ops.QuantizedMinMax(_is_signed(output), name == "maximum", needs_lut)
    return _launch(operator, output, inputs, target, tables)


def _requantization_tables(
    operands: tuple[Tensor, Tensor], output: Tensor
) -> tuple[tuple[bool, bool], tuple[bytes, ...]]:
    """Return which operands differ from the output in scale or zero point, and the tables for these."""
    first, second = (requantized_values(tensor, output) for tensor in operands)
    tables = tuple(table.tobytes() for table in (first, second) if table is not None)
    return (first is not None, second is not None), tables


def _select(condition: Tensor, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower SELECT."""
    inputs = condition, first, second
    if _have_dtype(_FLOAT, first, second) or _have_dtype(_INT32, first, second):
        return _launch(Select("f4" if first.dtype == _FLOAT else "i4"), output, inputs, target)
    if not _are_quantized(first, second, output):
        return None
    needs_lut, tables = _requantization_tables((first, second), output)
    return _launch(quantized_ops.QuantizedSelect(needs_lut), output, inputs, target, tables)


def _comparison(order: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower EQUAL, NOT_EQUAL, GREATER, GREATER_EQUAL, LESS and LESS_EQUAL."""
    inputs = first, second
    operator: ElementwiseOperator
    if _have_dtype(_FLOAT, *inputs) or _have_dtype(_INT32, *inputs):
        operator = Compare(order, "f4" if first.dtype == _FLOAT else "i4")
    elif _are_quantized(*inputs):
        a, b = ((_is_signed(t), t.zero_point, float(np.float32(t.scale))) for t in inputs)
        operator = quantized_ops.QuantizedCompare(order, (a, b))
    elif _have_dtype(_BYTE, *inputs):
        operator = Logical(order)
    else:
        return None
    return _launch(operator, output, inputs, target)


def _logical(name: str, *inputs: Tensor, output: Tensor, target: Target) -> KernelLaunch:
    """Lower LOGICAL_AND, LOGICAL_OR and LOGICAL_NOT."""
    return _launch(Logical(name), output, inputs, target)


# -- conversion -------------------------------------------------------------------------------------------------------


def _quantize(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower QUANTIZE of float32."""
    if input.dtype != _FLOAT or not _are_quantized(output):
        return None
    operator = quantized_ops.Quantize(output.zero_point, float(np.float32(output.scale)), *dtype_range(output))
    return _launch(operator, output, (input,), target)


def _quantize_linear(input: Tensor, *, output: Tensor, target: Target, adds_first: bool) -> KernelLaunch | None:
    """Lower QUANTIZE_LINEAR of float32."""
    if input.dtype != _FLOAT or not _are_quantized(output):
        return None
    scale = float(np.float32(output.scale))
    operator = quantized_ops.QuantizeLinear(output.zero_point, scale, _is_signed(output), bool(adds_first))
    return _launch(operator, output, (input,), target)


def _qlinear_add(first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch:
    """Lower QLINEAR_ADD."""
    *factors, offset = map(float, sum_factors(first, second, output))
    operator = quantized_ops.QLinearAdd((factors[0], factors[1]), offset, _is_signed(output))
    return _launch(operator, output, (first, second), target)


def _qlinear_mul(first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch:
    """Lower QLINEAR_MUL."""
    factor, zero_points = float(product_factor(first, second, output)), (first.zero_point, second.zero_point)
    operator = quantized_ops.QLinearMul(zero_points, factor, output.zero_point, _is_signed(output))
    return _launch(operator, output, (first, second), target)


def _dequantize(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower DEQUANTIZE to float32, per tensor."""
    if output.dtype != _FLOAT or not _are_quantized(input):
        return None
    operator = quantized_ops.Dequantize(_is_signed(input), input.zero_point, float(np.float32(input.scale)))
    return _launch(operator, output, (input,), target)


def _cast(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | ViewOp | None:
    """Lower CAST between float32, INT32 and TENSOR_QUANT8_ASYMM, float32 and float16, and of any type to itself."""
    if input.dtype == output.dtype:
        return ViewOp()
    letters = {_FLOAT: "f4", _INT32: "i4", _BYTE: "u1"}
    if _HALF in (input.dtype, output.dtype):
        letters = {_FLOAT: "f4", _HALF: "f2"} if target.has_half else {}
    input_type, output_type = letters.get(input.dtype), letters.get(output.dtype)
    if input_type is None or output_type is None:
        return None
    return _launch(Cast(input_type, output_type), output, (input,), target)


def _truncating_cast(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower the extension's CAST of float32 to INT32, and of INT32 to 8 bits, which have a scale if not BOOL8."""
    if (input.dtype, output.dtype) == (_FLOAT, _INT32):
        return _launch(Cast("f4", "i4", is_truncated=True), output, (input,), target)
    if input.dtype == _INT32 and _are_quantized(output) and output.scale:
        return _launch(Cast("i4", "u1", is_truncated=True), output, (input,), target)
    return None


# -- functions of one element -----------------------------------------------------------------------------------------


def _clamp(low: float, high: float, input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower an operation that is only a clamp: RELU and its variants."""
    if _are_quantized(input, output):
        bounds = quantized_range(low, high, output)
        return _launch(quantized_ops.QuantizedClamp(_is_signed(output), *bounds), output, (input,), target)
    return _launch(FloatClamp(low, high), output, (input,), target) if _have_dtype(_FLOAT, input, output) else None


def lower_unary(
    name: str, input: Tensor, *, output: Tensor, target: Target, **attributes: float
) -> KernelLaunch | None:
    """Lower a function of one float32 or INT32 element."""
    if _have_dtype(_FLOAT, input, output):
        parameters = [float(np.float32(value)) for value in attributes.values()]
        return _launch(FloatUnary(name, *parameters), output, (input,), target)
    if _have_dtype(_INT32, input, output) and name in ("abs", "neg"):
        return _launch(Int32Unary(name), output, (input,), target)
    return None


def _unary_or_lut(
    code: OperationType, name: str, input: Tensor, *, output: Tensor, target: Target
) -> KernelLaunch | None:
    """Lower a function of one element; a quantized one becomes a table of the interpreter's results."""
    if not _are_quantized(input, output):
        return lower_unary(name, input, output=output, target=target)
    plans = [v.plan for v in REGISTRY[code].variants if NUMPY_TYPES[v.types["T"]] == input.dtype]
    assert len(plans) == 1 and plans[0] is not None, "a matched variant has a plan"
    table: Array = plans[0](input, output=output)(all_quantized_values(input))
    return _launch(quantized_ops.Lut8(), output, (input,), target, (table.tobytes(),))


_ORDERS = {
    OperationType.EQUAL: "==",
    OperationType.NOT_EQUAL: "!=",
    OperationType.GREATER: ">",
    OperationType.GREATER_EQUAL: ">=",
    OperationType.LESS: "<",
    OperationType.LESS_EQUAL: "<=",
}
_UNARY = ("abs", "elu", "exp", "floor", "log", "neg", "sin", "sqrt")
_UNARY_OR_LUT = ("hard_swish", "logistic", "rsqrt", "tanh")

_ELEMENTWISE_RULES: Mapping[OperationType, LoweringRule] = {
    **{OperationType[name.upper()]: partial(lower_arithmetic, name) for name in ("add", "sub", "mul", "div")},
    **{OperationType[name.upper()]: partial(_min_max, name) for name in ("maximum", "minimum")},
    **{code: partial(_comparison, order) for code, order in _ORDERS.items()},
    **{OperationType[f"LOGICAL_{name.upper()}"]: partial(_logical, name) for name in ("and", "or", "not")},
    **{code: partial(_clamp, *function.bounds) for code, function in CLAMPS.items()},
    **{OperationType[name.upper()]: partial(lower_unary, name) for name in _UNARY},
    **{
        OperationType[name.upper()]: partial(_unary_or_lut, OperationType[name.upper()], name) for name in _UNARY_OR_LUT
    },
    OperationType.CAST: _cast,
    OperationType.DEQUANTIZE: _dequantize,
    OperationType.POW: _pow,
    OperationType.PRELU: _prelu,
    OperationType.QUANTIZE: _quantize,
    OperationType.SELECT: _select,
    operation_code(TfliteOperation.QLINEAR_ADD): _qlinear_add,
    operation_code(TfliteOperation.QLINEAR_MUL): _qlinear_mul,
    operation_code(TfliteOperation.QUANTIZE_LINEAR): _quantize_linear,
}


# ----------------------------------------------------------------------------------------------------------------------
# Lowering rules of operations of the built-in extension: 16-bit tensors that are moved, functions, sums, products.


VIEWS = tuple(
    extended_code(code, scheme)
    for code in (OperationType.EXPAND_DIMS, OperationType.RESHAPE, OperationType.SQUEEZE)
    for scheme in (Scheme.SIXTEEN_BITS, Scheme.WIDER)
)
"""The operations on 16-bit tensors, and on types that the HAL has not, that only change the shape."""

_TABLES = (
    operation_code(TfliteOperation.Q8_CLAMP),
    operation_code(TfliteOperation.Q8_LEAKY_RELU),
    *(
        extended_code(OperationType[name], Scheme.TFLITE)
        for name in ("ABS", "NEG", "SQRT", "RSQRT", "LOG", "EXP", "ELU")
    ),
)
_DIVISIONS = ("floor_mod", "truncated_div")
_FUNCTIONS = (
    "cos",
    "erf",
    "round",
    "sign",
    *["tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "softplus", "mish"],
)


def _dynamic_quantize(
    input: Tensor, *, output: Tensor, target: Target, row_length: int, asymmetric: bool
) -> KernelLaunch | None:
    """Lower DYNAMIC_QUANTIZE."""
    count = math.prod(input.shape)
    length = row_length or math.prod(input.shape[1:])
    axis_loop = plan_axis_loop((count // length, length), 1, 1, PARTIAL_RESULTS)
    return KernelLaunch(RowQuantization(axis_loop, bool(asymmetric)), (), count // 2)


def _table(code: OperationType, input: Tensor, *, output: Tensor, target: Target, **attributes: Any) -> KernelLaunch:
    """Lower a function of one 8-bit value to a table of the interpreter's results."""
    plan = next(v.plan for v in REGISTRY[code].variants if NUMPY_TYPES[v.types["T"]] == input.dtype)
    assert plan is not None, "a matched variant has a plan"
    table: Array = plan(input, output=output, **attributes)(all_quantized_values(input))
    return _launch(Lut8(), output, (input,), target, (table.tobytes(),))


def _requantize(input: Tensor, *, output: Tensor, target: Target, **scales: Any) -> KernelLaunch | None:
    """Lower REQUANTIZE between 8-bit types to a table."""
    if (input.dtype.itemsize, output.dtype.itemsize) != (1, 1):
        return None
    table: Array = plan_requantize(input, output=output, **scales)(all_quantized_values(input))
    return _launch(Lut8(), output, (input,), target, (table.tobytes(),))


def _saturate(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower SATURATE of INT64 to INT32."""
    if (input.dtype, output.dtype) != (np.dtype("<i8"), _INT32) or 0 in input.shape:
        return None
    return _launch(Saturate(), output, (input,), target)


def _gelu(input: Tensor, *, output: Tensor, target: Target, approximate: bool) -> KernelLaunch | None:
    """Lower GELU of float32 to a function, and that of 8 bits to a table."""
    if input.dtype.itemsize == 1:
        code = operation_code(TfliteOperation.GELU)
        return _table(code, input, output=output, target=target, approximate=approximate)
    return lower_unary("gelu", input, output=output, target=target, approximate=float(approximate))


def _requantized_sum(
    is_mean: bool, input: Tensor, *, output: Tensor, target: Target, axes: Array, keep_dimensions: int
) -> KernelLaunch | None:
    """Lower the extension's mean and sum of 8-bit tensors."""

    def reducer(input: Tensor, count: int) -> Reducer | None:
        number = quantize_multiplier_of_mean(input.scale / output.scale, max(count, 1) if is_mean else 1)
        zero_points = (input.zero_point, output.zero_point)
        return RequantizedSumReducer.of(input.dtype.kind == "i", count, zero_points, *number)

    return lower_reduction(reducer, input, output=output, target=target, axes=axes, keep_dimensions=keep_dimensions)


def _average_reducer(output: Tensor, activation: int, max_count: int) -> Reducer | None:
    return SignedMeanReducer.of(max_count, *quantized_activation_range(activation, output))


_EXTENDED_RULES: Mapping[tuple[OperationType, Scheme], LoweringRule] = {
    (OperationType.AVERAGE_POOL_2D, Scheme.TFLITE): partial(lower_pool, _average_reducer),
    (OperationType.CAST, Scheme.WIDER): _truncating_cast,
    (OperationType.FULLY_CONNECTED, Scheme.TFLITE): partial(products.fully_connected, rounds_once=True),
    (OperationType.MEAN, Scheme.TFLITE): partial(_requantized_sum, True),
    (OperationType.REDUCE_SUM, Scheme.TFLITE): partial(_requantized_sum, False),
}
"""Rules of what the extension adds to operations of the HAL."""

_EXTENSION_RULES: Mapping[OperationType, LoweringRule] = {
    **{extended_code(*key): rule for key, rule in _EXTENDED_RULES.items()},
    **{code: partial(_table, code) for code in _TABLES},
    **{operation_code(TfliteOperation[name.upper()]): partial(lower_unary, name) for name in _FUNCTIONS},
    operation_code(TfliteOperation.GELU): _gelu,
    **{operation_code(TfliteOperation[name.upper()]): partial(_division, name) for name in _DIVISIONS},
    operation_code(TfliteOperation.DYNAMIC_QUANTIZE): _dynamic_quantize,
    operation_code(TfliteOperation.REQUANTIZE): _requantize,
    operation_code(TfliteOperation.SATURATE): _saturate,
}

RULES: Mapping[OperationType, LoweringRule] = {**_ELEMENTWISE_RULES, **_EXTENSION_RULES}
