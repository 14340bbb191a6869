"""An application's arrays: checks against a model's inputs and outputs, their layout, and results with names.

An array must have the shape and the dtype of its tensor. An input's batch dimension of 1 may be missing. Only
conversions within a kind, such as float64 to float32, are made (NumPy's `same_kind` casting), and integers must be in
the range of the tensor's type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Self, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.summaries import counted, listed, nearest
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import DataLocation, OutputShape, Pool, RequestArgument

__all__ = [
    "LENGTH_MAX",
    "ExecutionInfo",
    "ExecutionResult",
    "MemoryPreference",
    "Outputs",
    "callers_shape",
    "check_count",
    "check_fits",
    "check_index",
    "check_out",
    "check_reported_shapes",
    "checked_array",
    "checked_arrays",
    "copy_out",
    "format_array_shape",
    "format_shape",
    "format_tensor_shape",
    "in_order",
    "layout",
    "names_of",
    "no_inputs_error",
    "outputs_type",
    "require_fixed_shapes",
    "size_bytes",
    "space_bytes",
    "view",
    "with_batch_dimension",
]


# ----------------------------------------------------------------------------------------------------------------------
# Layout of tensors in a memory pool, and array views of them.
#
# Each argument starts at a multiple of 64 bytes (the HAL's default request alignment), and its range ends with its last
# element.


Array = NDArray[Any]
InputValue: TypeAlias = ArrayLike | Mapping[str, Any]
"""An array for an input, or all of an execution's inputs by name."""
ALIGNMENT = PADDING = 64


class MemoryPreference(NamedTuple):
    """The fastest placement of an argument.

    Its offset is a multiple of `alignment`, its length is padded to a multiple of `padding`, both in bytes.
    """

    alignment: int
    padding: int


def size_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor of the type of `info` and of `shape`, in bytes."""
    return math.prod(shape) * np.dtype(info.dtype).itemsize


def space_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's argument, in bytes: that of the tensor, or of an empty tensor's one element."""
    return size_bytes(info, () if info.is_empty else shape)


def callers_shape(info: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the caller's array, given the shape that the driver reports or () if it reports none.

    Rank 0 and empty tensors have operands of another shape, and are never of unknown shape.
    """
    return info.shape if info.is_scalar or info.is_empty else shape or info.shape


def layout(
    infos: Sequence[TensorInfo],
    shapes: Sequence[tuple[int, ...]],
    pool_index: int,
    least_bytes: Sequence[int] | None = None,
) -> tuple[tuple[RequestArgument, ...], int]:
    """Return the request arguments of tensors placed one after the other in a pool, and the pool's size in bytes.

    A tensor of unknown size gets `least_bytes`, by default one byte: if that is too little, the driver replies
    OUTPUT_INSUFFICIENT_SIZE with its shape.
    """
    arguments, end = [], 0
    for info, shape, least in zip(infos, shapes, least_bytes or [1] * len(infos), strict=True):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        length = max(space_bytes(info, shape), least)
        # Dimensions are sent only if they add to what the model specifies.
        dimensions = shape if shape != info.shape else ()
        arguments.append(RequestArgument(False, DataLocation(pool_index, offset, length), dimensions))
        end = offset + length
    return tuple(arguments), max(end, 1)


def view(memory: Pool, argument: RequestArgument, info: TensorInfo, shape: tuple[int, ...]) -> Array:
    """Return an array of `shape` over the location of `argument` in `memory`, without a copy.

    `shape` must fit the location's length.
    """
    location = argument.location
    data = memory.view[location.offset : location.offset + size_bytes(info, shape)]
    return np.frombuffer(data, info.dtype).reshape(shape)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape for error messages: `1x8x3`; `1 x any x 3` if a dimension is unknown."""
    sign = " x " if 0 in shape else "x"
    return sign.join("any" if extent == 0 else str(extent) for extent in shape) or "scalar or unknown rank"


def format_array_shape(shape: tuple[int, ...]) -> str:
    """Return the shape of an array for error messages: `1x0x3`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def format_tensor_shape(info: TensorInfo) -> str:
    """Return the shape of an input or output for error messages, as the functions above."""
    return (format_shape if info.has_unknown_shape else format_array_shape)(info.shape)


# ----------------------------------------------------------------------------------------------------------------------
# Outputs: the arrays that an execution returns, by position and by name; and inputs that are given by name.
#
# The type of a model's results has its names, so that a result costs little more than a tuple: a burst makes one each
# time. `outputs_type` makes the type once for each list of names.


_NAMES_SHOWN = 16
ValueT = TypeVar("ValueT")


class Outputs(tuple[Array, ...]):
    """The outputs of an execution: a tuple of arrays in the model's order, `scores, = model(image)`.

    An output can also be taken by its name: `model(image)["scores"]`.
    """

    __slots__ = ()
    names: tuple[str, ...] = ()
    """The names of the outputs, in the same order."""

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Array: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Array, ...]: ...

    def __getitem__(self, key: SupportsIndex | slice | str) -> Array | tuple[Array, ...]:
        """Return an output by its position or its name.

        Raises:
            InvalidArgument: If there is no output of this name, or several; the message lists the names.
            IndexError: If there is none at this position.
        """
        if isinstance(key, str):
            key = _position("output", self.names, key)
        try:
            return tuple.__getitem__(self, key)
        except IndexError:
            the_model = f"the model has {counted(len(self), 'output')}: {_listed(self.names)}"
            raise IndexError(f"there is no output {key}; {the_model}") from None

    def as_dict(self) -> dict[str, Array]:
        """Return the outputs by name. Raises InvalidArgument if several have the same name."""
        return {name: self[name] for name in self.names}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.names, tuple(self))


def _restored(names: tuple[str, ...], arrays: tuple[Array, ...]) -> Outputs:
    """Return outputs again that were pickled or are copied."""
    return outputs_type(names)(arrays)


@lru_cache(maxsize=256)
def outputs_type(names: tuple[str, ...]) -> type[Outputs]:
    """Return the type of the outputs that have these names."""
    return type("Outputs", (Outputs,), {"__slots__": (), "__module__": __name__, "names": names})


def names_of(infos: Sequence[TensorInfo]) -> tuple[str, ...]:
    """Return the names of inputs or outputs."""
    return tuple(info.name for info in infos)


def in_order(infos: Sequence[TensorInfo], values: Sequence[Any], kind: str = "input") -> Sequence[Any]:
    """Return an execution's inputs in the model's order: `values`, or those of its only element, a mapping by name.

    `kind` is "input" or "state", for messages.

    Raises:
        InvalidArgument: If a name is wrong or missing, or several inputs have it; the message lists the names.
    """
    if len(values) != 1 or not isinstance(values[0], Mapping):
        return values
    given, names = dict(values[0]), names_of(infos)
    by_position = {_position(kind, names, name): value for name, value in given.items()}
    missing = [name for position, name in enumerate(names) if position not in by_position]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise InvalidArgument(
            f"of the model's {counted(len(names), kind)} {_listed(missing)} {verb} missing; given: "
            f"{_listed(given) or 'none'}"
        )
    return [by_position[position] for position in range(len(names))]


def _position(kind: str, names: Sequence[str], name: object) -> int:
    """Return the position of the input, output or state `name`; `kind` says which it is."""
    count = names.count(name) if isinstance(name, str) else 0
    if count == 1:
        return names.index(str(name))
    all_names = f"{counted(len(names), kind)}: {_listed(names)}"
    if count:
        raise InvalidArgument(f"{count} {kind}s are called {name!r}: use their positions; the model has {all_names}")
    raise InvalidArgument(f"no {kind} is called {name!r}; the model has {all_names}{nearest(name, names)}")


def _listed(names: Any) -> str:
    shown = [repr(name) for name in names]
    return listed(shown[:_NAMES_SHOWN], len(shown))


# ----------------------------------------------------------------------------------------------------------------------
# Checks of an application's arrays against a model's inputs and outputs.


def with_batch_dimension(array: Array, shape: tuple[int, ...]) -> Array:
    """Return `array` with a first dimension of 1 if that makes it fit `shape`, otherwise unchanged; without a copy.

    An unknown dimension of `shape` (0) fits any.
    """
    if array.ndim + 1 == len(shape) and _fits((1, *array.shape), shape):
        return array[np.newaxis]
    return array


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (0, s) for w, s in zip(wanted, shape, strict=True))


def checked_array(info: TensorInfo, value: InputValue, kind: str = "input") -> Array:
    """Return `value` as an array that can be copied into the input `info`. An unknown dimension (0) matches any.

    A missing batch dimension of 1 is added. `kind` is "input" or "state", for messages.

    Raises:
        InvalidArgument: If `value` is not an array, has another shape or an incompatible dtype, or contains an integer
            that the input's type cannot represent.
    """
    if isinstance(value, Mapping):
        raise InvalidArgument(
            f"{kind} {info.name!r} is given as a {type(value).__name__}: give all {kind}s in one mapping by name, or "
            "an array for each in order"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged lists
        raise InvalidArgument(f"{kind} {info.name!r} is no array: {error}") from error
    if array.dtype.kind in "OSU":
        given = f"array is {array.dtype}" if isinstance(value, np.ndarray) else f"value is a {type(value).__name__}"
        shape_text = format_tensor_shape(info)
        files = "; nnfmq.read_photo and nnfmq.read_audio read files" if isinstance(value, (str, os.PathLike)) else ""
        raise InvalidArgument(
            f"{kind} {info.name!r} holds {info.dtype}; the given {given}: give an array of the shape "
            f"{shape_text}{files}"
        )
    wanted = info.shape
    array = with_batch_dimension(array, wanted)
    shape = array.shape
    is_refused = shape != wanted if info.is_empty else not _fits(shape, wanted) and (wanted or info.is_scalar)
    if is_refused:
        wanted_text, text = format_tensor_shape(info), format_array_shape(shape)
        advice = _shape_advice(info, shape) if kind == "input" else ""
        raise InvalidArgument(f"{kind} {info.name!r} has shape {wanted_text}; the given array has {text}{advice}")
    if info.has_unknown_shape:
        _check_bound_shape(info, shape, kind)
    if array.dtype != info.dtype:
        _check_conversion(info, array, kind)
    return array


def _check_bound_shape(info: TensorInfo, shape: tuple[int, ...], kind: str) -> None:
    """Raise InvalidArgument if a request cannot specify `shape` for an input of unknown shape (N-RQX-7)."""
    if not shape:
        raise InvalidArgument(
            f"{kind} {info.name!r} has an unknown rank; the given array is a scalar, for which the HAL has no "
            "dimensions: give an array of one dimension or more (N-RQX-7)"
        )
    if 0 in shape:
        raise InvalidArgument(
            f"{kind} {info.name!r} has shape {format_shape(info.shape)}; the given array has "
            f"{format_array_shape(shape)}: to the HAL 0 is an unknown size, so an input has no elements only if the "
            "model says so (N-RQX-7)"
        )


def _shape_advice(info: TensorInfo, shape: tuple[int, ...]) -> str:
    """Return advice to make an array of another shape fit; "" if nothing known does."""
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


def _check_conversion(info: TensorInfo, array: Array, kind: str) -> None:
    """Raise InvalidArgument if the conversion to `info.dtype` would change values of `array` by more than rounding."""
    if not np.can_cast(array.dtype, info.dtype, "same_kind"):
        advice = f"array.astype({info.dtype!r})"
        if info.scale:
            advice = f"round(value / {info.scale:g}) {'-' if info.zero_point < 0 else '+'} {abs(info.zero_point)}"
        raise InvalidArgument(
            f"{kind} {info.name!r} holds {info.dtype}; the given array is {array.dtype}: convert it, as by {advice}"
        )
    if not array.size or not (np.issubdtype(array.dtype, np.integer) and np.issubdtype(info.dtype, np.integer)):
        return
    limits = np.iinfo(info.dtype)
    lowest, highest = int(array.min()), int(array.max())
    if lowest < limits.min or highest > limits.max:
        value = lowest if lowest < limits.min else highest
        raise InvalidArgument(
            f"{kind} {info.name!r} holds {info.dtype} ({limits.min} to {limits.max}); "
            f"the given {array.dtype} array contains {value}"
        )


def checked_arrays(infos: Sequence[TensorInfo], values: Sequence[InputValue], kind: str = "input") -> list[Array]:
    """Return all inputs of an execution, or all states, given in order or in a mapping by name, as arrays.

    `kind` is "input" or "state", for messages.

    Raises:
        InvalidArgument: If their number or a name is wrong, or as `checked_array`.
    """
    values = in_order(infos, values, kind)
    check_count(kind, infos, len(values))
    return [checked_array(info, value, kind) for info, value in zip(infos, values, strict=True)]


def check_count(kind: str, infos: Sequence[TensorInfo], count: int) -> None:
    """Raise InvalidArgument unless `count` is the model's number of `kind`s: "input", "output" or "state"."""
    if count != len(infos):
        names = ", ".join(repr(info.name) for info in infos)
        given = "1 was given" if count == 1 else f"{count} were given"
        raise InvalidArgument(f"the model has {counted(len(infos), kind)} ({names}); {given}")


def check_index(kind: str, infos: Sequence[TensorInfo], index: int) -> None:
    """Raise InvalidArgument unless `index` is one of the model's `kind`s, which is "input" or "output"."""
    if not 0 <= index < len(infos):
        raise InvalidArgument(f"the model has {counted(len(infos), kind)}, there is no {kind} {index}")


def no_inputs_error(infos: Sequence[TensorInfo], call: str) -> InvalidArgument:
    """Return the exception for a call without arguments on an object whose own input arrays nobody has accessed."""
    names = ", ".join(repr(info.name) for info in infos[:8])
    return InvalidArgument(
        f"{call}() without arguments uses the arrays in `inputs`, which were never written: "
        f"write them, or pass {counted(len(infos), 'array')} ({names})"
    )


def require_fixed_shapes(kind: str, infos: Sequence[TensorInfo], user: str = "a burst") -> None:
    """Raise InvalidArgument if a shape is not fully known, which `user` needs."""
    for info in infos:
        if info.has_unknown_shape:
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


# ----------------------------------------------------------------------------------------------------------------------
# Checks of the shapes that a driver reports, before anything is read in them: it is not trusted (VAL-7).


LENGTH_MAX = 2**32 - 1  # of a DataLocation


def check_reported_shapes(infos: Sequence[TensorInfo], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ProtocolError unless the reported `shapes` are possible for the outputs `infos`."""
    if len(shapes) != len(infos):
        raise ProtocolError(f"the driver reports the shapes of {len(shapes)} outputs, the model has {len(infos)}")
    for info, shape in zip(infos, shapes, strict=True):
        wanted = (1,) if info.is_empty else info.shape
        if (wanted and not _fits(shape, wanted)) or size_bytes(info, shape) > LENGTH_MAX:
            raise ProtocolError(
                f"the driver reports the shape {format_shape(shape)} for output {info.name!r} "
                f"of shape {format_shape(info.shape)}"
            )


def check_fits(
    infos: Sequence[TensorInfo], arguments: Sequence[RequestArgument], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise ProtocolError if a reported shape is larger than the location of the output's argument."""
    for info, argument, shape in zip(infos, arguments, shapes, strict=True):
        length = argument.location.length
        if size_bytes(info, shape) > length:
            raise ProtocolError(
                f"the driver reports {format_shape(shape)} for output {info.name!r}, whose location has {length} bytes"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Results of successful executions: ExecutionResult, in every execution mode, and the durations of a burst's.


class ExecutionResult(NamedTuple):
    """Output shapes as the driver reported them (empty if it reported none), and the timing in ns."""

    shapes: tuple[OutputShape, ...]
    timing: Timing


class ExecutionInfo(Struct, frozen=True):
    """Durations of one burst execution, in ns; 0 if the driver did not report them.

    latency_ns = queue_ns (both queues, including wake-ups) + driver_ns (decoding, binding, replying) + engine_ns.
    `timing` has the HAL's two durations if `measure` was set.
    """

    latency_ns: int
    queue_ns: int
    driver_ns: int
    engine_ns: int
    timing: Timing = NO_TIMING

    @classmethod
    def within(cls, latency_ns: int, driver_ns: int, engine_ns: int, timing: Timing) -> Self:
        """Return the durations of an execution whose driver reports its time, and that of the engine.

        The driver can report anything: its values are limited to what is possible.
        """
        driver_ns = min(max(driver_ns, 0), latency_ns)
        engine_ns = min(max(engine_ns, 0), driver_ns)
        return cls(latency_ns, latency_ns - driver_ns, driver_ns - engine_ns, engine_ns, timing)
