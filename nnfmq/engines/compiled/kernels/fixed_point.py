"""Steps of `operations.fixed_point` on single numbers, held in 64 bits: what a line needs once."""

from __future__ import annotations

from nnfmq.engines.compiled.emission import I1, I64, Emitter, Value
from nnfmq.operations.fixed_point import INT32_MAX, INT32_MIN, ONE_Q2
from nnfmq.operations.l2_lrn_instance_norm import HALF_SQRT_2_Q0, ONE_Q3

__all__ = ["inverse_square_root", "reciprocal"]


def reciprocal(e: Emitter, total: Value) -> tuple[Value, Value]:
    """Return the reciprocal of a sum with 12 whole bits: its mantissa, and the right shift to codes."""
    zeros = e.b.sub(_leading_zeros(e, total), e.i64(32))
    fraction = e.b.sub(e.b.shl(total, zeros), e.i64(1 << 31))
    half = e.b.ashr(e.b.add(fraction, e.i64(1 << 31)), e.i64(1))
    x = e.b.add(e.i64(1515870810), _high_product(e, half, e.i64(-1010580540)))
    for _ in range(3):
        error = e.b.sub(e.i64(ONE_Q2), _high_product(e, half, x))
        x = e.b.add(x, _shifted_left(e, _high_product(e, x, error), 2))
    return _shifted_left(e, x, 1), e.b.sub(e.i64(35), zeros)


def inverse_square_root(e: Emitter, total: Value) -> tuple[Value, Value]:
    """Return 1/sqrt of a sum below 2^29: mantissa and right shift. Sums of 0 and 1 give about 1."""
    known = e.intrinsic("llvm.umax", total, e.i64(2))
    pairs = e.b.sub(e.b.lshr(e.b.sub(_leading_zeros(e, known), e.i64(33)), e.i64(1)), e.i64(1))
    shift = e.b.sub(e.i64(11), pairs)
    x = _newton_steps(e, e.b.shl(known, e.b.shl(pairs, e.i64(1))))
    x = _high_product(e, x, e.i64(HALF_SQRT_2_Q0))
    x = e.b.shl(x, e.intrinsic("llvm.smax", e.b.neg(shift), e.i64(0)))
    least = e.b.icmp_signed("<=", total, e.i64(1))
    right = e.intrinsic("llvm.smax", shift, e.i64(0))
    return e.b.select(least, e.i64(INT32_MAX), x), e.b.select(least, e.i64(0), right)


def _newton_steps(e: Emitter, value: Value) -> Value:
    half = e.b.ashr(e.b.add(e.b.ashr(value, e.i64(1)), e.i64(1)), e.i64(1))
    x = e.i64(ONE_Q3)
    for _ in range(5):
        cube = _shifted_left(e, _high_product(e, _high_product(e, x, x), x), 6)
        more = _high_product(e, x, e.i64(ONE_Q3 + (ONE_Q3 >> 1)))
        x = _shifted_left(e, e.b.sub(more, _high_product(e, half, cube)), 3)
    return x


def _leading_zeros(e: Emitter, value: Value) -> Value:
    return e.call("llvm.ctlz.i64", I64, value, I1(0))


def _high_product(e: Emitter, first: Value, second: Value) -> Value:
    product = e.b.ashr(e.b.add(e.b.mul(first, second), e.i64(1 << 30)), e.i64(31))
    return e.intrinsic("llvm.smin", product, e.i64(INT32_MAX))


def _shifted_left(e: Emitter, value: Value, bits: int) -> Value:
    return e.clamp(e.b.shl(value, e.i64(bits)), e.i64(INT32_MIN), e.i64(INT32_MAX))
