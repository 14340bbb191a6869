"""Operations of the HAL for more operand types and for ranks above 4 (`hal.wider_operations`).

Overloads, plans and constraints are those of the HAL's operations. Arithmetic on elements of 64 bits and UINT32 is that
of these types: integers wrap around, and there are no fused activations.

CAST  to TENSOR_BOOL8 is a comparison with 0; to a smaller integer type it keeps the low bits; from floats to integers
      of 32 and 64 bits it rounds toward zero, and numbers beyond the type become what x86 processors return for them
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.extensions import TENSOR_COMPLEX64, WIDE_TYPES, TfliteOperation
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import (
    activation,
    batch_matmul,
    binary_arithmetic,
    comparison,
    gather,
    min_max_select,
    padding,
    permute,
    quantize_cast,
    reduction,
    reshape_concat,
    slicing,
    unary,
)
from nnfmq.operations.binary_arithmetic import plan_int32
from nnfmq.operations.declaration import (
    B8,
    F16,
    F32,
    I32,
    INT32,
    Q8,
    Q8S,
    V1_2,
    Array,
    Declaration,
    Plan,
    Run,
    Tensor,
    Variant,
)
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.quantize_cast import plan_cast, plan_identity
from nnfmq.operations.reduction import Axes, reduction_plan
from nnfmq.operations.shapes import broadcast_shapes, same_shape
from nnfmq.operations.tflite_extension.declaration import F64, SHAPES_OF_ANY_RANK, WIDE_INTEGERS, own_code

_FAMILIES = (
    activation,
    batch_matmul,
    binary_arithmetic,
    comparison,
    gather,
    min_max_select,
    padding,
    permute,
    quantize_cast,
    reduction,
    reshape_concat,
    slicing,
    unary,
)
_HAL: dict[OperationType, Declaration] = {d.code: d for family in _FAMILIES for d in family.DECLARATIONS}


def _wider(
    name: str, types: tuple[OperandType, ...] = (), plan: Plan | None = None, shape: Callable[..., Any] | None = None
) -> Declaration:
    """Return the operation `name` of the HAL for further `types` of T, with another shape rule if one is given.

    `plan` is by default that for FLOAT32.
    """
    base = _HAL[OperationType[name]]
    first = base.variants[0]
    further = (Variant({**first.types, "T": kind}, V1_2, plan or first.plan) for kind in types)
    levels = (replace(variant, level=V1_2) for variant in base.variants)
    return replace(
        base,
        code=own_code(TfliteOperation[name]),
        since=V1_2,
        overloads=tuple(replace(each, arities=dict.fromkeys(each.arities, V1_2)) for each in base.overloads),
        variants=(*levels, *further),
        shape=shape or SHAPES_OF_ANY_RANK.get(name, base.shape),
        level=lambda inputs, output: V1_2,
    )


def _pad_v2() -> Declaration:
    declaration = _wider("PAD_V2")
    plan = declaration.variants[0].plan
    further = (Variant({"T": kind, "V": INT32}, V1_2, plan) for kind in (I32, B8))
    return replace(declaration, variants=(*declaration.variants, *further))


def _integer_mean(input: Array, axes: Axes) -> Any:
    """Return the mean rounded towards zero. The sum of the quotients and that of the rests do not overflow."""
    count = math.prod(input.shape[axis] for axis in axes)
    quotients, rests = np.divmod(input, input.dtype.type(count))
    above, rest = np.divmod(np.sum(rests, axis=axes, dtype=np.int64), count)
    down = np.sum(quotients, axis=axes, dtype=input.dtype) + above.astype(input.dtype)
    return down + ((down < 0) & (rest != 0)).astype(input.dtype)


def _wrapped(reduce: Callable[..., Any]) -> Plan:
    def kernel(input: Array, axes: Axes) -> Any:
        return reduce(input, axis=axes, dtype=input.dtype)

    return reduction_plan(kernel)


def integer_power(base: Array, exponent: Array) -> Array:
    """Return base ** exponent of integers, wrapped around; a negative exponent gives 0, or 1 and -1 of these bases."""
    base, exponent = np.broadcast_arrays(base, exponent)
    result: Array = np.power(base, np.maximum(exponent, 0))
    negative = exponent < 0
    if negative.any():
        odd = np.where(exponent % 2 == 0, 1, base)
        result = np.where(negative, np.where(np.abs(base) == 1, odd, 0), result).astype(base.dtype)
    return result


def plan_wrapping_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan a conversion of integers that keeps the low bits."""
    return partial(np.ndarray.astype, dtype=output.dtype)


def plan_truth(input: Tensor, *, output: Tensor) -> Run:
    """Plan a comparison with 0."""
    return lambda values: (values != 0).view(np.uint8)


def plan_truncating_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan a conversion of floats to integers as x86 processors compute it."""
    if output.dtype == np.uint64:
        return _to_uint64
    if output.dtype == np.int32:
        return _to_int32
    if output.dtype == np.uint32 and input.dtype != np.float16:  # which ONNX Runtime converts by way of int64
        return _to_uint32
    return lambda values: _to_int64(values).astype(output.dtype)


_SIGN = np.int64(-1 << 63)


def _to_int64(values: Array) -> Array:
    """Return floats as int64: its minimum for what it does not have."""
    real = values.astype(np.float64)
    inside = (real >= -(2.0**63)) & (real < 2.0**63)
    return np.where(inside, np.where(inside, real, 0).astype(np.int64), _SIGN)


def _to_int32(values: Array) -> Array:
    """Return floats as int32: its minimum for what it does not have."""
    wide = _to_int64(values)
    low = wide.astype(np.int32)
    return np.where(low == wide, low, np.int32(-1 << 31))


def _to_uint32(values: Array) -> Array:
    """Return floats as uint32: from 2^31 on, it is 2^31 away from an int32."""
    real = values.astype(np.float64)
    is_high = real >= 2.0**31
    bits = _to_int32(np.where(is_high, real - 2.0**31, real))
    result: Array = np.where(is_high, bits ^ np.int32(-1 << 31), bits).view(np.uint32)
    return result


def _to_uint64(values: Array) -> Array:
    """Return floats as uint64: from 2^63 on, it is 2^63 away from an int64."""
    real = values.astype(np.float64)
    is_high = real >= 2.0**63
    bits = _to_int64(np.where(is_high, real - 2.0**63, real))
    result: Array = np.where(is_high, bits ^ _SIGN, bits).view(np.uint64)
    return result


def _from_truth(input: Tensor, *, output: Tensor) -> Run:
    return lambda values: (values != 0).astype(output.dtype)


def _cast_plan(source: OperandType, target: OperandType) -> Plan:
    if source == target:
        return plan_identity
    if target == B8:
        return plan_truth
    if source == B8:
        return _from_truth
    if source in _FLOATS and target not in _FLOATS and (source == F64 or target in (I32, *WIDE_INTEGERS)):
        return plan_truncating_cast
    return plan_cast if {source, target} & {F32, F16} else plan_wrapping_cast


_FLOATS = (F32, F16, F64)


def _cast() -> Declaration:
    pairs = itertools.product((F32, F16, I32, Q8, Q8S, B8, *WIDE_TYPES), repeat=2)
    variants = tuple(Variant({"T": source, "O": target}, V1_2, _cast_plan(source, target)) for source, target in pairs)
    return replace(_wider("CAST"), variants=variants, zero_sized=True)


def _with_wide_types(
    declaration: Declaration, plan: Plan | None = None, types: tuple[OperandType, ...] = WIDE_TYPES
) -> Declaration:
    """Return a declaration with variants for elements of 64 bits and UINT32, by default with the plan for FLOAT32."""
    first = declaration.variants[0]
    further = (Variant({**first.types, "T": kind}, V1_2, plan or first.plan) for kind in types)
    return replace(declaration, variants=(*declaration.variants, *further))


def _arithmetic(name: str, ufunc: np.ufunc, types: tuple[OperandType, ...] = WIDE_TYPES) -> Declaration:
    plan = partial(plan_int32, ufunc)
    return _with_wide_types(_wider(name, shape=broadcast_shapes), plan, types)


def _mean() -> Declaration:
    declaration = _wider("MEAN", (I32, *WIDE_INTEGERS), reduction_plan(_integer_mean))
    return _with_wide_types(declaration, types=(F64,))


_REST, _FEW = (I32, B8, *WIDE_TYPES), (B8, *WIDE_TYPES)
_OF_FLOATS = ("EXP", "LOG", "SQRT", "RSQRT", "SIN", "FLOOR", "LOGISTIC", "TANH")
_OF_NUMBERS = ("ABS", "NEG", "BATCH_MATMUL", "ARGMAX", "ARGMIN")
_OF_PAIRS = ("MAXIMUM", "MINIMUM", *(code.name for code in comparison.COMPARISONS))

DECLARATIONS = (
    _arithmetic("ADD", np.add),
    _arithmetic("SUB", np.subtract),
    _arithmetic("MUL", np.multiply),
    _arithmetic("DIV", np.divide, (F64,)),
    _with_wide_types(_wider("POW", (I32, *WIDE_INTEGERS), stateless(integer_power)), types=(F64,)),
    _wider("RESHAPE", (*_FEW, TENSOR_COMPLEX64)),
    _wider("SQUEEZE", (*_REST, TENSOR_COMPLEX64)),
    _wider("EXPAND_DIMS", (*_FEW, TENSOR_COMPLEX64)),
    _wider("CONCATENATION", _REST),
    _wider("PACK", _FEW),
    _wider("SLICE", _FEW),
    _wider("STRIDED_SLICE", _REST),
    _wider("SPLIT", _FEW),
    _wider("PAD", _REST),
    _pad_v2(),
    _wider("MIRROR_PAD", _FEW),
    _wider("TRANSPOSE", _REST),
    _wider("REVERSE", _FEW),
    _wider("TILE", _FEW),
    _wider("GATHER", _FEW),
    _wider("SELECT", _FEW),
    _mean(),
    _wider("REDUCE_MAX", (I32, *WIDE_TYPES)),
    _wider("REDUCE_MIN", (I32, *WIDE_TYPES)),
    _wider("REDUCE_SUM", (I32, *WIDE_TYPES), _wrapped(np.add.reduce)),
    _wider("REDUCE_PROD", (I32, *WIDE_TYPES), _wrapped(np.multiply.reduce)),
    _cast(),
    *(_wider(name, WIDE_TYPES) for name in (*_OF_NUMBERS, *_OF_PAIRS)),
    *(_wider(name, (F64,), shape=same_shape) for name in _OF_FLOATS),
    _wider("PRELU", (F64,)),
)
