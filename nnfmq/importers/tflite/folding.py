"""Folding: operators whose inputs are constants become constants, and so does the SHAPE of a tensor of known shape.

TFLite's converter writes sizes as computations if the batch is unknown. The operator is converted alone, and the
kernels of its operations compute the values. Only operators whose cost is linear are folded, within a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import OperandType
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators import ConversionContext, convert_operator, converter_of
from nnfmq.importers.tflite.operators.conversion import INTEGERS, follows_from_data

__all__ = ["EmptyTensors", "Folding"]

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
        elif (0 in shape and not x.is_empty) or follows_from_data(self._file, x.index, only_shape=True):
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
        from nnfmq.importers.tflite.evaluation import evaluate

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


# ----------------------------------------------------------------------------------------------------------------------
# Operators of .tflite files with tensors that have no elements: their results are constants.
#
# A result without elements is known from its shape. The file states it, but an extent of 0 may also stand for one that
# the model computes. It is taken for 0 if an input has no elements, or a constant says that there are none. Elements
# that are computed from none are those of an empty sum, an empty product, or padding. LiteRT's kernels return the
# largest finite number as the minimum of no floats; XNNPACK, LiteRT's default delegate, and nnfmq return infinity.


Array: TypeAlias = npt.NDArray[Any]
_DTYPES: Mapping[OperandType, Any] = {
    OperandType.TENSOR_FLOAT32: "<f4",
    OperandType.TENSOR_BOOL8: bool,
    **INTEGERS,
}
_SIZES = {"BROADCAST_TO": 1, "FILL": 0, "SLICE": 2, "TILE": 1, "TOPK_V2": 1}
"""Operators whose results have no elements if this input has a 0."""
_SELECTIONS = frozenset((*_SIZES, "STRIDED_SLICE"))
_MAX_ELEMENTS = 1 << 20
_Reduction = Callable[[Array, tuple[int, ...], bool], Array]


def _highest(x: Array, axes: tuple[int, ...], keeps: bool) -> Array:
    return np.asarray(np.max(x, axes, keepdims=keeps, initial=_limits(x)[0]))


def _lowest(x: Array, axes: tuple[int, ...], keeps: bool) -> Array:
    return np.asarray(np.min(x, axes, keepdims=keeps, initial=_limits(x)[1]))


def _mean(x: Array, axes: tuple[int, ...], keeps: bool) -> Array:
    if x.dtype.kind != "f":
        raise InvalidArgument("the mean of no integers is not defined")
    return np.full_like(np.sum(x, axes, keepdims=keeps), np.nan)


def _limits(x: Array) -> tuple[float, float]:
    """Return the least and the greatest value of an array's type: infinities of floats."""
    if x.dtype.kind == "f":
        return -np.inf, np.inf
    return int(np.iinfo(x.dtype).min), int(np.iinfo(x.dtype).max)


_REDUCTIONS: Mapping[str, _Reduction] = {
    "MEAN": _mean,
    "REDUCE_ALL": lambda x, axes, keeps: np.all(x, axes, keepdims=keeps),
    "REDUCE_ANY": lambda x, axes, keeps: np.any(x, axes, keepdims=keeps),
    "REDUCE_MAX": _highest,
    "REDUCE_MIN": _lowest,
    "REDUCE_PROD": lambda x, axes, keeps: np.prod(x, axes, x.dtype, keepdims=keeps),
    "SUM": lambda x, axes, keeps: np.sum(x, axes, x.dtype, keepdims=keeps),
}


class EmptyTensors:
    """The operators of one import that read or write tensors without elements."""

    def __init__(self, context: ConversionContext) -> None:
        self._context = context
        self._file = context.file

    def or_convert(self, convert: Callable[[TfliteOperator], None]) -> Callable[[TfliteOperator], None]:
        """Return a function that makes the results of an operator constants, or calls `convert` if they are none."""

        def know_or_convert(operator: TfliteOperator) -> None:
            if not self._know(operator):
                convert(operator)

        return know_or_convert

    def _know(self, operator: TfliteOperator) -> bool:
        try:
            inputs = [self._file.tensor(index) for index in operator.inputs if index >= 0]
        except InvalidArgument:  # a tensor that is not supported, or the handle of a variable
            return False
        reads_none = any(tensor.is_empty for tensor in inputs)
        if reads_none or operator.name in _SELECTIONS:
            converter_of(operator)  # checks the numbers of tensors, and that there are options
        if not reads_none and not self._selects_none(operator, inputs):
            return False
        outputs = [self._file.tensor(index) for index in operator.outputs]
        if all(0 in tensor.shape for tensor in outputs):
            for tensor in outputs:
                self._file.set_value(tensor.index, b"", tensor.shape)
            return True
        try:
            result = self._computed(operator, inputs) if reads_none else None
        except (ValueError, IndexError) as error:
            raise InvalidArgument(f"its shapes or axes do not fit: {error}") from None
        if result is None:
            return False
        self._file.set_value(operator.outputs[0], result.tobytes(), result.shape)
        return True

    def _selects_none(self, operator: TfliteOperator, inputs: list[TfliteTensor]) -> bool:
        """Return whether constants say that the results of an operator have no elements."""
        if operator.name == "STRIDED_SLICE":
            return self._strides_none(operator, inputs)
        place = _SIZES.get(operator.name, len(inputs))
        if place >= len(inputs) or inputs[place].data is None or inputs[place].type not in INTEGERS:
            return False
        return 0 in self._context.ints(operator.inputs[place])

    def _strides_none(self, operator: TfliteOperator, inputs: list[TfliteTensor]) -> bool:
        options = operator.options
        if options is None or options.EllipsisMask() or options.NewAxisMask() or options.ShrinkAxisMask():
            return False
        x = inputs[0] if inputs else None
        if x is None or len(inputs) != 4 or not x.shape or any(tensor.data is None for tensor in inputs[1:]):
            return False
        begins, ends, strides = (self._context.ints(index) for index in operator.inputs[1:])
        if 0 in strides or 0 in x.shape or not len(begins) == len(ends) == len(strides) <= len(x.shape):
            return False
        parts = [
            slice(
                None if options.BeginMask() >> axis & 1 else begins[axis],
                None if options.EndMask() >> axis & 1 else ends[axis],
                strides[axis],
            )
            for axis in range(len(begins))
        ]
        return not all(len(range(extent)[part]) for extent, part in zip(x.shape, parts, strict=False))

    def _computed(self, operator: TfliteOperator, inputs: list[TfliteTensor]) -> Array | None:
        """Return the result of an operator that computes elements from none; None if it may depend on an input."""
        if operator.inputs[0] < 0:
            return None
        x, kind = inputs[0], self._file.tensor(operator.outputs[0]).type
        if operator.name == "SHAPE" and kind in INTEGERS:
            return np.array(x.shape, INTEGERS[kind])
        if not x.is_empty or x.type not in _DTYPES or kind != x.type:
            return None
        given = np.zeros(x.shape, _DTYPES[x.type])
        if operator.name in _REDUCTIONS:
            axes = tuple(self._context.ints(operator.inputs[1]))
            keeps = operator.options is not None and bool(operator.options.KeepDims())
            return np.asarray(_REDUCTIONS[operator.name](given, axes, keeps), given.dtype)
        if operator.name == "BATCH_MATMUL" and inputs[1].is_empty:
            return self._product(operator, given, np.zeros(inputs[1].shape, given.dtype))
        if operator.name == "PAD":
            paddings = np.reshape(self._context.ints(operator.inputs[1]), (-1, 2))
            _check_size([extent + sum(pair) for extent, pair in zip(x.shape, paddings.tolist(), strict=True)])
            return np.pad(given, paddings)
        return None

    def _product(self, operator: TfliteOperator, left: Array, right: Array) -> Array:
        options = operator.options
        left = left.swapaxes(-1, -2) if options is not None and options.AdjX() else left
        right = right.swapaxes(-1, -2) if options is not None and options.AdjY() else right
        _check_size([*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]])
        return np.asarray(np.matmul(left, right))


def _check_size(shape: list[int]) -> None:
    if any(extent < 0 for extent in shape) or np.prod(shape, dtype=float) > _MAX_ELEMENTS:
        raise InvalidArgument(f"its constant result would have the shape {shape}")
