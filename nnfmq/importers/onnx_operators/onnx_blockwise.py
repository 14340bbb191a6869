"""Constants of 2, 4 or 8 bits with a scale for each block, which become floats: MatMulNBits, GatherBlockQuantized.

Also the tables of QEmbedLayerNormalization, each of which has one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx_operators.onnx_composition import Composition
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_operators.onnx_quantization import dequantized
from nnfmq.importers.onnx_operators.onnx_skip_normalization import embeddings
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS"]

Array: TypeAlias = npt.NDArray[Any]
_BITS = (2, 4, 8)
_TABLES = range(2, 7)  # positions of inputs of QEmbedLayerNormalization
_TO_SCALE, _TO_ZERO_POINT = 6, 11


def _product(node: Node) -> None:
    """Convert A · Bᵀ, whose rows B has in blocks of `block_size` numbers."""
    bits, block = _bits(node, 4), node.attribute("block_size", 0)
    columns, rows = node.attribute("K", 0), node.attribute("N", 0)
    node.attribute("accuracy_level", 0)  # permits to round A to 8 bits, too
    node.attribute("weight_prepacked", 0)
    packed = node.constant(1, "matrix")
    blocks = -(-columns // block) if block > 0 else 0
    if columns < 1 or rows < 1 or packed.size * (8 // bits) != rows * blocks * block:
        raise InvalidArgument(f"{packed.size} bytes do not have {rows} × {columns} numbers in blocks of {block}")
    node.builder.reserve(4 * rows * columns)  # before the matrix exists
    steps = _unpacked(packed.reshape(rows, -1), bits)[:, :columns]
    scales = node.constant(2, "scales").reshape(rows, blocks)
    zeros = _zero_points(node, bits, (rows, blocks))
    of_column = node.constant(4, "g_idx") if node.given(4) else np.arange(columns) // block
    matrix = (steps.astype(np.float32) - zeros[:, of_column]) * scales[:, of_column]
    compose = Composition(node)
    found = compose("MatMul", node.value(0), Value.of(matrix.T.astype(scales.dtype)))
    node.results[0] = compose("Add", found, node.value(5)) if node.given(5) else found


def _zero_points(node: Node, bits: int, shape: tuple[int, int]) -> Array:
    """Return the zero point of each block of each row; they are packed, or floats, or all in the middle."""
    if not node.given(3):
        return np.full(shape, 1 << (bits - 1), np.float32)
    given = node.constant(3, "zero points")
    if given.dtype != np.uint8:
        return given.reshape(shape).astype(np.float32)
    return _unpacked(given.reshape(shape[0], -1), bits)[:, : shape[1]].astype(np.float32)


def _bits(node: Node, default: int) -> int:
    bits: int = node.attribute("bits", default)
    if bits not in _BITS:
        raise InvalidArgument(f"numbers of {bits} bits are not supported; those of {_BITS} are")
    return bits


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the numbers along the last axis of bytes, of which the lowest bits come first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def _gather(node: Node) -> None:
    """Convert to a lookup in a table of floats."""
    table, scales, bits = node.constant(0, "table"), node.constant(2, "scales"), _bits(node, 4)
    block = node.attribute("block_size", 128)
    is_packed = table.dtype == np.uint8 and bits < 8
    extents = table.shape[:-1] + (table.shape[-1] * (8 // bits if is_packed else 1),)
    axis = axis_of(node.attribute("quantize_axis", 1), len(extents))
    if block < 1 or scales.ndim != len(extents) or scales.shape[axis] != -(-extents[axis] // block):
        raise InvalidArgument(f"scales of the shape {scales.shape} for blocks of {block} of {extents}")
    node.builder.reserve(4 * table.size * (8 // bits))  # before the table exists
    zeros: Array = np.full(scales.shape, 1 << (bits - 1) if table.dtype == np.uint8 else 0, np.float32)
    if node.given(3):
        zeros = node.constant(3, "zero points")
        zeros = _unpacked(zeros, bits)[..., : scales.shape[-1]] if is_packed else zeros
    steps = _unpacked(table, bits) if is_packed else table
    factors, offsets = (np.repeat(each, min(block, extents[axis]), axis)[_limited(extents)] for each in (scales, zeros))
    numbers = (steps.astype(np.float32) - offsets.astype(np.float32)) * factors
    found = Value.of(numbers.astype(scales.dtype))
    node.results[0] = Composition(node)("Gather", found, node.value(1), axis=node.attribute("gather_axis", 0))


def _limited(extents: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(extent) for extent in extents)


def _embeddings(node: Node) -> None:
    """Convert with tables, scale and bias as floats."""
    inputs = list(node.inputs)
    for position in _TABLES:
        if node.given(position):
            scale = node.constant(position + _TO_SCALE, "scale")
            zero_point = node.constant(position + _TO_ZERO_POINT, "zero point")
            inputs[position] = dequantized(node, Value.of(node.constant(position, "table")), scale, zero_point)
    node.inputs = inputs[:8]
    embeddings(node)


_MICROSOFT = "com.microsoft."
CONVERTERS: dict[str, Callable[[Node], None]] = {
    f"{_MICROSOFT}GatherBlockQuantized": _gather,
    f"{_MICROSOFT}MatMulNBits": _product,
    f"{_MICROSOFT}QEmbedLayerNormalization": _embeddings,
}
