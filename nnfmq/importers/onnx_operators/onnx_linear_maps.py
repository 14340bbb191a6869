"""Linear maps along an axis, as FULLY_CONNECTED with a constant matrix: DFT and STFT; and determinants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_movement import axis_of, pad, transposed
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "mapped"]

Array: TypeAlias = npt.NDArray[Any]
_AXIS_INPUT = 20  # the opset from which the axis of DFT is an input
_MAX_DFT = 4096
_DTYPES = ("float32", "float16")


def mapped(node: Node, operand: int, axis: int, matrix: Array, bias: Array | None = None) -> int:
    """Return `matrix` (outputs, inputs) times each vector along an axis, plus `bias`.

    Raises:
        InvalidArgument: If the elements are no floats.
    """
    dtype, rank = node.value(0).dtype, len(node.shape(operand))
    if dtype.kind != "f":
        raise InvalidArgument(f"elements of {dtype.name} are not supported")
    rows, columns = matrix.shape
    order = [*(other for other in range(rank) if other != axis), axis]
    reordered = transposed(node, operand, order)
    shape = node.shape(reordered)
    flat = node.reshaped(reordered, (math.prod(shape[:-1]), columns))
    offsets = np.zeros(rows) if bias is None else bias
    is_half = node.builder[operand].type == OperandType.TENSOR_FLOAT16
    constants = [node.add_constant(np.asarray(array, "f2" if is_half else "f4")) for array in (matrix, offsets)]
    found = node.emit(Op.FULLY_CONNECTED, [flat, *constants, node.builder.int32(0)])
    return transposed(node, node.reshaped(found, (*shape[:-1], rows)), [int(at) for at in np.argsort(order)])


def _dft(node: Node) -> None:
    """Convert with the matrix of a transform from (n, parts) numbers to (m, parts), of which parts is 1 or 2."""
    shape = node.value(0).shape
    axis, length = _dft_axis(node, shape), None
    if node.given(1):
        length = int(node.constant(1, "dft_length").reshape(-1)[0])
    is_inverse, is_onesided = node.attribute("inverse", 0), node.attribute("onesided", 0)
    parts, x = shape[-1], node.operand(0)
    count = _dft_length(shape[axis], length, bool(is_inverse and is_onesided))
    x = _resized_axis(node, x, axis, min(count // 2 + 1, count) if is_inverse and is_onesided else count)
    matrix = _dft_matrix(count, parts, is_inverse=bool(is_inverse), is_onesided=bool(is_onesided))
    node.builder.reserve(matrix.nbytes)
    rank = len(shape)
    order = [*(other for other in range(rank - 1) if other != axis), axis, rank - 1]
    reordered = transposed(node, x, order)
    outer = node.shape(reordered)[:-2]
    flat = node.reshaped(reordered, (math.prod(outer), 1, matrix.shape[1]))
    found = mapped(node, flat, 2, matrix)
    kept = 1 if is_inverse and is_onesided else 2
    found = node.reshaped(found, (*outer, matrix.shape[0] // kept, kept))
    found = transposed(node, found, [int(at) for at in np.argsort(order)])
    node.result(found, node.shape(found))


def _dft_axis(node: Node, shape: tuple[int, ...]) -> int:
    given = node.integers("axis", 2) if node.given(2) else None
    default = -2 if node.opset >= _AXIS_INPUT else 1
    axis = axis_of(given[0] if given else node.attribute("axis", default), len(shape))
    if axis == len(shape) - 1 or shape[-1] not in (1, 2):
        raise InvalidArgument(f"axis {axis} of numbers of shape {shape} cannot be transformed")
    return axis


def _dft_length(extent: int, length: int | None, is_half: bool) -> int:
    """Return how many numbers are transformed; of `extent` numbers if these are one half and `length` is None."""
    default = 2 * (extent - 1) if is_half else extent
    count = default if length is None else length
    if not 0 < count <= _MAX_DFT:
        raise InvalidArgument(f"a transform of {count} numbers is not supported")
    return count


def _resized_axis(node: Node, x: int, axis: int, count: int) -> int:
    """Return an operand that is cut, or padded with 0, to `count` along an axis."""
    shape = list(node.shape(x))
    if count > shape[axis]:
        end = [count - extent if at == axis else 0 for at, extent in enumerate(shape)]
        return pad(node, x, [0] * len(shape), end, 0.0)
    extents = [*shape[:axis], count, *shape[axis + 1 :]]
    if extents == shape:
        return x
    return node.emit(Op.SLICE, [x, *map(node.builder.int32_vector, ([0] * len(shape), extents))])


def _dft_matrix(count: int, parts: int, *, is_inverse: bool, is_onesided: bool) -> Array:
    """Return the transform of interleaved parts, found by transforming each unit vector."""
    is_half = is_inverse and is_onesided
    inputs = count // 2 + 1 if is_half else count
    units = np.zeros((inputs, parts, inputs * parts), np.float64)
    units.reshape(inputs * parts, -1)[:] = np.eye(inputs * parts)
    numbers = units[:, 0] + 1j * units[:, 1] if parts > 1 else units[:, 0].astype(complex)
    if is_half:
        return np.asarray(np.fft.irfft(numbers, count, axis=0))
    found = (np.fft.ifft if is_inverse else np.fft.fft)(numbers, axis=0)
    found = found[: count // 2 + 1] if is_onesided else found
    return np.stack([found.real, found.imag], axis=1).reshape(-1, inputs * parts)


def _stft(node: Node) -> None:
    """Convert to DFT of parts of the signal, each times the window."""
    shape, step = node.value(0).shape, int(node.constant(1, "frame_step").reshape(-1)[0])
    window = node.value(2) if node.given(2) else None
    length = int(node.constant(3, "frame_length").reshape(-1)[0]) if node.given(3) else None
    length = length if length is not None else 0 if window is None else window.size
    is_fit = len(shape) == 3 and step >= 1 and 1 <= length <= shape[1]
    if not is_fit or (window is not None and window.size != length):
        raise InvalidArgument(f"frames of {length} numbers, each after {step}, of a signal of shape {shape}")
    count = (shape[1] - length) // step + 1
    node.builder.reserve(4 * count * length)  # before the indices exist
    places = np.arange(length, dtype=np.int32) + step * np.arange(count, dtype=np.int32)[:, None]
    frames = node.emit(Op.GATHER, [node.operand(0), node.builder.int32(1), node.add_constant(places)])
    if window is not None:
        factors = node.reshaped(node.operand(window), (length, 1))
        frames = node.emit(Op.MUL, [frames, factors, node.builder.int32(0)])
    value = Value(node.shape(frames), node.value(0).dtype, frames)
    attributes = {"axis": 2, "onesided": node.attribute("onesided", 1)}
    inner = Node(node.name, "DFT", _AXIS_INPUT - 1, node.builder, [value], ["y"], attributes)
    _dft(inner)
    node.results[0] = inner.results[0]


def _det(node: Node) -> None:
    if node.value(0).dtype.name not in _DTYPES:
        raise InvalidArgument(f"elements of {node.value(0).dtype.name} are not supported")
    found = node.emit(operation_code(TfliteOperation.DETERMINANT), [node.operand(0)])
    node.result(found, node.value(0).shape[:-2])


CONVERTERS: dict[str, Callable[[Node], None]] = {"DFT": _dft, "Det": _det, "STFT": _stft}
