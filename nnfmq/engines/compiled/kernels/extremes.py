"""ARGMAX and ARGMIN: where along a line the greatest element is, the first of equal ones.

Elements become keys of 32 bits whose order as whole numbers is theirs; NaN has the greatest, so that the first wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.emission import F32, I8, I32, Emitter, Value, vector
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

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        source, out, size = e.argument(0), e.argument(1), int(self.item[1])

        def line(first: Value, number: Value) -> None:
            index = self._index(e, e.at(source, e.mul(first, size)))
            e.store(index, out, e.mul(number, 4))

        self.lines.for_each_slice(e, line)
        e.finish()

    def _index(self, e: Emitter, source: Value) -> Value:
        lines, lanes, size = self.lines, self.lines.lanes, int(self.item[1])
        numbers = vector(I32, lanes)([0] * lanes if lines.inner > 1 else list(range(lanes)))

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = e.load(vector(_KINDS[self.item], lanes), source, e.mul(lines.offset(e, k), size))
            place = e.broadcast(e.b.trunc(lines.place(e, k), I32), lanes)
            return _better(e, values, (self._keys(e, loaded), e.b.add(place, numbers)), first_wins=True)

        found = e.carry(lines.rounds, [e.splat(I32, INT32_MIN, lanes), numbers], compare)
        while lines.inner == 1 and found[0].type.count > 1:
            half = found[0].type.count // 2
            low, high = ([e.shuffle(v, v, range(at, at + half)) for v in found] for at in (0, half))
            found = _better(e, low, high, first_wins=False)
        return found[1]

    def _keys(self, e: Emitter, values: Value) -> Value:
        lanes = values.type.count
        kind, least = vector(I32, lanes), e.splat(I32, INT32_MIN, lanes)
        if self.item == "f4":
            bits = e.b.bitcast(values, kind)
            negative = e.b.icmp_signed("<", bits, e.splat(I32, 0, lanes))
            keys = e.b.select(negative, e.b.sub(least, bits), bits)
        elif self.item == "i4":
            keys = values
        else:
            keys = (e.b.sext if self.item == "i1" else e.b.zext)(values, kind)
        keys = keys if self.greatest else e.b.not_(keys)
        if self.item == "f4":
            unordered = e.b.fcmp_unordered("uno", values, values)
            keys = e.b.select(unordered, e.splat(I32, INT32_MAX, lanes), keys)
        return keys


def _better(e: Emitter, first: Sequence[Value], second: Sequence[Value], first_wins: bool) -> list[Value]:
    """Return keys and indexes of the greater keys; of equal ones the first, or the lower index."""
    wins = e.b.icmp_signed(">", second[0], first[0])
    if not first_wins:
        same, lower = e.b.icmp_signed("==", second[0], first[0]), e.b.icmp_signed("<", second[1], first[1])
        wins = e.b.or_(wins, e.b.and_(same, lower))
    return [e.b.select(wins, b, a) for a, b in zip(first, second, strict=True)]
