"""Operators that take pieces of a tensor: slices, equal and unequal splits, rows by their numbers."""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.importers.tflite_file import Operator, Tensor
from nnfmq.importers.tflite_operators.arguments import as_they_are, axis_of, reshaped
from nnfmq.importers.tflite_operators.translation import Rule, Translation

__all__ = ["RULES"]

_FEW = 8  # TFLite's highest rank


def _strided_slice(graph: Translation, operator: Operator) -> None:
    """Dimensions that the arguments do not reach are taken whole, as TFLite does."""
    options, rank = operator.options, len(graph.file.tensor(operator.inputs[0]).shape)
    if options.EllipsisMask() or options.NewAxisMask() or options.Offset():
        raise InvalidArgument("an ellipsis, a new axis, or an offset as end is not supported: NNAPI has none")
    begin, end, strides = (graph.ints(index, _FEW) for index in operator.inputs[1:])
    rest = rank - len(begin)
    if rest < 0 or not len(begin) == len(end) == len(strides):
        raise InvalidArgument(f"begin, end and strides of {len(begin)}, {len(end)} and {len(strides)} for rank {rank}")
    open_ones = ((1 << rest) - 1) << len(begin)
    vectors = [begin + [0] * rest, end + [0] * rest, strides + [1] * rest]
    masks = [options.BeginMask() | open_ones, options.EndMask() | open_ones, options.ShrinkAxisMask()]
    arguments = [graph.builder.int32_vector(values) for values in vectors] + [graph.builder.int32(m) for m in masks]
    graph.emit(OperationType.STRIDED_SLICE, operator, graph.value(operator.inputs[0]), *arguments, shape=(1,))


def _split(graph: Translation, operator: Operator) -> None:
    x = graph.file.tensor(operator.inputs[1])
    axis = axis_of(graph.one_int(operator.inputs[0]), len(x.shape))
    _equal_parts(graph, x, axis, [graph.result(index) for index in operator.outputs])


def _equal_parts(graph: Translation, x: Tensor, axis: int, parts: list[int]) -> None:
    arguments = [graph.value(x.index), graph.builder.int32(axis), graph.builder.int32(len(parts))]
    graph.builder.operation(OperationType.SPLIT, arguments, *parts)


def _split_v(graph: Translation, operator: Operator) -> None:
    """Write it as one SLICE for each part; one of the sizes may be -1, for what is left."""
    x = graph.file.tensor(operator.inputs[0])
    sizes = graph.ints(operator.inputs[1], len(operator.outputs))
    axis = axis_of(graph.one_int(operator.inputs[2]), len(x.shape))
    if len(sizes) != len(operator.outputs) or sizes.count(-1) > 1:
        raise InvalidArgument(
            f"{len(sizes)} sizes, {sizes.count(-1)} of them open, for {len(operator.outputs)} outputs"
        )
    known = sum(size for size in sizes if size != -1)
    start, value = 0, graph.value(x.index)
    for index, size in zip(operator.outputs, sizes, strict=True):
        extent = x.shape[axis] - known if size == -1 else size
        begin, extents = [0] * len(x.shape), list(x.shape)
        begin[axis], extents[axis] = start, extent
        vectors = [graph.builder.int32_vector(values) for values in (begin, extents)]
        graph.builder.operation(OperationType.SLICE, [value, *vectors], graph.result(index))
        start += extent


def _unpack(graph: Translation, operator: Operator) -> None:
    """Write it as SPLIT into parts of extent 1, and a RESHAPE of each."""
    x = graph.file.tensor(operator.inputs[0])
    axis = axis_of(operator.options.Axis(), len(x.shape))
    thin, final = ((*x.shape[:axis], *one, *x.shape[axis + 1 :]) for one in ((1,), ()))
    parts = [graph.temporary(x, thin) for _ in operator.outputs]
    _equal_parts(graph, x, axis, parts)
    shape = graph.builder.int32_vector(final or (1,))
    for part, index in zip(parts, operator.outputs, strict=True):
        graph.builder.operation(OperationType.RESHAPE, [part, shape], graph.result(index, (1,)))


def _gather(graph: Translation, operator: Operator) -> None:
    x, indices = (graph.file.tensor(index) for index in operator.inputs)
    options = operator.options
    axis = axis_of(options.Axis() if options is not None else 0, len(x.shape))
    if options is not None and options.BatchDims():
        raise InvalidArgument(f"{options.BatchDims()} batch dimensions are not supported: NNAPI's GATHER has none")
    arguments = [graph.value(x.index), graph.builder.int32(axis), graph.value(indices.index)]
    if indices.rank:
        return graph.emit(OperationType.GATHER, operator, *arguments)
    # One index of rank 0 takes a dimension away; an operand has at least one, so the gathered extent of 1 goes after.
    row = graph.temporary(x, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    graph.builder.operation(OperationType.GATHER, arguments, row)
    return reshaped(graph, operator, row)


_TWO, _THREE = range(2, 3), range(3, 4)
_SOME = range(1, 1 << 16)

RULES: dict[str, Rule] = {
    "EMBEDDING_LOOKUP": Rule(_TWO, as_they_are(OperationType.EMBEDDING_LOOKUP)),
    "GATHER": Rule(_TWO, _gather, "GatherOptions"),
    "SLICE": Rule(_THREE, as_they_are(OperationType.SLICE)),
    "SPLIT": Rule(_TWO, _split, output_counts=_SOME),
    "SPLIT_V": Rule(_THREE, _split_v, output_counts=_SOME),
    "STRIDED_SLICE": Rule(range(4, 5), _strided_slice, "StridedSliceOptions", True),
    "UNPACK": Rule(range(1, 2), _unpack, "UnpackOptions", True, _SOME),
}
