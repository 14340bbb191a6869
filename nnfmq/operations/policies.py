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


def direct(kernel: Callable[..., Any]) -> Plan:
    """Plan a kernel that computes in the type of its arrays and needs only the controls."""

    def plan(*tensors: Tensor, output: Tensor, **controls: Any) -> Run:
        return partial(kernel, **controls)

    return plan


def half(plan: Plan) -> Plan:
    """Plan float16 by converting to float32, computing there, and rounding once."""

    def planned(*tensors: Tensor | None, output: Tensor | tuple[Tensor, ...], **controls: Any) -> Run:
        wide_output = tuple(map(_widened, output)) if isinstance(output, tuple) else _widened(output)
        run = plan(*map(_widened, tensors), output=wide_output, **controls)

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


def table(entries: Callable[..., Array]) -> Plan:
    """Plan a function of one 8-bit code: `entries(codes, input, output, **controls)` is computed for all 256 once."""

    def plan(input: Tensor, *, output: Tensor, **controls: Any) -> Run:
        codes = np.arange(256, dtype=np.uint8).view(input.dtype)
        return partial(look_up, np.ascontiguousarray(entries(codes, input, output, **controls)))

    return plan


def look_up(values: Array, codes: Array) -> Array:
    """Return values[code] for 8-bit codes, signed ones by their bits."""
    return values.take(codes.view(np.uint8))
