"""Attention: products of rows with keys, an elementwise operator, SOFTMAX, and products with values, block by block.

A work item is a block of rows of one batch. Its products with all keys stay in scratch memory, where each row becomes
its softmax, which is the left-hand side of the second product. So no array of all rows and all keys exists. Each result
has the steps of the separate kernels, in their order: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    F32,
    KernelBuilder,
    Value,
    size_of,
    strided_offset,
    vector,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.elementwise import ELEMENT_TYPES, ElementwiseOperator
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.normalization import FloatSoftmax
from nnfmq.engines.compiled.kernels.packing import OVERREAD_BYTES
from nnfmq.engines.compiled.target import Target

__all__ = ["Attention", "ScoreInput", "ScoreOperator"]

_ALIGNMENT = 64
_PRODUCT_INPUTS = 3  # rows, keys and values


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """An input of the operator that is broadcast to all products, with strides in elements."""

    batch_extents: tuple[int, ...]
    batch_strides: tuple[int, ...]
    row_stride: int
    column_stride: int


@dataclass(frozen=True, slots=True)
class ScoreOperator:
    """An operator on the products before SOFTMAX; None among the inputs stands for the products themselves."""

    operator: ElementwiseOperator
    inputs: tuple[ScoreInput | None, ...]

    @property
    def operand_count(self) -> int:
        """Inputs that are arrays."""
        return sum(one is not None for one in self.inputs)


@dataclass(frozen=True, slots=True)
class Attention(Kernel):
    """Softmax of the products of rows with keys, times values.

    `scores` and `values` are GEMMs of blocks of the same rows, read in place, with one slice of N and a batched RHS
    that is packed at run time; `softmax` is that of a single row.
    """

    scores: GemmKernel
    operator: ScoreOperator | None
    softmax: FloatSoftmax
    values: GemmKernel

    compile_cost = 6

    @property
    def work_items(self) -> int:
        """Blocks of rows."""
        return self.scores.work_items

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of two rows and of a block of products."""
        return self._block_offset(target) + 4 * self._columns * self.scores.mc + OVERREAD_BYTES

    @property
    def _columns(self) -> int:
        return self.softmax.axis_loop.axis_size

    def _row_offset(self, target: Target) -> int:
        """Return the offset of a row of the operator's results, after what SOFTMAX needs."""
        return _aligned(self.softmax.scratch_bytes(target))

    def _block_offset(self, target: Target) -> int:
        row_bytes = _aligned(4 * self._columns) if self.operator is not None else 0
        return self._row_offset(target) + row_bytes

    def emit(self, kb: KernelBuilder) -> None:
        """Args: rows, packed keys, packed values, the operator's inputs, output; then constants.

        These are the epilogue's and the params of both products, and the operator's.
        """
        rows, keys, values = map(kb.argument, range(_PRODUCT_INPUTS))
        first = _PRODUCT_INPUTS + (0 if self.operator is None else self.operator.operand_count)
        out, score_epilogue, score_params, value_epilogue, value_params = map(kb.argument, range(first, first + 5))
        n, m = self.scores.load_params(kb, score_params), self.values.load_params(kb, value_params)
        block = kb.at(kb.scratch, self._block_offset(kb.target))
        with kb.loop(kb.begin, kb.end) as item:
            batch, begin = kb.ir.udiv(item, n.blocks_per_rhs), kb.ir.urem(item, n.blocks_per_rhs)
            begin = kb.intrinsic("llvm.smin", kb.ir.mul(begin, n.positions), kb.ir.sub(n.pixels, n.positions))
            position = kb.ir.add(kb.ir.mul(batch, n.pixels), begin)
            lhs, own_keys = kb.at(rows, kb.ir.mul(position, n.input_pixel_stride)), kb.ir.mul(batch, n.rhs_bytes)
            self.scores.emit_block(kb, n, kb.at(keys, own_keys), score_epilogue, lhs, block)
            with kb.loop(0, n.positions) as row:
                self._emit_row(kb, kb.at(block, kb.ir.mul(row, n.out_stride)), batch, kb.ir.add(begin, row), first + 5)
            own_values, target = kb.ir.mul(batch, m.rhs_bytes), kb.at(out, kb.ir.mul(position, m.out_stride))
            self.values.emit_block(kb, m, kb.at(values, own_values), value_epilogue, block, target)
        kb.return_void()

    def _emit_row(self, kb: KernelBuilder, products: Value, batch: Value, row: Value, first_constant: int) -> None:
        """Replace the products of a row by the softmax of the operator's results."""
        source = products
        if self.operator is not None:
            source = kb.at(kb.scratch, self._row_offset(kb.target))
            self._emit_operator(kb, self.operator, products, source, (batch, row), first_constant)
        self.softmax.emit_slice(kb, source, products)

    def _emit_operator(
        self,
        kb: KernelBuilder,
        score: ScoreOperator,
        products: Value,
        results: Value,
        number: tuple[Value, Value],
        first_constant: int,
    ) -> None:
        """Apply the operator to the products of the row with a batch and a number in it."""
        lanes = vector_width_for(self._columns, score.operator.vectors * kb.target.lanes)
        constants = [kb.argument(first_constant + one) for one in range(score.operator.constant_count)]
        kinds = [ELEMENT_TYPES[letters] for letters in score.operator.input_types]
        sources = _sources(kb, score.inputs, kinds, products, number)
        with vector_loop(kb, self._columns, lanes) as column:
            inputs = [
                kb.broadcast(kb.load(kind, address), lanes)
                if one is not None and not one.column_stride
                else kb.load(vector(kind, lanes), address, kb.mul(column, size_of(kind)))
                for one, kind, address in zip(score.inputs, kinds, sources, strict=True)
            ]
            kb.store(score.operator.emit(kb, inputs, constants), results, kb.mul(column, size_of(F32)))


def _sources(
    kb: KernelBuilder,
    inputs: Sequence[ScoreInput | None],
    kinds: Sequence[Value],
    products: Value,
    number: tuple[Value, Value],
) -> list[Value]:
    """Return the address of a row of each input of the operator."""
    found, argument, (batch, row) = [], _PRODUCT_INPUTS, number
    for one, kind in zip(inputs, kinds, strict=True):
        if one is None:
            found.append(products)
            continue
        element = strided_offset(kb, batch, one.batch_extents, one.batch_strides)
        element = kb.add(element, kb.mul(row, one.row_stride)) if one.row_stride else element
        found.append(kb.at(kb.argument(argument), kb.mul(element, size_of(kind))))
        argument += 1
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
