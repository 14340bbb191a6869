"""Lowering rule of BLOCKWISE_MATMUL, whose weights stay as packed as they are in the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnfmq.engines.compiled.kernels.blockwise import UnitTiles, plan_blockwise
from nnfmq.engines.compiled.kernels.blockwise_int8 import BlockStepsKernel, plan_rounded
from nnfmq.engines.compiled.lowering import Constant, Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Tensor

__all__ = ["RULES"]

_BYTE = np.dtype("u1")
_INPUT, _RECORDS = range(2)


def _matmul(
    input: Tensor,
    weights: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    *,
    output: Tensor,
    target: Target,
    bits: int,
    rounds_input: bool,
) -> KernelLaunch | KernelSequence | None:
    """BLOCKWISE_MATMUL."""
    if 0 in input.shape:
        return None
    units, _, size = weights.shape
    length, kind = input.shape[-1], "middle"
    if zero_points is not None:
        kind = "float" if zero_points.dtype.kind == "f" else "byte"
    rows, block = math.prod(input.shape) // length, size * 8 // bits
    plan: Any = plan_rounded if rounds_input else plan_blockwise
    kernel: UnitTiles = plan(rows, units, length, bits, block, kind, target)
    biases = np.zeros(units, np.float32) if bias is None else bias.array
    constants: list[Constant] = [
        lambda: kernel.pack_weights(weights.array),
        lambda: kernel.pack_columns(scales.array),
        kernel.pack_bias(biases),
        kernel.params(),
    ]
    if zero_points is not None:
        zeros = zero_points.array
        constants.append(lambda: kernel.pack_columns(zeros))
    launch = KernelLaunch(kernel, tuple(constants), rows * units * length // (64 if rounds_input else 16))
    if not rounds_input:
        return launch
    steps = BlockStepsKernel(block, length % block != 0, rows, length)
    records = Intermediate(
        KernelLaunch(steps, (steps.params(),), rows * length // 8), (_INPUT,), _BYTE, (rows, kernel.row_bytes)
    )
    return KernelSequence((records,), launch, (_RECORDS,))


RULES: Mapping[OperationType, LoweringRule] = {operation_code(TfliteOperation.BLOCKWISE_MATMUL): _matmul}
