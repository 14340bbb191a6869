"""Operators of .tflite files with tensors that have no elements: their results are constants.

A result without elements is known from its shape. The file states it, but an extent of 0 may also stand for one that
the model computes. It is taken for 0 if an input has no elements, or a constant says that there are none. Elements that
are computed from none are those of an empty sum, an empty product, or padding. LiteRT's kernels return the largest
finite number as the minimum of no floats; XNNPACK, LiteRT's default delegate, and nnfmq return infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite_file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite_operators import ConversionContext, converter_of
from nnfmq.importers.tflite_operators.conversion import INTEGERS

__all__ = ["EmptyTensors"]

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
