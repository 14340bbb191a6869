"""BATCH_MATMUL: the right matrices are packed, and then it is a product whose weights come with the request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from nnfmq.engines.compiled.kernels.arithmetic import Codes, Floats
from nnfmq.engines.compiled.kernels.packing import Packing
from nnfmq.engines.compiled.kernels.product_plan import plan_product
from nnfmq.engines.compiled.kernels.product_shape import ProductShape
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION, Codomain, Requantization, Rounding
from nnfmq.engines.compiled.lowering import Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.lowering.data_movement_rules import turned
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.quantization import OutputMultipliers, dtype_range
from nnfmq.operations.shapes import WindowDimension
from nnfmq.operations.signature import Shape, Tensor

__all__ = ["RULES"]

_LEFT, _RIGHT, _FIRST_MADE = 0, 1, 2
_ONE = WindowDimension(1, 1, 1, 0, 0, 1)
_LARGEST_PRODUCT = 1 << 16
_FLOATS, _DRAFT = Floats(-np.inf, np.inf), Codes(True, NO_REQUANTIZATION)


def batch_matmul(
    left: Tensor, right: Tensor, *, output: Tensor, target: Target, adjoint_left: bool, adjoint_right: bool
) -> KernelSequence | None:
    """BATCH_MATMUL of float32 and of signed codes."""
    is_float = left.dtype == np.dtype("<f4")
    if (not is_float and left.dtype != np.int8) or 0 in (*left.shape, *right.shape):
        return None
    batch, (rows, columns) = math.prod(output.shape[:-2]), output.shape[-2:]
    length = left.shape[-2 if adjoint_left else -1]
    shape = ProductShape(batch, 1, rows, length, _ONE, WindowDimension(1, 1, 1, 0, 0, rows), columns, own=True)
    draft = plan_product(shape, _FLOATS if is_float else _DRAFT, target)
    finish = _finish(left, right, output, length, len(draft.order), is_float, target)
    if finish is None:
        return None
    product = replace(draft, arithmetic=finish[0])
    width, factor = product.tile[1] * product.lanes, finish[0].factor
    packing = Packing(batch, length, columns, width, is_float, right.zero_point, factor)
    stages: list[Intermediate] = []
    sources = [
        _turned(stages, place, tensor, target) if adjoint else place
        for place, tensor, adjoint in ((_LEFT, left, adjoint_left), (_RIGHT, right, adjoint_right))
    ]
    packed = KernelLaunch(packing, (), batch * length * columns // 8)
    made = _FIRST_MADE + len(stages)
    stages.append(Intermediate(packed, (sources[_RIGHT],), np.dtype("u1"), (packing.bytes,)))
    return KernelSequence(
        tuple(stages),
        KernelLaunch(product, (finish[1], product.numbers()), shape.multiplications // 16),
        (sources[_LEFT], made),
    )


def _turned(stages: list[Intermediate], place: int, tensor: Tensor, target: Target) -> int:
    """Append what transposes the matrices at `place`, and return where they are then."""
    order = (*range(len(tensor.shape) - 2), len(tensor.shape) - 1, len(tensor.shape) - 2)
    shape: Shape = tuple(tensor.shape[axis] for axis in order)
    stages.append(Intermediate(turned(tensor.shape, order, tensor.dtype, target), (place,), tensor.dtype, shape))
    return _FIRST_MADE + len(stages) - 1


def _finish(
    left: Tensor, right: Tensor, output: Tensor, length: int, channels: int, is_float: bool, target: Target
) -> tuple[Floats | Codes, bytes] | None:
    """Return the arithmetic and what finishes sums: no bias for floats, how codes are requantized."""
    if is_float:
        return _FLOATS, bytes(4 * channels)
    real = float(np.float32(left.scale) * np.float32(right.scale)) / float(np.float32(output.scale))
    one = OutputMultipliers.of([real])
    multipliers = OutputMultipliers(np.repeat(one.multipliers, channels), np.repeat(one.shifts, channels))
    zeros, bounds = ints(np.zeros(channels)), ints(np.full(channels, length * _LARGEST_PRODUCT))
    found = Rounding.of(multipliers, zeros, bounds)
    if found is None:
        return None
    codes = Codomain(output.zero_point, *dtype_range(output), left.zero_point)
    requantization = Requantization(found)
    return Codes(True, requantization), requantization.constants(multipliers, zeros, codes, target.lanes)


RULES: Mapping[OperationType, LoweringRule] = {OperationType.BATCH_MATMUL: batch_matmul}
