"""Multiply-adds of adjacent integers: the target's instructions, or an exact equivalent in others."""

from __future__ import annotations

from nnfmq.engines.compiled.ir_builder import I16, I32, KernelBuilder, Value, vector

__all__ = ["dot2", "dot2_of_pair", "dot4", "dot4_signed", "madd_acc16", "mmla"]


def dot2(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of two adjacent int16 products: vpdpwssd, or pmaddwd and an addition."""
    if kb.target.vpdpwssd is not None and acc.type.count == kb.target.lanes:
        return kb.call(kb.target.vpdpwssd, acc.type, acc, *(kb.ir.bitcast(v, acc.type) for v in (lhs, weights)))
    return kb.ir.add(acc, _pmaddwd(kb, lhs, weights))


def dot2_of_pair(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return dot2 for an `lhs` of equal pairs: two smlal by element on AArch64."""
    if not kb.target.multiplies_by_element:
        return dot2(kb, acc, lhs, weights)
    lanes = acc.type.count
    for element in (0, 1):
        left = kb.shuffle(lhs, lhs, [element] * lanes)
        right = kb.shuffle(weights, weights, range(element, 2 * lanes, 2))
        acc = kb.ir.add(acc, kb.ir.mul(*(kb.ir.sext(factor, acc.type) for factor in (left, right))))
    return acc


def _pmaddwd(kb: KernelBuilder, lhs: Value, weights: Value) -> Value:
    lanes = weights.type.count // 2
    if kb.target.pmaddwd is not None and lanes == kb.target.lanes:
        return kb.call(kb.target.pmaddwd, vector(I32, lanes), lhs, weights)
    wide = vector(I32, 2 * lanes)
    products = kb.ir.mul(kb.ir.sext(lhs, wide), kb.ir.sext(weights, wide))
    even, odd = (kb.shuffle(products, products, range(first, 2 * lanes, 2)) for first in (0, 1))
    return kb.ir.add(even, odd)


def dot4(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of four adjacent u8 * s8 products: vpdpbusd, usdot, or two dot2."""
    lanes = acc.type.count
    vpdpbusd = {kb.target.lanes: kb.target.vpdpbusd, kb.target.half_lanes: kb.target.vpdpbusd_half}.get(lanes)
    if vpdpbusd is not None:
        return kb.call(vpdpbusd, acc.type, acc, *(kb.ir.bitcast(v, acc.type) for v in (lhs, weights)))
    if kb.target.usdot is not None:
        return kb.call(kb.target.usdot, acc.type, acc, lhs, weights)
    shorts, byte = vector(I16, 2 * lanes), kb.splat(I16, 8, 2 * lanes)
    lhs, weights = (kb.ir.bitcast(v, shorts) for v in (lhs, weights))
    even = kb.ir.and_(lhs, kb.splat(I16, 255, 2 * lanes)), kb.ir.ashr(kb.ir.shl(weights, byte), byte)
    odd = kb.ir.lshr(lhs, byte), kb.ir.ashr(weights, byte)
    return dot2(kb, dot2(kb, acc, *even), *odd)


def dot4_signed(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
    """Return int32 `acc` plus the sums of four adjacent s8 * s8 products: sdot."""
    assert kb.target.sdot is not None, "the micro-kernel is chosen only for targets that have it"
    return kb.call(kb.target.sdot, acc.type, acc, lhs, weights)


def mmla(kb: KernelBuilder, acc: Value, lhs: Value, weights: Value, lhs_is_signed: bool) -> Value:
    """Return int32 `acc` plus the product of a 2 x 8 matrix and the transposed of another, s8: usmmla or smmla."""
    name = kb.target.smmla if lhs_is_signed else kb.target.usmmla
    assert name is not None, "the micro-kernel is chosen only for targets that have it"
    return kb.call(name, acc.type, acc, lhs, weights)


def madd_acc16(kb: KernelBuilder, acc: Value, lhs: tuple[Value, Value], weights: tuple[Value, Value]) -> Value:
    """Return int32 `acc` plus eight u8 * s8 products: 2 pmaddubsw, paddw, then pmaddwd by ones.

    Neither pmaddubsw saturates nor paddw wraps, because packed weights keep the bound of `packing`: every partial sum
    of the four products in an int16 lane is at most 255 * 128 in magnitude.
    """
    pmaddubsw = kb.target.pmaddubsw
    assert pmaddubsw is not None, "acc16 kernels are chosen only for targets that have it"
    kind = vector(I16, lhs[0].type.count // 2)
    first, second = (kb.call(pmaddubsw, kind, *pair) for pair in zip(lhs, weights, strict=True))
    return dot2(kb, acc, kb.ir.add(first, second), kb.splat(I16, 1, 2 * acc.type.count))
