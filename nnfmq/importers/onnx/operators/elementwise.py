"""Elementwise operators: arithmetic, activations, comparisons, logic, selection, conversion of types."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_FLOAT64, TENSOR_INT64, Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import CLAMPS, OperandType
from nnfmq.importers.onnx.operators.movement import broadcast_to, common_shape
from nnfmq.importers.onnx.values import Node, Value, operand_type_of

__all__ = ["CONVERTERS", "conversion", "in_float32"]


# ----------------------------------------------------------------------------------------------------------------------
# Operators of float16 that are computed in float32, with their numbers, and rounded once.


_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)


def in_float32(convert: Callable[[Node], None], kept: Collection[int] = ()) -> Callable[[Node], None]:
    """Return a converter that converts a node of float16 as one of float32; outputs at `kept` stay float32."""

    def converted(node: Node) -> None:
        if node.value(0).dtype != _HALF:
            return convert(node)
        inner = replace(node, inputs=[_widened(node, value) for value in node.inputs], results={})
        convert(inner)
        for position, value in inner.results.items():
            is_narrow = value.dtype == _SINGLE and position not in kept
            node.results[position] = (
                _cast_element(node, value, _HALF, OperandType.TENSOR_FLOAT16) if is_narrow else value
            )
        return None

    return converted


def _widened(node: Node, value: Value | None) -> Value | None:
    if value is None or value.dtype != _HALF:
        return value
    return _cast_element(node, value, _SINGLE, OperandType.TENSOR_FLOAT32)


def _cast_element(node: Node, value: Value, dtype: np.dtype[np.floating], kind: OperandType) -> Value:
    if value.array is not None:
        return Value.of(value.array.astype(dtype))
    return Value(value.shape, dtype, node.emit(OperationType.CAST, [node.operand(value)], kind))


# ----------------------------------------------------------------------------------------------------------------------
# Elementwise operators: arithmetic, activations, comparisons, logic, selection, conversion of types.


_BOOL = np.dtype(bool)
_B8, _I32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_INT32
_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
_MOVEMENTS = frozenset(("Expand", "Flatten", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"))
_CLAMPS = {function.bounds: operation for operation, function in CLAMPS.items()}
_BOUNDS_ARE_INPUTS = 11  # of Clip
_BROADCASTING_OPSET = 8  # of operators with any number of inputs
_MASK_OF_ALL = 12  # the opset from which inference has a mask of ones; before, ONNX Runtime returns zeros
_BOOL_MASK = 10  # the opset from which the mask of Dropout is bool


def _same(node: Node, operand: int) -> None:
    node.result(operand, node.value(0).shape)


def _unary(operation: Op, node: Node) -> None:
    _same(node, node.emit(operation, [node.operand(0)]))


def _arithmetic(operation: Op, node: Node) -> None:
    """Convert ADD, SUB and MUL."""
    a, b = node.value(0), node.value(1)
    found = node.emit(operation, [node.operand(a), node.operand(b), node.builder.int32(0)])
    node.result(found, common_shape(a, b))


def _div(node: Node) -> None:
    if node.value(0).dtype.kind in "iu":
        operands = [node.operand(0), node.operand(1)]
        found = node.emit(operation_code(TfliteOperation.TRUNCATED_DIV), operands)  # NNAPI's DIV rounds down
        return node.result(found, common_shape(node.value(0), node.value(1)))
    return _arithmetic(Op.DIV, node)


_SQUARED = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def _pow(node: Node) -> None:
    """Convert to POW of a type that has the bases and the exponents; integers wrap around. Squares are products."""
    base, exponent = node.value(0), node.value(1)
    shape, kind = common_shape(base, exponent), operand_type_of(base.dtype)
    if base.dtype.kind == "f" and exponent.array is not None:
        with np.errstate(over="ignore"):
            rounded = exponent.array.astype(base.dtype)
        exponent = Value.of(rounded) if np.array_equal(rounded, exponent.array) else exponent
        if kind in _SQUARED and rounded.size == 1 and rounded.item() == 2 and shape == base.shape:
            x = node.operand(0)
            node.result(node.emit(Op.MUL, [x, x, node.builder.int32(0)]), shape)
            return
    power = node.operand(exponent)
    computed = _power_type(base.dtype, exponent.dtype, kind, node.builder[power].type)
    operands = [_as_type(node, operand, computed) for operand in (node.operand(0), power)]
    node.result(_as_type(node, node.emit(Op.POW, operands), kind), shape)


def _power_type(base: np.dtype[Any], exponent: np.dtype[Any], kind: OperandType, power: OperandType) -> OperandType:
    """Return the type that has the elements of both; of integers one whose powers wrap to those of the base's type."""
    if base.kind == exponent.kind == "f" or (base.kind == "f" and exponent.kind in "iu"):
        return operand_type_of(np.result_type(base, exponent))
    if base.kind not in "iu":
        return kind
    if exponent.kind not in "iu":
        return TENSOR_FLOAT64
    if exponent == np.uint64 != base:
        raise InvalidArgument(f"exponents of uint64 are not supported with a base of {base.name}")
    return kind if power == kind else TENSOR_INT64


def _as_type(node: Node, operand: int, kind: OperandType) -> int:
    return operand if node.builder[operand].type == kind else node.emit(Op.CAST, [operand], kind)


def _comparison(operation: Op, node: Node) -> None:
    a, b = node.value(0), node.value(1)
    node.result(node.emit(operation, [node.operand(a), node.operand(b)], _B8), common_shape(a, b), _BOOL)


def _not(node: Node) -> None:
    _same(node, node.emit(Op.LOGICAL_NOT, [node.operand(0)]))


def _extremum(operation: Op, node: Node) -> None:
    """Convert Max and Min of any number of inputs."""
    values = _all_inputs(node)
    found = node.operand(values[0])
    for value in values[1:]:
        found = node.emit(operation, [found, node.operand(value)])
    node.result(found, common_shape(*values))


def _all_inputs(node: Node) -> list[Value]:
    """Return the inputs of Max, Mean, Min or Sum, which have one shape before opset 8."""
    values = [node.value(position) for position in range(len(node.inputs))]
    if node.opset < _BROADCASTING_OPSET and len({value.shape for value in values}) > 1:
        raise InvalidArgument(f"the shapes {[value.shape for value in values]} differ, which opset 7 does not allow")
    return values


def _sum(node: Node) -> None:
    values = _all_inputs(node)
    node.result(_total(node, values), common_shape(*values))


def _mean(node: Node) -> None:
    values = _all_inputs(node)
    total = _total(node, values)
    count = node.filled(node.builder[total].type, len(values))
    node.result(node.emit(Op.DIV, [total, count, node.builder.int32(0)]), common_shape(*values))


def _total(node: Node, values: list[Value]) -> int:
    found = node.operand(values[0])
    for value in values[1:]:
        found = node.emit(Op.ADD, [found, node.operand(value), node.builder.int32(0)])
    return found


def _relu(node: Node) -> None:
    x = node.operand(0)
    if node.builder[x].type in _FLOATS and len(node.shape(x)) <= 4:
        return _same(node, node.emit(Op.RELU, [x]))
    return _same(node, node.emit(Op.MAXIMUM, [x, node.filled(node.builder[x].type, 0.0)]))


def _clip(node: Node) -> None:
    x = node.operand(0)
    bounds: dict[str, int] = {}
    for position, name in ((1, "min"), (2, "max")):
        if node.given(position):
            bounds[name] = node.operand(position)
        elif name in node.attributes:
            bounds[name] = node.filled(node.builder[x].type, node.attribute(name, 0.0))
        elif node.value(0).dtype.kind == "f":
            bounds[name] = node.filled(node.builder[x].type, _default_bound(node, name))
    clamp = _clamp_operation(node)
    if clamp is not None:
        return _same(node, node.emit(clamp, [x]))
    if "min" in bounds:
        x = node.emit(Op.MAXIMUM, [x, bounds["min"]])
    if "max" in bounds:
        x = node.emit(Op.MINIMUM, [x, bounds["max"]])
    return _same(node, x)


def _default_bound(node: Node, name: str) -> float:
    """Return a bound of Clip that is omitted: the last finite float, which old opsets have as a float32 attribute."""
    limits = np.finfo(np.float32 if node.opset < _BOUNDS_ARE_INPUTS else node.value(0).dtype.type)
    return float(getattr(limits, name))


def _clamp_operation(node: Node) -> Op | None:
    """Return the HAL's operation with the constant limits of a Clip of floats, None if there is none."""
    limits = [node.inputs[i].array if node.given(i) else None for i in (1, 2)]  # type: ignore[union-attr]
    if any(limit is None or limit.size != 1 for limit in limits) or operand_type_of(node.value(0).dtype) not in _FLOATS:
        return None
    low, high = (float(limit.reshape(-1)[0]) for limit in limits if limit is not None)
    return _CLAMPS.get((low, high)) if len(node.value(0).shape) <= 4 else None


def _leaky_relu(node: Node) -> None:
    x = node.operand(0)
    alpha = node.filled(node.builder[x].type, node.attribute("alpha", 0.01))
    _same(node, node.emit(Op.PRELU, [x, alpha]))


def _prelu(node: Node) -> None:
    if common_shape(node.value(0), node.value(1)) != node.value(0).shape:
        raise InvalidArgument(f"a slope of shape {node.value(1).shape} does not fit an input of {node.value(0).shape}")
    if node.value(0).dtype.kind in "iu":
        x, none = node.operand(0), node.builder.int32(0)
        zero = node.filled(node.builder[x].type, 0)
        above, below = (node.emit(operation, [x, zero]) for operation in (Op.MAXIMUM, Op.MINIMUM))
        sloping = node.emit(Op.MUL, [below, node.operand(1), none])
        return _same(node, node.emit(Op.ADD, [above, sloping, none]))
    return _same(node, node.emit(Op.PRELU, [node.operand(0), node.operand(1)]))


def _elu(node: Node) -> None:
    x = node.operand(0)
    alpha = node.scalar(node.builder[x].type, node.attribute("alpha", 1.0))
    _same(node, node.emit(Op.ELU, [x, alpha]))


def _hard_sigmoid(node: Node) -> None:
    """Convert to max(0, min(1, alpha·x + beta))."""
    x = node.operand(0)
    kind, none = node.builder[x].type, node.builder.int32(0)
    x = node.emit(Op.MUL, [x, node.filled(kind, node.attribute("alpha", 0.2)), none])
    x = node.emit(Op.ADD, [x, node.filled(kind, node.attribute("beta", 0.5)), none])
    x = node.emit(Op.MINIMUM, [x, node.filled(kind, 1.0)])
    _same(node, node.emit(Op.MAXIMUM, [x, node.filled(kind, 0.0)]))


def _reciprocal(node: Node) -> None:
    x = node.operand(0)
    _same(node, node.emit(Op.DIV, [node.filled(node.builder[x].type, 1.0), x, node.builder.int32(0)]))


def _ceil(node: Node) -> None:
    x = node.operand(0)
    for operation in (Op.NEG, Op.FLOOR, Op.NEG):
        x = node.emit(operation, [x])
    _same(node, x)


def _round(node: Node) -> None:
    _same(node, node.emit(operation_code(TfliteOperation.ROUND), [node.operand(0)]))


def _where(node: Node) -> None:
    shape = common_shape(*(node.value(position) for position in range(3)))
    operands = [broadcast_to(node, node.operand(position), shape) for position in range(3)]
    kind = node.builder[operands[1]].type
    if kind == _B8:
        operands = [operands[0], *(node.from_bool(operand) for operand in operands[1:])]
    found = node.emit(Op.SELECT, operands, node.builder[operands[1]].type)
    node.result(node.to_bool(found) if kind == _B8 else found, shape, node.value(1).dtype)


def _cast(node: Node) -> None:
    from nnfmq.importers.onnx.file import dtype_of

    _require_rounding_up(node)
    _cast_to(node, dtype_of(node.attribute("to", 0)))


def _cast_like(node: Node) -> None:
    _require_rounding_up(node)
    _cast_to(node, node.value(1).dtype)


def _require_rounding_up(node: Node) -> None:
    if node.attribute("round_mode", "up") != "up":
        raise InvalidArgument("attribute round_mode is not supported: it must be up")


def _cast_to(node: Node, dtype: np.dtype[Any]) -> None:
    cast_first = _cast_before_movement(node, node.value(0), dtype)
    if cast_first is not None:
        node.results[0] = cast_first
        return
    x, kind = node.operand(0), operand_type_of(dtype)
    source = node.builder[x].type
    if kind == TENSOR_INT64 and source in (_B8, _I32):
        kind = _I32  # which all its elements fit
    if source == kind:
        found = x
    elif source == _B8:
        found = node.from_bool(x, kind)
    else:
        found = node.to_bool(x) if kind == _B8 else node.emit(conversion(source, kind), [x], kind)
    node.result(found, node.value(0).shape, dtype)


def conversion(source: OperandType, kind: OperandType) -> Op:
    """Return the HAL's CAST, or the extension's, which makes floats beyond INT32 its minimum, not the nearest."""
    is_lossy = kind == _I32 and source in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
    return extended_code(Op.CAST, Scheme.WIDER) if is_lossy else Op.CAST


def _cast_before_movement(node: Node, value: Value, dtype: np.dtype[Any]) -> Value | None:
    """Return elements of 64 bits cast to 32 or fewer before a movement, which is faster then, not after it.

    None if no movement has made the value, or if it has no such elements.
    """
    mover = value.node
    is_wide = value.operand is not None and node.builder[value.operand].type == TENSOR_INT64
    if not is_wide or mover is None or mover.operator not in _MOVEMENTS or mover.builder is not node.builder:
        return None
    if operand_type_of(dtype) not in (*_FLOATS, _I32):
        return None
    from nnfmq.importers.onnx.operators import CONVERTERS as all_converters  # which import this module

    cast = replace(node, inputs=[mover.value(0)], results={})
    _cast_to(cast, dtype)
    movement = replace(mover, inputs=[cast.results[0], *mover.inputs[1:]], results={})
    all_converters[mover.operator](movement)
    return movement.results[0]


def _identity(node: Node) -> None:
    value = node.value(0)
    node.results[0] = value


def _dropout(node: Node) -> None:
    is_training = node.given(2) and bool(node.constant(2, "training_mode").any())
    if is_training and not (node.given(1) and float(node.constant(1, "ratio").reshape(-1)[0]) == 0):
        raise InvalidArgument("training is not supported")
    if node.used(1):
        shape = node.value(0).shape
        node.builder.reserve(node.value(0).size)  # before the mask exists
        mask_type = np.dtype(bool) if node.opset >= _BOOL_MASK else node.value(0).dtype
        node.results[1] = Value.of(np.full(shape, node.opset >= _MASK_OF_ALL, mask_type))
    _identity(node)


_UNARY = {"Abs": Op.ABS, "Exp": Op.EXP, "Floor": Op.FLOOR, "HardSwish": Op.HARD_SWISH, "Log": Op.LOG, "Neg": Op.NEG,
          "Sigmoid": Op.LOGISTIC, "Sin": Op.SIN, "Sqrt": Op.SQRT, "Tanh": Op.TANH}  # fmt: skip
_COMPARISONS = {"And": Op.LOGICAL_AND, "Equal": Op.EQUAL, "Greater": Op.GREATER, "GreaterOrEqual": Op.GREATER_EQUAL,
                "Less": Op.LESS, "LessOrEqual": Op.LESS_EQUAL, "Or": Op.LOGICAL_OR, "Xor": Op.NOT_EQUAL}  # fmt: skip

_ELEMENTWISE_CONVERTERS: dict[str, Callable[[Node], None]] = {
    **{name: partial(_unary, operation) for name, operation in _UNARY.items()},
    **{name: partial(_comparison, operation) for name, operation in _COMPARISONS.items()},
    **{name: partial(_arithmetic, Op[name.upper()]) for name in ("Add", "Sub", "Mul")},
    "Cast": _cast,
    "CastLike": _cast_like,
    "Ceil": _ceil,
    "Clip": _clip,
    "Div": _div,
    "Dropout": _dropout,
    "Elu": in_float32(_elu),
    "HardSigmoid": in_float32(_hard_sigmoid),
    "Identity": _identity,
    "LeakyRelu": in_float32(_leaky_relu),
    "Max": partial(_extremum, Op.MAXIMUM),
    "Mean": _mean,
    "Min": partial(_extremum, Op.MINIMUM),
    "Not": _not,
    "PRelu": _prelu,
    "Pow": _pow,
    "Reciprocal": _reciprocal,
    "Relu": _relu,
    "Round": _round,
    "Sum": _sum,
    "Where": _where,
}


# ----------------------------------------------------------------------------------------------------------------------
# Functions of real numbers that the HAL does not have: trigonometric and hyperbolic ones, IsNaN, IsInf, Sign, Mod.


_FLOOR_MOD_OF_FLOATS = 28  # the opset from which floats need no fmod
_BYTES, _F32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_FLOAT32
_BITS = {_F32: OperandType.TENSOR_INT32, TENSOR_FLOAT64: TENSOR_INT64}
"""The type of integers whose sign is that of a float's bits."""


_FUNCTIONS = {
    "Acos": TfliteOperation.ACOS, "Acosh": TfliteOperation.ACOSH, "Asin": TfliteOperation.ASIN,
    "Asinh": TfliteOperation.ASINH, "Atan": TfliteOperation.ATAN, "Atanh": TfliteOperation.ATANH,
    "Cos": TfliteOperation.COS, "Cosh": TfliteOperation.COSH, "Erf": TfliteOperation.ERF, "Mish": TfliteOperation.MISH,
    "Sign": TfliteOperation.SIGN, "Sinh": TfliteOperation.SINH, "Softplus": TfliteOperation.SOFTPLUS,
    "Tan": TfliteOperation.TAN,
}  # fmt: skip


def _function(operation: TfliteOperation, node: Node) -> None:
    """Convert a function of one real number, which an operation of the extension computes."""
    node.result(node.emit(operation_code(operation), [node.operand(0)]), node.value(0).shape)


def _is_nan(node: Node) -> None:
    x = node.operand(0)
    node.result(node.emit(Op.NOT_EQUAL, [x, x], _BYTES), node.value(0).shape, _BOOL)


def _is_inf(node: Node) -> None:
    x = node.operand(0)
    signs = {name: node.attribute(f"detect_{name}", 1) for name in ("positive", "negative")}
    if all(signs.values()):
        x = node.emit(Op.ABS, [x])
    limit = math.inf if signs["positive"] else -math.inf if signs["negative"] else math.nan  # no number is NaN
    number = node.filled(node.builder[x].type, limit)
    node.result(node.emit(Op.EQUAL, [x, number], _BYTES), node.value(0).shape, _BOOL)


def _mod(node: Node) -> None:
    """Convert the remainder that has the divisor's sign; with `fmod`, which floats need, it has the dividend's."""
    a, b = node.value(0), node.value(1)
    shape, operands = common_shape(a, b), [node.operand(0), node.operand(1)]
    if a.dtype.kind == "f" and not node.attribute("fmod", 0) and node.opset < _FLOOR_MOD_OF_FLOATS:
        raise InvalidArgument(f"opset {node.opset} requires fmod = 1 for floats")
    kind, has_sign_of_dividend = node.builder[operands[0]].type, node.attribute("fmod", 0)
    if has_sign_of_dividend and a.dtype.kind in "iu":
        return node.result(_rest(node, *operands), shape)
    if kind == OperandType.TENSOR_FLOAT16:
        operands = [node.emit(Op.CAST, [operand], _F32) for operand in operands]
    dividend, computed = operands[0], node.builder[operands[0]].type
    if has_sign_of_dividend:
        operands = [node.emit(Op.ABS, [operand]) for operand in operands]
    found = node.emit(operation_code(TfliteOperation.FLOOR_MOD), operands)
    if has_sign_of_dividend:
        bits = node.emit(operation_code(TfliteOperation.BITCAST), [dividend], _BITS[computed])  # -0 is negative, too
        is_negative = node.emit(Op.LESS, [bits, node.filled(_BITS[computed], 0)], _BYTES)
        pair = [node.emit(Op.NEG, [found]), found]
        chosen = [broadcast_to(node, operand, shape) for operand in (is_negative, *pair)]
        found = node.emit(Op.SELECT, chosen, computed)
    return node.result(found if computed == kind else node.emit(Op.CAST, [found], kind), shape)


def _rest(node: Node, dividend: int, divisor: int) -> int:
    """Return the remainder of a quotient of integers that is rounded towards zero."""
    quotient = node.emit(operation_code(TfliteOperation.TRUNCATED_DIV), [dividend, divisor])
    none = node.builder.int32(0)
    return node.emit(Op.SUB, [dividend, node.emit(Op.MUL, [quotient, divisor, none]), none])


_REALS_CONVERTERS: dict[str, Callable[[Node], None]] = {
    **{name: partial(_function, operation) for name, operation in _FUNCTIONS.items()},
    "IsInf": _is_inf,
    "IsNaN": _is_nan,
    "Mod": _mod,
}

CONVERTERS: dict[str, Callable[[Node], None]] = {**_ELEMENTWISE_CONVERTERS, **_REALS_CONVERTERS}
