"""Random ONNX graphs: a seed always gives the same graph, with inputs and the results that ONNX Runtime computes.

A graph grows node by node, on concrete arrays. The operator is drawn uniformly from those of `random_onnx_operators`;
it reads earlier results if type and rank fit, and new inputs or constants otherwise. ONNX Runtime, without
optimizations, runs the node by itself; if it refuses, the node is drawn again. So ONNX Runtime runs each graph. The
results of the nodes are kept, so that a difference can be traced to the node that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from peer_models import onnx_runtime
from random_choices import MAX_ELEMENTS, Array, Discard, Part, RandomChoices, Value, distinct, few, grow

OPSETS = range(7, 29)
IR_VERSION = 10
FLOATS = ("float32", "float16", "float64")
SMALL_INTEGERS = ("int8", "uint8", "int16", "uint16")
INTEGERS = ("int32", "int64", *SMALL_INTEGERS, "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
FAMILIES: dict[str, tuple[float, tuple[str, ...]]] = {
    "float32": (0.55, ("float32",)),
    "float16": (0.12, ("float16",)),
    "int32": (0.12, ("int32",)),
    "bool": (0.03, ("bool", "float32")),
    "int64": (0.05, ("int64",)),
    "float64": (0.03, ("float64",)),
    "mixed": (0.10, DTYPES),
}
"""The share of graphs whose new tensors have these types, if the operator allows."""
_NODES = (3, 8)


class Call(NamedTuple):
    """A node to try: its inputs (None: omitted), attributes and number of outputs."""

    inputs: Sequence[Value | None]
    attributes: Mapping[str, Any] = {}
    outputs: int = 1


@dataclass
class Node:
    """A node of a graph with the values that it reads, and its results in ONNX Runtime."""

    proto: Any
    inputs: list[Value | None]
    outputs: list[Value]


@dataclass
class RandomGraph(RandomChoices):
    """A graph under construction, and the random choices of operators."""

    opset: int = field(init=False)
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.opset = int(self.rng.choice(list(OPSETS)))
        self.choose_home(FAMILIES)

    def axis(self, rank: int) -> int:
        """Return a dimension of a tensor, counted from either end."""
        if not rank:
            raise Discard
        return self.number(-rank, rank - 1) if self.opset >= 11 else self.number(0, rank - 1)

    def axes(self, rank: int) -> list[int]:
        """Return some dimensions, at least one."""
        if not rank:
            raise Discard
        count = self.number(1, rank)
        chosen = [int(axis) for axis in self.rng.permutation(rank)[:count]]
        return [axis - rank if self.opset >= 11 and self.chance(0.3) else axis for axis in chosen]

    def types(self, operator: str, position: int = 0) -> tuple[str, ...]:
        """Return the element types of an input that the operator's definition allows."""
        schema = onnx.defs.get_schema(operator, self.opset)
        inputs = schema.inputs
        wanted = inputs[min(position, len(inputs) - 1)].type_str
        allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == wanted), [wanted])
        names = {"float": "float32", "double": "float64"}
        found = (text.removeprefix("tensor(").rstrip(")") for text in allowed)
        return tuple(name for name in (names.get(each, each) for each in found) if name in DTYPES)

    def add(self, operator: str, call: Call) -> None:
        """Add a node if ONNX Runtime runs it. Raises Discard otherwise."""
        number = len(self.nodes)
        names = [f"n{number}_{position}" for position in range(call.outputs)]
        inputs = ["" if value is None else value.name for value in call.inputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        try:
            proto = helper.make_node(operator, inputs, names, name=f"node{number}", **call.attributes)
        except (ValueError, TypeError) as error:
            raise Discard from error
        given = list(call.inputs)[: len(inputs)]
        arrays = run(single_node(proto, given, self.opset), feeds(given))
        if any(array.size > MAX_ELEMENTS or array.dtype.name not in DTYPES for array in arrays):
            raise Discard
        outputs = [Value(name, array) for name, array in zip(names, arrays, strict=True)]
        self.nodes.append(Node(proto, given, outputs))
        known = {value.name for value in self.values}
        self.values += [value for value in distinct(given) if value.name not in known]
        self.values += outputs

    def inputs(self) -> list[Value]:
        """Return the values that the graph is given."""
        made = {value.name for node in self.nodes for value in node.outputs}
        return [value for value in self.values if value.name not in made and not value.is_constant]

    def whole(self) -> Part:
        """Return the graph as a model; its outputs are the results that no node reads."""
        read = {value.name for node in self.nodes for value in node.inputs if value is not None}
        made = [value for node in self.nodes for value in node.outputs]
        outputs = [value for value in made if value.name not in read]
        constants = [value for value in self.values if value.is_constant]
        content = _file([node.proto for node in self.nodes], self.inputs(), outputs, constants, self.opset)
        return Part([node.proto.op_type for node in self.nodes], content, self.inputs(), outputs)

    def parts(self) -> Iterator[Part]:
        """Yield each node as a model."""
        for node in self.nodes:
            content = single_node(node.proto, node.inputs, self.opset, node.outputs)
            inputs = [value for value in distinct(node.inputs) if not value.is_constant]
            yield Part([node.proto.op_type], content, inputs, node.outputs, partial(_by_definition, node, self.opset))

    def describe(self) -> Iterator[str]:
        """Yield lines of text about the graph and its nodes."""
        yield f"seed {self.seed}, opset {self.opset}"
        for node in self.nodes:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.proto.attribute}
            yield f"{node.proto.op_type} {attributes}"
            yield from (f"    {few(value)}" for value in node.inputs)
            yield from (f"  → {few(value)}" for value in node.outputs)


def generate(seed: int, operators: Mapping[str, Callable[[RandomGraph], Call]]) -> RandomGraph:
    """Return the graph of a seed, of 3 to 8 nodes."""
    graph = RandomGraph(seed)
    grow(graph, {name: draw for name, draw in operators.items() if _exists(name, graph.opset)}, _NODES)
    return graph


def single_node(proto: Any, inputs: Sequence[Value | None], opset: int, outputs: Sequence[Value] = ()) -> bytes:
    """Return the ONNX file of one node; the types of its outputs are omitted unless they are given."""
    named = distinct(inputs)
    given, constants = ([value for value in named if value.is_constant is kind] for kind in (False, True))
    return _file([proto], given, outputs or list(proto.output), constants, opset)


def _file(
    nodes: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[Value | str],
    constants: Sequence[Value],
    opset: int,
) -> bytes:
    infos = [onnx.ValueInfoProto(name=each) if isinstance(each, str) else _info(each) for each in outputs]
    stored = [numpy_helper.from_array(value.array, value.name) for value in constants]
    graph = helper.make_graph(nodes, "random", [_info(value) for value in inputs], infos, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = IR_VERSION
    content: bytes = model.SerializeToString()
    return content


def _by_definition(node: Node, opset: int) -> list[Array]:
    """Return the outputs of ONNX's reference implementation, which gets float64 for all floats."""
    wide = [value and value._replace(array=_widened(value.array), is_constant=False) for value in node.inputs]
    model = onnx.ModelProto.FromString(single_node(node.proto, wide, opset))
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, feeds(wide))
    return [np.asarray(each) for each in found]


def _widened(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def feeds(inputs: Iterable[Value | None]) -> dict[str, Array]:
    """Return the arrays of the values that are no constants, by name."""
    return {value.name: value.array for value in distinct(inputs) if not value.is_constant}


def run(model: bytes, arrays: Mapping[str, Array]) -> list[Array]:
    """Return ONNX Runtime's results without optimizations. Raises Discard if it refuses the model or the inputs."""
    try:
        opened = onnx_runtime(model, is_optimized=False)
        return [np.asarray(array) for array in opened.run([arrays[name] for name, _, _ in opened.inputs])]
    except Exception as error:
        raise Discard(str(error)[:200]) from error


def _exists(operator: str, opset: int) -> bool:
    try:
        return not onnx.defs.get_schema(operator, opset).deprecated
    except onnx.defs.SchemaError:
        return False


def _info(value: Value) -> Any:
    return helper.make_tensor_value_info(
        value.name, helper.np_dtype_to_tensor_dtype(value.array.dtype), value.array.shape
    )
