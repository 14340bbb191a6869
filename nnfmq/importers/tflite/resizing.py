"""Resizing: import of a TFLite file with other input shapes than the file's.

The shapes in the file hold for its own inputs. The results of each operator are therefore converted with unknown
shapes, and the shape rules of the HAL's operations give the new ones. Some operators state the shape of their result,
or their conversion needs it: for those the new shape is computed here. If only the batch changes, stated shapes and
states change with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.summaries import nearest
from nnfmq.importers.file_format import Shapes
from nnfmq.importers.tflite.file import TfliteFile, TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators import ConversionContext, convert_operator, converter_of
from nnfmq.importers.tflite.operators.conversion import computed_size

__all__ = ["Resizing", "input_index"]

_SELECTIONS = ("SELECT", "SELECT_V2")
_OF_VARIABLES = ("READ_VARIABLE", "ASSIGN_VARIABLE")
_Shape = tuple[int, ...]


class Resizing:
    """New shapes of a model's inputs, and of what operators compute from them."""

    def __init__(self, context: ConversionContext, shapes: Shapes) -> None:
        self._context, self._file = context, context.file
        new = {input_index(self._file, key): tuple(shape) for key, shape in shapes.items()}
        self._unknown: set[int] = set()  # what operators write that are not supported, and those that read it
        self._batch = _batch_change([(self._file.tensor(index).shape, shape) for index, shape in new.items()])
        for index, shape in new.items():
            self._file.set_shape(index, shape)

    def convert(self, operator: TfliteOperator) -> None:
        """Add the operations that compute `operator`, for the new shapes.

        Raises:
            InvalidArgument: If the operator is not supported, or not with these shapes.
        """
        if not self._unknown.isdisjoint(operator.inputs):  # an earlier operator is at fault, not this one
            self._unknown.update(operator.outputs)
            if operator.name in _OF_VARIABLES:  # the handle is at fault
                self._context.assume_written(operator)
            else:
                convert_operator(self._context, operator)
            return
        try:
            self._convert(operator)
        except InvalidArgument:
            self._unknown.update(operator.outputs)
            raise

    def _convert(self, operator: TfliteOperator) -> None:
        converter_of(operator)  # checks the number of tensors
        if operator.name == "VAR_HANDLE":
            raise InvalidArgument(
                "its variable has a shape that the file states: inputs of the model cannot get another"
            )
        self._resize_states(operator)
        for index in operator.outputs:
            self._file.set_shape(index, self._stated(operator, self._file.tensor(index)))
        begin = self._context.builder.operation_count
        convert_operator(self._context, operator)
        try:
            self._context.builder.infer_shapes(begin)
        except GeneralFailure as error:
            raise InvalidArgument(f"does not accept the new shapes: {error}") from None
        for index in operator.outputs:
            if not self._file.tensor(index).is_empty:
                self._file.set_shape(index, self._context.shape(index))

    def _resize_states(self, operator: TfliteOperator) -> None:
        if self._batch is None:
            return
        old, new = self._batch
        for index in operator.inputs:
            tensor = self._file.tensor(index) if index >= 0 else None
            if tensor is not None and tensor.is_variable and tensor.shape[:1] == (old,):
                self._file.set_shape(index, (new, *tensor.shape[1:]))

    def _stated(self, operator: TfliteOperator, result: TfliteTensor) -> _Shape:
        """Return the new shape of a result if the conversion needs it, else ()."""
        tensors = [self._file.tensor(index) for index in operator.inputs if index >= 0]
        if operator.name == "RESHAPE":
            shape = self._reshaped(operator, tensors[0], result)
            self._context.resized_shapes[result.index] = shape
            return shape
        if operator.name == "FULLY_CONNECTED" and operator.options is not None and operator.options.KeepNumDims():
            return (*tensors[0].shape[:-1], *tensors[1].shape[:1])
        if operator.name in _SELECTIONS:
            return _broadcast([tensor.shape for tensor in tensors])
        return () if computed_size(self._file, operator) is None else self._scaled(result.shape)

    def _scaled(self, shape: _Shape) -> _Shape:
        """Return a shape that the file states, for the new batch."""
        old, new = self._batch or (0, 0)
        if not old or not shape or shape[0] * new % old:
            raise InvalidArgument(f"has a result of shape {list(shape)} in the file: only its batch can change")
        return (shape[0] * new // old, *shape[1:])

    def _reshaped(self, operator: TfliteOperator, x: TfliteTensor, result: TfliteTensor) -> _Shape:
        """Return the target shape of a RESHAPE for the new number of elements."""
        count, target = math.prod(x.shape), self._target(operator, result)
        known = math.prod(extent for extent in target if extent != -1)
        if target.count(-1) == 1 and known and count % known == 0:
            return tuple(count // known if extent == -1 else extent for extent in target)
        if known == count and -1 not in target:
            return target
        scaled = self._scaled(target if -1 not in target else result.shape)
        if math.prod(scaled) != count:
            raise InvalidArgument(f"{count} elements do not fit the shape {list(target)}")
        return scaled

    def _target(self, operator: TfliteOperator, result: TfliteTensor) -> _Shape:
        if len(operator.inputs) > 1 and operator.inputs[1] >= 0:
            if self._file.tensor(operator.inputs[1]).data is not None:
                return tuple(self._context.ints(operator.inputs[1]))
            if computed_size(self._file, operator) is None:
                raise InvalidArgument("the shape of its result depends on the data")
            return self._file.signature(result.index) or result.shape
        options = operator.options
        wanted = options.NewShapeAsNumpy().tolist() if options is not None and options.NewShapeLength() else ()
        return tuple(wanted) or result.shape


def _broadcast(shapes: Sequence[_Shape]) -> _Shape:
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise InvalidArgument(f"shapes {', '.join(str(list(shape)) for shape in shapes)} do not broadcast") from None


def _batch_change(changes: Sequence[tuple[_Shape, _Shape]]) -> tuple[int, int] | None:
    """Return the old and the new batch if all inputs have the same and nothing else has changed, else None."""
    firsts = {(old[:1], new[:1]) for old, new in changes}
    if len(firsts) != 1 or any(old[1:] != new[1:] or len(old) != len(new) or 0 in old[:1] for old, new in changes):
        return None
    ((old, new),) = firsts
    return (old[0], new[0]) if old else None


def input_index(file: TfliteFile, key: str | int) -> int:
    """Return the tensor of an input, given by its name or its index among the inputs."""
    names = [file.tensor(index).name for index in file.inputs]
    if isinstance(key, str) and names.count(key) == 1:
        return file.inputs[names.index(key)]
    if isinstance(key, int) and 0 <= key < len(names):
        return file.inputs[key]
    known = ", ".join(f"{index} = {name[:80]!r}" for index, name in enumerate(names))
    raise InvalidArgument(f"no input {key!r} to be resized: the inputs are {known}{nearest(key, names)}")
