"""Quantize a float32 .tflite model to 8-bit integers after training, calibrated with sample inputs.

    python tools/quantize.py MODEL.tflite CALIBRATION.npz -o OUT.tflite

CALIBRATION.npz contains a float array for each input of the model, with the input's name (any name if there is only one
input). The first axis counts the inputs; values are scaled as the model expects them. About 100 typical inputs suffice.
Inputs and outputs of the quantized model are int8 or uint8, with the scale and zero point in its file. The method is
described in docs/how-to/quantize.md.

Real = scale · (q − zero_point). The range of an activation's values, extended to contain 0, is mapped to all 256
quantized values; the zero point is rounded to the nearest integer so that 0 is exact. Weights are quantized to
−127..127, with one scale for the tensor or one for each channel. uint8 has the same scales as int8; its values and
zero points are higher by 128. Quotients are float64, halves are rounded away from zero, scales are float32. The
rules are those of TFLite's 8-bit quantization specification; RULES lists the operators and their constraints. Operator
versions are those that TFLite's converter writes for int8; every operator's first version supports uint8.

For calibration the model is rewritten with the results of all operators as outputs, loaded like any file, validated,
and executed by the reference interpreter: a quantized model that breaks the HAL's rules is rejected here.
"""

from __future__ import annotations

import argparse
import math
import sys
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tflite_writer
from tflite_writer import Operator, Tensor

import nnfmq
from nnfmq.cli.console import console, print_json, table
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite import file as tflite_file
from nnfmq.importers.tflite import flatbuffers
from nnfmq.importers.tflite.flatbuffers import Table, Vector
from nnfmq.validation.models import validate_model

Array = npt.NDArray[Any]
QMIN, QMAX, WEIGHT_QMAX = -128, 127, 127
"""The int8 limits of activations, and the largest magnitude of a quantized weight."""
UINT8_OFFSET = 128
RANGE_BITS = 12
_MAX_BIAS = 2.0**30  # half of int32's range; the other half is left for the sum of products
_MIN_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Range:
    """The minimum and the maximum of a tensor's values; `low` <= 0 <= `high` if created by `from_min_max`."""

    low: float
    high: float

    @classmethod
    def from_min_max(cls, low: float, high: float) -> Range:
        """Return a range that contains `low`, `high` and 0, its bounds rounded outward to RANGE_BITS significant bits.

        The rounding widens the range by 1/2048 at most. Float sums differ in their last bits between BLAS
        implementations; with rounded bounds the same model and inputs nearly always produce the same file.

        Raises:
            InvalidArgument: If a bound is infinite or NaN.
        """
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InvalidArgument(f"values from {low} to {high}: a range must be finite")
        return cls(0.0 - _round_up(max(0.0, -low)), _round_up(max(0.0, high)))

    def union(self, other: Range) -> Range:
        """Return the smallest range that contains both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


def _round_up(value: float) -> float:
    """Round up to RANGE_BITS significant bits."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.ceil(math.ldexp(fraction, RANGE_BITS)), exponent - RANGE_BITS)


@dataclass(frozen=True, slots=True)
class QuantParams:
    """Scale, zero point and data type ("int8" or "uint8") of a quantized tensor; `scale` is exact in float32."""

    scale: float
    zero_point: int
    dtype: str

    @classmethod
    def from_int8(cls, scale: float, zero_point: int, dtype: str) -> QuantParams:
        """Return the parameters for `dtype` that correspond to `zero_point` of an int8 tensor."""
        return cls(scale, zero_point + zero_point_offset(dtype), dtype)

    @property
    def representable_range(self) -> Range:
        """The real numbers that the minimum and the maximum of the data type represent."""
        offset = zero_point_offset(self.dtype)
        low, high = (self.scale * (limit + offset - self.zero_point) for limit in (QMIN, QMAX))
        return Range(low, high)

    def quantize(self, values: Array) -> Array:
        """Return the nearest quantized values; those out of range saturate."""
        limits = np.iinfo(self.dtype)
        nearest = round_half_away(values.astype(np.float64) / self.scale) + self.zero_point
        result: Array = np.clip(nearest, limits.min, limits.max).astype(self.dtype)
        return result

    def dequantize(self, quantized: Array) -> Array:
        """Return the real numbers that `quantized` represents, as float64."""
        result: Array = (quantized.astype(np.float64) - self.zero_point) * self.scale
        return result


def choose_quant_params(value_range: Range, dtype: str) -> QuantParams:
    """Return the parameters that map `value_range`, which must contain 0, to all values of "int8" or "uint8"."""
    scale = float(np.float32((value_range.high - value_range.low) / (QMAX - QMIN)))
    if scale < _MIN_SCALE:  # all values are 0, which every scale represents
        scale = 1.0
    zero_point = int(round_half_away(np.float64(QMIN - value_range.low / scale)))
    return QuantParams.from_int8(scale, min(QMAX, zero_point), dtype)


def zero_point_offset(dtype: str) -> int:
    """Return the difference between the zero points, and the quantized values, of `dtype` and of int8."""
    return UINT8_OFFSET if dtype == "uint8" else 0


def round_half_away(values: Array | np.float64 | float) -> Array:
    """Return the nearest integers as float64; halves are rounded away from zero."""
    result: Array = np.copysign(np.floor(np.abs(values) + 0.5), values)
    return result


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Quantized weights and bias of one operator.

    `values` (int8 or uint8) has the shape of the weights. `scales` (float32) has one element, or one for each channel
    along `channel_axis`. `bias` (int32, or None) is quantized with `bias_scales`, which has as many elements.
    """

    values: Array
    scales: Array
    channel_axis: int | None
    zero_point: int
    bias: Array | None
    bias_scales: Array

    def dequantize(self) -> Array:
        """Return the weights that the quantized values represent, as float64."""
        scales = _broadcast_scales(self.scales, self.channel_axis, self.values.ndim)
        result: Array = (self.values.astype(np.float64) - self.zero_point) * scales
        return result


def quantize_weights(
    weights: Array, bias: Array | None, channel_axis: int | None, input_params: QuantParams
) -> QuantizedWeights:
    """Quantize float32 weights and bias for an input that has `input_params`.

    With a `channel_axis` each channel has a scale, otherwise the tensor has one. A scale is the largest magnitude /
    127. It is larger if the bias, whose scale is input scale · weight scale, would otherwise exceed 30 bits: this
    happens if the weights of a channel are tiny and its bias is not.

    Raises:
        InvalidArgument: If a value is not finite, or a product of scales is not a normal float32.
    """
    if not (np.isfinite(weights).all() and (bias is None or np.isfinite(bias).all())):
        raise InvalidArgument("weights or bias are not all finite")
    other_axes = None if channel_axis is None else tuple(n for n in range(weights.ndim) if n != channel_axis)
    magnitudes = np.abs(weights).max(axis=other_axes).reshape(-1).astype(np.float64)
    scales = np.maximum(magnitudes / WEIGHT_QMAX, _min_scales_for_bias(bias, len(magnitudes), input_params))
    scales = np.where(scales < _MIN_SCALE, 1.0, scales).astype(np.float32)

    nearest = round_half_away(weights.astype(np.float64) / _broadcast_scales(scales, channel_axis, weights.ndim))
    zero_point = zero_point_offset(input_params.dtype)
    values = (np.clip(nearest, -WEIGHT_QMAX, WEIGHT_QMAX) + zero_point).astype(input_params.dtype)

    bias_scales = _multiply_scales(input_params.scale, scales)
    bias_values = None if bias is None else round_half_away(bias.astype(np.float64) / bias_scales).astype(np.int32)
    return QuantizedWeights(values, scales, channel_axis, zero_point, bias_values, bias_scales)


def _min_scales_for_bias(bias: Array | None, count: int, input_params: QuantParams) -> Array:
    """Return, for each of `count` weight scales, the smallest with which the bias fits."""
    if bias is None:
        return np.zeros(count)
    magnitudes = np.abs(bias.astype(np.float64))
    result: Array = (magnitudes if count > 1 else magnitudes.max(keepdims=True)) / (input_params.scale * _MAX_BIAS)
    return result


def _multiply_scales(input_scale: float, scales: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        products: Array = np.float32(input_scale) * scales
    if not (np.isfinite(products) & (products >= _MIN_SCALE)).all():
        raise InvalidArgument(
            f"an input scale of {input_scale:g} and weight scales from {scales.min():g} are too far from 1"
        )
    return products


def _broadcast_scales(scales: Array, axis: int | None, rank: int) -> Array:
    """Return `scales` as float64, in a shape that broadcasts along `axis`."""
    shape = [1] * rank
    if axis is not None:
        shape[axis] = len(scales)
    return scales.astype(np.float64).reshape(shape)


def sqnr_db(signal: float, noise: float) -> float | None:
    """Return the ratio of two sums of squares in decibels, or None if one of them is 0."""
    return 10.0 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


# ---- reading a float model


OMITTED = -1  # the index of an omitted optional input
_TYPES = {
    OperandType.TENSOR_FLOAT32: "FLOAT32",
    OperandType.TENSOR_FLOAT16: "FLOAT16",
    OperandType.TENSOR_INT32: "INT32",
    OperandType.TENSOR_BOOL8: "BOOL",
}


@dataclass(frozen=True)
class Graph:
    """A model with one subgraph: `inputs` and `outputs` are indexes of `tensors`; operators are in execution order."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def to_bytes(self, description: str = "") -> bytes:
        """Return the content of a .tflite file with this model."""
        return tflite_writer.write(self.tensors, self.operators, self.inputs, self.outputs, description)

    def without_unused_tensors(self) -> Graph:
        """Return the same model without unused tensors; the others keep their order."""
        kept = _used_tensors(self.operators, self.inputs, self.outputs)
        return _renumber_tensors([self.tensors[index] for index in kept], kept, self)


def read(data: bytes) -> Graph:
    """Return the model in the .tflite file `data`.

    Raises:
        InvalidArgument: If the file is corrupt or has a tensor of an unsupported type.
    """
    file = tflite_file.read(data)
    if file.subgraph_count != 1:
        raise InvalidArgument(f"{file.subgraph_count} subgraphs: only models of exactly one are supported")
    tables = {table.name: table for table in flatbuffers.OPTIONS.values()}
    operators = tuple(_read_operator(operator, tables) for operator in file.operators())
    kept = _used_tensors(operators, file.inputs, file.outputs)
    tensors = [_read_tensor(file.tensor(index)) for index in kept]
    return _renumber_tensors(tensors, kept, Graph((), operators, file.inputs, file.outputs))


def _used_tensors(operators: Sequence[Operator], inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    used = {*inputs, *outputs}
    for operator in operators:
        used.update(operator.inputs, operator.outputs)
    return sorted(used - {OMITTED})


def _renumber_tensors(tensors: Sequence[Tensor], kept: Sequence[int], graph: Graph) -> Graph:
    """Return `graph` with `tensors`, which have the indexes `kept` in it."""
    new_indexes = {old: new for new, old in enumerate(kept)} | {OMITTED: OMITTED}

    def renumber(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(new_indexes[index] for index in indexes)

    operators = [replace(o, inputs=renumber(o.inputs), outputs=renumber(o.outputs)) for o in graph.operators]
    return Graph(tuple(tensors), tuple(operators), renumber(graph.inputs), renumber(graph.outputs))


def _read_tensor(tensor: tflite_file.TfliteTensor) -> Tensor:
    if tensor.type not in _TYPES:
        raise InvalidArgument(f"{tensor} is {tensor.type.name}: only {', '.join(_TYPES.values())} are supported")
    return Tensor(tensor.name, tensor.shape, _TYPES[tensor.type], None if tensor.data is None else bytes(tensor.data))


def _read_operator(operator: tflite_file.TfliteOperator, tables: dict[str, Table]) -> Operator:
    if operator.options is None:
        return Operator(operator.name, operator.inputs, operator.outputs)
    options = {name: value for name, value in _options(operator.options, tables[operator.options_name]) if value != []}
    return Operator(operator.name, operator.inputs, operator.outputs, operator.options_name, options)


def _options(options: Any, table: Table) -> list[tuple[str, Any]]:
    """Return the fields of a generated options object and their values; vectors as lists."""
    return [(field.name, _value(options, field.name, isinstance(field.kind, Vector))) for field in table.fields]


def _value(options: Any, name: str, is_vector: bool) -> Any:
    if not is_vector:
        return getattr(options, name)()
    return getattr(options, f"{name}AsNumpy")().tolist() if getattr(options, f"{name}Length")() else []


# ---- conversion


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


# ---- calibration


Sample = tuple[Array, ...]
"""The inputs of one execution, in the model's order."""
GraphExecutor = Callable[[Sample], dict[int, Array]]
"""Executes a graph and returns its inputs and all results, by tensor index."""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A method to compute the range of a tensor from its values in many executions.

    With `percentile` p, the lower and the upper p-th percentile of each execution's values, averaged over executions.
    With `momentum`, a moving average of each execution's minimum and maximum: old · momentum + new · (1 − momentum).
    With neither, the minimum and the maximum over all executions.
    """

    percentile: float | None = None
    momentum: float | None = None

    def observe(self, values: Array) -> tuple[float, float]:
        """Return the lower and the upper bound for the values of one execution."""
        if self.percentile is None:
            return float(values.min()), float(values.max())
        low, high = np.percentile(values, (100.0 - self.percentile, self.percentile))
        return float(low), float(high)

    def combine(self, bounds: Sequence[tuple[float, float]]) -> Range:
        """Return the range over all executions, from the bounds of each in order."""
        lows, highs = zip(*bounds, strict=True)
        if self.percentile is not None:
            return Range.from_min_max(float(np.mean(lows)), float(np.mean(highs)))
        if self.momentum is None:
            return Range.from_min_max(float(np.min(lows)), float(np.max(highs)))  # unlike min(), these propagate NaN
        return Range.from_min_max(self._moving_average(lows), self._moving_average(highs))

    def _moving_average(self, values: Iterable[float]) -> float:
        assert self.momentum is not None
        average, *others = values
        for value in others:
            average = self.momentum * average + (1.0 - self.momentum) * value
        return average


def calibration_samples(arrays: Mapping[str, Array], graph: Graph) -> list[Sample]:
    """Return the inputs of each calibration execution of `graph`.

    `arrays` contains one float array for each input, by the input's name (any name if there is only one input). The
    first axis counts executions; the others are the input's shape, whose leading 1 may be missing.

    Raises:
        InvalidArgument: If an array is missing, or the type, shape or number of executions of one does not match.
    """
    tensors = [graph.tensors[index] for index in graph.inputs]
    if len(arrays) == len(tensors) == 1:
        arrays = {tensors[0].name: next(iter(arrays.values()))}
    missing = [tensor.name for tensor in tensors if tensor.name not in arrays]
    if missing:
        raise InvalidArgument(f"no calibration values for {', '.join(missing)}; there are {', '.join(arrays)}")
    inputs = [_check_input(arrays[tensor.name], tensor.name, tuple(tensor.shape)) for tensor in tensors]
    counts = [len(values) for values in inputs]
    if len(set(counts)) != 1 or not counts[0]:
        raise InvalidArgument(
            f"calibration inputs of {counts} executions: each input needs the same number, and at least one"
        )
    return list(zip(*inputs, strict=True))


def _check_input(array: Array, name: str, shape: tuple[int, ...]) -> Array:
    """Return the calibration values of one input as float32 in the shape (executions, *shape)."""
    if array.dtype.kind != "f":
        raise InvalidArgument(f"calibration values of {name} are {array.dtype}: they must be floats")
    if array.shape[1:] != shape and (1, *array.shape[1:]) != shape:
        raise InvalidArgument(
            f"calibration values of {name} have shape {array.shape}, but must have (n, {str(shape)[1:]}"
        )
    return np.ascontiguousarray(array, np.float32).reshape(-1, *shape)


def expose_intermediates(graph: Graph) -> Graph:
    """Return `graph` with the results of all operators, in execution order, as its outputs."""
    results = tuple(index for operator in graph.operators for index in operator.outputs)
    return replace(graph, outputs=results).without_unused_tensors()


def make_executor(graph: Graph) -> GraphExecutor:
    """Prepare `graph` for execution in the reference interpreter.

    Raises:
        InvalidArgument: If the model breaks the HAL's rules.
        GeneralFailure: If the interpreter cannot execute it.
    """
    result_indexes = tuple(index for operator in graph.operators for index in operator.outputs)
    loaded = nnfmq.load(expose_intermediates(graph).to_bytes())
    validate_model(loaded.model)
    program = interpreter.prepare(loaded.model)

    def execute(inputs: Sample) -> dict[int, Array]:
        results = [np.empty(info.shape, info.dtype) for info in loaded.outputs]
        program.execute(inputs, results)
        return dict(zip((*graph.inputs, *result_indexes), (*inputs, *results), strict=True))

    return execute


def calibrate(graph: Graph, samples: Sequence[Sample], calibrator: Calibrator) -> dict[int, Range]:
    """Execute the float model with all `samples`; return the range of each input and result, by tensor index.

    Raises:
        InvalidArgument: If a tensor contains an infinity or NaN.
    """
    execute = make_executor(graph)
    bounds: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for index, array in execute(sample).items():
            bounds[index].append(calibrator.observe(array))
    ranges = {}
    for index, tensor_bounds in bounds.items():
        try:
            ranges[index] = calibrator.combine(tensor_bounds)
        except InvalidArgument as error:
            raise InvalidArgument(f"{graph.tensors[index].name!r}: {error}") from None
    return ranges


def measure_sqnr(
    graph: Graph, quantized: Graph, params: Mapping[int, QuantParams], samples: Sequence[Sample]
) -> dict[int, float | None]:
    """Return the signal-to-quantization-noise ratio in dB of each input and result, by tensor index.

    A ratio is None if the tensor is equal in both models or is all zeros. The quantized model receives the quantized
    `samples`, so the noise of a tensor includes that of the operators before it.
    """
    execute_float, execute_quantized = make_executor(graph), make_executor(quantized)
    sums: dict[int, Array] = defaultdict(lambda: np.zeros(2))  # of squares: signal, noise
    for sample in samples:
        inputs = tuple(params[index].quantize(array) for index, array in zip(graph.inputs, sample, strict=True))
        results = execute_quantized(inputs)
        for index, values in execute_float(sample).items():
            values = values.astype(np.float64)
            noise = values - params[index].dequantize(results[index])
            sums[index] += (np.square(values).sum(), np.square(noise).sum())
    return {index: sqnr_db(float(signal), float(noise)) for index, (signal, noise) in sums.items()}


# ---- the program


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The quantization of one operator's output, or of an input of the model (`operator` is then "input").

    `low` and `high` are the calibrated range, `scale` and `zero_point` the chosen parameters. `sqnr_db` compares the
    output with the float model's, `weights_sqnr_db` the weights; None: they are equal, or there is nothing to compare.
    """

    operator: str
    tensor: str
    low: float
    high: float
    scale: float
    zero_point: int
    sqnr_db: float | None
    weights_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """The content of the quantized .tflite file, and a report for each layer."""

    content: bytes
    layers: list[LayerReport]


def quantize(
    model: bytes, arrays: dict[str, Array], *, dtype: str = "int8", per_channel: bool, calibrator: Calibrator
) -> QuantizationResult:
    """Quantize the .tflite file `model`; `arrays` are calibration inputs, see `calibration_samples`.

    The quantized model is executed with them, so a returned model is one that nnfmq can execute.

    Raises:
        InvalidArgument: If the model or the calibration inputs cannot be quantized.
        GeneralFailure: If nnfmq cannot execute the model.
    """
    if per_channel and dtype != "int8":
        raise InvalidArgument(f"{dtype} has no per-channel scales; int8 has")
    graph = read(model)
    check_quantizable(graph)
    samples = calibration_samples(arrays, graph)
    ranges = calibrate(graph, samples, calibrator)
    quantized = convert_graph(graph, choose_params(graph, ranges, dtype), per_channel=per_channel)
    content = quantized.graph.without_unused_tensors().to_bytes(f"{dtype}, calibrated with {len(samples)} inputs")

    sqnr = measure_sqnr(graph, quantized.graph, quantized.params, samples)
    rows: list[tuple[str, int, float | None]] = [("input", index, None) for index in graph.inputs]
    for number, operator in enumerate(graph.operators):
        rows.append((operator_label(number, operator), operator.outputs[0], _weights_sqnr(graph, quantized, number)))
    layers = []
    for label, index, weights_sqnr in rows:
        params, low, high = quantized.params[index], ranges[index].low, ranges[index].high
        name = graph.tensors[index].name
        layers.append(LayerReport(label, name, low, high, params.scale, params.zero_point, sqnr[index], weights_sqnr))
    return QuantizationResult(content, layers)


def _weights_sqnr(graph: Graph, quantized: QuantizedGraph, number: int) -> float | None:
    """Return the ratio for the weights of an operator in dB, or None if it has none."""
    if number not in quantized.weights:
        return None
    exact = constant_values(graph.tensors[graph.operators[number].inputs[1]]).astype(np.float64)
    noise = np.square(exact - quantized.weights[number].dequantize()).sum()
    return sqnr_db(float(np.square(exact).sum()), float(noise))


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 if the file was written, 1 if it was not."""
    options = _parser().parse_args(args)
    per_channel = options.dtype == "int8" if options.per_channel is None else options.per_channel
    calibrator = Calibrator(options.percentile, options.moving_average)
    try:
        arrays = _load_arrays(options.calibration)
        model = options.model.read_bytes()
        result = quantize(model, arrays, dtype=options.dtype, per_channel=per_channel, calibrator=calibrator)
        options.out.write_bytes(result.content)
    except (NnfmqError, OSError) as error:
        print(f"quantize: error: {error}", file=sys.stderr)
        return 1
    sizes = {"float_bytes": len(model), "quantized_bytes": len(result.content)}
    if options.json:
        print_json({**sizes, "layers": [asdict(layer) for layer in result.layers]})
    else:
        _print_table(result.layers, sizes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a float32 .tflite file")
    parser.add_argument("calibration", type=Path, help="an .npz file with calibration inputs")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--dtype", choices=("int8", "uint8"), default="int8", help="type of the quantized values (default: %(default)s)"
    )
    channels = parser.add_mutually_exclusive_group()
    channels.add_argument(
        "--per-channel",
        action="store_const",
        const=True,
        help="one scale for each output channel of a convolution (default for int8)",
    )
    channels.add_argument(
        "--per-tensor", dest="per_channel", action="store_const", const=False, help="one scale for each tensor"
    )
    ranges = parser.add_mutually_exclusive_group()
    ranges.add_argument(
        "--percentile",
        type=_percentile,
        metavar="P",
        help="ranges from the P-th percentiles of each input's values, 50 < P < 100",
    )
    ranges.add_argument(
        "--moving-average", type=_momentum, metavar="M", help="ranges from moving averages: old × M + new × (1 − M)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _percentile(text: str) -> float:
    return _between(text, 50.0, 100.0)


def _momentum(text: str) -> float:
    return _between(text, 0.0, 1.0)


def _between(text: str, low: float, high: float) -> float:
    value = float(text)
    if not low < value < high:
        raise argparse.ArgumentTypeError(f"must be greater than {low:g} and less than {high:g}")
    return value


def _load_arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file:  # np.load(path) does not close the file if it is corrupt
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise InvalidArgument(f"{path}: not an .npz file but a single array (.npy)")
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgument(f"{path}: not an .npz file of plain arrays: {error}") from None


def _print_table(layers: Sequence[LayerReport], sizes: dict[str, Any]) -> None:
    rows = table("layer", "output", ">low", ">high", ">scale", ">zero point", ">SQNR dB", ">weights dB")
    for layer in layers:
        name = layer.operator.removeprefix("operator ")
        values = (f"{layer.low:.4g}", f"{layer.high:.4g}", f"{layer.scale:.4g}", str(layer.zero_point))
        rows.add_row(name, layer.tensor, *values, _format_db(layer.sqnr_db), _format_db(layer.weights_sqnr_db))
    screen = console(no_color=False, at_least=110)
    screen.print(rows)
    screen.print("float model: {float_bytes:,} bytes, quantized model: {quantized_bytes:,} bytes".format(**sizes))


def _format_db(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
