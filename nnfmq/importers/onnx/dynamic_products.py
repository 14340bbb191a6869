"""Products of inputs that are quantized at run time, found among the nodes of an ONNX graph.

ONNX's quantizer makes several nodes of each product. They are joined to one, whose inputs are the floats:

    DynamicQuantizeLinear, MatMulInteger, Cast, Mul, [Add]                   com.microsoft.DynamicQuantizeMatMul
    DynamicQuantizeLinear, ConvInteger, [Add (rounded bias)], Cast, Mul      nnfmq.DynamicConv

The factor of Mul is input scale · weight scale. A rounded bias is Cast(Floor(bias / that factor)) in some shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.extensions import MAX_DYNAMIC_PRODUCTS
from nnfmq.hal.types import ChannelQuant, LifeTime, Operand, OperandType
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.onnx.file import all_read_names, live_nodes
from nnfmq.importers.onnx.values import Array

__all__ = ["DYNAMIC_CONV", "ByteWeights", "joined_products"]

DYNAMIC_CONV = "nnfmq.DynamicConv"
"""Inputs: image, weights, their scale, their zero point, a bias; attributes: those of ConvInteger."""

_NODES = {"MatMulInteger": ("com.microsoft", "DynamicQuantizeMatMul"), "ConvInteger": ("nnfmq", "DynamicConv")}
_FLOAT, _INT32 = 1, 6
_TYPES = {"uint8": OperandType.TENSOR_QUANT8_ASYMM, "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED}


def joined_products(
    nodes: Sequence[tuple[int, Any]], outputs: Sequence[str], constants: Mapping[str, Array]
) -> list[tuple[int, Any]]:
    """Return nodes, with their numbers, in which each such product is one node; `outputs` are the graph's."""
    if not any(proto.op_type in _NODES for _, proto in nodes):
        return list(nodes)
    graph = _Graph.of(nodes, outputs, constants)
    replaced: dict[int, Any] = {}
    for number, proto in nodes:
        if proto.op_type in _NODES:
            replaced.update(graph.joined(number, proto))
    protos = [replaced.get(number, proto) for number, proto in nodes]
    return [(nodes[place][0], proto) for place, proto in live_nodes(protos, outputs)]


@dataclass(frozen=True, slots=True)
class ByteWeights:
    """Constant weights that an operand has as bytes: with one scale and zero point, or with scales of channels."""

    array: Array
    scales: Array
    zero_point: int

    @classmethod
    def of(
        cls, array: Array | None, scale: Array | None, zero_point: Array | None, channel_axis: int
    ) -> ByteWeights | None:
        """Return the weights, whose output channels are along an axis; None if no operand has such ones."""
        if array is None or scale is None or not array.size or array.dtype not in (np.uint8, np.int8):
            return None
        if array.ndim < 2 or array.size // array.shape[channel_axis] > MAX_DYNAMIC_PRODUCTS:
            return None
        scales = scale.astype(np.float32).reshape(-1)
        zeros = {0} if zero_point is None else set(zero_point.reshape(-1).tolist())
        if not (np.isfinite(scales) & (scales > 0)).all() or len(zeros) != 1:
            return None
        is_symmetric = array.dtype == np.int8 and zeros == {0} and len(scales) == array.shape[channel_axis]
        return cls(array, scales, zeros.pop()) if len(scales) == 1 or is_symmetric else None

    @property
    def kind(self) -> OperandType:
        """The type of the operand."""
        is_per_channel = len(self.scales) > 1
        return OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL if is_per_channel else _TYPES[self.array.dtype.name]

    def part(self, begin: int, end: int) -> ByteWeights:
        """Return some output channels of weights that have these first."""
        scales = self.scales[begin:end] if len(self.scales) > 1 else self.scales
        return ByteWeights(self.array[begin:end], scales, self.zero_point)

    def operand(self, builder: GraphBuilder, array: Array | None = None) -> int:
        """Add the weights as an operand; `array` has them in another order: output channels first."""
        array = self.array if array is None else array
        builder.reserve(array.nbytes)
        found = Operand(self.kind, array.shape, float(self.scales[0]), self.zero_point)
        if len(self.scales) > 1:
            quant = ChannelQuant(tuple(map(float, self.scales)), 0)
            found = Operand(self.kind, array.shape, channel_quant=quant)
        location = builder.stored(np.ascontiguousarray(array).tobytes())
        return builder.operand(replace(found, lifetime=LifeTime.CONSTANT_COPY, location=location))


@dataclass(frozen=True, slots=True)
class _Graph:
    """The nodes by what they write and read."""

    numbers: Mapping[str, int]  # of the nodes that write values
    writers: Mapping[str, Any]
    readers: Mapping[str, Any]  # of values that are read once
    constants: Mapping[str, Array]

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, Any]], outputs: Sequence[str], constants: Mapping[str, Array]) -> _Graph:
        counts = Counter(outputs)
        readers = {}
        for _, proto in nodes:
            counts.update(all_read_names(proto))
            readers.update(dict.fromkeys(proto.input, proto))
        single = {name: proto for name, proto in readers.items() if counts[name] == 1}
        written = [(name, number, proto) for number, proto in nodes for name in proto.output]
        numbers, writers = {n: number for n, number, _ in written}, {n: proto for n, _, proto in written}
        return cls(numbers, writers, single, constants)

    def joined(self, number: int, product: Any) -> Iterator[tuple[int, Any]]:
        """Yield the number of a product's last node and the node that takes its place, if there is one."""
        source = self._source(product)
        if source is None:
            return
        is_matmul, bias, last = product.op_type == "MatMulInteger", "", product
        if not is_matmul:
            bias, last = self._rounded_bias(last, source)
        last = self._reader(last, "Cast")
        if last is None or not _casts(last, _FLOAT):
            return
        last = self._reader(last, "Mul")
        scale = (
            None
            if last is None
            else next(filter(None, (self._weight_scale(name, source) for name in last.input)), None)
        )
        if last is None or scale is None or not self._is_supported(product, scale):
            return
        if is_matmul:
            bias, last = self._bias(last, self.constants[product.input[1]])
        joined = type(product)()
        joined.CopyFrom(product)
        joined.domain, joined.op_type = _NODES[product.op_type]
        zero_point = product.input[3] if len(product.input) > 3 else ""
        joined.input[:] = [source.input[0], product.input[1], scale, zero_point, bias]
        joined.output[:] = last.output
        yield self.numbers[last.output[0]], joined

    def _is_supported(self, product: Any, scale: str) -> bool:
        zero_point = self.constants.get(product.input[3]) if len(product.input) > 3 else None
        array, is_matmul = self.constants[product.input[1]], product.op_type == "MatMulInteger"
        is_grouped = any(attribute.name == "group" and attribute.i != 1 for attribute in product.attribute)
        is_weight = array.ndim == 2 if is_matmul else not is_grouped
        found = ByteWeights.of(array, self.constants[scale], zero_point, 1 if is_matmul else 0)
        return is_weight and found is not None

    def _source(self, product: Any) -> Any | None:
        """Return the DynamicQuantizeLinear of a product with constant weights; None if it has another input."""
        names = [*product.input, "", ""][:4]
        found = self.writers.get(names[0])
        if found is None or found.op_type != "DynamicQuantizeLinear" or names[0] != found.output[0]:
            return None
        is_own = names[2] == found.output[2]
        is_constant = names[1] in self.constants and (not names[3] or names[3] in self.constants)
        return found if is_own and is_constant else None

    def _reader(self, proto: Any, operator: str) -> Any | None:
        found = self.readers.get(proto.output[0])
        return found if found is not None and found.op_type == operator else None

    def _weight_scale(self, factor: str, source: Any) -> str | None:
        """Return the constant by which the input's scale is multiplied to give `factor`."""
        found = self.writers.get(factor)
        if found is None or found.op_type != "Mul" or source.output[1] not in found.input:
            return None
        other = found.input[1 - list(found.input).index(source.output[1])]
        return other if other in self.constants else None

    def _rounded_bias(self, product: Any, source: Any) -> tuple[str, Any]:
        """Return the bias that is rounded and added to the sums, and that addition; else none and the product."""
        addition = self._reader(product, "Add")
        if addition is None:
            return "", product
        name = next(name for name in addition.input if name != product.output[0])
        found: Any = None
        for operator in ("Reshape", "Cast", "Floor", "Div"):
            found = self.writers.get(name)
            if found is None or found.op_type != operator or (operator == "Cast" and not _casts(found, _INT32)):
                return "", product
            name = found.input[0]
        is_factor = self._weight_scale(found.input[1], source) is not None
        return (name, addition) if is_factor and name in self.constants else ("", product)

    def _bias(self, product: Any, weights: Array) -> tuple[str, Any]:
        """Return the constant that is added to each row, and that addition; else none and the product."""
        addition = self._reader(product, "Add")
        if addition is None:
            return "", product
        name = next((name for name in addition.input if name != product.output[0]), "")
        bias = self.constants.get(name)
        is_row = bias is not None and bias.shape == weights.shape[1:]
        return (name, addition) if is_row else ("", product)


def _casts(proto: Any, kind: int) -> bool:
    return any(attribute.name == "to" and attribute.i == kind for attribute in proto.attribute)
