"""Functions of elements: arithmetic, choices, comparisons, conversions and activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from nnfmq.engines.compiled.kernels import quantized_ops as codes
from nnfmq.engines.compiled.kernels.elementwise_kernels import Function, plan_elementwise
from nnfmq.engines.compiled.kernels.functions import (
    Cast,
    Compare,
    FloatBinary,
    FloatUnary,
    Int32Binary,
    Int32Unary,
    Logical,
    Select,
)
from nnfmq.engines.compiled.lowering import KernelLaunch, LoweringRule, ViewOp
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import FusedActivationFunc, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.binary_arithmetic import rescaled_values, sum_multipliers
from nnfmq.operations.fixed_point import quantize_multiplier
from nnfmq.operations.quantization import (
    all_quantized_values,
    dtype_range,
    float_activation_range,
    quantized_activation_range,
    requantized_values,
)
from nnfmq.operations.signature import NUMPY_TYPES, Array, Tensor

__all__ = ["RULES", "arithmetic"]

_FLOAT, _WHOLE, _BYTE = np.dtype("<f4"), np.dtype("<i4"), np.dtype("u1")
_CODES = (_BYTE, np.dtype("i1"))


def _lowered(
    function: Function, output: Tensor, inputs: tuple[Tensor, ...], target: Target, constants: tuple[bytes, ...] = ()
) -> KernelLaunch:
    kernel = plan_elementwise(function, output.shape, [tensor.shape for tensor in inputs], target)
    return KernelLaunch(kernel, constants, math.prod(output.shape) // 4)


def _are(dtype: np.dtype[Any], *tensors: Tensor) -> bool:
    return all(tensor.dtype == dtype for tensor in tensors)


def _of_codes(*tensors: Tensor) -> bool:
    """Whether all are codes of 8 bits with one scale each."""
    return all(t.dtype in _CODES and t.scale > 0 and t.channel_quant is None for t in tensors)


def _is_signed(tensor: Tensor) -> bool:
    return tensor.dtype.kind == "i"


def arithmetic(
    name: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target, activation: int
) -> KernelLaunch | None:
    """ADD, SUB, MUL and DIV."""
    inputs = first, second
    if _are(_FLOAT, *inputs):
        return _lowered(FloatBinary(name, *float_activation_range(activation)), output, inputs, target)
    if _are(_WHOLE, *inputs):
        return _lowered(Int32Binary(name), output, inputs, target)
    if not _of_codes(*inputs, output):
        return None  # there is no DIV of codes
    found = (_product if name == "mul" else partial(_sum, name == "sub"))(first, second, output, activation)
    return None if found is None else _lowered(found[0], output, inputs, target, found[1])


def _sum(
    subtracts: bool, first: Tensor, second: Tensor, output: Tensor, activation: int
) -> tuple[Function, tuple[bytes, ...]] | None:
    signs = (1, -1 if subtracts else 1)
    multipliers, total = sum_multipliers(first, second, output)
    most = sum(
        int(np.abs(rescaled_values(tensor, multiplier, sign)).max())
        for tensor, multiplier, sign in zip((first, second), multipliers, signs, strict=True)
    )
    finish = codes.per_tensor_requantization(total, most, activation, output)
    if finish is None:
        return None
    halved = multipliers[0] == (1 << 30, 0), multipliers[1] == (1 << 30, 0)
    operands = (
        codes.QuantizedAdd.operand(tensor.zero_point, multiplier, sign)
        for tensor, multiplier, sign in zip((first, second), multipliers, signs, strict=True)
    )
    signed = _is_signed(first), _is_signed(second)
    return codes.QuantizedAdd(signed, halved, subtracts, finish[0]), (*operands, finish[1])


def _product(
    first: Tensor, second: Tensor, output: Tensor, activation: int
) -> tuple[Function, tuple[bytes, ...]] | None:
    real = float(np.float32(first.scale) * np.float32(second.scale)) / output.scale
    finish = codes.per_tensor_requantization(quantize_multiplier(real), 1 << 16, activation, output)
    if finish is None:
        return None
    zero_points = codes.repeated(first.zero_point, second.zero_point)
    return codes.QuantizedMul((_is_signed(first), _is_signed(second)), finish[0]), (zero_points, finish[1])


def _extreme(name: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """MAXIMUM and MINIMUM."""
    inputs = first, second
    if _are(_FLOAT, *inputs):
        return _lowered(FloatBinary(name), output, inputs, target)
    if _are(_WHOLE, *inputs):
        return _lowered(Int32Binary(name), output, inputs, target)
    if not _of_codes(*inputs, output):
        return None
    adapted, tables = _adapting(inputs, output)
    return _lowered(
        codes.QuantizedMinMax(_is_signed(output), name == "maximum", adapted), output, inputs, target, tables
    )


def _adapting(operands: tuple[Tensor, Tensor], output: Tensor) -> tuple[tuple[bool, bool], tuple[bytes, ...]]:
    first, second = (requantized_values(tensor, output) for tensor in operands)
    tables = tuple(table.tobytes() for table in (first, second) if table is not None)
    return (first is not None, second is not None), tables


def _power(base: Tensor, exponent: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """POW of floats."""
    inputs = base, exponent
    return _lowered(FloatBinary("pow"), output, inputs, target) if _are(_FLOAT, *inputs) else None


def _select(condition: Tensor, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """SELECT."""
    inputs = condition, first, second
    if _are(_FLOAT, first, second) or _are(_WHOLE, first, second):
        return _lowered(Select("f4" if first.dtype == _FLOAT else "i4"), output, inputs, target)
    if not _of_codes(first, second, output):
        return None
    adapted, tables = _adapting((first, second), output)
    return _lowered(codes.QuantizedSelect(adapted), output, inputs, target, tables)


def _comparison(order: str, first: Tensor, second: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """EQUAL, NOT_EQUAL, GREATER, GREATER_EQUAL, LESS and LESS_EQUAL."""
    inputs = first, second
    function: Function
    if _are(_FLOAT, *inputs) or _are(_WHOLE, *inputs):
        function = Compare(order, "f4" if first.dtype == _FLOAT else "i4")
    elif _of_codes(*inputs):
        a, b = ((_is_signed(t), t.zero_point, float(np.float32(t.scale))) for t in inputs)
        function = codes.QuantizedCompare(order, (a, b))
    elif _are(_BYTE, *inputs):
        function = Logical(order)
    else:
        return None
    return _lowered(function, output, inputs, target)


def _logical(name: str, *inputs: Tensor, output: Tensor, target: Target) -> KernelLaunch:
    """LOGICAL_AND, LOGICAL_OR and LOGICAL_NOT."""
    return _lowered(Logical(name), output, inputs, target)


def _quantize(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """QUANTIZE of float32."""
    if input.dtype != _FLOAT or not _of_codes(output):
        return None
    function = codes.Quantize(output.zero_point, float(np.float32(output.scale)), *dtype_range(output))
    return _lowered(function, output, (input,), target)


def _dequantize(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """DEQUANTIZE to float32, of codes with one scale."""
    if output.dtype != _FLOAT or not _of_codes(input):
        return None
    function = codes.Dequantize(_is_signed(input), input.zero_point, float(np.float32(input.scale)))
    return _lowered(function, output, (input,), target)


def _cast(input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | ViewOp | None:
    """CAST among float32, INT32 and TENSOR_QUANT8_ASYMM; and of any type to itself."""
    if input.dtype == output.dtype:
        return ViewOp()
    letters = {_FLOAT: "f4", _WHOLE: "i4", _BYTE: "u1"}
    source, result = letters.get(input.dtype), letters.get(output.dtype)
    if source is None or result is None:
        return None
    return _lowered(Cast(source, result), output, (input,), target)


def _rectifier(
    name: str, activation: FusedActivationFunc, input: Tensor, *, output: Tensor, target: Target
) -> KernelLaunch | None:
    """RELU, RELU1 and RELU6."""
    if _of_codes(input, output):
        function = codes.QuantizedClamp(_is_signed(output), *quantized_activation_range(activation, output))
        return _lowered(function, output, (input,), target)
    return _unary(name, input, output=output, target=target)


def _unary(name: str, input: Tensor, *, output: Tensor, target: Target, **attributes: float) -> KernelLaunch | None:
    """A function of one float32 or INT32, by a kernel of its own."""
    if _are(_FLOAT, input, output):
        parameters = [float(np.float32(value)) for value in attributes.values()]
        return _lowered(FloatUnary(name, *parameters), output, (input,), target)
    if _are(_WHOLE, input, output) and name in ("abs", "neg"):
        return _lowered(Int32Unary(name), output, (input,), target)
    return None


def _tabulated(code: OperationType, name: str, input: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """A function of one element; of codes the reference computes all results at once."""
    if not _of_codes(input, output):
        return _unary(name, input, output=output, target=target)
    table = _reference_table(code, input, output)
    return _lowered(codes.Lut8(), output, (input,), target, (table.tobytes(),))


def _reference_table(code: OperationType, input: Tensor, output: Tensor) -> Array:
    """Return what the reference makes of each code, by its bits."""
    plans = [v.plan for v in REGISTRY[code].variants if NUMPY_TYPES[v.types["T"]] == input.dtype]
    assert len(plans) == 1 and plans[0] is not None, "a matched variant has a plan"
    table: Array = plans[0](input, output=output)(all_quantized_values(input))
    return table


def _prelu(input: Tensor, alpha: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """PRELU."""
    if _are(_FLOAT, input, alpha, output):
        return _lowered(FloatBinary("prelu"), output, (input, alpha), target)
    if not _of_codes(input, alpha, output):
        return None
    scales = np.float32(input.scale), np.float32(alpha.scale), np.float32(output.scale)
    reals = float(scales[0] / scales[2]), float(scales[0] * scales[1]) / float(scales[2])
    passed, sloped = (
        codes.per_tensor_requantization(quantize_multiplier(real), bound, FusedActivationFunc.NONE, output)
        for real, bound in zip(reals, (255, 1 << 16), strict=True)
    )
    if passed is None or sloped is None:
        return None
    function = codes.QuantizedPrelu((_is_signed(input), _is_signed(alpha)), passed[0], sloped[0])
    zero_points = codes.repeated(input.zero_point, alpha.zero_point)
    return _lowered(function, output, (input, alpha), target, (zero_points, passed[1], sloped[1]))


_ORDERS = {
    OperationType.EQUAL: "==",
    OperationType.NOT_EQUAL: "!=",
    OperationType.GREATER: ">",
    OperationType.GREATER_EQUAL: ">=",
    OperationType.LESS: "<",
    OperationType.LESS_EQUAL: "<=",
}
_UNARY = ("abs", "elu", "exp", "floor", "log", "neg", "sin", "sqrt")
_TABULATED = ("hard_swish", "logistic", "rsqrt", "tanh")

RULES: Mapping[OperationType, LoweringRule] = {
    **{OperationType[name.upper()]: partial(arithmetic, name) for name in ("add", "sub", "mul", "div")},
    **{OperationType[name.upper()]: partial(_extreme, name) for name in ("maximum", "minimum")},
    **{code: partial(_comparison, order) for code, order in _ORDERS.items()},
    **{OperationType[f"LOGICAL_{name.upper()}"]: partial(_logical, name) for name in ("and", "or", "not")},
    **{
        OperationType[kind.name]: partial(_rectifier, kind.name.lower(), kind)
        for kind in (FusedActivationFunc.RELU, FusedActivationFunc.RELU1, FusedActivationFunc.RELU6)
    },
    **{OperationType[name.upper()]: partial(_unary, name) for name in _UNARY},
    **{OperationType[name.upper()]: partial(_tabulated, OperationType[name.upper()], name) for name in _TABULATED},
    OperationType.CAST: _cast,
    OperationType.DEQUANTIZE: _dequantize,
    OperationType.POW: _power,
    OperationType.PRELU: _prelu,
    OperationType.QUANTIZE: _quantize,
    OperationType.SELECT: _select,
}
