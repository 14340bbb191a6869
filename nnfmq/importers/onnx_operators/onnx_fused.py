"""Operators that ONNX Runtime's optimizer fuses from others: GELU in its forms, products and convolutions.

Names of operators of ONNX Runtime itself begin with its domain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_composition import Composition, applied
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "activated", "gelu"]

_F32, _F16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
_ACTIVATIONS = {
    "": (), "Clip": ("min", "max"), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Relu": (),
    "Sigmoid": (), "Tanh": (),
}  # fmt: skip


def gelu(node: Node, value: Value, is_approximate: bool = False) -> Value:
    """Return GELU of floats, by the error function or approximated by a hyperbolic tangent."""
    x = node.operand(value)
    kind = node.builder[x].type
    if kind not in (_F32, _F16):
        raise InvalidArgument(f"GELU of {value.dtype.name} is not supported")
    x = x if kind == _F32 else node.emit(Op.CAST, [x], _F32)
    found = node.emit(operation_code(TfliteOperation.GELU), [x, node.builder.boolean(is_approximate)])
    return Value(value.shape, value.dtype, found if kind == _F32 else node.emit(Op.CAST, [found], kind))


def activated(node: Node, value: Value, parameters: Sequence[float]) -> Value:
    """Return the result of the activation that the attribute of a fused node names."""
    name = node.attribute("activation", "")
    if name not in _ACTIVATIONS or len(parameters) < len(_ACTIVATIONS[name]):
        raise InvalidArgument(f"the activation {name!r} with {len(parameters)} parameters is not supported")
    if not name:
        return value
    attributes = dict(zip(_ACTIVATIONS[name], map(float, parameters), strict=False))
    if name == "Clip":
        limits = [Value.of(np.array(limit, value.dtype)) for limit in attributes.values()]
        return applied(node, name, [value, *limits], {})
    return applied(node, name, [value], attributes)


def _gelu_of_sum(is_approximate: bool, node: Node) -> None:
    """Convert GELU of the sum of the inputs, of which the second may be missing."""
    x = node.value(0)
    x = Composition(node)("Add", x, node.value(1)) if node.given(1) else x
    node.results[0] = gelu(node, x, is_approximate)


def _split_gelu(node: Node) -> None:
    """Convert to the sum's first half times GELU of its second half."""
    compose = Composition(node)
    total = compose("Add", node.value(0), node.value(1))
    width = total.shape[-1] // 2
    left, right = (compose.part(total, -1, begin, begin + width) for begin in (0, width))
    node.results[0] = compose("Mul", left, gelu(node, right))


def _quick_gelu(node: Node) -> None:
    compose, x, alpha = Composition(node), node.value(0), node.attribute("alpha", 1.702)
    scaled = x if alpha == 1.0 else compose("Mul", x, compose.like(alpha, x))
    node.results[0] = compose("Mul", x, compose("Sigmoid", scaled))


def _matmul(node: Node) -> None:
    """Convert alpha·A·B, each of which may be transposed; the factor goes into a constant matrix."""
    compose, alpha = Composition(node), node.attribute("alpha", 1.0)
    a, b = (_matrices(node, compose, position) for position in (0, 1))
    if alpha != 1.0 and b.array is not None:
        b = Value.of(b.array * b.dtype.type(alpha))
    found = compose("MatMul", a, b)
    if alpha != 1.0 and b.array is None:
        found = compose("Mul", found, compose.like(alpha, found))
    node.results[0] = found


def _matrices(node: Node, compose: Composition, position: int) -> Value:
    """Return an input of a product as its attributes transpose it."""
    value, side = node.value(position), "AB"[position]
    rank, last = len(value.shape), node.attribute(f"trans{side}", 0)
    order = list(range(rank))
    if node.attribute(f"transBatch{side}", 0):  # the first dimension goes after the other batch dimensions
        order = [*order[1:-1], 0, rank - 1]
    if last and rank > 1:
        order[-2:] = order[:-3:-1]
    return compose.transpose(value, *order)


def _gemm(node: Node) -> None:
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = [node.attribute(name, 0.0) for name in names if name in node.attributes]
    found = applied(node, "Gemm", [node.value(0), node.value(1), node.value(2) if node.given(2) else None])
    node.results[0] = activated(node, found, parameters)


def _convolution(node: Node) -> None:
    """Convert the activation of a convolution plus, if it is given, a fourth input."""
    values = [node.value(position) if node.given(position) else None for position in range(3)]
    found = applied(node, "Conv", values)
    if node.given(3):
        found = Composition(node)("Add", found, node.value(3))
    node.results[0] = activated(node, found, node.attribute("activation_params", ()))


_MICROSOFT = "com.microsoft."
CONVERTERS: dict[str, Callable[[Node], Any]] = {
    f"{_MICROSOFT}BiasGelu": partial(_gelu_of_sum, False),
    f"{_MICROSOFT}BiasSplitGelu": _split_gelu,
    f"{_MICROSOFT}FastGelu": partial(_gelu_of_sum, True),
    f"{_MICROSOFT}FusedConv": _convolution,
    f"{_MICROSOFT}FusedGemm": _gemm,
    f"{_MICROSOFT}FusedMatMul": _matmul,
    f"{_MICROSOFT}Gelu": partial(_gelu_of_sum, False),
    f"{_MICROSOFT}QuickGelu": _quick_gelu,
    f"{_MICROSOFT}TransposeMatMul": _matmul,
}
