"""Random ONNX graphs: a seed always gives the same graph, with inputs and the results that ONNX Runtime computes.

A graph grows node by node, on concrete arrays. The operator is drawn uniformly from those of `random_onnx_operators`;
it reads earlier results if type and rank fit, and new inputs or constants otherwise. ONNX Runtime, without
optimizations, runs the node by itself; if it refuses, the node is drawn again. So ONNX Runtime runs each graph. The
results of the nodes are kept, so that a difference can be traced to the node that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from onnx import helper, numpy_helper

Array: TypeAlias = np.ndarray[Any, Any]

OPSETS = range(7, 23)
IR_VERSION = 10
MAX_ELEMENTS = 20_000  # of a tensor
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
CORE = frozenset(("float32", "float16", "int32", "bool"))
"""Graphs of these types are counted by themselves."""

_NODES = (3, 8)
_ATTEMPTS = 30  # for one node
_REUSE = 0.7  # probability that an input is an earlier result, if one fits
_CONSTANT = 0.35  # probability that a new tensor is a constant
_EXTENTS = (1, 1, 2, 2, 3, 3, 4, 5, 7)
_EMPTY = 0.02  # probability that a new extent is 0


class Value(NamedTuple):
    """A tensor of a graph: its name, and its elements for the inputs of this seed."""

    name: str
    array: Array
    is_constant: bool = False


class Call(NamedTuple):
    """A node to try: its inputs (None: omitted), attributes and number of outputs."""

    inputs: Sequence[Value | None]
    attributes: Mapping[str, Any] = {}
    outputs: int = 1


class Discard(Exception):
    """The values of the graph do not fit the operator."""


@dataclass
class Node:
    """A node of a graph with the values that it reads, and its results in ONNX Runtime."""

    proto: Any
    inputs: list[Value | None]
    outputs: list[Value]


@dataclass
class RandomGraph:
    """A graph under construction, and the random choices of operators."""

    seed: int
    rng: np.random.Generator = field(init=False)
    opset: int = field(init=False)
    family: str = field(init=False)
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.opset = int(self.rng.choice(list(OPSETS)))
        shares = [share for share, _ in FAMILIES.values()]
        self.family = str(self.rng.choice(list(FAMILIES), p=np.array(shares) / sum(shares)))

    # ------------------------------------------------------------------------------------------------- choices

    def chance(self, probability: float = 0.5) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < probability)

    def one_of(self, choices: Iterable[Any]) -> Any:
        """Return one of the choices."""
        found = list(choices)
        if not found:
            raise Discard
        return found[int(self.rng.integers(len(found)))]

    def number(self, low: int, high: int) -> int:
        """Return an integer of low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def some(self, **choices: Callable[[], Any] | Any) -> dict[str, Any]:
        """Return a random part of the attributes; a function makes the value."""
        return {name: made() if callable(made) else made for name, made in choices.items() if self.chance()}

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Return a shape, of the rank or of 0 to 5 dimensions."""
        rank = self.one_of((0, 1, 1, 2, 2, 3, 3, 4, 4, 5)) if rank is None else rank
        return tuple(0 if self.chance(_EMPTY) else int(self.one_of(_EXTENTS)) for _ in range(rank))

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

    # -------------------------------------------------------------------------------------------------- values

    def types(self, operator: str, position: int = 0) -> tuple[str, ...]:
        """Return the element types of an input that the operator's definition allows."""
        schema = onnx.defs.get_schema(operator, self.opset)
        inputs = schema.inputs
        wanted = inputs[min(position, len(inputs) - 1)].type_str
        allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == wanted), [wanted])
        names = {"float": "float32", "double": "float64"}
        found = (text.removeprefix("tensor(").rstrip(")") for text in allowed)
        return tuple(name for name in (names.get(each, each) for each in found) if name in DTYPES)

    def pick(self, dtypes: Sequence[str], rank: int | range | None = None, shape: Sequence[int] | None = None) -> Value:
        """Return a tensor of one of the types, and of the rank or the shape: an earlier result or a new one."""
        ranks = range(6) if rank is None else (rank,) if isinstance(rank, int) else rank
        wanted = None if shape is None else tuple(shape)
        fitting = [
            value
            for value in self.values
            if value.array.dtype.name in dtypes
            and (value.array.ndim in ranks if wanted is None else value.array.shape == wanted)
        ]
        if fitting and self.chance(_REUSE):
            return self.one_of(fitting)  # type: ignore[no-any-return]
        if wanted is None:
            ranks_found = [rank for rank in (0, 1, 2, 2, 3, 3, 4, 4, 5) if rank in ranks] or list(ranks)
            wanted = self.shape(int(self.one_of(ranks_found)))
        return self.new(self.elements(self.dtype(dtypes), wanted))

    def dtype(self, dtypes: Sequence[str]) -> str:
        """Return one of the types, if possible one of the graph's family."""
        home = [name for name in FAMILIES[self.family][1] if name in dtypes]
        return str(self.one_of(home or dtypes))

    def like(self, value: Value, shape: Sequence[int] | None = None) -> Value:
        """Return a tensor of the same type, and of this shape or the same one."""
        return self.pick((value.array.dtype.name,), shape=value.array.shape if shape is None else shape)

    def broadcast_partner(self, value: Value) -> Value:
        """Return a tensor of the same type whose shape broadcasts with that of `value`."""
        fitting = [
            each
            for each in self.values
            if each.array.dtype == value.array.dtype and _broadcast(each.array.shape, value.array.shape)
        ]
        if fitting and self.chance(_REUSE):
            return self.one_of(fitting)  # type: ignore[no-any-return]
        shape = [1 if self.chance(0.25) else extent for extent in value.array.shape]
        shape = shape[self.number(0, len(shape)) :] if self.chance(0.4) else shape
        if self.chance(0.1) and len(shape) < 5:
            shape = [int(self.one_of(_EXTENTS)), *[1] * (value.array.ndim - len(shape)), *shape]
        return self.new(self.elements(value.array.dtype.name, tuple(shape)))

    def new(self, array: Array, is_constant: bool | None = None) -> Value:
        """Return a new input or constant of the graph."""
        is_constant = self.chance(_CONSTANT) if is_constant is None else is_constant
        return Value(f"{'c' if is_constant else 'x'}{len(self.values)}_{self.number(0, 999_999)}", array, is_constant)

    def constant(self, numbers: Any, dtype: str = "int64") -> Value:
        """Return a new constant."""
        return self.new(np.array(numbers, dtype), True)

    def integers(self, dtypes: Sequence[str], shape: Sequence[int], low: int, high: int) -> Value:
        """Return new integers of low to high."""
        return self.new(self.rng.integers(low, high + 1, tuple(shape)).astype(self.one_of(dtypes)))

    def elements(self, dtype: str, shape: Sequence[int]) -> Array:
        """Return random elements: mostly small ones, sometimes halves, extremes, infinity and NaN."""
        shape = tuple(shape)
        if dtype == "bool":
            return self.rng.random(shape) < 0.5
        kind = self.rng.random()
        if np.dtype(dtype).kind in "iu":
            return self._integer_elements(np.dtype(dtype), shape, kind)
        with np.errstate(all="ignore"):
            if kind < 0.65:
                scale = float(self.one_of((0.1, 1.0, 1.0, 3.0, 10.0)))
                return np.asarray(self.rng.standard_normal(shape) * scale).astype(dtype)
            if kind < 0.75:
                return np.asarray(self.rng.integers(-8, 9, shape) / 2).astype(dtype)
            limits = np.finfo(dtype)
            if kind < 0.85:
                exponents = self.rng.uniform(limits.minexp, limits.maxexp, shape) * float(self.one_of((0.1, 0.3, 1)))
                return np.asarray(np.sign(self.rng.standard_normal(shape)) * 2.0**exponents).astype(dtype)
            special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -1.5, 1.0, -1.0, 1e-7, 88.5, -20.0, 300.0, 1e20]
            special += [float(limits.max), float(limits.min), float(limits.smallest_subnormal), float(limits.eps)]
            usual = self.rng.standard_normal(shape)
            chosen = np.array(special)[self.rng.integers(len(special), size=shape)]
            return np.asarray(np.where(self.rng.random(shape) < 0.4, chosen, usual)).astype(dtype)

    def _integer_elements(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: float) -> Array:
        limits = np.iinfo(dtype)
        if kind < 0.8:
            return self.rng.integers(max(-9, limits.min), 10, shape).astype(dtype)
        if kind < 0.9:
            return self.rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        chosen = [limits.min, limits.max, 0, 1, limits.max - 1, limits.max // 2 + 1]
        return np.array(chosen, dtype)[self.rng.integers(len(chosen), size=shape)]

    # --------------------------------------------------------------------------------------------------- growth

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
        self.values += [value for value in _named(given) if value.name not in known]
        self.values += outputs

    @property
    def is_core(self) -> bool:
        """True if all tensors but constants of integers have types of `CORE`."""
        return all(
            value.array.dtype.name in CORE or (value.is_constant and value.array.dtype.kind in "iu")
            for value in self.values
        )

    def inputs(self) -> list[Value]:
        """Return the values that the graph is given."""
        made = {value.name for node in self.nodes for value in node.outputs}
        return [value for value in self.values if value.name not in made and not value.is_constant]

    def results(self) -> list[Value]:
        """Return the values that no node reads, and sometimes others that nodes compute."""
        read = {value.name for node in self.nodes for value in node.inputs if value is not None}
        made = [value for node in self.nodes for value in node.outputs]
        return [value for value in made if value.name not in read or self.rng.random() < 0.1]


def generate(seed: int, operators: Mapping[str, Callable[[RandomGraph], Call]]) -> RandomGraph:
    """Return the graph of a seed, of 3 to 8 nodes."""
    graph = RandomGraph(seed)
    known = [name for name in operators if _exists(name, graph.opset)]
    wanted = graph.number(*_NODES)
    while len(graph.nodes) < wanted:
        operator = str(graph.one_of(known))
        for _ in range(_ATTEMPTS):
            try:
                graph.add(operator, operators[operator](graph))
                break
            except Discard:
                continue
    return graph


def to_model(graph: RandomGraph, outputs: Sequence[Value]) -> bytes:
    """Return the ONNX file of a graph."""
    constants = {v.name: v for node in graph.nodes for v in _named(node.inputs) if v.is_constant}
    made = helper.make_graph(
        [node.proto for node in graph.nodes],
        f"seed{graph.seed}",
        [_info(value) for value in graph.inputs()],
        [_info(value) for value in outputs],
        [numpy_helper.from_array(value.array, value.name) for value in constants.values()],
    )
    return _serialized(made, graph.opset)


def single_node(proto: Any, inputs: Sequence[Value | None], opset: int, outputs: Sequence[Value] = ()) -> bytes:
    """Return the ONNX file of one node; the types of its outputs are omitted unless they are given."""
    named = _named(inputs)
    made = helper.make_graph(
        [proto],
        "node",
        [_info(value) for value in named if not value.is_constant],
        [_info(value) for value in outputs] or [onnx.ValueInfoProto(name=name) for name in proto.output],
        [numpy_helper.from_array(value.array, value.name) for value in named if value.is_constant],
    )
    return _serialized(made, opset)


def feeds(inputs: Iterable[Value | None]) -> dict[str, Array]:
    """Return the arrays of the values that are no constants, by name."""
    return {value.name: value.array for value in _named(inputs) if not value.is_constant}


def run(model: bytes, arrays: Mapping[str, Array]) -> list[Array]:
    """Return ONNX Runtime's results without optimizations. Raises Discard if it refuses the model or the inputs."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    onnxruntime.set_default_logger_severity(4)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return [np.asarray(array) for array in session.run(None, dict(arrays))]
    except Exception as error:
        raise Discard(str(error)[:200]) from error


def _exists(operator: str, opset: int) -> bool:
    try:
        return not onnx.defs.get_schema(operator, opset).deprecated
    except onnx.defs.SchemaError:
        return False


def _serialized(graph: Any, opset: int) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = IR_VERSION
    return model.SerializeToString()  # type: ignore[no-any-return]


def _info(value: Value) -> Any:
    return helper.make_tensor_value_info(
        value.name, helper.np_dtype_to_tensor_dtype(value.array.dtype), value.array.shape
    )


def _named(values: Iterable[Value | None]) -> list[Value]:
    found: dict[str, Value] = {}
    for value in values:
        if value is not None:
            found.setdefault(value.name, value)
    return list(found.values())


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(first, second)
    except ValueError:
        return False
    return True
