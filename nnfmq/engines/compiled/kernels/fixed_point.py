"""Steps of `operations.fixed_point` on single numbers, held in 64 bits: what a line needs once."""

from __future__ import annotations

from nnfmq.engines.compiled.ir_builder import I1, I64, KernelBuilder, Value
from nnfmq.operations.fixed_point import INT32_MAX, INT32_MIN, ONE_Q2
from nnfmq.operations.l2_lrn_instance_norm import HALF_SQRT_2_Q0, ONE_Q3

__all__ = ["inverse_square_root", "reciprocal"]


def reciprocal(kb: KernelBuilder, total: Value) -> tuple[Value, Value]:
    """Return the reciprocal of a sum with 12 whole bits: its mantissa, and the right shift to codes."""
    zeros = kb.ir.sub(_leading_zeros(kb, total), kb.i64(32))
    fraction = kb.ir.sub(kb.ir.shl(total, zeros), kb.i64(1 << 31))
    half = kb.ir.ashr(kb.ir.add(fraction, kb.i64(1 << 31)), kb.i64(1))
    x = kb.ir.add(kb.i64(1515870810), _high_product(kb, half, kb.i64(-1010580540)))
    for _ in range(3):
        error = kb.ir.sub(kb.i64(ONE_Q2), _high_product(kb, half, x))
        x = kb.ir.add(x, _shifted_left(kb, _high_product(kb, x, error), 2))
    return _shifted_left(kb, x, 1), kb.ir.sub(kb.i64(35), zeros)


def inverse_square_root(kb: KernelBuilder, total: Value) -> tuple[Value, Value]:
    """Return 1/sqrt of a sum below 2^29: mantissa and right shift. Sums of 0 and 1 give about 1."""
    known = kb.intrinsic("llvm.umax", total, kb.i64(2))
    pairs = kb.ir.sub(kb.ir.lshr(kb.ir.sub(_leading_zeros(kb, known), kb.i64(33)), kb.i64(1)), kb.i64(1))
    shift = kb.ir.sub(kb.i64(11), pairs)
    x = _newton_steps(kb, kb.ir.shl(known, kb.ir.shl(pairs, kb.i64(1))))
    x = _high_product(kb, x, kb.i64(HALF_SQRT_2_Q0))
    x = kb.ir.shl(x, kb.intrinsic("llvm.smax", kb.ir.neg(shift), kb.i64(0)))
    least = kb.ir.icmp_signed("<=", total, kb.i64(1))
    right = kb.intrinsic("llvm.smax", shift, kb.i64(0))
    return kb.ir.select(least, kb.i64(INT32_MAX), x), kb.ir.select(least, kb.i64(0), right)


def _newton_steps(kb: KernelBuilder, value: Value) -> Value:
    half = kb.ir.ashr(kb.ir.add(kb.ir.ashr(value, kb.i64(1)), kb.i64(1)), kb.i64(1))
    x = kb.i64(ONE_Q3)
    for _ in range(5):
        cube = _shifted_left(kb, _high_product(kb, _high_product(kb, x, x), x), 6)
        more = _high_product(kb, x, kb.i64(ONE_Q3 + (ONE_Q3 >> 1)))
        x = _shifted_left(kb, kb.ir.sub(more, _high_product(kb, half, cube)), 3)
    return x


def _leading_zeros(kb: KernelBuilder, value: Value) -> Value:
    return kb.call("llvm.ctlz.i64", I64, value, I1(0))


def _high_product(kb: KernelBuilder, first: Value, second: Value) -> Value:
    product = kb.ir.ashr(kb.ir.add(kb.ir.mul(first, second), kb.i64(1 << 30)), kb.i64(31))
    return kb.intrinsic("llvm.smin", product, kb.i64(INT32_MAX))


def _shifted_left(kb: KernelBuilder, value: Value, bits: int) -> Value:
    return kb.clamp(kb.ir.shl(value, kb.i64(bits)), kb.i64(INT32_MIN), kb.i64(INT32_MAX))
