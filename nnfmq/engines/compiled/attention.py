"""Attention in a partition: BATCH_MATMUL, at most one elementwise loop, SOFTMAX and BATCH_MATMUL become one operation.

Views may be between them. All results in between must have one reader. What both products need before their GEMMs, such
as packed keys and values, stays launches of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.engines.compiled.kernels.attention import Attention, ScoreInput, ScoreOperator
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseKernel, FlatElementwiseKernel
from nnfmq.engines.compiled.kernels.gemm import GemmKernel, LhsLayout
from nnfmq.engines.compiled.kernels.normalization import FloatSoftmax
from nnfmq.engines.compiled.lowering import Constant, Intermediate, KernelLaunch, KernelSequence, LoweredOp
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Shape

__all__ = ["fuse_attention"]

_BLOCK_BYTES = 1 << 17  # of products in scratch memory, about a quarter of a second-level cache
_MAX_BLOCK_BYTES = 1 << 20  # of the fewest rows that a tile has
_MAX_ROWS = 64
_FLOAT32 = np.dtype("<f4")


class _Chain(Struct, frozen=True):
    """The operations of an attention: the products, what is applied to them if anything is, and the softmax."""

    scores: LoweredOp
    elementwise: LoweredOp | None
    products: int  # the operand that the elementwise operation reads
    softmax: LoweredOp
    values: LoweredOp
    views: tuple[LoweredOp, ...]


def fuse_attention(ops: Sequence[LoweredOp], read_outside: AbstractSet[int]) -> list[LoweredOp]:
    """Return the operations of a partition in order, each attention at the position of its last product."""
    readers = Counter(index for op in ops for index in op.inputs)
    producers = {index: op for op in ops for index in op.outputs}
    inner = {index for index in producers if readers[index] == 1 and index not in read_outside}
    replaced: dict[int, LoweredOp] = {}
    removed: set[int] = set()
    for op in ops:
        chain = _chain(op, producers, inner) if op.call.code == OperationType.BATCH_MATMUL else None
        fused = None if chain is None else _fused(chain)
        if chain is not None and fused is not None:
            replaced[op.number] = fused
            parts = chain.scores, chain.softmax, chain.elementwise, *chain.views
            removed.update(part.number for part in parts if part is not None)
    return [replaced.get(op.number, op) for op in ops if op.number not in removed]


def _chain(values: LoweredOp, producers: dict[int, LoweredOp], inner: AbstractSet[int]) -> _Chain | None:
    """Return the operations whose result the first input of `values` is; None if they are no attention."""
    views: list[LoweredOp] = []

    def producer(index: int) -> LoweredOp | None:
        op = producers.get(index) if index in inner else None
        while op is not None and op.is_view:
            views.append(op)
            index = op.inputs[0]
            op = producers.get(index) if index in inner else None
        return op

    softmax = producer(values.inputs[0])
    if softmax is None or softmax.call.code != OperationType.SOFTMAX:
        return None
    before, elementwise, products = producer(softmax.inputs[0]), None, -1
    if before is not None and before.call.code != OperationType.BATCH_MATMUL:
        elementwise, before = before, None
        for index in elementwise.inputs:
            count = len(views)
            found = producer(index)
            if found is not None and found.call.code == OperationType.BATCH_MATMUL:
                before, products = found, index
                break
            del views[count:]
    if before is None or before.call.code != OperationType.BATCH_MATMUL:
        return None
    return _Chain(before, elementwise, products, softmax, values, tuple(views))


def _fused(chain: _Chain) -> LoweredOp | None:
    """Return the operation that computes a chain, or None if its kernels cannot be one."""
    ops = [op for op in (chain.scores, chain.elementwise, chain.softmax, chain.values) if op is not None]
    if any(any(op.inputs_nchw) or op.outputs_nchw for op in ops):
        return None
    found = _kernel(chain)
    if found is None:
        return None
    kernel, constants = found
    others = () if chain.elementwise is None else _others(chain.elementwise, chain.products)
    inputs = (*chain.scores.inputs, chain.values.inputs[1], *others)
    estimated_ns = sum(op.lowered.last.estimated_ns for op in ops if isinstance(op.lowered, KernelSequence))
    launch = KernelLaunch(kernel, constants, estimated_ns)
    lowered = _sequence(chain, launch, len(inputs))
    fused = sorted({number for op in ops for number in (op.number, *op.fused)} - {chain.values.number})
    layouts = (False,) * len(inputs)
    return replace(chain.values, lowered=lowered, inputs=inputs, inputs_nchw=layouts, fused=tuple(fused))


def _others(elementwise: LoweredOp, products: int) -> tuple[int, ...]:
    return tuple(index for index in elementwise.inputs if index != products)


def _sequence(chain: _Chain, launch: KernelLaunch, count: int) -> KernelSequence:
    """Return the launches before both products, and the one of all, for an operation with `count` inputs."""
    scores, values = chain.scores.lowered, chain.values.lowered
    assert isinstance(scores, KernelSequence) and isinstance(values, KernelSequence), "_kernel has checked it"
    launches, first = [], count
    for sequence, inputs in ((scores, (0, 1)), (values, (None, 2))):
        numbers = (*inputs, *range(first, first + len(sequence.intermediates)))
        launches.append([_renumbered(one, numbers) for one in sequence.intermediates])
        first += len(sequence.intermediates)
    rows = 0 if scores.inputs[0] == 0 else count + scores.inputs[0] - 2
    packed = count + len(scores.intermediates) - 1, first - 1
    operands = tuple(range(3, count))
    return KernelSequence((*launches[0], *launches[1]), launch, (rows, *packed, *operands))


def _renumbered(one: Intermediate, numbers: Sequence[int | None]) -> Intermediate:
    inputs = [numbers[index] for index in one.inputs]
    return dataclasses.replace(one, inputs=tuple(index for index in inputs if index is not None))


def _kernel(chain: _Chain) -> tuple[Attention, tuple[Constant, ...]] | None:
    """Return the kernel and its constants; None if a part of the chain has another kernel or shape than it needs."""
    scores, values, softmax = chain.scores.lowered, chain.values.lowered, chain.softmax.lowered
    if not isinstance(scores, KernelSequence) or not isinstance(values, KernelSequence):
        return None
    if chain.values.call.attributes["adjoint_left"] or not isinstance(softmax, KernelLaunch):
        return None
    gemms, own = (scores.last.kernel, values.last.kernel), softmax.kernel
    shape, columns = chain.scores.call.output.shape, chain.scores.call.output.shape[-1]
    if not isinstance(own, FloatSoftmax) or (own.axis_loop.axis_size, own.axis_loop.inner) != (columns, 1):
        return None
    blocks = _blocks(gemms, columns)
    operator = _operator(chain, shape)
    if blocks is None or (operator is None and chain.elementwise is not None):
        return None
    row = dataclasses.replace(own, axis_loop=dataclasses.replace(own.axis_loop, outer=1, outer_per_item=1))
    kernel = Attention(blocks[0], operator, row, blocks[1])
    constants: list[Constant] = []
    for sequence, gemm in zip((scores, values), blocks, strict=True):
        constants += [sequence.last.constants[0], gemm.params()]
    if chain.elementwise is not None and isinstance(chain.elementwise.lowered, KernelLaunch):
        constants += chain.elementwise.lowered.constants
    return kernel, tuple(constants)


def _blocks(gemms: Sequence[object], columns: int) -> list[GemmKernel] | None:
    """Return both GEMMs for the same blocks of rows; None if they are not of floats, or a block is too large."""
    found = [gemm for gemm in gemms if isinstance(gemm, GemmKernel) and gemm.micro_kernel.item_bytes == 4]
    if len(found) < len(gemms) or any(gemm.operator is not None for gemm in found):
        return None
    tile, rows = max(gemm.mr for gemm in found), found[0].shape.pixels
    if 4 * columns * tile > _MAX_BLOCK_BYTES:
        return None
    mc = _rows_of_block(rows, min(_MAX_ROWS, _BLOCK_BYTES // (4 * columns)), tile)
    return [
        dataclasses.replace(gemm, mc=mc, n_splits=1, k_blocks=1, streams_weights=False, lhs_layout=LhsLayout.DIRECT)
        for gemm in found
    ]


def _rows_of_block(rows: int, limit: int, tile: int) -> int:
    """Return the rows of a block, about `limit`: whole tiles in blocks of one size, so that few rows are in two."""
    blocks = math.ceil(rows / (tile * max(1, math.ceil(limit / tile))))
    return min(rows, tile * math.ceil(rows / blocks / tile))


def _operator(chain: _Chain, shape: Shape) -> ScoreOperator | None:
    """Return the operator on the products of `shape`; None if there is none, or none that the kernel computes."""
    op = chain.elementwise
    if op is None or not isinstance(op.lowered, KernelLaunch):
        return None
    kernel, output = op.lowered.kernel, op.call.output
    if not isinstance(kernel, ElementwiseKernel | FlatElementwiseKernel) or output.dtype != _FLOAT32:
        return None
    if output.shape[-2:] != shape[-2:] or math.prod(output.shape) != math.prod(shape):
        return None
    inputs = [
        None if index == chain.products else _input(tensor.shape, output.shape)
        for index, tensor in zip(op.inputs, op.call.tensors, strict=True)
        if tensor is not None
    ]
    return ScoreOperator(kernel.operator, tuple(inputs)) if inputs.count(None) == 1 else None


def _input(shape: Shape, output: Shape) -> ScoreInput:
    """Return the broadcast of an input of `shape` to the output."""
    padded = (1,) * (len(output) - len(shape)) + tuple(shape)
    strides = [math.prod(padded[axis + 1 :]) * (padded[axis] > 1) for axis in range(len(padded))]
    *batch, row, column = strides
    return ScoreInput(tuple(output[:-2]), tuple(batch), row, column)
