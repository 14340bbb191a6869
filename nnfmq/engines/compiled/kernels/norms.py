"""L2_NORMALIZATION of float32: a line by the root of its sum of squares, which is at least 1e-6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.emission import F32, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.combining import FloatSum
from nnfmq.engines.compiled.kernels.floats import greater, multiply_add
from nnfmq.engines.compiled.kernels.lines import Lines
from nnfmq.engines.compiled.target import Target

__all__ = ["FloatNormalization"]

_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class FloatNormalization:
    """Lines, each by its norm."""

    lines: Lines

    @property
    def units(self) -> int:
        """Those of the lines."""
        return self.lines.units

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        source, out = e.argument(0), e.argument(1)
        self.lines.emit_each(
            e, lambda first, _: self._emit_line(e, e.at(source, e.mul(first, 4)), e.at(out, e.mul(first, 4)))
        )
        e.finish()

    def _emit_line(self, e: Emitter, source: Value, out: Value) -> None:
        lines, kind = self.lines, vector(F32, self.lines.lanes)
        zeros = e.splat(F32, 0.0, lines.lanes)

        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = e.load(kind, source, e.mul(lines.offset(e, k), 4))
            counted = lines.counted(e, k, loaded, zeros)
            return [multiply_add(e, counted, counted, values[0])]

        (found,) = e.carry(lines.rounds, [zeros], add)
        norm = e.intrinsic("llvm.sqrt", lines.of_line(e, FloatSum(), found))
        norm = greater(e, norm, e.splat(F32, _LEAST, lines.lanes))
        with e.loop(0, lines.rounds) as k:
            offset = e.mul(lines.offset(e, k), 4)
            e.store(e.b.fdiv(e.load(kind, source, offset), norm), out, offset)
