"""Checks of an application's arrays against a model's inputs and outputs.

An array must have the shape and the dtype of its tensor. An input's batch dimension of 1 may be missing. Only
conversions within a kind, such as float64 to float32, are made (NumPy's `same_kind` casting), and integers must be in
the range of the tensor's type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.runtime.outputs import in_order
from nnfmq.runtime.tensor_layout import (
    Array,
    InputValue,
    format_array_shape,
    format_tensor_shape,
    has_unknown_shape,
)


def with_batch_dimension(array: Array, shape: tuple[int, ...]) -> Array:
    """Return `array` with a first dimension of 1 if that makes it fit `shape`, otherwise unchanged; without a copy.

    An unknown dimension of `shape` (0) fits any.
    """
    if array.ndim + 1 == len(shape) and _fits((1, *array.shape), shape):
        return array[np.newaxis]
    return array


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (0, s) for w, s in zip(wanted, shape, strict=True))


def checked_array(info: TensorInfo, value: InputValue) -> Array:
    """Return `value` as an array that can be copied into the input `info`. An unknown dimension (0) matches any.

    A missing batch dimension of 1 is added.

    Raises:
        InvalidArgument: If `value` is not an array, has another shape or an incompatible dtype, or contains an integer
            that the input's type cannot represent.
    """
    if isinstance(value, Mapping):
        raise InvalidArgument(
            f"input {info.name!r} is given as a {type(value).__name__}: give all inputs in one mapping by name, or an "
            "array for each in order"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged lists
        raise InvalidArgument(f"input {info.name!r} is no array: {error}") from error
    if array.dtype.kind in "OSU":
        given = f"array is {array.dtype}" if isinstance(value, np.ndarray) else f"value is a {type(value).__name__}"
        shape_text = format_tensor_shape(info)
        files = "; nnfmq.read_photo and nnfmq.read_audio read files" if isinstance(value, (str, os.PathLike)) else ""
        raise InvalidArgument(
            f"input {info.name!r} holds {info.dtype}; the given {given}: give an array of the shape {shape_text}{files}"
        )
    wanted = info.shape
    array = with_batch_dimension(array, wanted)
    shape = array.shape
    is_refused = shape != wanted if info.is_empty else not _fits(shape, wanted) and (wanted or info.is_scalar)
    if is_refused:
        wanted_text, text = format_tensor_shape(info), format_array_shape(shape)
        advice = _shape_advice(info, shape)
        raise InvalidArgument(f"input {info.name!r} has shape {wanted_text}; the given array has {text}{advice}")
    if array.dtype != info.dtype:
        _check_conversion(info, array)
    return array


def _shape_advice(info: TensorInfo, shape: tuple[int, ...]) -> str:
    """Return what may make an array of another shape fit; "" if nothing known does."""
    wanted, count = info.shape, math.prod(shape)
    if info.has_unknown_shape or not shape or not count:
        return ""
    if shape == (1, *wanted):
        return ": give the array itself, without another dimension around it"
    if len(shape) == len(wanted) and shape[1:] == wanted[1:]:
        return f": call the model for each row, or prepare its file with shapes={{{info.name!r}: {shape}}}"
    if len(shape) == len(wanted) and sorted(shape) == sorted(wanted):
        return ": its dimensions are in another order, so use array.transpose"
    return f": use array.reshape{wanted}" if count == math.prod(wanted) else ""


def _check_conversion(info: TensorInfo, array: Array) -> None:
    """Raise InvalidArgument if the conversion to `info.dtype` would change values of `array` by more than rounding."""
    if not np.can_cast(array.dtype, info.dtype, "same_kind"):
        advice = f"array.astype({info.dtype!r})"
        if info.scale:
            advice = f"round(value / {info.scale:g}) {'-' if info.zero_point < 0 else '+'} {abs(info.zero_point)}"
        raise InvalidArgument(
            f"input {info.name!r} holds {info.dtype}; the given array is {array.dtype}: convert it, as by {advice}"
        )
    if not array.size or not (np.issubdtype(array.dtype, np.integer) and np.issubdtype(info.dtype, np.integer)):
        return
    limits = np.iinfo(info.dtype)
    lowest, highest = int(array.min()), int(array.max())
    if lowest < limits.min or highest > limits.max:
        value = lowest if lowest < limits.min else highest
        raise InvalidArgument(
            f"input {info.name!r} holds {info.dtype} ({limits.min} to {limits.max}); "
            f"the given {array.dtype} array contains {value}"
        )


def checked_arrays(infos: Sequence[TensorInfo], values: Sequence[InputValue]) -> list[Array]:
    """Return all inputs of an execution, given in order or in a mapping by name, as arrays.

    Raises:
        InvalidArgument: If their number or a name is wrong, or as `checked_array`.
    """
    values = in_order(infos, values)
    check_count("input", infos, len(values))
    return [checked_array(info, value) for info, value in zip(infos, values, strict=True)]


def check_count(kind: str, infos: Sequence[TensorInfo], count: int) -> None:
    """Raise InvalidArgument unless `count` is the model's number of `kind`s, which is "input" or "output"."""
    if count != len(infos):
        names = ", ".join(repr(info.name) for info in infos)
        given = "1 was given" if count == 1 else f"{count} were given"
        raise InvalidArgument(f"the model has {counted(len(infos), kind)} ({names}); {given}")


def no_inputs_error(infos: Sequence[TensorInfo], call: str) -> InvalidArgument:
    """Return the exception for a call without arguments on an object whose own input arrays nobody has accessed."""
    names = ", ".join(repr(info.name) for info in infos[:8])
    return InvalidArgument(
        f"{call}() without arguments uses the arrays in `inputs`, which were never written: "
        f"write them, or pass {counted(len(infos), 'array')} ({names})"
    )


def require_fixed_shapes(kind: str, infos: Sequence[TensorInfo], user: str = "a burst") -> None:
    """Raise InvalidArgument if a shape is not fully known: `user` lays out its memory only once."""
    for info in infos:
        if has_unknown_shape(info):
            raise InvalidArgument(
                f"{kind} {info.name!r} has the shape {format_tensor_shape(info)}, which is not fully known: "
                f"{user} needs fixed shapes; use model.execute, or prepare the model with `shapes` of its inputs"
            )


def check_out(infos: Sequence[TensorInfo], targets: Sequence[Array]) -> None:
    """Raise InvalidArgument unless the arrays of `out` can take the outputs.

    For an output of unknown shape `copy_out` checks the shape.
    """
    unchecked: Any = targets  # from the application: any type
    if not isinstance(unchecked, Sequence) or not all(isinstance(target, np.ndarray) for target in unchecked):
        raise InvalidArgument("`out` must be a sequence of numpy arrays, one for each output")
    if len(targets) != len(infos):
        raise InvalidArgument(
            f"the model has {counted(len(infos), 'output')}, `out` has {counted(len(targets), 'array')}"
        )
    for info, target in zip(infos, targets, strict=True):
        if target.dtype != info.dtype or (not info.has_unknown_shape and target.shape != info.shape):
            raise InvalidArgument(
                f"output {info.name!r} is {info.dtype} of shape {format_tensor_shape(info)}, "
                f"`out` has {target.dtype} of shape {format_array_shape(target.shape)}"
            )
        if not target.flags.writeable:
            raise InvalidArgument(f"the array in `out` for output {info.name!r} is read-only")


def copy_out(targets: Sequence[Array], results: Sequence[Array]) -> None:
    """Copy results into the caller's arrays.

    Raises:
        InvalidArgument: If a shape differs.
    """
    for index, (target, result) in enumerate(zip(targets, results, strict=True)):
        if target.shape != result.shape:
            raise InvalidArgument(f"output {index} has shape {result.shape}, `out` has {target.shape}")
        np.copyto(target, result)
