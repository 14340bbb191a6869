"""An extension for nnfmq's driver, `com.example.fibonacci`: FIBONACCI(n) is the first n Fibonacci numbers.

type 0 INT64           a scalar of 8 bytes
type 1 QUANT64_ASYMM   a tensor of 8-byte quantized values, real = scale * (q - zero_point); the operand's extension
                       data has scale and zero point: a double and an int64, 16 bytes
operation 0 FIBONACCI  n: INT64, or a TENSOR_FLOAT32 of one element -> QUANT64_ASYMM or TENSOR_FLOAT32 of shape [n]

C1 n is one whole number from 1 to 186 (the 187th Fibonacci number exceeds float32)
C2 the output's extension data has 16 bytes, and the scale is positive and finite
C3 every quantized value fits 64 bits
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from nnfmq.operations.declaration import F32, V1_2, Declaration, Run, Shape, Tensor, Variant, attribute, overload
from nnfmq.operations.extensions import ExtensionType, VendorExtension, define_operation, define_type
from nnfmq.operations.shapes import require

N_MAX = 186
INT64, QUANT64_ASYMM = define_type(0, "INT64"), define_type(1, "QUANT64_ASYMM")


def fibonacci_shape(n: Any) -> Shape:
    """Return [n]. `n` is an int if the argument is a scalar, an array if it is a tensor."""
    return (count_of(n),)


def count_of(n: Any) -> int:
    """Return n as an int. It comes from the client and determines the size of the output, so it is checked."""
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
    """Compute quantized values with the output's scale and zero point."""
    scale, zero_point = quantization(output.extension_data)
    reals = [number / scale for number in fibonacci(count_of(n))]
    require(all(map(math.isfinite, reals)), "C3", f"a number of scale {scale} does not fit 64 bits")
    values = [round(real) + zero_point for real in reals]
    fits = all(value in range(-(2**63), 2**63) for value in values)
    require(fits, "C3", f"values from {values[0]} to {values[-1]} do not fit 64 bits")
    result = np.array(values, output.dtype)
    return lambda: result


def quantization(data: bytes) -> tuple[float, int]:
    """Return scale and zero point from an operand's extension data. It comes from the client, so it is checked."""
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
