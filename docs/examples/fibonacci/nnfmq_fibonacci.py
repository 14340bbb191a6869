"""An extension for nnfmq's driver, `com.example.fibonacci`: FIBONACCI(n) is the first n Fibonacci numbers.

type 0 INT64           a scalar of 8 bytes
type 1 QUANT64_ASYMM   a tensor of 8 bytes: real value = scale * (code - zero_point); the operand carries both as
                       16 bytes, a double and an int64
operation 0 FIBONACCI  n: INT64, or a TENSOR_FLOAT32 of one element -> QUANT64_ASYMM or TENSOR_FLOAT32 of shape [n]

C1 n is one whole number from 1 to 186 (the next Fibonacci number is beyond float32)
C2 the output's scale is positive and finite, and it carries 16 bytes
C3 every code fits 64 bits
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from nnfmq.operations.extensions import ExtensionType, VendorExtension, define_operation, define_type
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import F32, V1_2, Declaration, Run, Shape, Tensor, Variant, attribute, overload

N_MAX = 186
INT64, QUANT64_ASYMM = define_type(0, "INT64"), define_type(1, "QUANT64_ASYMM")


def fibonacci_shape(n: Any) -> Shape:
    """Return [n]. `n` is an int where the argument is a scalar, an array where it is a tensor."""
    return (count_of(n),)


def count_of(n: Any) -> int:
    """Return n, which is the client's: whatever is allocated depends on it."""
    require(np.size(n) == 1, "C1", f"n has {np.size(n)} elements")
    value = np.asarray(n).item()
    require(value in range(1, N_MAX + 1), "C1", f"n is {value}, allowed are whole numbers from 1 to {N_MAX}")
    return int(value)


def fibonacci(count: int) -> list[int]:
    """Return the first `count` Fibonacci numbers."""
    numbers = [1, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:count]


def plan_float(*, output: Tensor, n: Any) -> Run:
    """Compute in float32."""
    numbers = np.array(fibonacci(count_of(n)), output.dtype)
    return lambda: numbers


def plan_quantized(*, output: Tensor, n: Any) -> Run:
    """Compute codes of the output's scale and zero point."""
    scale, zero_point = quantization(output.extension_data)
    reals = [number / scale for number in fibonacci(count_of(n))]
    require(all(map(math.isfinite, reals)), "C3", f"a number of scale {scale} has no code of 64 bits")
    codes = [round(real) + zero_point for real in reals]
    fits = all(code in range(-(2**63), 2**63) for code in codes)
    require(fits, "C3", f"codes from {codes[0]} to {codes[-1]} do not fit 64 bits")
    result = np.array(codes, output.dtype)
    return lambda: result


def quantization(data: bytes) -> tuple[float, int]:
    """Return scale and zero point of an operand's extension data, which is the client's."""
    require(len(data) == 16, "C2", f"a QUANT64_ASYMM carries {len(data)} bytes, not 16")
    scale, zero_point = struct.unpack("<dq", data)
    require(math.isfinite(scale) and scale > 0, "C2", f"the scale is {scale}")
    return scale, zero_point


EXTENSION = VendorExtension(
    "com.example.fibonacci",
    types=(ExtensionType(INT64, "int64", is_tensor=False), ExtensionType(QUANT64_ASYMM, "int64")),
    declarations=(
        Declaration(
            define_operation(0, "FIBONACCI"),
            since=V1_2,
            overloads=(overload(attribute("n", INT64)), overload(attribute("n", F32))),
            variants=(Variant({"T": QUANT64_ASYMM}, V1_2, plan_quantized), Variant({"T": F32}, V1_2, plan_float)),
            shape=fibonacci_shape,
        ),
    ),
)
