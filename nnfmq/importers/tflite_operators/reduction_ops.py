"""Operators that reduce: over axes, to the largest elements, to the place of one, to hashes.

What is reduced to one number has rank 0 in TFLite and the shape (1,) in NNAPI.
"""

from __future__ import annotations

from collections.abc import Callable

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite_file import Operator
from nnfmq.importers.tflite_operators.conversion import Rule, Translation
from nnfmq.importers.tflite_operators.options import axis_of, emit_reals, keeping_codes, reals

__all__ = ["RULES"]

_OF_FLOATS = (OperationType.REDUCE_PROD, OperationType.REDUCE_SUM)
_PROJECTIONS = {1: 3, 2: 2}  # TFLite's SPARSE is NNAPI's third kind: its first one is deprecated


def _reduction(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        axes = graph.value(operator.inputs[1])
        keeps = operator.options is not None and bool(operator.options.KeepDims())
        is_mean = operation_type == OperationType.MEAN  # the only one that takes a number
        flag = graph.builder.int32(int(keeps)) if is_mean else graph.builder.boolean(keeps)
        shape = _reduced_to_one(graph, operator)
        if operation_type in _OF_FLOATS:
            return emit_reals(
                graph, operator, operation_type, reals(graph, operator.inputs[0]), axes, flag, shape=shape
            )
        return keeping_codes(graph, operator, operation_type, axes, flag, shape=shape)

    return apply


def _reduced_to_one(graph: Translation, operator: Operator) -> tuple[int, ...]:
    """Return (1,) where an output of rank 0 is meant, and () where the file does not know the shape."""
    x, axes = (graph.file.tensor(index) for index in operator.inputs)
    if axes.data is None or not x.shape:
        return ()
    return (1,) if len({axis_of(axis, len(x.shape)) for axis in graph.ints(axes.index)}) == len(x.shape) else ()


def _arg(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        x = graph.file.tensor(operator.inputs[0])
        axis = axis_of(graph.one_int(operator.inputs[1]), len(x.shape))
        shape = (1,) if len(x.shape) == 1 else ()
        graph.emit(operation_type, operator, graph.value(x.index), graph.builder.int32(axis), shape=shape)

    return apply


def _topk_v2(graph: Translation, operator: Operator) -> None:
    arguments = [graph.value(operator.inputs[0]), graph.builder.int32(graph.one_int(operator.inputs[1]))]
    outputs = [graph.result(index) for index in operator.outputs]
    graph.builder.operation(OperationType.TOPK_V2, arguments, *outputs)


def _lsh_projection(graph: Translation, operator: Operator) -> None:
    kind = operator.options.Type()
    if kind not in _PROJECTIONS:
        raise InvalidArgument(f"projection type {kind} is neither SPARSE (1) nor DENSE (2)")
    hashes, x = map(graph.value, operator.inputs[:2])
    weights = graph.optional(operator, 2, OperandType.TENSOR_FLOAT32)
    graph.emit(OperationType.LSH_PROJECTION, operator, hashes, x, weights, graph.builder.int32(_PROJECTIONS[kind]))


_TWO = range(2, 3)
_REDUCTIONS = {
    "MEAN": OperationType.MEAN,
    "REDUCE_ALL": OperationType.REDUCE_ALL,
    "REDUCE_ANY": OperationType.REDUCE_ANY,
    "REDUCE_MAX": OperationType.REDUCE_MAX,
    "REDUCE_MIN": OperationType.REDUCE_MIN,
    "REDUCE_PROD": OperationType.REDUCE_PROD,
    "SUM": OperationType.REDUCE_SUM,
}

RULES: dict[str, Rule] = {
    **{name: Rule(_TWO, _reduction(code), "ReducerOptions") for name, code in _REDUCTIONS.items()},
    "ARG_MAX": Rule(_TWO, _arg(OperationType.ARGMAX)),
    "ARG_MIN": Rule(_TWO, _arg(OperationType.ARGMIN)),
    "LSH_PROJECTION": Rule(range(2, 4), _lsh_projection, "LSHProjectionOptions", True),
    "TOPK_V2": Rule(_TWO, _topk_v2, output_counts=_TWO),
}
