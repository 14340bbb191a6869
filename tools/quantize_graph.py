"""A float model and the ranges of its tensors → the same model in 8-bit integers.

RULES is the table of what can be quantized, and how: which operators multiply by weights, whose output has a fixed
quantization, and which share one quantization among inputs and output. Tensors that share are a group: it has the
union of their ranges, or the fixed quantization of the one that has it. Constants that are no weights, such as one
side of an ADD, are treated as activations whose range is known. Versions of operators are those that TFLite's own
writer gives for int8; uint8 is the first version of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from quant_params import Affine, Array, Range, Weights, quantized_weights
from tflite_reader import OMITTED, Graph
from tflite_writer import Operator, Tensor

from nnfmq.hal.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator is quantized.

    `weighted`: its inputs 1 and 2 are constant weights and bias, with scales along `channel_axis` (None: one scale).
    `shares`: all its float tensors have one quantization. `fixed`: its output's scale and int8 zero point.
    """

    version: int = 2
    weighted: bool = False
    channel_axis: int | None = None
    shares: bool = False
    fixed: tuple[float, int] | None = None


RULES: dict[str, Rule] = {
    "ADD": Rule(),
    "AVERAGE_POOL_2D": Rule(shares=True),
    "CONCATENATION": Rule(shares=True),
    "CONV_2D": Rule(3, weighted=True, channel_axis=0),
    "DEPTHWISE_CONV_2D": Rule(3, weighted=True, channel_axis=3),
    "FULLY_CONNECTED": Rule(4, weighted=True),  # the HAL has no scales per channel here
    "LOGISTIC": Rule(fixed=(1 / 256, -128)),
    "MAX_POOL_2D": Rule(shares=True),
    "MEAN": Rule(shares=True),  # TFLite would allow another output scale, the HAL does not
    "MUL": Rule(),
    "PAD": Rule(shares=True),
    "RELU": Rule(shares=True),  # and so with these
    "RELU6": Rule(shares=True),
    "RELU_N1_TO_1": Rule(1, shares=True),
    "RESHAPE": Rule(1, shares=True),
    "SOFTMAX": Rule(fixed=(1 / 256, -128)),
    "SQUEEZE": Rule(1, shares=True),
    "TANH": Rule(fixed=(1 / 128, 0)),
}


def label(number: int, operator: Operator) -> str:
    """Return how messages and reports name an operator."""
    return f"operator {number} ({operator.name})"


def check(graph: Graph) -> None:
    """Raise InvalidArgument, naming operator and tensor, unless all of `graph` can be quantized."""
    for index in graph.inputs:
        _require_float(graph.tensors[index], "the model's input")
    for number, operator in enumerate(graph.operators):
        if operator.name not in RULES:
            raise InvalidArgument(f"{label(number, operator)} cannot be quantized; what can: {', '.join(RULES)}")
        for index in operator.outputs:
            _require_float(graph.tensors[index], f"the result of {label(number, operator)}")
        if RULES[operator.name].weighted:
            _check_weights(graph, number, operator)


def _require_float(tensor: Tensor, role: str) -> None:
    if tensor.type != "FLOAT32":
        raise InvalidArgument(f"{role}, {tensor.name!r}, is {tensor.type}: only float32 models are quantized")


def _check_weights(graph: Graph, number: int, operator: Operator) -> None:
    for index in operator.inputs[1:]:
        tensor = graph.tensors[index]
        if index != OMITTED and (tensor.data is None or tensor.type != "FLOAT32"):
            kind = tensor.type if tensor.data is not None else "no constant"
            raise InvalidArgument(f"{label(number, operator)}: {tensor.name!r} is {kind}: float32 constants are needed")


def activations(graph: Graph, operator: Operator) -> Iterator[int]:
    """Yield an operator's float tensors other than weights and bias, the output last."""
    inputs = operator.inputs[:1] if RULES[operator.name].weighted else operator.inputs
    for index in (*inputs, *operator.outputs):
        if index != OMITTED and graph.tensors[index].type == "FLOAT32":
            yield index


def parameters(graph: Graph, ranges: Mapping[int, Range], dtype: str) -> dict[int, Affine]:
    """Return the quantization of every activation, by its index.

    `ranges` are those of the tensors that are no constants. Raises InvalidArgument where tensors must share one
    quantization that cannot serve all of them.
    """
    spans = {**ranges, **_constant_ranges(graph)}
    result: dict[int, Affine] = {}
    for group in _groups(graph):
        span = _union([spans[index] for index in group])
        fixed = _fixed(graph, group, dtype)
        if fixed is not None:
            _require_within(graph, group, span, fixed)
        result.update(dict.fromkeys(group, fixed or Affine.spread(span, dtype)))
    return result


def _constant_ranges(graph: Graph) -> dict[int, Range]:
    used = {index for operator in graph.operators for index in activations(graph, operator)}
    constants = {index: graph.tensors[index] for index in used if graph.tensors[index].data is not None}
    return {i: Range.holding(float(values(t).min()), float(values(t).max())) for i, t in constants.items()}


def values(tensor: Tensor) -> Array:
    """Return the value of a float32 constant."""
    assert tensor.data is not None
    return np.frombuffer(tensor.data, np.float32).reshape(tuple(tensor.shape))


def _union(spans: list[Range]) -> Range:
    result = spans[0]
    for span in spans[1:]:
        result = result.union(span)
    return result


def _groups(graph: Graph) -> list[list[int]]:
    """Return the activations, those that share a quantization together."""
    group_of: dict[int, list[int]] = {index: [index] for index in graph.inputs}
    for operator in graph.operators:
        members = list(activations(graph, operator))
        for index in members:
            group_of.setdefault(index, [index])
        if RULES[operator.name].shares:
            for index in members[1:]:
                _join(group_of, members[0], index)
    return list({id(group): group for group in group_of.values()}.values())


def _join(group_of: dict[int, list[int]], first: int, second: int) -> None:
    kept, taken = group_of[first], group_of[second]
    if kept is not taken:
        kept += taken
        group_of.update(dict.fromkeys(taken, kept))


def _fixed(graph: Graph, group: list[int], dtype: str) -> Affine | None:
    """Return the fixed quantization that a group holds, if any."""
    found = {
        RULES[operator.name].fixed: graph.tensors[index].name
        for operator in graph.operators
        for index in operator.outputs
        if index in group and RULES[operator.name].fixed is not None
    }
    if len(found) > 1:
        raise InvalidArgument(f"{_listed(found.values())} have fixed quantizations, but must share one")
    for fixed in found:
        assert fixed is not None
        return Affine.signed(*fixed, dtype)
    return None


def _listed(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


def _require_within(graph: Graph, group: list[int], span: Range, fixed: Affine) -> None:
    held = fixed.span
    if span.low < held.low - fixed.scale or span.high > held.high + fixed.scale:
        names = _listed(graph.tensors[index].name for index in sorted(group))
        raise InvalidArgument(
            f"{names} must share the quantization that one of them has by definition, {held.low:g} to {held.high:g}, "
            f"but reach from {span.low:g} to {span.high:g}"
        )


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantized model. Tensors that are in the float one have the indexes that they have there, until `compacted`.

    `weights` are those of each weighted operator, by its number.
    """

    graph: Graph
    parameters: Mapping[int, Affine]
    weights: Mapping[int, Weights]


def quantized(graph: Graph, parameters: Mapping[int, Affine], *, per_channel: bool) -> Quantized:
    """Return `graph` in 8-bit integers, its activations quantized by `parameters`."""
    tensors = [_activation(t, parameters[i]) if i in parameters else t for i, t in enumerate(graph.tensors)]
    operators, weights = [], {}
    for number, operator in enumerate(graph.operators):
        if RULES[operator.name].weighted:
            weights[number] = _weights(graph, operator, parameters[operator.inputs[0]], per_channel)
            operator = _with_weights(graph, operator, weights[number], tensors)
        operators.append(replace(operator, version=_version(operator, parameters)))
    made = Graph(tuple(tensors), tuple(operators), graph.inputs, graph.outputs)
    return Quantized(made, parameters, weights)


def _activation(tensor: Tensor, how: Affine) -> Tensor:
    data = None if tensor.data is None else how.codes(values(tensor)).tobytes()
    return replace(tensor, type=how.dtype.upper(), data=data, scales=(how.scale,), zero_points=(how.zero_point,))


def _weights(graph: Graph, operator: Operator, input: Affine, per_channel: bool) -> Weights:
    has_bias = len(operator.inputs) > 2 and operator.inputs[2] != OMITTED
    bias = values(graph.tensors[operator.inputs[2]]) if has_bias else None
    axis = RULES[operator.name].channel_axis if per_channel else None
    return quantized_weights(values(graph.tensors[operator.inputs[1]]), bias, axis, input)


def _with_weights(graph: Graph, operator: Operator, weights: Weights, tensors: list[Tensor]) -> Operator:
    """Add weights and bias to `tensors`, for this operator alone: another one's may have other scales."""
    inputs = list(operator.inputs)
    inputs[1] = len(tensors)
    scales, zeros = weights.scales.tolist(), [weights.zero_point] * len(weights.scales)
    old, axis = graph.tensors[operator.inputs[1]], weights.axis or 0
    kind = weights.codes.dtype.name.upper()
    tensors.append(Tensor(old.name, old.shape, kind, weights.codes.tobytes(), scales, zeros, axis))
    if weights.bias is not None:
        inputs[2] = len(tensors)
        old, scales = graph.tensors[operator.inputs[2]], weights.bias_scales.tolist()
        tensors.append(Tensor(old.name, old.shape, "INT32", weights.bias.tobytes(), scales, [0] * len(scales)))
    return replace(operator, inputs=tuple(inputs))


def _version(operator: Operator, parameters: Mapping[int, Affine]) -> int:
    """Return the least version of the operator that has what it uses."""
    if operator.name == "FULLY_CONNECTED" and len(operator.inputs) == 2:
        return 6
    if operator.name == "FULLY_CONNECTED" and operator.options.get("KeepNumDims"):
        return 5
    output = parameters[operator.outputs[0]]
    if operator.name == "MUL":
        first, second = (parameters[index].scale for index in operator.inputs)
        if first * second >= output.scale:
            return 3
    return RULES[operator.name].version if output.dtype == "int8" else 1
