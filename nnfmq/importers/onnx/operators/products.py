"""Matrix products, Einsum, and linear maps along an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_FLOAT64, TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.operators.movement import axis_of, broadcast_to, pad, transposed
from nnfmq.importers.onnx.values import Node, Value, operand_type_of

__all__ = ["CONVERTERS"]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)  # of FULLY_CONNECTED


def _matmul(node: Node) -> None:
    a, b = node.value(0), node.value(1)
    if not a.shape or not b.shape or a.shape[-1] != (b.shape[-2] if len(b.shape) > 1 else b.shape[0]):
        raise InvalidArgument(f"matrices of the shapes {a.shape} and {b.shape} have no product")
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    tail = (left[-2:-1] if len(a.shape) > 1 else ()) + (right[-1:] if len(b.shape) > 1 else ())
    node.result(_product(node, left, right, batch), (*batch, *tail))


def _product(node: Node, left: tuple[int, ...], right: tuple[int, ...], batch: tuple[int, ...]) -> int:
    """Return the product of the inputs as matrices of these shapes."""
    b = node.value(1)
    if len(right) == 2:  # one matrix for all rows
        rows = node.reshaped(node.operand(0), (math.prod(left[:-1]), left[-1]))
        if b.array is not None and operand_type_of(b.dtype) in _FLOATS:
            return _fully_connected(node, rows, b.array.reshape(right), None)
        return _batch_matmul(node, rows, node.reshaped(node.operand(1), right))
    operands = []
    for position, shape in enumerate((left, right)):
        operand = node.reshaped(node.operand(position), shape)
        operand = broadcast_to(node, operand, (*batch, *shape[-2:]))
        operands.append(node.reshaped(operand, (math.prod(batch), *shape[-2:])))
    return _batch_matmul(node, operands[0], operands[1])


def _batch_matmul(node: Node, a: int, b: int, adjoint_a: bool = False, adjoint_b: bool = False) -> int:
    return node.emit(Op.BATCH_MATMUL, [a, b, node.builder.boolean(adjoint_a), node.builder.boolean(adjoint_b)])


def _fully_connected(node: Node, rows: int, matrix: np.ndarray, bias: np.ndarray | None) -> int:
    weights = node.add_constant(matrix.T)
    biases = node.add_constant(np.zeros(matrix.shape[1], matrix.dtype) if bias is None else bias)
    return node.emit(Op.FULLY_CONNECTED, [rows, weights, biases, node.builder.int32(0)])


def _gemm(node: Node) -> None:
    """Convert alpha·A·B + beta·C, of float16 in float32 if A·B alone could overflow."""
    has_factors = node.attribute("alpha", 1.0) != 1.0 or node.attribute("beta", 1.0) != 1.0
    (in_float32(_scaled_sum) if has_factors else _scaled_sum)(node)


def _scaled_sum(node: Node) -> None:
    """Convert alpha·A·B + beta·C; constant factors go into constant matrices."""
    a, b = node.value(0), node.value(1)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.dtype.kind != "f":
        raise InvalidArgument(f"operands of the shapes {a.shape} and {b.shape}, {a.dtype}, are not supported")
    adjoint_a, adjoint_b = bool(node.attribute("transA", 0)), bool(node.attribute("transB", 0))
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    is_added, has_sum = False, node.given(2) and beta != 0  # as in BLAS, whatever C is, 0 times it is 0
    bias = _vector(node, b.shape[0 if adjoint_b else 1], beta) if has_sum else None
    if b.array is not None and not adjoint_a and operand_type_of(b.dtype) in _FLOATS:
        matrix = (b.array.T if adjoint_b else b.array) * b.dtype.type(alpha)
        found, is_added = _fully_connected(node, node.operand(0), matrix, bias), bias is not None
    else:
        found = _scaled(node, _batch_matmul(node, node.operand(0), node.operand(1), adjoint_a, adjoint_b), alpha)
    if has_sum and not is_added:
        found = node.emit(Op.ADD, [found, _scaled(node, node.operand(2), beta), node.builder.int32(0)])
    node.result(found, node.shape(found))


def _vector(node: Node, units: int, beta: float) -> np.ndarray | None:
    """Return beta·C if it is a constant vector with an element for each column."""
    c: Value | None = node.value(2) if node.given(2) else None
    if c is None or c.array is None or c.array.size != units or c.shape[-1:] != (units,):
        return None
    return np.asarray(c.array.reshape(-1) * c.dtype.type(beta))


def _scaled(node: Node, operand: int, factor: float) -> int:
    if factor == 1.0:
        return operand
    return node.emit(Op.MUL, [operand, node.filled(node.builder[operand].type, factor), node.builder.int32(0)])


_PRODUCTS_CONVERTERS: dict[str, Callable[[Node], None]] = {"Gemm": _gemm, "MatMul": _matmul}


# ----------------------------------------------------------------------------------------------------------------------
# Einsum: products of two tensors after the other, as (batch, rows, summed) times (batch, summed, columns).
#
# Indices are characters; an ellipsis is replaced by further ones. Before each product, an input loses the indices that
# nothing after it reads: it is summed over them. An index that occurs twice in an input selects its diagonal.


_Term: TypeAlias = tuple[int, str]  # an operand, and an index for each of its dimensions
_TERM = re.compile(r"[a-zA-Z]*(\.\.\.)?[a-zA-Z]*")
_MAX_ELLIPSIS = 8
_ELLIPSIS = "01234567"  # the indices of its dimensions, the last one first


def _einsum(node: Node) -> None:
    terms, wanted = _parsed(node)
    sizes = _sizes(node, terms)
    if len(set(wanted)) < len(wanted) or not set(wanted) <= sizes.keys():
        raise InvalidArgument(f"{node.attributes['equation']!r} names an index of its result twice, or one of no input")
    operands = [_diagonal(node, _widest(node, position, term, sizes)) for position, term in enumerate(terms)]
    found = _kept(node, operands[0], wanted + "".join(names for _, names in operands[1:]))
    for place, other in enumerate(operands[1:], 2):
        later = wanted + "".join(names for _, names in operands[place:])
        found = _einsum_product(
            node, _kept(node, found, later + other[1]), _kept(node, other, later + found[1]), later, sizes
        )
    operand, names = _kept(node, found, wanted)
    operand = transposed(node, operand, [names.index(name) for name in wanted]) if wanted else operand
    node.result(operand, tuple(sizes[name] for name in wanted))


def _parsed(node: Node) -> tuple[list[str], str]:
    """Return the indices of each input and of the result, with characters for those of ellipses."""
    equation = node.attribute("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    written = left.split(",")
    if len(written) != len(node.inputs) or not all(_TERM.fullmatch(term) for term in (*written, right)):
        raise InvalidArgument(f"equation {equation!r} of {len(node.inputs)} inputs is malformed")
    terms = []
    for position, term in enumerate(written):
        count = len(node.value(position).shape) - len(term.replace("...", ""))
        if count < 0 or count > _MAX_ELLIPSIS or (count and "..." not in term):
            raise InvalidArgument(f"{term!r} does not fit a tensor of rank {len(node.value(position).shape)}")
        terms.append(term.replace("...", _ELLIPSIS[:count][::-1]))
    shared = "".join(sorted({name for term in terms for name in term if name in _ELLIPSIS}, reverse=True))
    names = "".join(terms)
    implicit = "".join(sorted(name for name in set(names) if names.count(name) == 1 and name not in _ELLIPSIS))
    return terms, right.replace("...", shared) if arrow else shared + implicit


def _sizes(node: Node, terms: Sequence[str]) -> dict[str, int]:
    """Return the extent of each index; where it is 1, an input is repeated."""
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        for name, extent in zip(term, node.value(position).shape, strict=True):
            known = sizes.get(name, 1)
            if 1 not in (known, extent) and known != extent:
                raise InvalidArgument(f"an index has the extents {known} and {extent}")
            sizes[name] = max(known, extent)
    return sizes


def _widest(node: Node, position: int, term: str, sizes: dict[str, int]) -> _Term:
    """Return an input without the dimensions of 1 that another input has in full."""
    shape, operand = node.value(position).shape, node.operand(position)
    kept = [axis for axis, name in enumerate(term) if shape[axis] == sizes[name]]
    return node.reshaped(operand, tuple(shape[axis] for axis in kept)), "".join(term[axis] for axis in kept)


def _diagonal(node: Node, given: _Term) -> _Term:
    """Return a tensor in which no index occurs twice."""
    operand, term = given
    for name in dict.fromkeys(term):
        axes = [axis for axis, other in enumerate(term) if other == name]
        if len(axes) == 1:
            continue
        rest = [axis for axis in range(len(term)) if axis not in axes]
        shape = node.shape(operand)
        extent, others = shape[axes[0]], tuple(shape[axis] for axis in rest)
        flat = node.reshaped(transposed(node, operand, [*axes, *rest]), (extent ** len(axes), *others))
        step = sum(extent**power for power in range(len(axes)))
        indices = node.builder.int32_vector([place * step for place in range(extent)])
        operand = node.emit(Op.GATHER, [flat, node.builder.int32(0), indices])
        term = name + "".join(term[axis] for axis in rest)
    return operand, term


def _kept(node: Node, given: _Term, wanted: str) -> _Term:
    """Return a tensor summed over the indices that are not wanted."""
    operand, term = given
    axes = [axis for axis, name in enumerate(term) if name not in wanted]
    if not axes:
        return given
    rest = "".join(name for name in term if name in wanted)
    return node.emit(Op.REDUCE_SUM, [operand, node.builder.int32_vector(axes), node.builder.boolean(False)]), rest


def _einsum_product(node: Node, first: _Term, second: _Term, wanted: str, sizes: dict[str, int]) -> _Term:
    """Return the product of two tensors, summed over the indices that they share and nothing after it reads."""
    (a, left), (b, right) = first, second
    batch = [name for name in left if name in right and name in wanted]
    summed = [name for name in left if name in right and name not in wanted]
    rows, columns = ([name for name in term if name not in other] for term, other in ((left, right), (right, left)))
    extents = [math.prod(sizes[name] for name in names) for names in (batch, rows, summed, columns)]
    names = [*batch, *rows, *columns]
    found = _matrices(
        node,
        _arranged(node, a, left, (batch, rows, summed), (extents[0], extents[1], extents[2])),
        _arranged(node, b, right, (batch, summed, columns), (extents[0], extents[2], extents[3])),
    )
    return node.reshaped(found, tuple(sizes[name] for name in names)), "".join(names)


def _matrices(node: Node, a: int, b: int) -> int:
    """Return the products of two batches of matrices; integers, which BATCH_MATMUL does not take, are summed."""
    if node.builder[a].type != OperandType.TENSOR_INT32:
        return node.emit(Op.BATCH_MATMUL, [a, b, node.builder.boolean(False), node.builder.boolean(False)])
    batch, summed, columns = node.shape(b)
    factors = [node.reshaped(a, (*node.shape(a), 1)), node.reshaped(b, (batch, 1, summed, columns))]
    products = node.emit(Op.MUL, [*factors, node.builder.int32(0)])
    return node.emit(Op.REDUCE_SUM, [products, node.builder.int32_vector([2]), node.builder.boolean(False)])


def _arranged(node: Node, operand: int, term: str, groups: Sequence[Sequence[str]], shape: tuple[int, ...]) -> int:
    order = [term.index(name) for group in groups for name in group]
    return node.reshaped(transposed(node, operand, order), shape)


_EINSUM_CONVERTERS: dict[str, Callable[[Node], None]] = {"Einsum": _einsum}


# ----------------------------------------------------------------------------------------------------------------------
# Linear maps along an axis, as FULLY_CONNECTED with a constant matrix: DFT and STFT; and determinants.


Array: TypeAlias = npt.NDArray[Any]
_AXIS_INPUT = 20  # the opset from which the axis of DFT is an input
_MAX_DFT = 4096
_DTYPES = ("float32", "float16")


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
    found = _mapped(node, node.reshaped(reordered, (math.prod(outer), matrix.shape[1])), matrix.T)
    kept = 1 if is_inverse and is_onesided else 2
    found = node.reshaped(found, (*outer, matrix.shape[0] // kept, kept))
    found = transposed(node, found, [int(at) for at in np.argsort(order)])
    node.result(found, node.shape(found))


def _mapped(node: Node, rows: int, matrix: Array) -> int:
    """Return the product of rows of floats with a matrix of float64, which gets their type."""
    kind = node.builder[rows].type
    if kind == TENSOR_FLOAT64:
        return _batch_matmul(node, rows, node.add_constant(matrix))
    return _fully_connected(node, rows, matrix.astype("f2" if kind == OperandType.TENSOR_FLOAT16 else "f4"), None)


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


_LINEAR_MAPS_CONVERTERS: dict[str, Callable[[Node], None]] = {"DFT": _dft, "Det": _det, "STFT": _stft}

CONVERTERS: dict[str, Callable[[Node], None]] = {
    **_PRODUCTS_CONVERTERS,
    **_EINSUM_CONVERTERS,
    **_LINEAR_MAPS_CONVERTERS,
}
