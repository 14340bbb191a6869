"""Conversion of a float model, with the ranges of its tensors, to 8-bit integers.

RULES lists the operators that can be quantized and their constraints: operators with constant weights, operators whose
output has fixed parameters, and operators whose input and output must have the same scale. Tensors that must have the
same scale form a group, with the union of their ranges or the fixed parameters of one of them. Constants other than
weights, for instance an input of ADD, are quantized like activations; their values are their range. Operator versions
are those that TFLite's converter writes for int8; uint8 is supported by the first version of every operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from quant_params import Array, QuantizedWeights, QuantParams, Range, choose_quant_params, quantize_weights
from tflite_reader import OMITTED, Graph
from tflite_writer import Operator, Tensor

from nnfmq.hal.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class QuantizationRule:
    """The quantization constraints of one operator type.

    version: Operator version for int8, unless its options need a later one.
    has_weights: Inputs 1 and 2 are constant weights and bias.
    channel_axis: Axis of the weights along which each channel has a scale; None: one scale.
    same_scale: All float inputs and outputs have the same parameters.
    fixed_output_range: Scale and int8 zero point of the output; None: they follow from its range.
    """

    version: int = 2
    has_weights: bool = False
    channel_axis: int | None = None
    same_scale: bool = False
    fixed_output_range: tuple[float, int] | None = None


RULES: dict[str, QuantizationRule] = {
    "ADD": QuantizationRule(),
    "AVERAGE_POOL_2D": QuantizationRule(same_scale=True),
    "BATCH_MATMUL": QuantizationRule(),
    "CONCATENATION": QuantizationRule(same_scale=True),
    "CONV_2D": QuantizationRule(3, has_weights=True, channel_axis=0),
    "DEPTHWISE_CONV_2D": QuantizationRule(3, has_weights=True, channel_axis=3),
    "FULLY_CONNECTED": QuantizationRule(4, has_weights=True),  # the HAL has no per-channel scales for it
    "LOGISTIC": QuantizationRule(fixed_output_range=(1 / 256, -128)),
    "MAX_POOL_2D": QuantizationRule(same_scale=True),
    # The HAL requires the same scale for MEAN and the RELU family; TFLite does not.
    "MEAN": QuantizationRule(same_scale=True),
    "MUL": QuantizationRule(),
    "PAD": QuantizationRule(same_scale=True),
    "RELU": QuantizationRule(same_scale=True),
    "RELU6": QuantizationRule(same_scale=True),
    "RELU_N1_TO_1": QuantizationRule(1, same_scale=True),
    "RESHAPE": QuantizationRule(1, same_scale=True),
    "SOFTMAX": QuantizationRule(fixed_output_range=(1 / 256, -128)),
    "SQUEEZE": QuantizationRule(1, same_scale=True),
    "TANH": QuantizationRule(fixed_output_range=(1 / 128, 0)),
    "TRANSPOSE": QuantizationRule(same_scale=True),
}


def operator_label(number: int, operator: Operator) -> str:
    """Return the name of an operator in messages and reports."""
    return f"operator {number} ({operator.name})"


def check_quantizable(graph: Graph) -> None:
    """Check that every operator and tensor of `graph` can be quantized.

    Raises:
        InvalidArgument: If one cannot; the message names the operator and the tensor.
    """
    for index in graph.inputs:
        _require_float(graph.tensors[index], "the model's input")
    for number, operator in enumerate(graph.operators):
        label = operator_label(number, operator)
        if operator.name not in RULES:
            raise InvalidArgument(f"{label} cannot be quantized; supported operators: {', '.join(RULES)}")
        for index in operator.outputs:
            _require_float(graph.tensors[index], f"the result of {label}")
        if RULES[operator.name].has_weights:
            _require_constant_weights(graph, label, operator)


def _require_float(tensor: Tensor, role: str) -> None:
    if tensor.type != "FLOAT32":
        raise InvalidArgument(f"{role}, {tensor.name!r}, is {tensor.type}: only float32 models can be quantized")


def _require_constant_weights(graph: Graph, label: str, operator: Operator) -> None:
    for index in operator.inputs[1:]:
        tensor = graph.tensors[index]
        if index != OMITTED and (tensor.data is None or tensor.type != "FLOAT32"):
            kind = tensor.type if tensor.data is not None else "not a constant"
            raise InvalidArgument(f"{label}: {tensor.name!r} is {kind}: weights and bias must be float32 constants")


def activations(graph: Graph, operator: Operator) -> Iterator[int]:
    """Yield the indexes of an operator's float tensors other than weights and bias, outputs last."""
    inputs = operator.inputs[:1] if RULES[operator.name].has_weights else operator.inputs
    for index in (*inputs, *operator.outputs):
        if index != OMITTED and graph.tensors[index].type == "FLOAT32":
            yield index


def choose_params(graph: Graph, ranges: Mapping[int, Range], dtype: str) -> dict[int, QuantParams]:
    """Return the quantization parameters of every activation, by tensor index.

    `ranges` has the range of every tensor that is not a constant.

    Raises:
        InvalidArgument: If tensors must have the same parameters, but no parameters satisfy all of them.
    """
    ranges = {**ranges, **_constant_ranges(graph)}
    params: dict[int, QuantParams] = {}
    for group in _same_scale_groups(graph):
        group_range = reduce(Range.union, (ranges[index] for index in group))
        fixed = _fixed_params(graph, group, dtype)
        if fixed is not None:
            _require_within(graph, group, group_range, fixed)
        params.update(dict.fromkeys(group, fixed or choose_quant_params(group_range, dtype)))
    return params


def _constant_ranges(graph: Graph) -> dict[int, Range]:
    ranges = {}
    for operator in graph.operators:
        for index in activations(graph, operator):
            if graph.tensors[index].data is not None:
                values = constant_values(graph.tensors[index])
                ranges[index] = Range.from_min_max(float(values.min()), float(values.max()))
    return ranges


def constant_values(tensor: Tensor) -> Array:
    """Return the values of a float32 constant."""
    assert tensor.data is not None
    return np.frombuffer(tensor.data, np.float32).reshape(tuple(tensor.shape))


def _same_scale_groups(graph: Graph) -> list[list[int]]:
    """Return the indexes of all activations, grouped by the tensors that must have the same parameters."""
    group_of: dict[int, list[int]] = {index: [index] for index in graph.inputs}
    for operator in graph.operators:
        members = list(activations(graph, operator))
        for index in members:
            group_of.setdefault(index, [index])
        if RULES[operator.name].same_scale:
            for index in members[1:]:
                _merge_groups(group_of, members[0], index)
    return list({id(group): group for group in group_of.values()}.values())


def _merge_groups(group_of: dict[int, list[int]], first: int, second: int) -> None:
    kept, merged = group_of[first], group_of[second]
    if kept is not merged:
        kept += merged
        group_of.update(dict.fromkeys(merged, kept))


def _fixed_params(graph: Graph, group: list[int], dtype: str) -> QuantParams | None:
    """Return the fixed parameters of a tensor in `group`, or None if there are none."""
    found: dict[tuple[float, int], str] = {}
    for operator in graph.operators:
        fixed = RULES[operator.name].fixed_output_range
        for index in operator.outputs:
            if fixed is not None and index in group:
                found[fixed] = graph.tensors[index].name
    if len(found) > 1:
        raise InvalidArgument(f"{_join_names(found.values())} have different fixed scales, but must have the same")
    return QuantParams.from_int8(*next(iter(found)), dtype) if found else None


def _join_names(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


def _require_within(graph: Graph, group: list[int], group_range: Range, fixed: QuantParams) -> None:
    limits = fixed.representable_range
    if group_range.low < limits.low - fixed.scale or group_range.high > limits.high + fixed.scale:
        names = _join_names(graph.tensors[index].name for index in sorted(group))
        raise InvalidArgument(
            f"{names} must have the same scale, which is fixed for one of them and represents {limits.low:g} to "
            f"{limits.high:g}, but their values reach from {group_range.low:g} to {group_range.high:g}"
        )


@dataclass(frozen=True, slots=True)
class QuantizedGraph:
    """A quantized model and its parameters.

    Tensors of the float model keep their indexes in `graph`, which may have unused tensors. `params` has an entry for
    each activation; `weights` has one for each operator with weights, by its number.
    """

    graph: Graph
    params: Mapping[int, QuantParams]
    weights: Mapping[int, QuantizedWeights]


def convert_graph(graph: Graph, params: Mapping[int, QuantParams], *, per_channel: bool) -> QuantizedGraph:
    """Return `graph` in 8-bit integers, with `params` for its activations."""
    tensors = [_convert_activation(t, params[i]) if i in params else t for i, t in enumerate(graph.tensors)]
    operators, weights = [], {}
    for number, operator in enumerate(graph.operators):
        version = _operator_version(operator, params)
        if RULES[operator.name].has_weights:
            weights[number] = _quantize_weights_of(graph, operator, params[operator.inputs[0]], per_channel)
            operator = _append_weights(graph, operator, weights[number], tensors)
        operators.append(replace(operator, version=version))
    quantized = Graph(tuple(tensors), tuple(operators), graph.inputs, graph.outputs)
    return QuantizedGraph(quantized, params, weights)


def _convert_activation(tensor: Tensor, params: QuantParams) -> Tensor:
    data = None if tensor.data is None else params.quantize(constant_values(tensor)).tobytes()
    return replace(
        tensor, type=params.dtype.upper(), data=data, scales=(params.scale,), zero_points=(params.zero_point,)
    )


def _quantize_weights_of(
    graph: Graph, operator: Operator, input_params: QuantParams, per_channel: bool
) -> QuantizedWeights:
    has_bias = len(operator.inputs) > 2 and operator.inputs[2] != OMITTED
    bias = constant_values(graph.tensors[operator.inputs[2]]) if has_bias else None
    channel_axis = RULES[operator.name].channel_axis if per_channel else None
    return quantize_weights(constant_values(graph.tensors[operator.inputs[1]]), bias, channel_axis, input_params)


def _append_weights(graph: Graph, operator: Operator, weights: QuantizedWeights, tensors: list[Tensor]) -> Operator:
    """Append weights and bias to `tensors`; return `operator` with their indexes.

    Operators do not share them even if the float model's do: the bias scale depends on the operator's input.
    """
    inputs = list(operator.inputs)
    inputs[1] = len(tensors)
    original, axis = graph.tensors[operator.inputs[1]], weights.channel_axis or 0
    scales, zero_points = weights.scales.tolist(), [weights.zero_point] * len(weights.scales)
    dtype = weights.values.dtype.name.upper()
    tensors.append(Tensor(original.name, original.shape, dtype, weights.values.tobytes(), scales, zero_points, axis))
    if weights.bias is not None:
        inputs[2] = len(tensors)
        original, scales = graph.tensors[operator.inputs[2]], weights.bias_scales.tolist()
        zero_points = [0] * len(scales)
        tensors.append(Tensor(original.name, original.shape, "INT32", weights.bias.tobytes(), scales, zero_points))
    return replace(operator, inputs=tuple(inputs))


def _operator_version(operator: Operator, params: Mapping[int, QuantParams]) -> int:
    """Return the first version of the operator that supports its types, options and scales."""
    if operator.name == "FULLY_CONNECTED" and len(operator.inputs) == 2:
        return 6
    if operator.name == "FULLY_CONNECTED" and operator.options.get("KeepNumDims"):
        return 5
    output = params[operator.outputs[0]]
    if operator.name == "MUL":
        first, second = (params[index].scale for index in operator.inputs)
        if first * second >= output.scale:  # the rescaling factor is 1 or more
            return 3
    return RULES[operator.name].version if output.dtype == "int8" else 1
