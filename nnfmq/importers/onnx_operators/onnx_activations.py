"""Activations that ONNX defines by other operators: their intermediate results would be rounded, or overflow."""

from __future__ import annotations

from collections.abc import Callable

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx_operators.onnx_fused import gelu
from nnfmq.importers.onnx_operators.onnx_half import in_float32
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_ALPHA, _GAMMA = 1.67326319217681884765625, 1.05070102214813232421875  # of Selu


def _celu(node: Node) -> None:
    """Convert to max(x, 0) + min(alpha · (e^(x / alpha) − 1), 0)."""
    x, alpha, none = node.operand(0), node.attribute("alpha", 1.0), node.builder.int32(0)
    kind = node.builder[x].type
    zero, factor = node.filled(kind, 0.0), node.filled(kind, alpha)
    ratio = node.emit(Op.DIV, [x, factor, none])
    if alpha > 0:
        curve = node.emit(Op.ELU, [ratio, node.scalar(kind, 1.0)])
    else:  # the minimum is that of a curve above 0, which ELU does not have
        curve = node.emit(Op.SUB, [node.emit(Op.EXP, [ratio]), node.filled(kind, 1.0), none])
    below = node.emit(Op.MINIMUM, [node.emit(Op.MUL, [curve, factor, none]), zero])
    node.result(node.emit(Op.ADD, [node.emit(Op.MAXIMUM, [x, zero]), below, none]), node.value(0).shape)


def _gelu(node: Node) -> None:
    approximation = node.attribute("approximate", "none")
    if approximation not in ("none", "tanh"):
        raise InvalidArgument(f"the approximation {approximation!r} is not supported; none and tanh are")
    node.results[0] = gelu(node, node.value(0), approximation == "tanh")


def _selu(node: Node) -> None:
    """Convert to gamma · ELU."""
    x = node.operand(0)
    kind = node.builder[x].type
    curve = node.emit(Op.ELU, [x, node.scalar(kind, node.attribute("alpha", _ALPHA))])
    gamma = node.filled(kind, node.attribute("gamma", _GAMMA))
    node.result(node.emit(Op.MUL, [curve, gamma, node.builder.int32(0)]), node.value(0).shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "Celu": in_float32(_celu),
    "Gelu": _gelu,
    "Selu": in_float32(_selu),
}
