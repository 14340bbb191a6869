"""ARGMAX and ARGMIN: where along a line the greatest element is, the first of equal ones.

Elements become keys of 32 bits whose order as whole numbers is theirs; NaN has the greatest, so that the first wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import F32, I8, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.operations.fixed_point import INT32_MAX, INT32_MIN

__all__ = ["ArgMinMax"]

_KINDS = {"f4": F32, "i4": I32, "u1": I8, "i1": I8}


@dataclass(frozen=True, slots=True)
class ArgMinMax(AxisKernel):
    """Of lines of `item`, numpy's letters, the index of the greatest element or the least."""

    lines: AxisLoop
    item: str
    greatest: bool

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        source, out, size = kb.argument(0), kb.argument(1), int(self.item[1])

        def line(first: Value, number: Value) -> None:
            index = self._index(kb, kb.at(source, kb.mul(first, size)))
            kb.store(index, out, kb.mul(number, 4))

        self.lines.for_each_slice(kb, line)
        kb.return_void()

    def _index(self, kb: KernelBuilder, source: Value) -> Value:
        lines, lanes, size = self.lines, self.lines.lanes, int(self.item[1])
        numbers = vector(I32, lanes)([0] * lanes if lines.inner > 1 else list(range(lanes)))

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(vector(_KINDS[self.item], lanes), source, kb.mul(lines.offset(kb, k), size))
            place = kb.broadcast(kb.ir.trunc(lines.place(kb, k), I32), lanes)
            return _better(kb, values, (self._keys(kb, loaded), kb.ir.add(place, numbers)), first_wins=True)

        found = kb.for_loop(lines.rounds, [kb.splat(I32, INT32_MIN, lanes), numbers], compare)
        while lines.inner == 1 and found[0].type.count > 1:
            half = found[0].type.count // 2
            low, high = ([kb.shuffle(v, v, range(at, at + half)) for v in found] for at in (0, half))
            found = _better(kb, low, high, first_wins=False)
        return found[1]

    def _keys(self, kb: KernelBuilder, values: Value) -> Value:
        lanes = values.type.count
        kind, least = vector(I32, lanes), kb.splat(I32, INT32_MIN, lanes)
        if self.item == "f4":
            bits = kb.ir.bitcast(values, kind)
            negative = kb.ir.icmp_signed("<", bits, kb.splat(I32, 0, lanes))
            keys = kb.ir.select(negative, kb.ir.sub(least, bits), bits)
        elif self.item == "i4":
            keys = values
        else:
            keys = (kb.ir.sext if self.item == "i1" else kb.ir.zext)(values, kind)
        keys = keys if self.greatest else kb.ir.not_(keys)
        if self.item == "f4":
            unordered = kb.ir.fcmp_unordered("uno", values, values)
            keys = kb.ir.select(unordered, kb.splat(I32, INT32_MAX, lanes), keys)
        return keys


def _better(kb: KernelBuilder, first: Sequence[Value], second: Sequence[Value], first_wins: bool) -> list[Value]:
    """Return keys and indexes of the greater keys; of equal ones the first, or the lower index."""
    wins = kb.ir.icmp_signed(">", second[0], first[0])
    if not first_wins:
        same, lower = kb.ir.icmp_signed("==", second[0], first[0]), kb.ir.icmp_signed("<", second[1], first[1])
        wins = kb.ir.or_(wins, kb.ir.and_(same, lower))
    return [kb.ir.select(wins, b, a) for a, b in zip(first, second, strict=True)]
