"""Kernels that do nothing useful as fast as the machine can: what the others' rates are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.dot_product import Float32, dot2, dot4, madd_acc16
from nnfmq.engines.compiled.target import Target

__all__ = ["CopyBandwidth", "FmaThroughput"]

_NO_CLAMP = Float32(-np.inf, np.inf)


@dataclass(frozen=True, slots=True)
class FmaThroughput:
    """Multiply-adds in registers alone: float32, or codes in pairs, quads or octets, as products have them.

    Each of `sums` goes on from itself, and waits for nothing else: with 12 of them two units of a latency of 5 or 6
    cycles are never idle. Factors change with every round, since what stays the same is computed once. With a first
    element of 0.25, float32 goes to 1/3: no infinity, nothing subnormal.
    """

    kind: Literal["float32", "pairs", "quads", "octets"]
    sums: int
    lanes: int
    rounds: int
    work_items: int

    compile_cost = 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of all units."""
        products = self.lanes * {"float32": 1, "pairs": 2, "quads": 4, "octets": 8}[self.kind]
        return 2 * products * self.sums * self.rounds * self.work_items

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: a vector of factors, of 4 bytes a lane, for octets two; output, 4 bytes a lane for each unit."""
        factors, out = map(kb.argument, range(2))
        kinds = {"float32": vector(F32, self.lanes), "pairs": vector(I16, 2 * self.lanes)}
        kind = kinds.get(self.kind) or vector(I8, 4 * self.lanes)
        first = kb.load(vector(F32 if self.kind == "float32" else I32, self.lanes), factors)
        factor = kb.load(kind, factors)
        other = kb.load(kind, factors, 4 * self.lanes) if self.kind == "octets" else factor

        def step(_: Value, sums: Sequence[Value]) -> Sequence[Value]:
            if self.kind == "float32":
                return [_NO_CLAMP.multiply_add(kb, first, value, factor) for value in sums]
            cells = [kb.ir.bitcast(value, kind) for value in sums]
            if self.kind == "octets":
                return [madd_acc16(kb, value, (c, c), (factor, other)) for value, c in zip(sums, cells, strict=True)]
            add_products = dot4 if self.kind == "quads" else dot2
            return [add_products(kb, value, c, factor) for value, c in zip(sums, cells, strict=True)]

        with kb.loop(kb.begin, kb.end) as unit:
            total, *others = kb.for_loop(self.rounds, [first] * self.sums, step)
            for value in others:
                total = (kb.ir.fadd if self.kind == "float32" else kb.ir.add)(total, value)
            kb.store(total, out, kb.mul(unit, 4 * self.lanes))
        kb.return_void()


@dataclass(frozen=True, slots=True)
class CopyBandwidth:
    """A copy; each unit copies a part of its own, so many times."""

    part_bytes: int
    rounds: int
    work_items: int

    compile_cost = 1

    @property
    def moved_bytes(self) -> int:
        """What all units read and write."""
        return 2 * self.part_bytes * self.rounds * self.work_items

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        source, out = map(kb.argument, range(2))
        with kb.loop(kb.begin, kb.end) as unit:
            offset = kb.mul(unit, self.part_bytes)
            with kb.loop(0, self.rounds):
                kb.memcpy(kb.at(out, offset), kb.at(source, offset), self.part_bytes)
        kb.return_void()
