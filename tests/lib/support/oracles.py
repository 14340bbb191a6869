"""For tests against another implementation: random arguments, a case that both compute, and the comparison.

Codes, integers and truth values must be equal. Floats are within the HAL's tolerance: the other implementation adds
in another order and has other exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.types import ChannelQuant, Operand, OperandType

Array = npt.NDArray[Any]
Argument = tuple[Operand, Array]

TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "int32": OperandType.TENSOR_INT32,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "bool": OperandType.TENSOR_BOOL8,
}
FLOAT, CODES = ("float32",), ("uint8", "int8")
FLOAT_AND_CODES = (*FLOAT, *CODES)
NUMBERS = (*FLOAT_AND_CODES, "int32")

ABSOLUTE, RELATIVE = 1e-5, 5 * 1.1920928955078125e-7  # the HAL's tolerance of float32


@dataclass(frozen=True)
class Case:
    """Two implementations of one computation; each returns all outputs."""

    ours: Callable[[], Sequence[Array]]
    theirs: Callable[[], Sequence[Array]]


class Draw:
    """Random arguments of one type, the same in each run."""

    def __init__(self, name: str, seed: int, dtype: str) -> None:
        self.rng = np.random.default_rng([seed, *name.encode()])
        self.dtype = dtype

    def below(self, least: int, end: int) -> int:
        """Return an integer of [least, end)."""
        return int(self.rng.integers(least, end))

    def real(self, least: float, most: float) -> float:
        """Return a number that float32 holds."""
        return float(np.float32(self.rng.uniform(least, most)))

    def truth(self) -> bool:
        """Return one of the two."""
        return self.below(0, 2) == 1

    def shape(self, rank: int, most: int = 6) -> tuple[int, ...]:
        """Return extents from 1 to `most`."""
        return tuple(self.below(1, most + 1) for _ in range(rank))

    def operand(self, shape: tuple[int, ...], scale: float = 0.0) -> Operand:
        """Return an operand; one of codes has a random zero point, and a random scale where none is given."""
        if self.dtype not in CODES:
            return Operand(TYPES[self.dtype], shape)
        chosen = float(np.float32(scale or self.rng.uniform(0.01, 0.1)))
        return Operand(TYPES[self.dtype], shape, chosen, self.below(0, 256) - 128 * (self.dtype == "int8"))

    def tensor(self, shape: tuple[int, ...], least: float = -4.0, most: float = 4.0) -> Argument:
        """Return an argument; the bounds are for floats."""
        operand = self.operand(shape)
        if self.dtype == "float32":
            return operand, self.rng.uniform(least, most, shape).astype(np.float32)
        if self.dtype == "int32":
            return operand, self.rng.integers(-50, 50, shape).astype(np.int32)
        if self.dtype == "bool":
            return operand, self.rng.integers(0, 2, shape).astype(np.uint8)
        return operand, self.rng.integers(0, 256, shape).astype(np.uint8).view(self.dtype)


Builder: TypeAlias = Callable[[Draw], Case]
Listed: TypeAlias = tuple[str, tuple[str, ...], Builder]


def like(operand: Operand, shape: Sequence[int] | npt.NDArray[Any]) -> Operand:
    """Return an operand of another shape."""
    return Operand(operand.type, tuple(map(int, shape)), operand.scale, operand.zero_point)


def integers(values: Any) -> tuple[Operand, bytes]:
    """Return a constant of TENSOR_INT32, in the values' shape."""
    array = np.asarray(values, np.int32)
    return Operand(OperandType.TENSOR_INT32, array.shape), array.tobytes()


def weights(draw: Draw, shape: tuple[int, ...], source: Operand, units: int) -> tuple[Argument, Argument]:
    """Return a filter and a bias of `units` values, in int32 where the filter has codes."""
    filter = draw.tensor(shape, -1, 1)
    if draw.dtype == "float32":
        return filter, draw.tensor((units,))
    if draw.dtype == "int8":  # TFLite's signed weights are symmetric
        filter = (Operand(filter[0].type, shape, filter[0].scale, 0), filter[1])
    bias = Operand(OperandType.TENSOR_INT32, (units,), float(np.float32(source.scale) * np.float32(filter[0].scale)))
    return filter, (bias, draw.rng.integers(-3000, 3000, units).astype(np.int32))


def channel_weights(draw: Draw, shape: tuple[int, ...], dimension: int) -> tuple[Argument, Argument]:
    """Return a symmetric filter with a scale for each channel, and its bias."""
    units = shape[dimension]
    scales = tuple(draw.real(0.01, 0.1) for _ in range(units))
    filter = Operand(OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, shape, channel_quant=ChannelQuant(scales, dimension))
    codes = draw.rng.integers(-127, 128, shape).astype(np.int8)
    bias = draw.rng.integers(-3000, 3000, units).astype(np.int32)
    return (filter, codes), (Operand(OperandType.TENSOR_INT32, (units,)), bias)


def pairs(case: Case) -> list[tuple[Array, Array]]:
    """Return each output of both, truth values as bytes. The HAL has no rank 0: one number has shape (1,)."""
    ours, theirs = case.ours(), case.theirs()
    return [
        (a, b.reshape(b.shape or a.shape).astype(np.uint8 if b.dtype == bool else b.dtype))
        for a, b in zip(ours, theirs, strict=True)
    ]


def assert_same(case: Case) -> None:
    """Compare all outputs, shapes and types included."""
    for ours, theirs in pairs(case):
        is_float = ours.dtype == np.float32
        absolute, relative = (ABSOLUTE, RELATIVE) if is_float else (0, 0)
        np.testing.assert_allclose(ours, theirs, rtol=relative, atol=absolute, strict=True)
