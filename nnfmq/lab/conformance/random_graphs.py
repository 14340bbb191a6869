"""Random valid graphs as test models. A class and a seed always give the same graph.

A graph grows operation by operation, on concrete arrays: each operation takes results of earlier ones if type, rank and
values fit, and generates its other arguments. So a graph is connected as far as possible, its shapes are valid by
construction, and no operation gets values for which it is undefined. A `GraphClass` defines the operations, the limits
and the criteria (`classes` has those of the command). Expected outputs are computed by the reference; those of a
single operation by the `random_source`, in float32.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import ChannelQuant, LifeTime, Operand, OperandType, OperationType, is_scalar
from nnfmq.lab.conformance import random_source
from nnfmq.lab.conformance.random_operations import GENERATORS, ArgumentRequest, OperandSpec, OperationGenerator
from nnfmq.lab.conformance.random_source import (
    FIXED_QUANTIZATION,
    Discard,
    GraphLimits,
    Quantization,
    RandomSource,
    Sign,
)
from nnfmq.lab.conformance.testmodels import FEATURE_LEVELS, FORMAT, Array, Criterion, Line
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import NUMPY_TYPES, V1_2, V1_3, Declaration, Overload, Parameter, Role, Shape, Variant

__all__ = ["Batch", "GraphClass", "Usage", "batches", "classes", "generate", "name_of", "usages"]

_ATTEMPTS = 1000
_JOIN_PROBABILITY = 0.7  # probability that an argument is an earlier result, if one fits
_CONSTANT_PROBABILITY = 0.5
_MAX_BIAS = 4096
_OUTPUT_SCALES = (0.25, 4.0)  # relative to the first input's scale
MAX_REAL = {OperandType.TENSOR_FLOAT32: 1e3, OperandType.TENSOR_FLOAT16: 1e2}
"""A larger float result is not compared, and is not the input of another operation."""
_FEEDING_SCALES = (2.0**-16, 2.0**10)
"""Results with other scales are not inputs of another operation: in a chain of products scales would diverge."""
_TO_NHWC, _TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
_VERSIONS = {level: name for name, level in FEATURE_LEVELS.items()}


Criteria = Mapping[OperandType, Criterion]


class GraphClass(Struct, frozen=True):
    """A class of random graphs: number and choice of operations, limits, and criteria for the outputs.

    An operation's first array has the type `type` and, unless it is an earlier result, the rank `rank` (None: any).
    `code` and `exact_level` select one operation with the overloads and types that one feature level introduced;
    otherwise all operations up to `level` are used. `has_constants`: half of the arrays that may be inputs are
    constants.
    """

    name: str
    family: str
    limits: GraphLimits
    criteria: Criteria
    operation_count: int = 1
    type: OperandType | None = None
    rank: int | None = None
    code: OperationType | None = None
    exact_level: int | None = None
    level: int = V1_3
    has_constants: bool = True

    @property
    def highest_level(self) -> int:
        """The feature level that no graph of the class exceeds."""
        return self.level if self.exact_level is None else self.exact_level


class Usage(Struct, frozen=True):
    """An overload of an operation with its number of parameters and its types."""

    declaration: Declaration
    overload: Overload
    count: int
    variant: Variant

    @property
    def level(self) -> int:
        """The feature level that introduced this usage."""
        return max(self.declaration.since, self.overload.arities[self.count], self.variant.level)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters that are passed; a repeated one occurs once."""
        return self.overload.parameters[: self.count]

    def type_of(self, declared: Any) -> OperandType:
        """Return the type of a parameter or output from its declared type or type variable."""
        kind = self.variant.types[declared] if isinstance(declared, str) else declared
        assert isinstance(kind, OperandType), "only control flow takes any type"
        return kind

    @property
    def first(self) -> Parameter | None:
        """The main parameter of the operation, which determines type and rank; None for FILL."""
        arrays = [p for p in self.parameters if p.role is Role.DATA]
        return next((p for p in arrays if p.type == "T"), arrays[0] if arrays else None)

    @property
    def first_type(self) -> OperandType:
        """The type of the main parameter."""
        return self.type_of("T" if self.first is None else self.first.type)


def usages(graph_class: GraphClass) -> dict[OperationType, list[Usage]]:
    """Return the usages of each operation from which the graphs of a class are generated."""
    found: dict[OperationType, list[Usage]] = {}
    for code in GENERATORS if graph_class.code is None else (graph_class.code,):
        selected = [usage for usage in _all_usages(code) if _belongs(graph_class, usage)]
        if selected:
            found[code] = selected
    return found


@cache
def _all_usages(code: OperationType) -> tuple[Usage, ...]:
    declaration = REGISTRY[code]
    signatures = [(overload, count) for overload in declaration.overloads for count in overload.arities]
    return tuple(
        Usage(declaration, *signature, variant) for signature in signatures for variant in declaration.variants
    )


def _belongs(graph_class: GraphClass, usage: Usage) -> bool:
    generator = GENERATORS[usage.declaration.code]
    matches = graph_class.type in (None, usage.first_type) and (graph_class.rank in (None, *generator.ranks))
    if graph_class.exact_level is not None:
        return matches and usage.level == graph_class.exact_level
    return matches and usage.level <= graph_class.level


# ---------------------------------------------------------------------------------------- construction of a graph


class _Value(Struct):
    """An operand with its array (None: omitted). `is_free`: its values may come from a request."""

    operand: Operand
    array: Array | None
    is_free: bool = False
    is_result: bool = False
    consumers: int = 0

    def can_feed(self, type: OperandType, sign: Sign) -> bool:
        """Return True if this result can be an argument of this type whose values need this sign."""
        if not self.is_result or self.operand.type != type or is_scalar(type) or self.array is None:
            return False
        if self.operand.scale and not _FEEDING_SCALES[0] <= self.operand.scale <= _FEEDING_SCALES[1]:
            return False
        reals = self.array.astype(np.float64) - self.operand.zero_point
        max_real = MAX_REAL.get(type)
        return (max_real is None or bool(np.all(np.abs(reals) <= max_real))) and sign.is_satisfied(reals)


class _Node(Struct):
    """An operation under construction: the values of its parameters, in order."""

    usage: Usage
    generator: OperationGenerator
    nchw: bool
    first: _Value | None = None
    inputs: list[_Value] = field(default_factory=list)

    @property
    def first_name(self) -> str:
        """The name of the main parameter."""
        return "" if self.usage.first is None else self.usage.first.name

    def is_transposed(self, name: str) -> bool:
        """Return True if a parameter is transposed for NCHW."""
        return self.nchw and name in self.usage.declaration.images


class _Graph:
    """A graph under construction. A discarded operation leaves it unchanged."""

    def __init__(self, rng: RandomSource, highest_level: int) -> None:
        self.rng = rng
        self.highest_level = highest_level
        self.level = 0
        self.values: list[_Value] = []
        self.operations: list[tuple[OperationType, list[_Value], list[_Value]]] = []
        self.calls: list[random_source.OperationCall] = []

    def add(self, usage: Usage, rank: int) -> None:
        """Generate one operation and compute it. Raises Discard."""
        generator, names = GENERATORS[usage.declaration.code], [p.name for p in usage.parameters]
        node = _Node(usage, generator, "nchw" in names and self.rng.chance())
        shape = self._choose_first(node, rank)
        types = {p.name: usage.type_of(p.type) for p in usage.parameters}
        arguments = generator.arguments(self.rng, ArgumentRequest(shape, usage.first_type, types)) | {"nchw": node.nchw}
        for parameter in usage.parameters:
            node.inputs += self._parameter_values(node, parameter, arguments)
        self._compute(node, arguments)

    def _choose_first(self, node: _Node, rank: int) -> Shape:
        """Choose the array for the main parameter; return its shape in NHWC."""
        generator, first, type = node.generator, node.usage.first, node.usage.first_type
        if first is None:
            return generator.shape(self.rng, rank)
        is_transposed = node.is_transposed(first.name)
        fitting = [
            value
            for value in self.values
            if len(value.operand.dimensions) in generator.ranks
            and value.can_feed(type, generator.sign)
            and generator.accepts(_permute(value.operand.dimensions, _TO_NHWC, is_transposed))
        ]
        if fitting and self.rng.chance(_JOIN_PROBABILITY):
            node.first = self._choose_result(fitting)
            return _permute(node.first.operand.dimensions, _TO_NHWC, is_transposed)
        shape = generator.shape(self.rng, rank)
        spec = OperandSpec(_permute(shape, _TO_NCHW, is_transposed), generator.sign)
        node.first = self._new_array(node, first, type, spec)
        return shape

    def _parameter_values(self, node: _Node, parameter: Parameter, arguments: Mapping[str, Any]) -> list[_Value]:
        """Return the values of a parameter: one, or several if it is repeated."""
        if parameter.name == node.first_name:
            assert node.first is not None
            others = arguments.get(parameter.name, ()) if parameter.repeated else ()
            return [node.first, *(self._array(node, parameter, spec) for spec in others)]
        argument = arguments[parameter.name]
        if isinstance(argument, OperandSpec):
            return [self._array(node, parameter, argument)]
        return [_attribute(node, node.usage.type_of(parameter.type), parameter.name, argument)]

    def _array(self, node: _Node, parameter: Parameter, spec: OperandSpec) -> _Value:
        type = node.usage.type_of(parameter.type)
        is_transposed = node.is_transposed(parameter.name)
        spec = replace(spec, shape=_permute(spec.shape, _TO_NCHW, is_transposed))
        required = self._required_quantization(node, parameter, type)
        fitting = [
            value
            for value in self.values
            if value.operand.dimensions == spec.shape
            and value.can_feed(type, spec.sign)
            and required in (None, _quantization_of(value.operand))
        ]
        if spec.values is None and fitting and self.rng.chance(_JOIN_PROBABILITY):
            return self._choose_result(fitting)
        return self._new_array(node, parameter, type, spec, required)

    def _choose_result(self, fitting: list[_Value]) -> _Value:
        """Choose an earlier result, preferably one that no operation has read."""
        unread = [value for value in fitting if not value.consumers]
        return self.rng.choice(unread if unread and self.rng.chance(_JOIN_PROBABILITY) else fitting)

    def _required_quantization(self, node: _Node, parameter: Parameter, type: OperandType) -> Quantization | None:
        """Return the scale and zero point that an argument must have, if any."""
        if node.first is None or (type in FIXED_QUANTIZATION and parameter.name != "bias"):
            return None
        declaration, first = node.usage.declaration, node.first.operand
        if parameter.name == "bias" and type == OperandType.TENSOR_INT32:
            weights = node.inputs[1].operand  # 0 for per-channel weights, whose scales the bias takes
            return Quantization(float(np.float32(first.scale) * np.float32(weights.scale)))
        is_early = declaration.code == OperationType.CONCATENATION and self.highest_level < V1_2
        return _quantization_of(first) if declaration.same_quantization or is_early else None

    def _new_array(
        self,
        node: _Node,
        parameter: Parameter,
        type: OperandType,
        spec: OperandSpec,
        required: Quantization | None = None,
    ) -> _Value:
        if math.prod(spec.shape) > self.rng.limits.elements:
            raise Discard("an argument with too many elements")
        quant = self.rng.quantization(type) if required is None else required
        channels = self._channel_quant(node, type, spec.shape)
        values = spec.values
        if values is None and parameter.name == "bias" and required is not None:
            values = self._bias(spec.shape)
        if values is None:
            values = self.rng.values(type, spec.shape, spec.sign, quant.zero_point)
        operand = Operand(type, spec.shape, quant.scale, quant.zero_point, channel_quant=channels)
        return _Value(operand, values, is_free=True)

    def _bias(self, shape: Shape) -> Array:
        values = np.floor(self.rng.fractions(math.prod(shape)) * (2 * _MAX_BIAS)) - _MAX_BIAS
        return np.asarray(values.reshape(shape), np.int32)

    def _channel_quant(self, node: _Node, type: OperandType, shape: Shape) -> ChannelQuant | None:
        if type != OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
            return None
        dimension = 3 if node.usage.declaration.code == OperationType.DEPTHWISE_CONV_2D else 0
        return ChannelQuant(tuple(self.rng.real(0.1, 2.0) for _ in range(shape[dimension])), dimension)

    def _compute(self, node: _Node, arguments: Mapping[str, Any]) -> None:
        declaration = node.usage.declaration
        count = arguments["count"] if declaration.repeated_outputs else len(declaration.outputs)
        output_types, _ = declaration.expand_outputs(count) or ((), 0)
        outputs = tuple(self._output(node, number, declared) for number, declared in enumerate(output_types))
        operands, arrays = tuple(v.operand for v in node.inputs), tuple(v.array for v in node.inputs)
        call = random_source.OperationCall(declaration.code, operands, arrays, outputs)
        if node.generator.fits_output_scale and outputs[0].scale:
            call = replace(call, outputs=(random_source.fit_output_scale(call, outputs[0]),))
        results = random_source.compute(call)
        self._check_size(results)
        outputs = tuple(replace(o, dimensions=array.shape) for o, array in zip(call.outputs, results, strict=True))
        call = replace(call, outputs=outputs)
        level = call.matched().level
        if level > self.highest_level:
            raise Discard("values that need a newer feature level")
        self._append(node, call, results, level)

    def _check_size(self, results: Sequence[Array]) -> None:
        for array in results:
            if not 0 < array.size <= self.rng.limits.elements:
                raise Discard("a result without elements, or with too many")
            if array.dtype.kind == "f" and bool(np.isnan(array).any()):
                raise Discard("a result that is NaN")

    def _output(self, node: _Node, number: int, declared: Any) -> Operand:
        """Return an output operand without its shape."""
        type = node.usage.type_of(declared)
        quant = self.rng.quantization(type)
        is_fixed = type in FIXED_QUANTIZATION
        if node.generator.fixed_output is not None and not is_fixed:
            scale, zero_point = node.generator.fixed_output
            quant = Quantization(scale, zero_point - 128 * (type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED))
        elif node.usage.declaration.code == OperationType.HASHTABLE_LOOKUP and number == 1:
            quant = Quantization(1.0)
        elif node.first is not None and not is_fixed and self._has_input_quantization(node, number):
            quant = _quantization_of(node.first.operand)
        elif node.first is not None and not is_fixed and node.first.operand.scale:
            factor = self.rng.real(*_OUTPUT_SCALES)
            quant = replace(quant, scale=float(np.float32(node.first.operand.scale * factor)))
        return Operand(type, (), quant.scale, quant.zero_point)

    def _has_input_quantization(self, node: _Node, number: int) -> bool:
        declaration = node.usage.declaration
        is_early = declaration.code == OperationType.CONCATENATION and self.highest_level < V1_2
        return declaration.same_quantization or number in node.generator.same_quantization or is_early

    def _append(self, node: _Node, call: random_source.OperationCall, results: Sequence[Array], level: int) -> None:
        self.level = max(self.level, level)
        outputs = [_Value(o, array, is_result=True) for o, array in zip(call.outputs, results, strict=True)]
        for value in node.inputs:
            value.consumers += 1
            if not any(value is other for other in self.values):
                self.values.append(value)
        self.values += outputs
        self.operations.append((call.code, node.inputs, outputs))
        self.calls.append(call)


def _attribute(node: _Node, type: OperandType, name: str, argument: Any) -> _Value:
    if argument is None:
        return _Value(Operand(type, lifetime=LifeTime.NO_VALUE), None)
    array = np.array(argument).astype(NUMPY_TYPES[type])
    if node.is_transposed(name):
        array = array[list(_TO_NCHW)]
    return _Value(Operand(type, array.shape), array)


def _permute(shape: Shape, axes: tuple[int, ...], is_transposed: bool) -> Shape:
    return tuple(shape[axis] for axis in axes) if is_transposed else shape


def _quantization_of(operand: Operand) -> Quantization:
    return Quantization(operand.scale, operand.zero_point)


# ------------------------------------------------------------------------------------------------ as a test model


def name_of(graph_class: GraphClass, seed: int) -> str:
    """Return the name of a graph's test model."""
    return f"random_{graph_class.name}_seed_{seed}"


def generate(graph_class: GraphClass, seed: int) -> Line:
    """Return the test model of a class and seed.

    Raises:
        GeneralFailure: If no graph of the class fits its limits.
    """
    rng = RandomSource([zlib.crc32(graph_class.name.encode()), seed], graph_class.limits)
    graph = _Graph(rng, graph_class.highest_level)
    choices = usages(graph_class)
    for _ in range(graph_class.operation_count):
        _grow(graph, graph_class, choices)
    return _line(graph, graph_class, seed)


def _grow(graph: _Graph, graph_class: GraphClass, choices: Mapping[OperationType, list[Usage]]) -> None:
    for _ in range(_ATTEMPTS):
        code = graph.rng.choice(list(choices))
        usage = graph.rng.choice(choices[code])
        rank = graph.rng.choice(GENERATORS[code].ranks) if graph_class.rank is None else graph_class.rank
        try:
            graph.add(usage, rank)
        except Discard:
            continue
        return
    raise GeneralFailure(f"{graph_class.name}: no operation fits its limits in {_ATTEMPTS} attempts")


def _line(graph: _Graph, graph_class: GraphClass, seed: int) -> Line:
    _set_expected_outputs(graph)
    lifetimes = _lifetimes(graph, graph_class.has_constants)
    indexes = {id(value): number for number, value in enumerate(graph.values)}
    operands = [_operand(n, v, lifetimes[n]) for n, v in enumerate(graph.values)]
    operations = [
        {"type": code.name, "inputs": [indexes[id(v)] for v in inputs], "outputs": [indexes[id(v)] for v in outputs]}
        for code, inputs, outputs in graph.operations
    ]
    io_indexes = {
        key: [number for number, lifetime in enumerate(lifetimes) if lifetime == io_lifetime]
        for key, io_lifetime in (("inputIndexes", LifeTime.SUBGRAPH_INPUT), ("outputIndexes", LifeTime.SUBGRAPH_OUTPUT))
    }
    types = {operands[number]["type"] for number in io_indexes["outputIndexes"]}
    return {
        "format": FORMAT, "name": name_of(graph_class, seed), "spec": f"random/{graph_class.name}",
        "minSupportedVersion": _VERSIONS[graph.level], "isRelaxed": False, "expectFailure": False,
        "expectedMultinomialDistributionTolerance": 0, "hasOemOrExtension": False,
        "main": {"name": None, "operands": operands, "operations": operations, **io_indexes}, "referenced": [],
        "criteria": {name: graph_class.criteria[OperandType[name]].as_json() for name in sorted(types)},
    }  # fmt: skip


def _set_expected_outputs(graph: _Graph) -> None:
    """Replace the computed outputs of a single operation by the expected ones."""
    if len(graph.calls) == 1:
        _, _, outputs = graph.operations[0]
        for value, array in zip(outputs, random_source.expected_outputs(graph.calls[0]), strict=True):
            value.array = array


def _lifetimes(graph: _Graph, has_constants: bool) -> list[LifeTime]:
    free = [number for number, value in enumerate(graph.values) if value.is_free]
    if not free:  # a model must have an input
        free = [n for n, v in enumerate(graph.values) if not v.is_result and v.array is not None and v.array.ndim][:1]
    requested = {number for number in free if not graph.rng.chance(_CONSTANT_PROBABILITY)} or {graph.rng.choice(free)}
    requested = requested if has_constants else set(free)
    return [_lifetime(graph, value, number in requested) for number, value in enumerate(graph.values)]


def _lifetime(graph: _Graph, value: _Value, is_input: bool) -> LifeTime:
    if value.is_result:
        return LifeTime.TEMPORARY_VARIABLE if value.consumers else LifeTime.SUBGRAPH_OUTPUT
    if value.array is None:
        return LifeTime.NO_VALUE
    if is_input:
        return LifeTime.SUBGRAPH_INPUT
    return graph.rng.choice((LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE))


def _operand(number: int, value: _Value, lifetime: LifeTime) -> Line:
    operand, quant = value.operand, value.operand.channel_quant
    has_data = value.array is not None and lifetime != LifeTime.TEMPORARY_VARIABLE
    extra = {"channelQuant": {"scales": list(quant.scales), "channelDim": quant.channel_dim}} if quant else None
    return {
        "name": f"op{number}", "type": operand.type.name, "dimensions": list(operand.dimensions),
        "scale": operand.scale, "zeroPoint": operand.zero_point, "numberOfConsumers": value.consumers,
        "lifetime": lifetime.name, "extraParams": extra, "isIgnored": False,
        "data": base64.b64encode(np.asarray(value.array).tobytes()).decode() if has_data else None,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The classes of random graphs that the command runs: AOSP's, and additional ones.
#
#     single     179 tests of one operation with the overloads and types of one HAL version; dimensions up to 1000
#     small      graphs of 5 operations of one type and rank; dimensions up to 1000
#     large      graphs of 40 operations of one type and rank; dimensions up to 10
#     quantized  small and large graphs of uint8 and int8, which AOSP does not have
#     later      single operations that were introduced after HAL 1.3, which AOSP does not have
#     divided    graphs of 12 operations whose arrays are no constants, for several devices: a step needs an input
#
# The operations and limits of each class are those of AOSP's TestRandomGraph (Android 13).


SEEDS = (0, 49)
"""First and last seed that AOSP runs."""
USUAL_FAMILIES = ("single", "small", "large")
FAMILIES = (*USUAL_FAMILIES, "quantized", "later", "divided")

_WIDE, _NARROW = GraphLimits(1000), GraphLimits(10)
_FLOAT32, _FLOAT16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
_QUANTIZED_TYPES = tuple(type for type in OperandType if "QUANT" in type.name)
_EXACT: dict[OperandType, Criterion] = {
    OperandType.TENSOR_INT32: Criterion(atol=1),
    OperandType.INT32: Criterion(atol=1),
    OperandType.TENSOR_BOOL8: Criterion(wrong_share=0.1),
}


def _criteria(float32: Criterion, float16: Criterion, quantized: Criterion) -> Criteria:
    floats = {_FLOAT32: float32, _FLOAT16: float16}
    with_limits = {type: replace(rule, skip_above=MAX_REAL[type]) for type, rule in floats.items()}
    return {**with_limits, **dict.fromkeys(_QUANTIZED_TYPES, quantized), **_EXACT}


_STRICT = _criteria(
    Criterion(1e-6, 1e-6, bias=1e-7, mse=1e-10),
    Criterion(1e-3, 1e-3, bias=1e-4, mse=1e-8),
    Criterion(1, bias=0.1, mse=0.1),
)
"""For operations that only move or compare values."""
_MEDIUM = _criteria(
    Criterion(1e-5, 1e-5, bias=1e-6, mse=1e-8),
    Criterion(1e-2, 1e-2, bias=1e-3, mse=1e-5),
    Criterion(2, bias=1.2, mse=1.2),
)
"""For one simple computation on each value."""
_RELAXED = _criteria(
    Criterion(1e-3, 1e-3, bias=3e-5, mse=1e-6),
    Criterion(1.0, 1.0, bias=5e-3, mse=1e-3),
    Criterion(10, bias=1.5, mse=1.5),
)
"""For transcendental functions, and for sums."""
_PRODUCTS = _criteria(
    Criterion(2e-2, 2e-2, bias=4e-4, mse=1e-5),
    Criterion(1.0, 1.0, bias=5e-2, mse=1e-2),
    Criterion(10, bias=1.5, mse=1.5),
)
"""For convolutions, whose sums may be long."""
_SMALL = _criteria(
    Criterion(1e-2, 1e-2, bias=4e-4, mse=1e-5), Criterion(1.0, 1.0, bias=5e-2, mse=1e-2), Criterion(12, bias=2, mse=2)
)
_LARGE = _criteria(
    Criterion(1e-1, 1e-1, bias=1e-2, mse=1e-4), Criterion(1.0, 1.0, bias=1e-1, mse=5e-2), Criterion(12, bias=2, mse=2)
)

_SINGLE: tuple[tuple[Criteria, str], ...] = (
    (
        _STRICT,
        "DEPTH_TO_SPACE.023 SPACE_TO_DEPTH.023 EMBEDDING_LOOKUP.023 HASHTABLE_LOOKUP.0 RESHAPE.023 "
        "BATCH_TO_SPACE_ND.123 SPACE_TO_BATCH_ND.123 PAD.123 TRANSPOSE.123 SQUEEZE.123 STRIDED_SLICE.123 ARGMAX.23 "
        "ARGMIN.23 EQUAL.23 GREATER.23 GREATER_EQUAL.23 LESS.23 LESS_EQUAL.23 NOT_EQUAL.23 LOGICAL_AND.2 "
        "LOGICAL_NOT.2 LOGICAL_OR.2 CHANNEL_SHUFFLE.23 PAD_V2.23 EXPAND_DIMS.23 TILE.23 GATHER.23 SELECT.23 "
        "TOPK_V2.23 SLICE.23 FILL.3 RANK.3",
    ),
    (
        _MEDIUM,
        "ADD.023 MUL.023 FLOOR.02 RELU.023 RELU1.023 RELU6.023 CONCATENATION.023 DEQUANTIZE.023 SUB.123 ABS.23 NEG.2 "
        "MAXIMUM.23 MINIMUM.23 PRELU.23 QUANTIZE.23 CAST.23 SPLIT.23 DIV.3 ELU.3 HARD_SWISH.3",
    ),
    (
        _RELAXED,
        "LOGISTIC.023 TANH.023 SOFTMAX.023 L2_NORMALIZATION.023 LOCAL_RESPONSE_NORMALIZATION.02 AVERAGE_POOL_2D.023 "
        "L2_POOL_2D.02 MAX_POOL_2D.023 RESIZE_BILINEAR.023 FULLY_CONNECTED.023 DIV.12 MEAN.123 EXP.2 LOG.2 RSQRT.2 "
        "SIN.2 SQRT.2 POW.2 REDUCE_ALL.2 REDUCE_ANY.2 REDUCE_MAX.23 REDUCE_MIN.23 REDUCE_PROD.2 REDUCE_SUM.2 "
        "INSTANCE_NORMALIZATION.2 LOG_SOFTMAX.2 RESIZE_NEAREST_NEIGHBOR.23 ROI_ALIGN.23 ROI_POOLING.23 "
        "HEATMAP_MAX_KEYPOINT.23",
    ),
    (_PRODUCTS, "CONV_2D.023 DEPTHWISE_CONV_2D.023 GROUPED_CONV_2D.23 TRANSPOSE_CONV_2D.23"),
)
"""Operations by criterion, with the minor versions of HAL 1.x whose overloads and types are tested."""
_LATER: tuple[tuple[Criteria, str], ...] = (
    (_STRICT, "RESHAPE.AIDL_V2 PACK.AIDL_V2 MIRROR_PAD.AIDL_V3 REVERSE.AIDL_V3"),
    (_RELAXED, "RSQRT.AIDL_V3"),
    (_PRODUCTS, "BATCH_MATMUL.AIDL_V2"),
)
_GRAPH_TYPES = {
    "float32": _FLOAT32, "float16": _FLOAT16, "int32": OperandType.TENSOR_INT32, "bool": OperandType.TENSOR_BOOL8,
}  # fmt: skip
_UINT8_INT8_TYPES = {"uint8": OperandType.TENSOR_QUANT8_ASYMM, "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
_RANKS = (1, 2, 3, 4)


def _single_classes(family: str, table: tuple[tuple[Criteria, str], ...]) -> Iterator[GraphClass]:
    for criteria, entries in table:
        for name, minors in (entry.split(".") for entry in entries.split()):
            for version in [minors] if minors.startswith("AIDL") else [f"V1_{minor}" for minor in minors]:
                yield GraphClass(
                    f"{family}_{name.lower()}_{version.lower()}",
                    family,
                    _WIDE,
                    criteria,
                    code=OperationType[name],
                    exact_level=FEATURE_LEVELS[version],
                )


def _graph_classes(types: dict[str, OperandType]) -> Iterator[GraphClass]:
    for name, type in types.items():
        for rank in _RANKS:
            small = GraphClass(f"small_{name}_rank{rank}", "small", _WIDE, _SMALL, 5, type, rank)
            yield small
            yield replace(
                small,
                name=f"large_{name}_rank{rank}",
                family="large",
                limits=_NARROW,
                criteria=_LARGE,
                operation_count=40,
            )


def _divided_classes() -> Iterator[GraphClass]:
    for name, type in {**_GRAPH_TYPES, **_UINT8_INT8_TYPES}.items():
        for rank in (2, 4):
            yield GraphClass(
                f"divided_{name}_rank{rank}", "divided", _NARROW, _LARGE, 12, type, rank, has_constants=False
            )


@cache
def classes() -> dict[str, GraphClass]:
    """Return all classes by name, families in the order of `FAMILIES`."""
    found = [*_single_classes("single", _SINGLE), *_graph_classes(_GRAPH_TYPES)]
    found += [replace(c, family="quantized") for c in _graph_classes(_UINT8_INT8_TYPES)]
    found += _single_classes("later", _LATER)
    found += _divided_classes()
    found.sort(key=lambda graph_class: FAMILIES.index(graph_class.family))
    return {graph_class.name: graph_class for graph_class in found}


@dataclass(frozen=True, slots=True)
class Batch:
    """The graphs of one class with seeds from `first` to `last`; used like a file of test models."""

    class_name: str
    first: int
    last: int

    def lines(self, search: re.Pattern[str]) -> Iterator[tuple[int, Line]]:
        """Yield seed and test model of each graph whose name matches the expression."""
        graph_class = classes()[self.class_name]
        return ((seed, generate(graph_class, seed)) for seed in self.seeds(search))

    def seeds(self, search: re.Pattern[str]) -> list[int]:
        """Return the seeds of the graphs whose name matches, without generating them."""
        graph_class = classes()[self.class_name]
        return [seed for seed in range(self.first, self.last + 1) if search.search(name_of(graph_class, seed))]


def batches(families: Sequence[str], first: int, last: int) -> list[Batch]:
    """Return a batch for each class of the families."""
    return [Batch(c.name, first, last) for c in classes().values() if c.family in families]
