"""Import of ONNX files: a HAL model, and descriptions of its inputs and outputs.

    bytes ── onnx_file: ModelProto ── onnx_folding: constants ── onnx_operators: conversion ── graph_builder ── Model

Every shape is known when a node is converted: symbolic dimensions are bound by `shapes`. The file is not trusted.
Operators and tensors that are not supported raise UnsupportedModel, which lists all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import ELEMENTS, TENSOR_INT64
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo, operand_info
from nnfmq.hal.types import DataLocation, LifeTime, Operand, OperandType
from nnfmq.importers.file_format import ModelSource
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel, Problems, UnknownShapes
from nnfmq.importers.onnx.dynamic_products import joined_products
from nnfmq.importers.onnx.file import (
    OnnxFile,
    all_read_names,
    attribute_values,
    dtype_of,
    element_name,
    inference_errors,
    input_shapes,
    live_nodes,
    node_count,
    read,
    tensor_array,
)
from nnfmq.importers.onnx.folding import FOLDED, MAX_ELEMENTS, evaluated, fold
from nnfmq.importers.onnx.loops import (
    Iterations,
    VaryingShape,
    WhileLoop,
    iterations_of,
    trip_count,
    unrolled,
    with_products_around,
)
from nnfmq.importers.onnx.operators import CONVERTERS
from nnfmq.importers.onnx.schema import require_legal
from nnfmq.importers.onnx.values import Array, Node, Value, nothing, operand_type_of
from nnfmq.importers.rewriting import GraphRewriting, fold_into_weights, fuse_hard_swish, widen_half_precision

__all__ = [
    "body",
    "called",
    "empty_results",
    "import_model",
    "index_inputs",
    "local_functions",
    "results_of_nothing",
]


# ----------------------------------------------------------------------------------------------------------------------
# Nodes that are calls of functions: those of the model, and operators that ONNX defines by a function of others.
#
# `body` finds the function, and `called` returns its nodes with the names and attributes of one call.


FunctionKey: TypeAlias = tuple[str, str, str]
"""Domain, name and overload of a function."""


def local_functions(proto: Any, opset: int) -> dict[FunctionKey, Any]:
    """Return the functions of a model (onnx.ModelProto) that its nodes call.

    An operator that ONNX defines itself is not replaced by a function of its name, as in ONNX Runtime.

    Raises:
        InvalidArgument: If the model has two functions of one domain, name and overload.
    """
    found: dict[FunctionKey, Any] = {}
    for function in proto.functions:
        key = (function.domain, function.name, function.overload)
        if key in found:
            raise InvalidArgument(f"a corrupt ONNX model: it has two functions {function.name[:80]!r}")
        found[key] = function
    return {key: each for key, each in found.items() if key[0] not in _DEFAULT_DOMAINS or not _schema(key[1], opset)}


def _key_of(proto: Any) -> FunctionKey:
    """Return which function a node calls, if its operator is one."""
    return proto.domain, proto.op_type, proto.overload


def _schema(name: str, opset: int) -> Any | None:
    """Return the onnx.defs.OpSchema of an operator of ONNX; None if the opset does not have it."""
    import onnx

    with suppress(onnx.defs.SchemaError):
        return onnx.defs.get_schema(name, opset, "")
    return None


def _require_one_meaning(function: Any, opset: int, file_opset: int) -> None:
    """Require that the attributes of a function's nodes have one default in its opset and in the model's.

    Raises:
        InvalidArgument: If one has not, as Softmax's axis. ONNX forbids that; ONNX Runtime takes the model's opset.
    """
    for name in dict.fromkeys(proto.op_type for proto in function.node if proto.domain in _DEFAULT_DOMAINS):
        own, others = (_defaults(name, each) for each in (opset, file_opset))
        if any(others.get(attribute, default) != default for attribute, default in own.items()):
            raise InvalidArgument(f"its function is of opset {opset}, in which {name} is not that of {file_opset}")


def _defaults(name: str, opset: int) -> dict[str, bytes]:
    """Return the defaults of an operator's attributes, serialized."""
    attributes: Mapping[str, Any] = getattr(_schema(name, opset), "attributes", {})
    return {each: attribute.default_value.SerializeToString() for each, attribute in attributes.items()}


def body(proto: Any, opset: int, functions: Mapping[FunctionKey, Any], types: Sequence[Any]) -> Any | None:
    """Return the onnx.FunctionProto that a node calls; None if its operator is not a function.

    `functions` are those of `local_functions`, and `types` the onnx.TypeProto of each input.

    Raises:
        InvalidArgument: If ONNX cannot write the function for this node.
    """
    local = functions.get(_key_of(proto))
    if local is not None:
        return local
    return _defined(proto, opset, types) if proto.domain in _DEFAULT_DOMAINS else None


def _defined(proto: Any, opset: int, types: Sequence[Any]) -> Any | None:
    """Return the function by which ONNX defines an operator."""
    import onnx

    schema = _function_schema(proto, opset)
    if schema is None:
        return None
    plain, dependent = schema.function_opset_versions, schema.context_dependent_function_opset_versions
    complete = onnx.NodeProto()
    complete.CopyFrom(proto)
    given = {attribute.name for attribute in proto.attribute}
    defaults = (schema.attributes[name].default_value for name in schema.attributes if name not in given)
    complete.attribute.extend(default for default in defaults if default.type)
    try:
        if plain:
            written = schema.get_function_with_opset_version(_version(plain, opset))
        else:
            serialized = [kind.SerializeToString() for kind in types]
            version = _version(dependent, opset)
            written = schema.get_context_dependent_function_with_opset_version(
                version, complete.SerializeToString(), serialized
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise InvalidArgument(f"ONNX has no function for it: {str(error)[:200]}") from None
    if not written:
        return None
    function = onnx.FunctionProto.FromString(written)
    del proto.attribute[:]
    proto.attribute.extend(complete.attribute)
    return function


def _function_schema(proto: Any, opset: int) -> Any | None:
    """Return the onnx.defs.OpSchema of an operator that ONNX defines by a function; None if it does not."""
    schema = _schema(proto.op_type, opset)
    if schema is None or not (schema.function_opset_versions or schema.context_dependent_function_opset_versions):
        return None
    return schema


def _version(versions: Sequence[int], opset: int) -> int:
    """Return the newest version up to `opset`; else the oldest, whose meaning is the same."""
    return max((version for version in versions if version <= opset), default=min(versions))


def called(proto: Any, function: Any, prefix: str) -> list[Any]:
    """Return the nodes of a function for one call of it: results inside it have names that begin with `prefix`."""
    if len(proto.input) > len(function.input) or len(proto.output) > len(function.output):
        raise InvalidArgument("the call has more inputs or outputs than its function")
    names = dict.fromkeys((*function.input, *function.output), "")
    names.update({formal: prefix + formal for formal in function.output})
    names.update(zip(function.input, proto.input, strict=False))
    actual = zip(function.output, proto.output, strict=False)
    names.update({formal: name or prefix + formal for formal, name in actual})
    attributes = {default.name: default for default in function.attribute_proto}
    attributes.update({attribute.name: attribute for attribute in proto.attribute})
    return [_renamed(node, names, attributes, prefix) for node in function.node]


def _renamed(node: Any, names: dict[str, str], attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return a copy of a node with other names of values and with the call's attributes."""
    copy = type(node)()
    copy.CopyFrom(node)
    for field in (copy.input, copy.output):
        field[:] = [names.setdefault(name, prefix + name) if name else "" for name in field]
    del copy.attribute[:]
    for attribute in node.attribute:
        source = attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if source is None:
            continue  # an optional attribute that the call does not have
        added = copy.attribute.add()
        added.CopyFrom(source)
        added.name = attribute.name
        if added.HasField("g"):
            _rename_graph(added.g, names, attributes, prefix)
    return copy


def _rename_graph(graph: Any, names: dict[str, str], attributes: Mapping[str, Any], prefix: str) -> None:
    """Rename the values of a graph within a function; those that it makes itself hide those outside."""
    inner = dict(names)
    for value in (*graph.input, *graph.initializer):
        inner[value.name] = prefix + value.name
        value.name = inner[value.name]
    nodes = [_renamed(node, inner, attributes, prefix) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.output:
        value.name = inner.get(value.name, prefix + value.name)


# ----------------------------------------------------------------------------------------------------------------------
# Nodes with tensors that have no elements: their results are known when the file is loaded.
#
# The HAL has no such tensors. A value without elements is a constant, whatever computes it: its shape says everything.
# Which results have none follows from the shapes of a node's inputs, by the inference of the package `onnx`. Others are
# the identity of a reduction or of a sum of products.


_COMPUTED = frozenset(
    ("Einsum", "Gemm", "MatMul", "MatMulInteger", "Pad", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
     "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")
)  # fmt: skip
"""Operators besides those that are folded that compute elements from none."""
_KEEPING = ("DepthToSpace", "Reshape", "STFT", "SpaceToDepth")
"""Operators whose result has elements if the input has: inference does not reject others."""
_MAX_VALUES = 1 << 12  # of a constant that may decide a shape


def results_of_nothing(node: Node, proto: Any) -> list[Array] | None:
    """Return the outputs of a node with an input that has no elements; None if they depend on the other inputs.

    Raises:
        InvalidArgument: If the operator does not accept the inputs.
    """
    given = [value for value in node.inputs if value is not None]
    if all(value.size for value in given):
        return None
    shapes = _inferred_shapes(node, proto)
    if shapes is not None and all(0 in shape for shape, _ in shapes):
        return [nothing(shape, dtype) for shape, dtype in shapes]
    arrays = [value.array for value in given if value.array is not None]
    if node.operator not in _COMPUTED | FOLDED or len(arrays) != len(given):
        return None
    if node.operator in _COMPUTED and (shapes is None or math.prod(shapes[0][0]) > MAX_ELEMENTS):
        raise InvalidArgument("the shape of its result is unknown, or too large for a constant")
    if node.operator != "ReduceMean":
        return evaluated(node, proto, arrays)
    assert shapes is not None
    if shapes[0][1].kind != "f":
        raise InvalidArgument("the mean of no integers is not defined")
    return [np.full(shapes[0][0], np.nan, shapes[0][1])]


def empty_results(node: Node, proto: Any) -> list[Array] | None:
    """Return the outputs of a node if none of them has elements; None if one has some, or a shape is not known."""
    if node.operator in _KEEPING and node.value(0).size:
        return None
    shapes = _inferred_shapes(node, proto)
    if shapes is None or not all(0 in shape for shape, _ in shapes):
        return None
    return [nothing(shape, dtype) for shape, dtype in shapes]


def _inferred_shapes(node: Node, proto: Any) -> list[tuple[tuple[int, ...], np.dtype[Any]]] | None:
    """Return shape and type of each output that has a name; None if one is not known."""
    import onnx

    inputs, constants = [], []
    for name, value in dict(zip(proto.input, node.inputs, strict=True)).items():
        if value is None:
            continue
        if value.array is not None and value.size <= _MAX_VALUES:
            constants.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value.array).reshape(value.shape), name))
        else:
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "one node", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(proto.domain, node.opset)])
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        shapes = [_known(info.type.tensor_type) for info in inferred.graph.output]
        return [(_without_windows_in_padding(node, shape), dtype) for shape, dtype in shapes]
    except inference_errors():  # InvalidArgument, too, which is a ValueError
        return None


def _without_windows_in_padding(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a pool's shape less the windows that begin in the padding at an end, which ONNX's inference may count."""
    if not node.attributes.get("ceil_mode"):
        return shape
    rank = len(shape) - 2
    strides = node.attributes.get("strides") or [1] * rank
    pads = node.attributes.get("pads") or [0] * 2 * rank
    limits = [size + begin for size, begin in zip(node.value(0).shape[2:], pads[:rank], strict=True)]
    counts = zip(shape[2:], strides, limits, strict=True)
    return *shape[:2], *(count - ((count - 1) * stride >= limit > 0) for count, stride, limit in counts)


def _known(kind: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return an inferred shape and type. Raises InvalidArgument if it is not fully known."""
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        raise InvalidArgument("a shape is not known")
    return tuple(dim.dim_value for dim in kind.shape.dim), dtype_of(kind.elem_type)


# ----------------------------------------------------------------------------------------------------------------------
# Inputs of an ONNX graph that are indices: their elements of int64 fit 32 bits, or an operator would reject them.


_INDICES = {
    "Gather": 1, "GatherElements": 1, "GatherND": 1, "Scatter": 1, "ScatterElements": 1, "ScatterND": 1,
}  # fmt: skip
"""The position of the indices, all of which the operator requires to be inside an extent."""
_SAME_ELEMENTS = ("Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def index_inputs(nodes: Iterable[Any]) -> set[str]:
    """Return the names that nodes (onnx.NodeProto) of a graph read as indices, in whatever shape."""
    found: set[str] = set()
    for proto in reversed(list(nodes)):
        if proto.op_type in _INDICES:
            found.update(proto.input[_INDICES[proto.op_type] :][:1])
        elif proto.op_type == "Concat" and not found.isdisjoint(proto.output):
            found.update(proto.input)
        elif proto.op_type in _SAME_ELEMENTS and not found.isdisjoint(proto.output):
            found.update(proto.input[:1])
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Import of ONNX files: a HAL model, and descriptions of its inputs and outputs.


_DEFAULT_DOMAINS = ("", "ai.onnx")
_BLOCKED_DOMAIN = "com.microsoft.nchwc"  # what ONNX Runtime writes with ORT_ENABLE_ALL
_CONTROL_FLOW = ("If", "Loop", "Scan")
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, ZeroDivisionError)
"""What Python raises for attributes that a converter does not expect: an ONNX file may have any."""
_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "cubic_coeff_a": ("Resize",),  # of the modes that do not read it
    "extrapolation_value": ("Resize",),
    "keep_aspect_ratio_policy": ("Resize",),  # of scales
    "kernel_shape": (  # that of the weights
        "Conv", "ConvInteger", "ConvTranspose", "QLinearConv", "com.microsoft.FusedConv", "com.microsoft.QLinearConv",
    ),
    "momentum": ("BatchNormalization",),  # of training
    "ratio": ("Dropout",),
    "saturate": ("Cast", "CastLike", "QuantizeLinear"),  # to types other than those of float8
    "seed": ("Dropout",),
    "sorted": ("TopK",),  # without it any order is right
    "storage_order": ("MaxPool",),  # of the indices
    "value": ("Pad",),  # of the modes other than constant
}  # fmt: skip
"""The operators whose results do not depend on an attribute that their converters do not read."""
_MAX_DEPTH = 16  # of functions that call each other
_MAX_CALLS = 10_000
_MAX_BRANCH_DEPTH = 8
_MAX_UNROLLED_NODES = 1000  # of one loop, which is WHILE if it has more
_MAX_UNROLLED = 20_000  # nodes of the bodies of loops, in all iterations
_MAX_EVALUATED = 40_000  # nodes on which conditions of loops depend, in all iterations
_INPUT = LifeTime.SUBGRAPH_INPUT
_EXPANSION = 12  # of constants; those of 4 bits become floats of 32
_SPARE_BYTES = 1 << 26  # for constants that the arithmetic on shapes makes


def import_model(source: ModelSource) -> LoadedModel:
    """Return the model of an ONNX file.

    Raises:
        InvalidArgument: If the file is corrupt or uses an unsupported feature.
    """
    file = read(source)
    try:
        shapes = input_shapes(file, source.shapes)
    except UnknownShapes:
        _require_operators(file)  # sizes would not help
        raise
    return _Import(file, shapes).run()


def _require_operators(file: OnnxFile) -> None:
    """Raise UnsupportedModel, which lists them, if the graph has operators that are supported in no shape."""
    problems = Problems()
    functions = local_functions(file.proto, file.opset)
    for index, proto in live_nodes(file.graph.node, (info.name for info in file.graph.output)):
        name = _qualified_name(proto)
        is_local = _key_of(proto) in functions
        is_known = is_local or name in CONVERTERS or name in _CONTROL_FLOW or name in FOLDED
        is_default = proto.domain in _DEFAULT_DOMAINS
        if not is_known and not (is_default and _function_schema(proto, file.opset)):
            types = f"{counted(len(proto.input), 'input')} → {counted(len(proto.output), 'output')}"
            problems.add(_refusal(proto) + _quoted_name(proto), index, name[:80], types)
    problems.raise_if_any()


class _Import:
    """One import: the values by name, and the problems so far."""

    def __init__(self, file: OnnxFile, shapes: dict[str, tuple[int, ...]]) -> None:
        self._file = file
        self._shapes = shapes
        constant_bytes = sum(array.nbytes for array in file.constants.values())
        self._builder = GraphBuilder(4 * file.size_bytes + _EXPANSION * constant_bytes + _SPARE_BYTES)
        self._problems = Problems()
        self._values: dict[str, Value | None] = {}  # None: a result that a problem prevented
        self._opset = file.opset  # of the function whose nodes are converted
        self._functions = local_functions(file.proto, file.opset)
        self._read: set[str] = set()  # the names that nodes and outputs read, those in functions from their calls on
        self._calls: list[str] = []  # of functions, those that have ended included
        self._depth = 0
        self._in_subgraph = False
        self._unrolled_nodes = self._evaluated_nodes = 0

    def run(self) -> LoadedModel:
        """Return the model. Raises UnsupportedModel with all problems."""
        self._values.update({name: Value.of(array) for name, array in self._file.constants.items()})
        results = [info.name for info in self._file.graph.output]
        nodes = joined_products(live_nodes(self._file.graph.node, results), results, self._file.constants)
        self._read.update(results, *(all_read_names(proto) for _, proto in nodes))
        indices = index_inputs(proto for _, proto in nodes)
        inputs = [self._input(info, info.name in indices) for info in self._file.inputs]
        for index, proto in nodes:
            self._convert(index, proto)
        self._problems.raise_if_any()
        outputs = [self._output(info.name) for info in self._file.graph.output]
        self._problems.raise_if_any()
        if not outputs:
            raise InvalidArgument("the model has no outputs")
        self._rewrite(outputs)
        model = self._builder.build(inputs, outputs)
        shapes = {name: value.shape for name, value in self._values.items() if value is not None}
        return LoadedModel(
            model,
            self._infos(self._file.inputs, inputs, self._shapes),
            self._infos(self._file.graph.output, outputs, shapes),
            data_files=tuple(sorted(self._file.data_files)),
        )

    def _rewrite(self, outputs: Sequence[int]) -> None:
        """Join operations of the subgraph under construction, whose outputs are known now."""
        graph = GraphRewriting(self._builder, outputs)
        graph.remove_unread()
        fuse_hard_swish(graph)
        fold_into_weights(graph)
        widen_half_precision(graph)
        graph.finish()

    def _infos(
        self, protos: Iterable[Any], indexes: Iterable[int], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[TensorInfo, ...]:
        """Return the descriptions of inputs or outputs, whose operands have these indexes."""
        pairs = zip(protos, indexes, strict=True)
        return tuple(self._info(proto.name, index, shapes[proto.name]) for proto, index in pairs)

    def _info(self, name: str, index: int, shape: tuple[int, ...]) -> TensorInfo:
        info = operand_info(self._builder[index], name, ELEMENTS)
        return replace(info, shape=shape, is_scalar=not shape, is_empty=0 in shape)

    def _input(self, info: Any, is_index: bool) -> int:
        dtype, kind = None, OperandType.TENSOR_FLOAT32
        with self._problems.collect(f"input {info.name[:80]!r}: "):
            if info.type.WhichOneof("value") != "tensor_type":
                raise InvalidArgument("it is no tensor")
            dtype = dtype_of(info.type.tensor_type.elem_type)
            kind = operand_type_of(dtype)
            kind = OperandType.TENSOR_INT32 if is_index and kind == TENSOR_INT64 else kind
        shape = self._shapes[info.name]
        operand_shape = shape if shape and 0 not in shape else (1,)
        index = self._builder.operand(Operand(kind, operand_shape, lifetime=LifeTime.SUBGRAPH_INPUT))
        self._values[info.name] = None if dtype is None else Value.of_operand(shape, dtype, index)
        return index

    def _convert(self, index: int, proto: Any) -> None:
        """Add the operations of a node, or a problem."""
        unknown = [name for name in proto.input if name and name not in self._values]
        try:
            if unknown:
                raise InvalidArgument(f"input {unknown[0][:80]!r} is the result of no earlier node")
            if not self._is_known(proto):
                raise InvalidArgument(_refusal(proto))
            inputs = [self._values[name] if name else None for name in proto.input]
            if any(value is None and name for name, value in zip(proto.input, inputs, strict=True)):
                return self._assume(proto)  # a problem of an earlier node
            self._require_legal(proto, inputs)
            if _qualified_name(proto) == "If":
                return self._if(index, self._node(proto, inputs), proto)
            if _qualified_name(proto) in _CONTROL_FLOW:
                return self._loop(index, self._node(proto, inputs), proto)
            self._add(index, self._node(proto, inputs), proto)
        except InvalidArgument as error:
            if not self._is_empty(proto):
                self._fail(index, proto, str(error))
        except _MALFORMED as error:
            self._fail(index, proto, f"an attribute or input is malformed ({type(error).__name__}: {error})")
        return None

    def _is_empty(self, proto: Any) -> bool:
        """Return whether none of the results of a node that cannot be converted has elements, which are known then."""
        inputs = [self._values.get(name) if name else None for name in proto.input]
        if any(value is None and name for name, value in zip(proto.input, inputs, strict=True)):
            return False
        with suppress(InvalidArgument):
            self._require_legal(proto, inputs)
            return self._know(proto, empty_results(self._node(proto, inputs), proto))
        return False

    def _know(self, proto: Any, arrays: Sequence[Array] | None) -> bool:
        """Make constants the results of a node, if they are known; return whether they are."""
        if arrays is not None:
            named = [name for name in proto.output if name]
            self._values.update({name: Value.of(array) for name, array in zip(named, arrays, strict=True)})
        return arrays is not None

    def _require_legal(self, proto: Any, inputs: Sequence[Value | None]) -> None:
        if proto.domain in _DEFAULT_DOMAINS and _key_of(proto) not in self._functions:
            require_legal(proto, self._opset, inputs)

    def _is_known(self, proto: Any) -> bool:
        is_local = _key_of(proto) in self._functions
        return is_local or proto.domain in _DEFAULT_DOMAINS or _qualified_name(proto) in CONVERTERS

    def _if(self, index: int, node: Node, proto: Any) -> None:
        convert = self._select if node.value(0).array is None else self._inline
        convert(index, node, proto)

    def _inline(self, index: int, node: Node, proto: Any) -> None:
        """Convert the nodes of the branch of an If that its condition, a constant, selects."""
        condition = node.constant(0, "condition")
        branch = node.attributes["then_branch" if condition.reshape(-1)[0] else "else_branch"]
        self._values.update(zip(proto.output, self._scoped(index, branch, {}), strict=True))

    def _select(self, index: int, node: Node, proto: Any) -> None:
        """Add IF: both branches become subgraphs; their inputs are the results around them that either reads."""
        graphs = [node.attributes[name] for name in ("then_branch", "else_branch")]
        if node.value(0).dtype != np.bool_ or node.value(0).size != 1:
            raise InvalidArgument(f"its condition is {node.value(0).dtype} of the shape {node.value(0).shape}")
        condition = node.reshaped(node.operand(0), (1,))
        known, given = self._read_by(graphs)
        branches = [self._branch(index, graph, known, given) for graph in graphs]
        first, second = branches
        if first is None or second is None:
            return self._assume(proto)  # a problem of a node in a branch
        (then, results), (otherwise, others) = first, second
        if [_kind(*result) for result in results] != [_kind(*other) for other in others]:
            raise InvalidArgument("the results of its branches differ in number, type or shape: that is not supported")
        callees = [self._builder.callee(number) for number in (then, otherwise)]
        operands = [value.operand for value in given.values() if value.operand is not None]
        outputs = [self._builder.operand(replace(o, lifetime=LifeTime.TEMPORARY_VARIABLE)) for _, o in results]
        self._builder.operation(OperationType.IF, [condition, *callees, *(operands or [condition])], *outputs)
        for name, (value, _), output in zip(proto.output, results, outputs, strict=True):
            self._values[name] = Value.of_operand(value.shape, value.dtype, output)
        return None

    def _branch(
        self, index: int, graph: Any, known: dict[str, Value | None], given: dict[str, Value]
    ) -> tuple[int, list[tuple[Value, Operand]]] | None:
        """Return the number of a branch's subgraph and its results; None if there is a problem in it."""
        outer = self._builder
        with self._subgraph(known):
            inputs = [self._give(outer, name, value) for name, value in given.items()]
            if not inputs:  # the HAL requires one; the condition is given
                inputs = [self._builder.operand(Operand(OperandType.TENSOR_BOOL8, (1,), 0.0, 0, _INPUT))]
            results = self._converted(index, graph)
            if results is None:
                return None
            outputs = [self._output(info.name) for info in graph.output]
            self._rewrite(outputs)
            pairs = list(zip(results, (self._builder[output] for output in outputs), strict=True))
            return self._builder.refer(inputs, outputs), pairs

    @contextmanager
    def _subgraph(self, known: Mapping[str, Value | None]) -> Iterator[None]:
        """Let the block build another subgraph; of the values around it, only constants exist in it."""
        if self._depth == _MAX_BRANCH_DEPTH:
            raise InvalidArgument(f"it is nested more than {_MAX_BRANCH_DEPTH} deep")
        outer_values, outer, was_in_subgraph = self._values, self._builder, self._in_subgraph
        self._values, self._builder = {name: _constant_of(value) for name, value in known.items()}, outer.child()
        self._depth, self._in_subgraph = self._depth + 1, True
        try:
            yield
        finally:
            self._values, self._builder, self._in_subgraph = outer_values, outer, was_in_subgraph
            self._depth -= 1

    def _converted(self, index: int, graph: Any) -> list[Value] | None:
        """Convert the nodes of a graph in the present scope; return its results, None if there is a problem."""
        self._convert_graph(index, graph)
        results = [self._values.get(info.name) for info in graph.output]
        found = [result for result in results if result is not None]
        return found if len(found) == len(results) else None

    def _read_by(self, graphs: Sequence[Any]) -> tuple[dict[str, Value | None], dict[str, Value]]:
        """Return the values around graphs that they read, and those of them that are no constants."""
        names = dict.fromkeys(name for graph in graphs for inner in graph.node for name in all_read_names(inner))
        names.update(dict.fromkeys(info.name for graph in graphs for info in graph.output))
        known = {name: self._values[name] for name in names if name in self._values}
        return known, {name: value for name, value in known.items() if value is not None and value.array is None}

    def _give(self, outer: GraphBuilder, name: str, value: Value) -> int:
        """Return the input of a branch for a result of the graph around it."""
        assert value.operand is not None
        operand = replace(outer[value.operand], lifetime=_INPUT, location=DataLocation())
        index = self._builder.operand(operand)
        self._values[name] = Value(value.shape, value.dtype, index)
        return index

    def _loop(self, index: int, node: Node, proto: Any) -> None:
        """Convert the body of a Loop or Scan for each iteration if they are few, else to WHILE."""
        loop = iterations_of(node)
        count = trip_count(loop, lambda inner: list(all_read_names(inner)), partial(self._evaluated, index, loop.body))
        nodes = (count or 0) * node_count(loop.body)
        fits = self._unrolled_nodes + nodes <= _MAX_UNROLLED
        if count is None or nodes > _MAX_UNROLLED_NODES or not fits:
            try:
                return self._while(index, node, proto, loop, count)
            except VaryingShape:
                if count is None or not fits:
                    raise
        self._unrolled_nodes += nodes
        if self._depth == _MAX_BRANCH_DEPTH:
            raise InvalidArgument(f"it is nested more than {_MAX_BRANCH_DEPTH} deep")
        self._depth += 1
        try:
            results = unrolled(node, loop, count, partial(self._scoped, index, loop.body))
        finally:
            self._depth -= 1
        if results is None:
            return self._assume(proto)  # a problem of a node in the body
        self._values.update(zip(proto.output, results, strict=False))
        return None

    def _while(self, index: int, node: Node, proto: Any, loop: Iterations, count: int | None) -> None:
        """Add WHILE, whose body and condition become subgraphs."""
        if count is None and any(node.used(len(loop.carried) + place) for place in range(len(loop.results))):
            raise InvalidArgument("how often it iterates, and so a result's size, depends on the model's inputs")
        limit = loop.limit if count is None else count
        loop = replace(loop, results=()) if count is None else with_products_around(node, loop, count, self._values)
        known, given = self._read_by([loop.body])
        with self._subgraph(known):
            inner = Node(node.name, node.operator, self._opset, self._builder, [], [])
            loops = WhileLoop(node, inner, loop, limit, count is not None)
            self._values.update(loops.begin(given))
            results = self._converted(index, loop.body)
            if results is not None:
                first = len(results) - len(loop.results)
                values = [value for value in map(self._values.get, loops.names) if value is not None]
                outputs = [self._output(name) for name in loops.names]
                found = loops.end(outputs, results[first:], values)
        if results is None:
            return self._assume(proto)  # a problem of a node in the body
        self._values.update(zip(proto.output, found, strict=False))
        return None

    def _scoped(self, index: int, graph: Any, given: Mapping[str, Value]) -> list[Value | None]:
        """Convert the nodes of a body with these values of its inputs; return its results."""
        outer = self._values
        self._values = {**outer, **given}
        try:
            self._convert_graph(index, graph)
            return [self._values.get(info.name) for info in graph.output]
        finally:
            self._values = outer

    def _evaluated(
        self, index: int, graph: Any, nodes: Sequence[Any], given: Mapping[str, Value]
    ) -> dict[str, Value | None] | None:
        """Return the values of nodes of a body, whose inputs are constants; None if they are not."""
        self._evaluated_nodes += len(nodes)
        if self._evaluated_nodes > _MAX_EVALUATED:
            raise InvalidArgument(f"conditions of loops take more than {_MAX_EVALUATED} nodes to evaluate")
        outer, builder = self._values, self._builder
        names = {name for proto in nodes for name in all_read_names(proto)}
        self._values = {**{name: outer[name] for name in names if name in outer}, **given}
        self._values.update((each.name, self._constant(each)) for each in graph.initializer if each.name in names)
        self._builder = builder.child()
        try:
            for proto in nodes:
                inputs = [self._values.get(name) if name else None for name in proto.input]
                known = [value is not None and value.array is not None for value in inputs]
                if not all(known[at] for at, name in enumerate(proto.input) if name):
                    return None
                self._add(index, self._node(proto, inputs), proto)
            return self._values
        except (InvalidArgument, *_MALFORMED):
            return None  # the conversion of the body has the same problem, and says so
        finally:
            self._values, self._builder = outer, builder

    def _convert_graph(self, index: int, graph: Any) -> None:
        """Convert the nodes of a branch, in the scope of the present values."""
        self._values.update((tensor.name, self._constant(tensor)) for tensor in graph.initializer)
        for _, inner in live_nodes(graph.node, (info.name for info in graph.output)):
            self._convert(index, inner)

    def _constant(self, tensor: Any) -> Value:
        return Value.of(tensor_array(tensor, self._file.folder))

    def _node(self, proto: Any, inputs: list[Value | None]) -> Node:
        attributes = attribute_values(proto, self._file.folder)
        outputs = list(proto.output)
        node = Node(proto.name, _qualified_name(proto), self._opset, self._builder, inputs, outputs, attributes)
        node.unread = frozenset(outputs) - self._read
        return node

    def _add(self, index: int, node: Node, proto: Any) -> None:
        is_local = _key_of(proto) in self._functions
        if not is_local and any(self._know(proto, known(node, proto)) for known in (results_of_nothing, fold)):
            return None
        if is_local or node.operator not in CONVERTERS:
            return self._call(index, node, proto)
        with np.errstate(all="ignore"):  # constants may overflow, as they would at execution
            CONVERTERS[node.operator](node)
        unread = sorted(node.attributes.keys() - node.attributes_read)
        unread = [name for name in unread if node.operator not in _WITHOUT_EFFECT.get(name, ())]
        if unread and node.operator != "Constant":  # a later opset may give the operator another meaning
            raise InvalidArgument(f"attribute {unread[0][:80]} is not supported")
        for position, name in enumerate(proto.output):
            if name and position in node.results:
                self._values[name] = node.computed(position)
            elif node.used(position):
                raise InvalidArgument(f"output {position} is not supported")
        return None

    def _call(self, index: int, node: Node, proto: Any) -> None:
        """Convert the nodes of the function that a node calls."""
        function = body(proto, self._opset, self._functions, [_type_proto(value) for value in node.inputs])
        if function is None:
            raise InvalidArgument("is supported only for constants" if _may_fold(proto) else "is not supported")
        if self._depth == _MAX_DEPTH or len(self._calls) == _MAX_CALLS:
            raise InvalidArgument(f"functions call each other more than {_MAX_DEPTH} deep, or {_MAX_CALLS} times")
        self._calls.append(f"{proto.op_type}#{len(self._calls)}/")
        versions = [entry.version for entry in function.opset_import if entry.domain in _DEFAULT_DOMAINS]
        outer, self._opset = self._opset, versions[0] if versions else self._opset
        self._depth += 1
        try:
            if _key_of(proto) in self._functions:
                _require_one_meaning(function, self._opset, self._file.opset)
            nodes = live_nodes(called(proto, function, self._calls[-1]), proto.output)
            self._read.update(*(all_read_names(inner) for _, inner in nodes))
            for _, inner in nodes:
                self._convert(index, inner)
        finally:
            self._opset, self._depth = outer, self._depth - 1

    def _fail(self, index: int, proto: Any, reason: str) -> None:
        types = f"{self._types(proto.input)} → {counted(len(proto.output), 'output')}"
        self._problems.add(reason + _quoted_name(proto), index, _qualified_name(proto)[:80], types)
        self._assume(proto)

    def _assume(self, proto: Any) -> None:
        for name in proto.output:
            self._values.setdefault(name, None)

    def _types(self, names: Iterable[str]) -> str:
        values = [self._values.get(name) for name in names if name]
        return ", ".join("?" if value is None else element_name(value.dtype) for value in values) or "nothing"

    def _output(self, name: str) -> int:
        """Return the operand of an output: a copy if it is an input, a constant, or another output, too.

        In other subgraphs than the main one it has the type of all tensors of its elements.
        """
        value = self._values.get(name)
        if value is None:
            self._problems.add(f"output {name[:80]!r} is the result of no node")
            return 0
        operator = "If" if self._in_subgraph else "Identity"
        node = Node(name, operator, self._file.opset, self._builder, [value], [name])
        try:
            operand = node.output() if value.size else node.add_constant(np.zeros(1, value.dtype))
            if self._builder[operand].lifetime != LifeTime.TEMPORARY_VARIABLE:
                is_bool = self._builder[operand].type == OperandType.TENSOR_BOOL8
                copy = OperationType.LOGICAL_OR if is_bool else OperationType.MAXIMUM
                operand = node.emit(copy, [operand, operand])
        except InvalidArgument as error:
            self._problems.add(f"output {name[:80]!r}: {error}")
            return 0
        self._builder.as_output(operand)
        return operand


def _qualified_name(proto: Any) -> str:
    """Return the name of a node's operator, with its domain unless that is ONNX's own."""
    name = str(proto.op_type)  # bytes if it is no UTF-8
    return name if proto.domain in _DEFAULT_DOMAINS else f"{proto.domain}.{name}"


def _quoted_name(proto: Any) -> str:
    return f" ({proto.name[:80]!r})" if proto.name else ""


def _refusal(proto: Any) -> str:
    """Return the reason for which a node's operator is not supported."""
    if proto.domain == _BLOCKED_DOMAIN:
        return "its layout fits one machine; optimize the file with ORT_ENABLE_EXTENDED at most"
    return "is not supported"


def _kind(value: Value, operand: Operand) -> tuple[Any, ...]:
    return value.shape, value.dtype, operand.type, operand.dimensions, operand.scale, operand.zero_point


def _constant_of(value: Value | None) -> Value | None:
    """Return a constant without its operand, which another subgraph cannot use."""
    return None if value is None or value.array is None else Value.of(value.array)


def _type_proto(value: Value | None) -> Any:
    """Return the onnx.TypeProto of an input; an empty one if it is omitted."""
    import onnx

    if value is None:
        return onnx.TypeProto()
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _may_fold(proto: Any) -> bool:
    return proto.op_type in ("CastLike", "CumSum", "GatherElements", "GatherND", "Mod", "NonZero", "Range", "ScatterND")
