"""Operations of the HAL for more operand types and for ranks above 4 (`hal.wider_operations`).

Overloads, plans and constraints are those of the HAL's operations.

CAST  to TENSOR_BOOL8 is a comparison with 0; to a smaller integer type it keeps the low bits
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.tflite_codes import TENSOR_COMPLEX64, TfliteOperation
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import (
    binary_arithmetic,
    gather_topk,
    min_max_select,
    padding,
    permute,
    quantize_cast,
    reduce_argmax,
    reshape_concat,
    slicing,
)
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.quantize_cast import plan_cast, plan_identity
from nnfmq.operations.reduce_argmax import Axes, reduction_plan
from nnfmq.operations.shapes import broadcast_shapes
from nnfmq.operations.signature import (
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
    Shape,
    Tensor,
    Variant,
)
from nnfmq.operations.tflite_extension.declaring import own_code

_FAMILIES = (
    binary_arithmetic,
    gather_topk,
    min_max_select,
    padding,
    permute,
    quantize_cast,
    reduce_argmax,
    reshape_concat,
    slicing,
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
        shape=shape or base.shape,
        level=lambda inputs, output: V1_2,
    )


def padded_shape_of_any_rank(input: Shape, *, paddings: Array, value: float = 0) -> Shape:
    """Return the input's shape, of any rank, plus the paddings."""
    return padding.padded(input, paddings)


def _pad_v2() -> Declaration:
    declaration = _wider("PAD_V2", shape=padded_shape_of_any_rank)
    plan = declaration.variants[0].plan
    further = (Variant({"T": kind, "V": INT32}, V1_2, plan) for kind in (I32, B8))
    return replace(declaration, variants=(*declaration.variants, *further))


def _integer_mean(input: Array, axes: Axes) -> Any:
    sums = np.sum(input, axis=axes, dtype=np.int64)
    count = input.size // max(sums.size, 1)
    return (np.sign(sums) * (np.abs(sums) // count)).astype(input.dtype)


def _wrapped(reduce: Callable[..., Any]) -> Plan:
    def kernel(input: Array, axes: Axes) -> Any:
        return reduce(input, axis=axes, dtype=input.dtype)

    return reduction_plan(kernel)


def integer_power(base: Array, exponent: Array) -> Array:
    """Return base ** exponent in INT32, wrapped around; a negative exponent gives 0, or 1 and -1 of these bases."""
    base, exponent = np.broadcast_arrays(base, exponent)
    result: Array = np.power(base, np.maximum(exponent, 0))
    negative = exponent < 0
    if negative.any():
        odd = np.where(exponent % 2 == 0, 1, base)
        result = np.where(negative, np.where(np.abs(base) == 1, odd, 0), result).astype(np.int32)
    return result


def plan_wrapping_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan a conversion of integers that keeps the low bits."""
    return partial(np.ndarray.astype, dtype=output.dtype)


def plan_truth(input: Tensor, *, output: Tensor) -> Run:
    """Plan a comparison with 0."""
    return lambda values: (values != 0).view(np.uint8)


def _from_truth(input: Tensor, *, output: Tensor) -> Run:
    return lambda values: (values != 0).astype(output.dtype)


def _cast_plan(source: OperandType, target: OperandType) -> Plan:
    if source == target:
        return plan_identity
    if target == B8:
        return plan_truth
    if source == B8:
        return _from_truth
    return plan_cast if F32 in (source, target) or F16 in (source, target) else plan_wrapping_cast


def _cast() -> Declaration:
    pairs = itertools.product((F32, F16, I32, Q8, Q8S, B8), repeat=2)
    variants = tuple(Variant({"T": source, "O": target}, V1_2, _cast_plan(source, target)) for source, target in pairs)
    return replace(_wider("CAST"), variants=variants)


_REST, _FEW = (I32, B8), (B8,)

DECLARATIONS = (
    *(_wider(name, shape=broadcast_shapes) for name in ("ADD", "SUB", "MUL", "DIV")),
    _wider("POW", (I32,), stateless(integer_power)),
    _wider("RESHAPE", (*_FEW, TENSOR_COMPLEX64), shape=reshape_concat.reshaped),
    _wider("SQUEEZE", (*_REST, TENSOR_COMPLEX64), shape=reshape_concat.squeezed),
    _wider("EXPAND_DIMS", (*_FEW, TENSOR_COMPLEX64)),
    _wider("CONCATENATION", _REST, shape=reshape_concat.concatenated),
    _wider("PACK", _FEW),
    _wider("SLICE", _FEW),
    _wider("STRIDED_SLICE", _REST, shape=slicing.strided),
    _wider("SPLIT", _FEW),
    _wider("PAD", _REST, shape=padded_shape_of_any_rank),
    _pad_v2(),
    _wider("MIRROR_PAD", _FEW),
    _wider("TRANSPOSE", _REST, shape=permute.permuted),
    _wider("REVERSE", _FEW),
    _wider("TILE", _FEW),
    _wider("GATHER", _FEW),
    _wider("SELECT", _FEW),
    _wider("MEAN", (I32,), reduction_plan(_integer_mean), shape=reduce_argmax.reduced),
    _wider("REDUCE_MAX", (I32,), shape=reduce_argmax.reduced),
    _wider("REDUCE_MIN", (I32,), shape=reduce_argmax.reduced),
    _wider("REDUCE_SUM", (I32,), _wrapped(np.add.reduce), shape=reduce_argmax.reduced),
    _wider("REDUCE_PROD", (I32,), _wrapped(np.multiply.reduce), shape=reduce_argmax.reduced),
    _cast(),
)
