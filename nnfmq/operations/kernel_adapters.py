"""How a plain kernel becomes the plan of a variant: as it is, through a 256-entry table, or through float32.

A *kernel* is a pure function of arrays and named scalars. A *plan* is called once per preparation with what is known
then (Tensors of DATA and WEIGHT parameters, `output=`, controls by name) and returns the function that runs.
Kernels that have nothing to prepare become plans here; the others (convolutions, ...) are written as plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nnfmq.operations.signature import Array, Plan, Run, Tensor

_FLOAT32 = np.dtype("<f4")


def stateless(kernel: Callable[..., Any]) -> Plan:
    """Plan a kernel that computes in the type of its arrays and needs only the controls."""

    def plan(*tensors: Tensor, output: Tensor, **attributes: Any) -> Run:
        return partial(kernel, **attributes)

    return plan


def fp16_via_fp32(plan: Plan) -> Plan:
    """Plan float16 by converting to float32, computing there, and rounding once."""

    def planned(*tensors: Tensor | None, output: Tensor | tuple[Tensor, ...], **attributes: Any) -> Run:
        wide_output = tuple(map(_widened, output)) if isinstance(output, tuple) else _widened(output)
        run = plan(*map(_widened, tensors), output=wide_output, **attributes)

        def widened_run(*arrays: Array | None) -> Any:
            result = run(*(a if a is None or a.dtype != np.float16 else a.astype(_FLOAT32) for a in arrays))
            return tuple(map(_narrowed, result)) if isinstance(result, tuple) else _narrowed(result)

        return widened_run

    return planned


def _narrowed(result: Array) -> Array:
    return result.astype(np.float16) if result.dtype == np.float32 else result


def _widened(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dtype != np.float16:
        return tensor
    return replace(tensor, dtype=_FLOAT32, value=None if tensor.value is None else tensor.value.astype(_FLOAT32))


def dequantized(plan: Plan) -> Plan:
    """Plan any type by converting each array to float32 (INT32 stays), computing there, and rounding once.

    The plan's function gets private copies of everything: what they say may become addresses. Codes are rounded half
    away from the type's least code, so that int8 results are the uint8 ones less 128.
    """

    def planned(*tensors: Tensor | None, output: Any, **attributes: Any) -> Run:
        several = isinstance(output, tuple)
        outputs = output if several else (output,)
        described = tuple(replace(o, dtype=_real_dtype(o)) for o in outputs)
        inner = plan(*map(_as_real, tensors), output=described if several else described[0], **attributes)

        def run(*arrays: Array | None) -> Any:
            pairs = zip(arrays, tensors, strict=True)
            results = inner(*(None if a is None or t is None else dequantize_array(a, t) for a, t in pairs))
            stored = zip(results if several else (results,), outputs, strict=True)
            written = tuple(quantize_array(values, tensor) for values, tensor in stored)
            return written if several else written[0]

        return run

    return planned


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.dtype.kind in "iu" and tensor.dtype != np.int32 and tensor.scale > 0


def _real_dtype(tensor: Tensor) -> np.dtype[Any]:
    return _FLOAT32 if tensor.dtype == np.float16 or _is_quantized(tensor) else tensor.dtype


def _as_real(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    value = None if tensor.value is None else dequantize_array(tensor.value, tensor)
    return replace(tensor, dtype=_real_dtype(tensor), value=value)


def dequantize_array(array: Array, tensor: Tensor) -> Array:
    """Return a private copy of `array`: floats and codes as float32, anything else as it is."""
    if _is_quantized(tensor):
        return (array.astype(_FLOAT32) - np.float32(tensor.zero_point)) * np.float32(tensor.scale)
    return array.astype(_real_dtype(tensor))


def quantize_array(values: Array, tensor: Tensor) -> Array:
    """Return float32 `values` in the type of `tensor`; NaN becomes the zero point."""
    if not _is_quantized(tensor):
        return values.astype(tensor.dtype, copy=False)
    info = np.iinfo(tensor.dtype)
    codes = values / np.float32(tensor.scale) + np.float32(tensor.zero_point - info.min)
    rounded = np.copysign(np.floor(np.abs(codes.astype(np.float64)) + 0.5), codes)
    known = np.where(np.isnan(rounded), tensor.zero_point - info.min, rounded)
    return (np.clip(known, 0, info.max - info.min) + info.min).astype(tensor.dtype)


def via_lut8(entries: Callable[..., Array]) -> Plan:
    """Plan a function of one 8-bit code: `entries(codes, input, output, **controls)` is computed for all 256 once."""

    def plan(input: Tensor, *, output: Tensor, **attributes: Any) -> Run:
        codes = np.arange(256, dtype=np.uint8).view(input.dtype)
        return partial(lut8, np.ascontiguousarray(entries(codes, input, output, **attributes)))

    return plan


def lut8(values: Array, codes: Array) -> Array:
    """Return values[code] for 8-bit codes, signed ones by their bits."""
    return values.take(codes.view(np.uint8))
