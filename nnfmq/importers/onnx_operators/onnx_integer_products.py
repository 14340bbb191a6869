"""Products of integers of 8 bits whose results are floats, and what ONNX Runtime's quantizer makes of attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx_operators.onnx_attention import self_attention
from nnfmq.importers.onnx_operators.onnx_composition import Composition
from nnfmq.importers.onnx_operators.onnx_quantized import dynamically_quantized, without_zero_point
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS"]


def _product(node: Node) -> None:
    """Convert (A − its zero point) · (B − its zero point), times both scales, plus a bias."""
    if node.value(2).size != 1:
        raise InvalidArgument(f"{node.value(2).size} scales of the first matrix are not supported: one is")
    factors = [without_zero_point(node, 0, 4), without_zero_point(node, 1, 5)]
    node.results[0] = _scaled(node, factors, [node.value(2), node.value(3)], 6)


def _product_of_floats(node: Node) -> None:
    """Convert a product whose first factor is quantized when the model runs."""
    steps, scale, zero_point = dynamically_quantized(node, node.value(0))
    factors = [Composition(node)("Sub", steps, zero_point), without_zero_point(node, 1, 3)]
    node.results[0] = _scaled(node, factors, [scale, node.value(2)], 4)


def _attention(node: Node) -> None:
    factors = [without_zero_point(node, 0, 6), without_zero_point(node, 1, 7)]
    projected = _scaled(node, factors, [node.value(3), node.value(4)], 2)
    self_attention(node, projected, mask=5, past=8, bias=None)


def _scaled(node: Node, factors: list[Value], scales: list[Value], bias: int) -> Value:
    """Return the product of the factors and scales, plus the bias at a position if there is one."""
    compose = Composition(node)
    first, second = scales
    if first.array is not None and second.array is not None:
        scale = Value.of(np.asarray(first.array * second.array, np.float32))
    else:
        scale = compose("Mul", first, second)
    found = compose("Mul", compose("MatMul", *factors), scale)
    return compose("Add", found, node.value(bias)) if node.given(bias) else found


_MICROSOFT = "com.microsoft."
CONVERTERS: dict[str, Callable[[Node], None]] = {
    f"{_MICROSOFT}DynamicQuantizeMatMul": _product_of_floats,
    f"{_MICROSOFT}MatMulIntegerToFloat": _product,
    f"{_MICROSOFT}QAttention": _attention,
}
