"""FULLY_CONNECTED of 8-bit tensors as TFLite defines it: sums times a float64 number, rounded once.

The number is input scale x weights' scale / output scale; halves are rounded away from zero.

    C1 to C3 are those of the HAL's operation
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import fully_connected
from nnfmq.operations.convolution import require_channel_dim
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.fully_connected import product_of_rows
from nnfmq.operations.packed_matmul import PackedMatmul, pack_exact_matrix
from nnfmq.operations.quantization import Epilogue, quantized_activation_range, real_scales
from nnfmq.operations.signature import (
    I32,
    PC,
    Q8,
    Q8S,
    V1_2,
    Array,
    Run,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
    weight,
)
from nnfmq.operations.tflite_extension.declaring import as_tflite
from nnfmq.operations.tflite_extension.sixteen_bits import find, rounded


def plan_fully_connected(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan the exact integer product and its scaling, by one number or one for each unit."""
    require_channel_dim(weights, 0)
    matrix, sums, _ = pack_exact_matrix(weights.array.T, weights.zero_point, input)
    addend = (ints(bias.array) - input.zero_point * sums).astype(np.float64)
    epilogue = _epilogue(addend, np.array(real_scales(input, weights, output)), output, activation)
    return product_of_rows(PackedMatmul(matrix, epilogue, output.dtype, 1), weights.shape[1])


def _epilogue(addend: Array, factors: Array, output: Tensor, activation: int) -> Epilogue:
    low, high = quantized_activation_range(activation, output)

    def epilogue(sums: Array, out: Array) -> None:
        scaled = np.add(sums, addend, dtype=np.float64)
        np.multiply(scaled, factors, out=scaled)
        np.copyto(out, np.clip(rounded(scaled) + output.zero_point, low, high), casting="unsafe")

    return epilogue


_SOURCE = find(fully_connected.DECLARATIONS, Op.FULLY_CONNECTED)

DECLARATIONS = (
    replace(
        as_tflite(TfliteOperation.Q8_FULLY_CONNECTED, _SOURCE, plan_fully_connected, ()),
        overloads=(
            overload(data("input"), weight("weights", "F"), weight("bias", "B"), attribute("activation"), level=V1_2),
        ),
        variants=tuple(
            Variant({"T": kind, "F": weights, "B": I32}, V1_2, plan_fully_connected)
            for kind, weights in ((Q8, Q8), (Q8S, Q8S), (Q8S, PC))
        ),
    ),
)
