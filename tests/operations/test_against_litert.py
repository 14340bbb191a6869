"""Operations of codes that the HAL and TFLite define alike, bit for bit against LiteRT's reference kernels.

LiteRT is an optional dependency; without it these tests are skipped. Scales and zero points are drawn at random.
Shapes, windows and all other operations are in `test_shared_with_tflite`; what the two define differently is in
`support.tflite_differences`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.litert import by_litert
from support.one_result import result_of, tensor

from nnfmq.hal.types import Operand, OperandType, OperationType

Array = npt.NDArray[Any]

KINDS = {
    "uint8": (OperandType.TENSOR_QUANT8_ASYMM, 0),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, -128),
}
ALL_QUANTIZED_VALUES = np.arange(256, dtype=np.uint8).reshape(4, 64)


class Draw:
    """Random quantizations: scales over some decades, exact in float32, and any zero point."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.rng, self.lowest, self.dtype = np.random.default_rng(seed), KINDS[dtype][1], dtype

    def scale(self, least: float, most: float) -> float:
        return float(np.float32(np.exp(self.rng.uniform(np.log(least), np.log(most)))))

    def zero_point(self) -> int:
        return int(self.rng.integers(0, 256)) + self.lowest

    def codes(self, shape: tuple[int, ...]) -> Array:
        return self.rng.integers(0, 256, shape).astype(np.uint8).view(self.dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("name", "steps", "middle"), [("HARD_SWISH", 0, 0), ("TANH", 128, 128), ("LOGISTIC", 256, 0)])
def test_a_function_of_quantized_values_is_litert_s(name: str, steps: int, middle: int, seed: int, dtype: str) -> None:
    draw = Draw(seed, dtype)
    scale = draw.scale(1e-3, 1)
    input = tensor(ALL_QUANTIZED_VALUES.view(dtype), dtype, scale, draw.zero_point())
    free = (draw.scale(scale / 10, scale * 4), draw.zero_point())
    output = Operand(KINDS[dtype][0], (4, 64), *((1 / steps, middle + draw.lowest) if steps else free))

    found = result_of(OperationType[name], [input], output)

    (expected,) = by_litert(name, [input], [output])
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL", "PRELU"])
def test_a_function_of_two_codes_is_litert_s(name: str, seed: int, dtype: str) -> None:
    draw = Draw(seed, dtype)
    scale = draw.scale(1e-3, 1)
    first = tensor(draw.codes((8, 16, 4)), dtype, scale, draw.zero_point())
    second = tensor(draw.codes((16, 4)), dtype, draw.scale(scale / 10, scale * 10), draw.zero_point())
    unit = scale * second[0].scale if name == "MUL" else scale
    output = Operand(KINDS[dtype][0], (8, 16, 4), draw.scale(unit * 1.1, unit * 100), draw.zero_point())

    found = result_of(OperationType[name], [first, second, *([0] if name != "PRELU" else [])], output)

    (expected,) = by_litert(name, [first, second], [output], f"{name.capitalize()}Options" if name != "PRELU" else "")
    np.testing.assert_array_equal(found, expected, strict=True)
