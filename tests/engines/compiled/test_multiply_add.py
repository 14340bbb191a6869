"""Multiply-adds of float32 round once on every target but sse4.1, also where no instruction does it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from support.compiled import bits, outputs_of
from support.instruction_sets import using
from support.oracles import Array
from support.small_models import one_operation

from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import Operand, OperandType, OperationType

F32 = OperandType.TENSOR_FLOAT32
LEAST, MOST = np.float32(2.0**-149), np.finfo(np.float32).max


def multiply_add(factor: np.float32, weights: Array, biases: Array) -> Array:
    """Return factor · weights + biases of a GEMM with one K."""
    count = len(weights)
    operands = [(Operand(F32, shape), array.tobytes()) for shape, array in (((count, 1), weights), ((count,), biases))]
    model = one_operation(OperationType.FULLY_CONNECTED, [Operand(F32, (1, 1)), *operands, 0], Operand(F32, (1, count)))
    program = prepare(model)
    assert program.compiled_ops == {0}
    return outputs_of(program, model, [np.array([[factor]], np.float32)])[0][0]


def rounded_once(factor: np.float32, weight: np.float32, bias: np.float32) -> np.float32:
    """Return the float32 next to the exact result; of two equally near ones the even one."""
    if not np.isfinite([factor, weight, bias]).all():
        return np.float32(np.float64(factor) * np.float64(weight) + np.float64(bias))
    exact = Fraction(float(factor)) * Fraction(float(weight)) + Fraction(float(bias))
    if not exact:
        return np.float32(np.float64(factor) * np.float64(weight) + np.float64(bias))  # the sign of zero
    if abs(exact) >= Fraction(float(MOST)) + Fraction(2) ** 103:
        return np.float32(np.copysign(np.inf, float(exact > 0) - 0.5))
    near = np.float32(min(max(float(exact), -float(MOST)), float(MOST)))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    finite = [number for number in around if np.isfinite(number)]
    best = min(finite, key=lambda n: (abs(Fraction(float(n)) - exact), int(n.view(np.uint32)) & 1))
    return np.copysign(best, np.float32(1 if exact > 0 else -1))


def cases() -> tuple[Array, Array]:
    """Return weights and biases for the factor 1 + 2^-12: exact halves, cancellation, and numbers of all sizes."""
    rng = np.random.default_rng(0)
    one = np.float32(1 + 2.0**-12)
    special = [
        (one, 2.0**-60), (one, -(2.0**-60)), (one, 0), (-one, one * one), (1, -one), (1 + 2.0**-23, 2.0**-80),
        (LEAST, LEAST), (-LEAST, LEAST), (2.0**-126, -(2.0**-127)), (MOST, MOST), (MOST, -MOST), (MOST, np.inf),
        (np.inf, -np.inf), (np.nan, 1), (0, -0.0), (-0.0, -0.0), (2.0**-149, 2.0**-100), (3 * 2.0**-149, 0),
    ]  # fmt: skip
    weights = np.exp2(rng.integers(-140, 120, 2000)) * rng.normal(size=2000)
    biases = weights * np.exp2(rng.integers(-55, 3, 2000)) * rng.choice([-1, 1], 2000)
    pairs = np.concatenate([np.array(special), np.stack([weights, biases], axis=1)])
    return tuple(np.ascontiguousarray(column) for column in pairs.astype(np.float32).T)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["sse4.1-fma", "avx2", "neon"])
def test_a_multiply_add_rounds_once(name: str) -> None:
    factor, (weights, biases) = np.float32(1 + 2.0**-12), cases()
    with np.errstate(all="ignore"), using(name):
        expected = [rounded_once(factor, *pair) for pair in zip(weights, biases, strict=True)]
        assert bits(multiply_add(factor, weights, biases)) == bits(np.array(expected))


def test_without_an_instruction_the_product_is_rounded_first() -> None:
    weights, biases = cases()
    with np.errstate(all="ignore"), using("sse4.1"):
        found = multiply_add(np.float32(1 + 2.0**-12), weights, biases)
        assert bits(found) == bits(np.float32(1 + 2.0**-12) * weights + biases)
