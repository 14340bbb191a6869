"""ONNX files: the parsed model, its constants, and the shapes of its inputs.

Only this module and `folding` import the package `onnx`, which the extra `onnx` installs. The file is not trusted:
what the protocol buffer does not guarantee (types of attributes, sizes of constants) is checked when it is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.importers.file_format import ModelSource, Shapes, indexed_shapes
from nnfmq.importers.loaded_model import DeclaredInput, UnknownShapes

__all__ = [
    "FIRST_OPSET",
    "FLOAT_FORMATS",
    "FloatFormat",
    "OnnxFile",
    "all_read_names",
    "attribute_values",
    "dtype_of",
    "element_name",
    "inference_errors",
    "input_shapes",
    "integer_limits",
    "live_nodes",
    "node_count",
    "parse",
    "read",
    "tensor_array",
]

Array: TypeAlias = npt.NDArray[Any]
FIRST_OPSET = 7
"""The first opset with NumPy's broadcasting."""
_DEFAULT_DOMAINS = ("", "ai.onnx")
_MAX_DENSE_ELEMENTS = 1 << 24  # of a tensor whose file states some elements only
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, NotImplementedError)
"""What the package `onnx` raises for a field that contradicts another."""


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A parsed model. `proto` is onnx.ModelProto; `constants` are the initializers, by name.

    `data_files` are the other files of the folder that have initializers.
    """

    proto: Any
    opset: int
    size_bytes: int
    folder: Path | None
    constants: dict[str, Array] = field(default_factory=dict)
    data_files: set[str] = field(default_factory=set)

    @property
    def graph(self) -> Any:
        """The model's graph, an onnx.GraphProto."""
        return self.proto.graph

    @property
    def inputs(self) -> list[Any]:
        """The inputs without a default value, as onnx.ValueInfoProto."""
        return [info for info in self.graph.input if info.name not in self.constants]


def read(source: ModelSource) -> OnnxFile:
    """Return the model of an ONNX file with its constants, those in other files of its folder included.

    Raises:
        UnsupportedModel: If its opset is not supported, or the package `onnx` is not installed.
        InvalidArgument: If the file is corrupt.
    """
    proto = source.parsed if source.parsed is not None else parse(source)
    _require_texts(proto)
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _make_sparse_nodes(nodes)
    _sort_nodes(proto.graph)
    _require_definitions(proto)
    folder = source.path.parent if source.path is not None else None
    file = OnnxFile(proto, _opset(proto), len(source.data), folder)
    for tensor in proto.graph.initializer:
        file.data_files.update(entry.value for entry in tensor.external_data if entry.key == "location")
        file.constants[tensor.name] = tensor_array(tensor, folder)
    for sparse in proto.graph.sparse_initializer:
        file.constants[sparse.values.name] = dense_array(sparse, folder)
    file.constants.update(source.values)
    return file


def parse(source: ModelSource) -> Any:
    """Return the onnx.ModelProto of a file.

    Raises:
        UnsupportedModel: If the package `onnx` is not installed.
        InvalidArgument: If the file is corrupt.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise UnsupportedModel(
            "this is an ONNX model; reading it needs the package onnx: pip install 'nnfmq[onnx]'"
        ) from None
    try:
        return onnx.load_model_from_string(bytes(source.data))
    except DecodeError as error:
        raise InvalidArgument(f"a truncated or corrupt ONNX model: {error}") from None


def _require_texts(proto: Any) -> None:
    """Check that each name is text: protobuf returns the bytes of one that is not UTF-8.

    Raises:
        InvalidArgument: If one is not.
    """
    domains = (entry.domain for entry in proto.opset_import)
    texts = itertools.chain(domains, _graph_texts(proto.graph), *map(_function_texts, proto.functions))
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise InvalidArgument(f"a corrupt ONNX model: the name {wrong[:80]!r} is not UTF-8")


def _function_texts(function: Any) -> Iterator[str | bytes]:
    yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
    yield from (entry.domain for entry in function.opset_import)
    yield from _node_texts(function.node)


def _graph_texts(graph: Any) -> Iterator[str | bytes]:
    for info in (*graph.input, *graph.output):
        yield info.name
        yield from (dim.dim_param for dim in info.type.tensor_type.shape.dim)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from _node_texts(graph.node)


def _node_texts(nodes: Iterable[Any]) -> Iterator[str | bytes]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name
            yield attribute.ref_attr_name
            if attribute.HasField("g"):
                yield from _graph_texts(attribute.g)


def _make_sparse_nodes(nodes: Iterable[Any]) -> None:
    """Make nodes of Constant of the sparse initializers of graphs in the attributes of nodes."""
    import onnx

    for graph in (attribute.g for node in nodes for attribute in node.attribute if attribute.HasField("g")):
        _make_sparse_nodes(graph.node)
        sparse = list(graph.sparse_initializer)
        if sparse:
            made = [onnx.helper.make_node("Constant", (), [each.values.name], sparse_value=each) for each in sparse]
            _replace_nodes(graph, [*made, *graph.node])
            del graph.sparse_initializer[:]


def _replace_nodes(graph: Any, nodes: Sequence[Any]) -> None:
    copy = type(graph)(node=nodes)  # which does not change with the graph
    del graph.node[:]
    graph.node.extend(copy.node)


def _sort_nodes(graph: Any) -> None:
    """Put the nodes of a model's graph after those whose results they read, if they are not: ONNX Runtime does so."""
    writers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    sources = [{writers[name] for name in _outer_names(node) if name in writers} for node in graph.node]
    if all(max(indexes, default=-1) < index for index, indexes in enumerate(sources)):
        return
    with suppress(CycleError):  # the conversion says what is missing
        nodes = [graph.node[index] for index in TopologicalSorter(dict(enumerate(sources))).static_order()]
        _replace_nodes(graph, nodes)


def _outer_names(node: Any) -> Iterator[str]:
    """Yield the names that a node reads, and the graphs in its attributes from outside of it."""
    yield from node.input
    for graph in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
        own = {each.name for each in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        read = itertools.chain((info.name for info in graph.output), *map(_outer_names, graph.node))
        yield from (name for name in read if name not in own)


def _require_definitions(proto: Any) -> None:
    """Check that each name is defined once. The inputs of a graph within another hide what is around it.

    Raises:
        InvalidArgument: If one is defined again.
    """
    scopes = [_redefined(proto.graph.input, proto.graph.initializer, proto.graph.node, set())]
    for function in proto.functions:
        scopes.append(_redefined((), (), function.node, set(function.input)))
    twice = next(itertools.chain.from_iterable(scopes), None)
    if twice is not None:
        raise InvalidArgument(f"a corrupt ONNX model: the name {twice[:80]!r} is defined twice")


def _redefined(inputs: Iterable[Any], constants: Iterable[Any], nodes: Iterable[Any], known: set[str]) -> Iterator[str]:
    """Yield the names that a graph, or one in its nodes' attributes, defines although they are `known`."""
    names = {info.name for info in inputs}
    own = names - known
    known |= own
    defined = (tensor.name for tensor in constants if tensor.name not in names)
    for name in itertools.chain(defined, _node_definitions(nodes, known)):
        if name in known:
            yield name
        known.add(name)
        own.add(name)
    known -= own


def _node_definitions(nodes: Iterable[Any], known: set[str]) -> Iterator[str]:
    """Yield the names that nodes define, and those that graphs in their attributes define again."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _redefined(attribute.g.input, attribute.g.initializer, attribute.g.node, known)
        yield from filter(None, node.output)


def _opset(proto: Any) -> int:
    import onnx

    versions = [entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS]
    if not versions:
        domains = ", ".join(sorted(str(entry.domain)[:80] for entry in proto.opset_import))
        if domains:
            raise UnsupportedModel(f"the model has no operators of ONNX itself; those of {domains} are not supported")
        raise InvalidArgument("the model does not say which opset of ONNX it uses: it is corrupt")
    if len(set(versions)) > 1:
        raise UnsupportedModel(f"the model uses opsets {' and '.join(map(str, versions))} of ONNX: one is supported")
    latest = onnx.defs.onnx_opset_version()
    if versions[0] > latest:
        raise UnsupportedModel(
            f"the model uses opset {versions[0]}; the installed onnx {onnx.__version__} knows those up to {latest}"
        )
    if versions[0] < FIRST_OPSET:
        raise UnsupportedModel(f"the model uses opset {versions[0]}; supported are {FIRST_OPSET} and later ones")
    return int(versions[0])


def tensor_array(tensor: Any, folder: Path | None) -> Array:
    """Return the array of an onnx.TensorProto; `folder` has the files with external data.

    Raises:
        InvalidArgument: If the tensor is corrupt, or its external data are missing.
    """
    import onnx

    name = tensor.name[:80]
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if folder is None:
            raise InvalidArgument(f"tensor {name!r} has its data in another file: load the model from a path")
        try:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except (*_MALFORMED, OSError, onnx.checker.ValidationError) as error:
            raise InvalidArgument(f"the external data of tensor {name!r} cannot be read: {error}") from None
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (*_MALFORMED, SystemError) as error:
        raise InvalidArgument(f"tensor {name!r} is corrupt: {error}") from None
    return np.asarray(array)


def dense_array(sparse: Any, folder: Path | None) -> Array:
    """Return the array of an onnx.SparseTensorProto; the elements that it does not state are 0.

    Raises:
        InvalidArgument: If it is corrupt, or has too many elements.
    """
    values, shape = tensor_array(sparse.values, folder), tuple(sparse.dims)
    indices, name = tensor_array(sparse.indices, folder), sparse.values.name[:80]
    if min(shape, default=1) < 1 or math.prod(shape) > _MAX_DENSE_ELEMENTS:
        raise InvalidArgument(
            f"sparse tensor {name!r} of the shape {shape}: it may have {_MAX_DENSE_ELEMENTS} elements"
        )
    try:
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), shape)
        dense = np.zeros(math.prod(shape), values.dtype)
        is_right = indices.shape == values.shape and indices.min(initial=0) >= 0 and (np.diff(indices) > 0).all()
        dense[indices] = values
    except (*_MALFORMED, IndexError) as error:
        raise InvalidArgument(f"sparse tensor {name!r} is corrupt: {error}") from None
    if not is_right:
        raise InvalidArgument(f"sparse tensor {name!r} is corrupt: its indices do not ascend, or not each has a value")
    return dense.reshape(shape)


def dtype_of(element_type: int) -> np.dtype[Any]:
    """Return NumPy's type of an ONNX element type. Raises InvalidArgument if there is none."""
    import onnx

    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type))
    except _MALFORMED:
        raise InvalidArgument(f"element type {element_type} is unknown") from None


def element_name(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type in messages; NumPy calls strings objects."""
    return "string" if dtype == np.object_ else dtype.name


def inference_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the shape inference of the package `onnx` for a node that its definition forbids."""
    import onnx

    return onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError


def attribute_values(node: Any, folder: Path | None) -> dict[str, Any]:
    """Return the attributes of a node: numbers, strings, tuples of them, arrays, and graphs as they are.

    Raises:
        InvalidArgument: If an attribute is corrupt.
    """
    import onnx

    values = {}
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise InvalidArgument("attributes of functions are not supported")
        try:
            value = onnx.helper.get_attribute_value(attribute)
            values[attribute.name] = _plain(value, folder)
        except (*_MALFORMED, UnicodeDecodeError) as error:
            raise InvalidArgument(f"attribute {attribute.name[:80]!r} is corrupt: {error}") from None
    return values


def _plain(value: Any, folder: Path | None) -> Any:
    import onnx

    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return tensor_array(value, folder)
    if isinstance(value, onnx.SparseTensorProto):
        return dense_array(value, folder)
    if isinstance(value, (int, float, onnx.GraphProto)):
        return value
    return tuple(_plain(element, folder) for element in value) if hasattr(value, "__iter__") else value


def input_shapes(file: OnnxFile, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input. A symbolic dimension has one size in all inputs.

    Raises:
        InvalidArgument: If a size remains unknown; the message names all of them. Or if `shapes` contradict the file.
    """
    names = [info.name for info in file.inputs]
    given = {names[position]: shape for position, shape in indexed_shapes(names, shapes).items()}
    symbols: dict[str, int] = {}
    for info in file.inputs:
        if info.name in given:
            _bind(info, given[info.name], symbols)
    resolved = {info.name: given.get(info.name, _resolved(info, symbols)) for info in file.inputs}
    if None in resolved.values():
        raise UnknownShapes(
            [DeclaredInput(info.name, _dimensions(info), resolved[info.name] is not None) for info in file.inputs]
        )
    return {name: shape for name, shape in resolved.items() if shape is not None}


def _bind(info: Any, shape: tuple[int, ...], symbols: dict[str, int]) -> None:
    """Remember the sizes of the symbolic dimensions of an input, given its shape."""
    dimensions = info.type.tensor_type.shape.dim
    if (info.type.tensor_type.HasField("shape") and len(dimensions) != len(shape)) or min(shape, default=0) < 0:
        declared = DeclaredInput(info.name, _dimensions(info)).text()
        raise InvalidArgument(f"shapes: {shape} is no shape for input {info.name!r}, which is {declared}")
    for dimension, size in zip(dimensions, shape, strict=False):
        if dimension.dim_param in ("", "?"):  # PaddlePaddle writes "?" for every unknown dimension
            continue
        if symbols.setdefault(dimension.dim_param, size) != size:
            raise InvalidArgument(
                f"shapes: dimension {dimension.dim_param!r} is {symbols[dimension.dim_param]} and also {size}"
            )


def _resolved(info: Any, symbols: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return an input's shape, or None if one of its dimensions has no known size."""
    if not info.type.tensor_type.HasField("shape"):
        return None
    dimensions = info.type.tensor_type.shape.dim
    sizes = [
        symbols.get(d.dim_param, -1) if d.dim_param else d.dim_value if d.HasField("dim_value") else -1
        for d in dimensions
    ]
    return tuple(sizes) if all(size >= 0 for size in sizes) else None


def _dimensions(info: Any) -> tuple[int | str | None, ...] | None:
    """Return the dimensions that the file declares; None if the rank is not known."""
    if not info.type.tensor_type.HasField("shape"):
        return None
    dimensions = info.type.tensor_type.shape.dim
    return tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in dimensions)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs of an ONNX file: the nodes that outputs need, and the names that nodes read.


def live_nodes(nodes: Sequence[Any], outputs: Iterable[str]) -> list[tuple[int, Any]]:
    """Return the nodes on which the outputs of a graph depend, with their indexes, in the graph's order."""
    wanted, found = set(outputs) - {""}, []
    for index, proto in reversed(list(enumerate(nodes))):
        if not wanted.isdisjoint(proto.output):
            found.append((index, proto))
            wanted.update(name for name in all_read_names(proto) if name)
    return found[::-1]


def node_count(graph: Any) -> int:
    """Return the number of nodes of a graph and of those in its nodes' attributes."""
    inner = (each.g for proto in graph.node for each in proto.attribute if each.HasField("g"))
    return len(graph.node) + sum(map(node_count, inner))


def all_read_names(proto: Any) -> Iterator[str]:
    """Yield all names that are read in a node: by itself, and in the graphs of its attributes, also of values there."""
    yield from proto.input
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            yield from (info.name for info in attribute.g.output)
            for inner in attribute.g.node:
                yield from all_read_names(inner)


# ----------------------------------------------------------------------------------------------------------------------
# Element types narrower than those of the HAL: which numbers they have.
#
# Their elements are INT32 or FLOAT32 in the HAL model, and results are wrapped or rounded to what the type has.


_LIMITS = {"int2": (-2, 1), "uint2": (0, 3), "int4": (-8, 7), "uint4": (0, 15)}


class FloatFormat(NamedTuple):
    """A floating-point type; `overflow` says what larger numbers become: 0 or 3 the largest, 1 infinity, 2 NaN.

    With 3, for types without NaN, NaN becomes 0.
    """

    fraction: int
    exponent: int
    largest: float
    overflow: int


FLOAT_FORMATS = {
    "bfloat16": FloatFormat(7, -126, 3.3895313892515355e38, 1),
    "float8_e4m3fn": FloatFormat(3, -6, 448.0, 2),
    "float8_e4m3fnuz": FloatFormat(3, -7, 240.0, 2),
    "float8_e5m2": FloatFormat(2, -14, 57344.0, 1),
    "float8_e5m2fnuz": FloatFormat(2, -15, 57344.0, 2),
    "float4_e2m1fn": FloatFormat(1, 0, 6.0, 3),
}


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the smallest and the largest integer of a type; None if it has no integers."""
    if dtype.name in _LIMITS:
        return _LIMITS[dtype.name]
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if dtype.kind in "iu" else None
