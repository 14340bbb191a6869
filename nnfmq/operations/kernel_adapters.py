"""Kernel adapters: turn a NumPy kernel into the plan of a variant.

A *kernel* is a pure function of arrays and named scalars. A *plan* is called once for each preparation, with the
Tensors of DATA and WEIGHT parameters, `output=` and the attributes by name, and returns the Run for executions. Kernels
without preparation become plans here; others, such as convolutions, are written as plans.

    stateless       the kernel computes in the type of its arrays
    fp16_via_fp32   float16 is computed in float32 and rounded once
    dequantized     every type is computed in float32 and rounded once, on private copies
    via_lut8        a function of one 8-bit value becomes a 256-entry table
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Tensor
from nnfmq.operations.fixed_point import rounded
from nnfmq.operations.quantization import all_quantized_values

_FLOAT32 = np.dtype("<f4")


def stateless(kernel: Callable[..., Any]) -> Plan:
    """Return a plan for a kernel that takes only arrays and attributes and computes in the arrays' type."""

    def plan(*tensors: Tensor, output: Tensor, **attributes: Any) -> Run:
        return partial(kernel, **attributes)

    return plan


def fp16_via_fp32(plan: Plan) -> Plan:
    """Return a plan for float16 that converts to float32, runs `plan` there and rounds the results once."""

    def fp16_plan(*tensors: Tensor | None, output: Tensor | tuple[Tensor, ...], **attributes: Any) -> Run:
        fp32_output = tuple(map(_tensor_to_fp32, output)) if isinstance(output, tuple) else _tensor_to_fp32(output)
        run = plan(*map(_tensor_to_fp32, tensors), output=fp32_output, **attributes)

        def fp16_run(*arrays: Array | None) -> Any:
            result = run(*(a if a is None or a.dtype != np.float16 else a.astype(_FLOAT32) for a in arrays))
            return tuple(map(_to_fp16, result)) if isinstance(result, tuple) else _to_fp16(result)

        return fp16_run

    return fp16_plan


def float_variants(plan: Plan, *scalars: str, level: int = op.V1_2) -> tuple[op.Variant, ...]:
    """Return the variants for float32, since `level`, and for float16 computed in float32.

    `scalars` are the variables of attributes that are scalars of the same type.
    """
    of_float32, of_float16 = dict.fromkeys(scalars, op.FLOAT32), dict.fromkeys(scalars, op.FLOAT16)
    return (
        op.Variant({"T": op.F32, **of_float32}, level, plan),
        op.Variant({"T": op.F16, **of_float16}, max(level, op.V1_2), fp16_via_fp32(plan)),
    )


def _to_fp16(result: Array) -> Array:
    return result.astype(np.float16) if result.dtype == np.float32 else result


def _tensor_to_fp32(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dtype != np.float16:
        return tensor
    return replace(tensor, dtype=_FLOAT32, value=None if tensor.value is None else tensor.value.astype(_FLOAT32))


def dequantized(plan: Plan) -> Plan:
    """Return a plan that converts each array to float32 (INT32 stays), runs `plan` there and rounds the results once.

    The Run of `plan` gets private copies of all arrays, so that it may use their contents as addresses. Quantized
    results are rounded half away from the dtype's minimum, which makes int8 results equal to uint8 results - 128.
    """

    def real_plan(*tensors: Tensor | None, output: Any, **attributes: Any) -> Run:
        several = isinstance(output, tuple)
        outputs = output if several else (output,)
        real_outputs = tuple(replace(o, dtype=_real_dtype(o)) for o in outputs)
        inner = plan(*map(_real_tensor, tensors), output=real_outputs if several else real_outputs[0], **attributes)

        def run(*arrays: Array | None) -> Any:
            pairs = zip(arrays, tensors, strict=True)
            results = inner(*(None if a is None or t is None else dequantize_array(a, t) for a, t in pairs))
            computed = zip(results if several else (results,), outputs, strict=True)
            quantized = tuple(quantize_array(values, tensor) for values, tensor in computed)
            return quantized if several else quantized[0]

        return run

    return real_plan


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.dtype.kind in "iu" and tensor.dtype != np.int32 and tensor.scale > 0


def _real_dtype(tensor: Tensor) -> np.dtype[Any]:
    return _FLOAT32 if tensor.dtype == np.float16 or _is_quantized(tensor) else tensor.dtype


def _real_tensor(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    value = None if tensor.value is None else dequantize_array(tensor.value, tensor)
    return replace(tensor, dtype=_real_dtype(tensor), value=value)


def dequantize_array(array: Array, tensor: Tensor) -> Array:
    """Return a copy of `array`: floats and quantized values as float32, other types unchanged."""
    if _is_quantized(tensor):
        return (array.astype(_FLOAT32) - np.float32(tensor.zero_point)) * np.float32(tensor.scale)
    return array.astype(_real_dtype(tensor))


def quantize_array(values: Array, tensor: Tensor) -> Array:
    """Return float32 `values` in the type of `tensor`, saturated; NaN becomes the zero point."""
    if not _is_quantized(tensor):
        return values.astype(tensor.dtype, copy=False)
    info = np.iinfo(tensor.dtype)
    above_min = values / np.float32(tensor.scale) + np.float32(tensor.zero_point - info.min)
    steps = rounded(above_min.astype(np.float64))
    known = np.where(np.isnan(steps), tensor.zero_point - info.min, steps)
    return (np.clip(known, 0, info.max - info.min) + info.min).astype(tensor.dtype)


def via_lut8(entries: Callable[..., Array]) -> Plan:
    """Return a plan for a function of one 8-bit value, tabulated once.

    `entries(quantized, input, output, **attributes)` gets all 256 values of the input's dtype, ordered by their bits.
    """

    def plan(input: Tensor, *, output: Tensor, **attributes: Any) -> Run:
        quantized = np.arange(256, dtype=np.uint8).view(input.dtype)
        return partial(lut8, np.ascontiguousarray(entries(quantized, input, output, **attributes)))

    return plan


def lut8(table: Array, quantized: Array) -> Array:
    """Return the table entries of 8-bit values, which index it by their bits."""
    return table.take(quantized.view(np.uint8))


_PAIRS = 1 << 16


def by_pairs(function: Run, first: Tensor, second: Tensor, output: Tensor) -> Run:
    """Return a function of two 8-bit values as a table of all pairs, if there are more elements than pairs."""
    if math.prod(output.shape) <= _PAIRS or first.dtype.itemsize > 1:
        return function
    values, others = (all_quantized_values(tensor) for tensor in (first, second))
    table = function(values[:, np.newaxis], others).ravel()
    return lambda a, b: table.take(a.view(np.uint8).astype(np.uint16) << 8 | b.view(np.uint8))
