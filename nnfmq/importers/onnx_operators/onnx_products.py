"""Matrix products: FULLY_CONNECTED if the second matrix is a constant, else BATCH_MATMUL."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_broadcasting import broadcast_to
from nnfmq.importers.onnx_operators.onnx_half import in_float32
from nnfmq.importers.onnx_values import Node, Value, operand_type_of

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


CONVERTERS: dict[str, Callable[[Node], None]] = {"Gemm": _gemm, "MatMul": _matmul}
