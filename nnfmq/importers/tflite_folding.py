"""Folding: operators whose inputs are constants become constants, and so does the SHAPE of a tensor of known shape.

TFLite's converter writes sizes as computations if the batch is unknown. The operator is converted alone, and the
kernels of its operations compute the values. Only operators whose cost is linear are folded, within a budget.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.tflite_file import TfliteOperator
from nnfmq.importers.tflite_operators import ConversionContext, convert_operator
from nnfmq.importers.tflite_operators.conversion import INTEGERS

__all__ = ["Folding"]

_SPARE_BYTES = 1 << 20
_FOLDED = frozenset(
    (
        *("ABS", "ADD", "BITCAST", "BROADCAST_ARGS", "BROADCAST_TO", "CAST", "CEIL", "CONCATENATION", "DEQUANTIZE"),
        *("DIV", "EQUAL", "EXPAND_DIMS", "FILL", "FLOOR", "FLOOR_DIV", "FLOOR_MOD", "GATHER", "GATHER_ND", "GREATER"),
        *("GREATER_EQUAL", "LESS", "LESS_EQUAL", "LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR", "MAXIMUM", "MINIMUM"),
        *("MUL", "NEG", "NOT_EQUAL", "ONE_HOT", "PACK", "PAD", "PADV2", "RANGE", "REDUCE_MAX", "REDUCE_MIN"),
        *("REDUCE_PROD", "RESHAPE", "REVERSE_V2", "RSQRT", "SELECT", "SELECT_V2", "SLICE", "SPLIT", "SPLIT_V", "SQRT"),
        *("SQUARE", "SQUEEZE", "STRIDED_SLICE", "SUB", "SUM", "TILE", "TRANSPOSE", "UNPACK", "WHERE", "ZEROS_LIKE"),
    )
)


class Folding:
    """The budget of one import in bytes, for the constants that are read and made."""

    def __init__(self, context: ConversionContext) -> None:
        self._context = context
        self._file = context.file
        self._bytes_left = 8 * context.file.size_bytes + _SPARE_BYTES

    def or_convert(self, convert: Callable[[TfliteOperator], None]) -> Callable[[TfliteOperator], None]:
        """Return a function that folds an operator, or calls `convert` if that is not possible."""

        def fold_or_convert(operator: TfliteOperator) -> None:
            if not self._fold(operator):
                convert(operator)

        return fold_or_convert

    def _fold(self, operator: TfliteOperator) -> bool:
        if operator.name == "DENSIFY":
            return self._fold_copy(operator)
        if any(self._context.is_model_output(index) for index in operator.outputs):
            return False
        if operator.name in ("SHAPE", "RANK") and len(operator.inputs) == len(operator.outputs) == 1:
            return self._fold_shape(operator)
        if operator.name not in _FOLDED or not self._is_constant(operator):
            return False
        return self._fold_split(operator) or self._evaluate(operator)

    def _fold_split(self, operator: TfliteOperator) -> bool:
        """Cut a vector with SPLIT_V, which the HAL cannot do if a part has no elements."""
        if operator.name != "SPLIT_V":
            return False
        x, sizes, _ = (self._file.tensor(index) for index in operator.inputs)
        if len(x.shape) != 1 or not {x.type, sizes.type} <= INTEGERS.keys():
            return False
        values, counts = (np.frombuffer(tensor.data or b"", INTEGERS[tensor.type]) for tensor in (x, sizes))
        free = np.flatnonzero(counts < 0)
        if len(counts) != len(operator.outputs) or len(free) > 1:
            return False
        counts = np.where(counts < 0, len(values) - counts[counts >= 0].sum(), counts)
        if (counts < 0).any() or counts.sum() != len(values):
            return False
        for index, part in zip(operator.outputs, np.split(values, np.cumsum(counts)[:-1]), strict=True):
            if part.size:
                self._file.set_value(index, part.tobytes(), part.shape)
        return True

    def _fold_shape(self, operator: TfliteOperator) -> bool:
        x = self._file.tensor(operator.inputs[0])
        shape = x.shape if x.rank else ()
        if operator.name == "RANK":
            shape = (x.rank,)
        elif 0 in shape and not x.is_empty:
            return False
        dtype = INTEGERS.get(self._file.tensor(operator.outputs[0]).type)
        if dtype is None:
            return False
        self._file.set_value(operator.outputs[0], np.array(shape, dtype).tobytes(), (len(shape),))
        return True

    def _fold_copy(self, operator: TfliteOperator) -> bool:
        """Make the result of DENSIFY the constant that it reads, which has become dense when it was read."""
        if len(operator.inputs) != 1 or len(operator.outputs) != 1 or not self._is_constant(operator):
            return False
        x = self._file.tensor(operator.inputs[0])
        assert x.data is not None, "checked above"
        self._file.set_value(operator.outputs[0], x.data, x.shape)
        return True

    def _is_constant(self, operator: TfliteOperator) -> bool:
        tensors = [self._file.tensor(index) for index in operator.inputs if index >= 0]
        if operator.name == "RESHAPE" and len(tensors) == 2 and tensors[1].shape == (0,):
            del tensors[1]  # the shape of a scalar
        return bool(tensors) and all(tensor.data is not None for tensor in tensors)

    def _evaluate(self, operator: TfliteOperator) -> bool:
        # Imports all operations, which few models need: 3 MiB of an application.
        from nnfmq.importers.constant_evaluation import evaluate

        read = sum(len(self._file.tensor(index).data or b"") for index in operator.inputs if index >= 0)
        if read > self._bytes_left:
            return False
        alone = ConversionContext(self._file, GraphBuilder(max_constant_bytes=4 * read + _SPARE_BYTES))
        convert_operator(alone, operator)
        for operation in alone.builder.operations:  # the shapes in the file may be those of other sizes
            for index in operation.outputs:
                alone.builder.set_dimensions(index, ())
        try:
            values = evaluate(
                alone.builder, [alone.value(index) for index in operator.outputs], self._bytes_left - read
            )
        except GeneralFailure as error:
            raise InvalidArgument(f"its constant inputs are rejected: {error}") from None
        if values is None:
            return False
        self._bytes_left -= read + sum(value.nbytes for value in values)
        for index, value in zip(operator.outputs, values, strict=True):
            self._file.set_value(index, value.tobytes(), value.shape)
        return True
