"""RESIZE_BILINEAR: two weighted source rows in scratch, then output pixels from these.

Both source rows of an output row are multiplied by their weights, as float32; each output pixel is then a sum of four
products. A pixel is computed in whole vectors even if it has few channels: a vector reaches into the next pixel, which
is computed after it. Products and sums are rounded one by one, in the order of the reference.
"""

from __future__ import annotations

import math
from typing import Any

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, I8, I32, I64, KernelBuilder, Value, for_each_vector, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.target import Target

__all__ = ["BilinearResize"]

_MAX_UNROLLED_VECTORS = 2
_SIGN_BIT = -0x80


@dataclass(frozen=True, slots=True)
class BilinearResize(Kernel):
    """A resize of NHWC images of float32 or quantized values. A work item is an output row."""

    batch: int
    height: int
    width: int
    channels: int
    output_height: int
    output_width: int
    is_float: bool
    is_signed: bool

    @property
    def work_items(self) -> int:
        """Output rows of all images."""
        return self.batch * self.output_height

    @property
    def _element_bytes(self) -> int:
        return 4 if self.is_float else 1

    def _row_bytes(self, target: Target, columns: int) -> int:
        """Return the size of a scratch row with the part of its last vector that reaches past its end."""
        return 4 * (columns * self.channels + target.lanes)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of two weighted source rows and an output row."""
        return 2 * self._row_bytes(target, self.width) + self._row_bytes(target, self.output_width)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output; pairs of 64-bit byte offsets and pairs of weights, of the rows, then of the columns."""
        image, out, row_offsets, row_weights, column_offsets, column_weights = map(kb.argument, range(6))
        pitch, width = self._row_bytes(kb.target, self.width), self.width * self.channels
        length = self.output_width * self.channels
        with kb.loop(kb.begin, kb.end) as work_item:
            number, row = (
                kb.ir.udiv(work_item, kb.i64(self.output_height)),
                kb.ir.urem(work_item, kb.i64(self.output_height)),
            )
            first = kb.at(image, kb.mul(number, self.height * width * self._element_bytes))
            with kb.loop(0, 2) as side:
                entry = kb.add(kb.mul(row, 2), side)
                source = kb.at(first, kb.load(I64, row_offsets, kb.mul(entry, 8)))
                weight = kb.load(F32, row_weights, kb.mul(entry, 4))
                self._weigh_row(kb, source, weight, kb.at(kb.scratch, kb.mul(side, pitch)), width)
            results = kb.at(kb.scratch, 2 * pitch)
            with kb.loop(0, self.output_width) as column:
                offsets = kb.at(column_offsets, kb.mul(column, 16))
                weights = kb.at(column_weights, kb.mul(column, 8))
                self._emit_pixel(kb, offsets, weights, pitch, kb.at(results, kb.mul(column, 4 * self.channels)))
            self._store_row(kb, results, kb.at(out, kb.mul(work_item, length * self._element_bytes)), length)
        kb.return_void()

    def _weigh_row(self, kb: KernelBuilder, source: Value, weight: Value, target: Value, count: int) -> None:
        """Store `count` elements times `weight`, as float32."""

        def weigh(offset: Any, lanes: int) -> None:
            weights = kb.broadcast(weight, lanes)
            if self.is_float:
                values = kb.load(vector(F32, lanes), source, kb.mul(offset, 4))
            else:
                values = kb.load(vector(I8, lanes), source, offset)
                if self.is_signed:  # offset to unsigned values, because rounding is defined on these
                    values = kb.ir.xor(values, kb.splat(I8, _SIGN_BIT, lanes))
                values = kb.ir.uitofp(kb.ir.zext(values, vector(I32, lanes)), vector(F32, lanes))
            kb.store(kb.ir.fmul(values, weights), target, kb.mul(offset, 4))

        for_each_vector(kb, count, kb.target.lanes, weigh)

    def _emit_pixel(self, kb: KernelBuilder, offsets: Value, weights: Value, pitch: int, pixel: Value) -> None:
        """Store one output pixel: the sum of its left and right neighbours in both weighted rows."""
        lanes = kb.target.lanes
        kind = vector(F32, lanes)
        sides = [kb.at(kb.scratch, kb.load(I64, offsets, 8 * n)) for n in (0, 1)]
        factors = [kb.broadcast(kb.load(F32, weights, 4 * n), lanes) for n in (0, 1)]

        def emit_vector(offset: Any) -> None:
            products = [
                kb.ir.fmul(kb.load(kind, kb.at(side, offset), row * pitch), factor)
                for side, factor in zip(sides, factors, strict=True)
                for row in (0, 1)
            ]
            total = products[0]
            for product in products[1:]:
                total = kb.ir.fadd(total, product)
            kb.store(total, pixel, offset)

        vectors = math.ceil(self.channels / lanes)
        if vectors <= _MAX_UNROLLED_VECTORS:
            for number in range(vectors):
                emit_vector(4 * lanes * number)
            return
        with kb.loop(0, 4 * lanes * vectors, 4 * lanes) as offset:
            emit_vector(offset)

    def _store_row(self, kb: KernelBuilder, results: Value, out: Value, count: int) -> None:
        """Store an output row; quantized values are rounded half up."""
        if self.is_float:
            kb.memcpy(out, results, 4 * count)
            return

        def round_vector(offset: Any, lanes: int) -> None:
            floats = kb.load(vector(F32, lanes), results, kb.mul(offset, 4))
            rounded = kb.ir.fptosi(kb.ir.fadd(floats, kb.splat(F32, 0.5, lanes)), vector(I32, lanes))
            values = kb.ir.trunc(rounded, vector(I8, lanes))
            values = kb.ir.xor(values, kb.splat(I8, _SIGN_BIT, lanes)) if self.is_signed else values
            kb.store(values, out, offset)

        for_each_vector(kb, count, kb.target.lanes, round_vector)
