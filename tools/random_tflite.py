"""Random TFLite graphs: a seed always gives the same graph, with inputs and the results of LiteRT's reference kernels.

They grow as those of `random_onnx` do. Tensors of int8, uint8 and int16 are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType  # type: ignore[import-untyped]
from random_choices import MAX_ELEMENTS, Array, Discard, Part, RandomChoices, Value, distinct, few, grow
from tflite_writer import Operator, Tensor, write

FAMILIES: dict[str, tuple[float, tuple[str, ...]]] = {
    "float32": (0.6, ("float32",)),
    "int8": (0.15, ("int8",)),
    "uint8": (0.07, ("uint8",)),
    "int32": (0.1, ("int32",)),
    "mixed": (0.08, ("float32", "int8", "uint8", "int16", "int32", "int64", "bool")),
}
"""The share of graphs whose new tensors have these types, if the operator allows."""
QUANTIZED = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}
NODES = (2, 6)


class Kind(NamedTuple):
    """The type and quantization of an output; its shape is LiteRT's."""

    dtype: str
    scale: float = 0.0
    zero_point: int = 0


class Call(NamedTuple):
    """An operator to try: its inputs (None: omitted), the kinds of its outputs, and its options."""

    inputs: Sequence[Value | None]
    outputs: Sequence[Kind]
    table: str = ""
    options: Mapping[str, Any] = {}


@dataclass
class Node:
    """An operator of a graph with the values that it reads, and its results in LiteRT."""

    name: str
    call: Call
    outputs: list[Value]


@dataclass
class RandomGraph(RandomChoices):
    """A graph under construction, and the random choices of operators."""

    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_home(FAMILIES)

    def new(self, array: Array, is_constant: bool | None = None) -> Value:
        """Return a new input or constant of the graph, with a quantization if its type has one."""
        value = super().new(array, is_constant)
        kind = self.kind(array.dtype.name)
        return value._replace(scale=kind.scale, zero_point=kind.zero_point)

    def plain(self, numbers: Any, dtype: str = "int32") -> Value:
        """Return a new constant without quantization."""
        return super().new(np.array(numbers, dtype), True)

    def kind(self, dtype: str) -> Kind:
        """Return a random quantization of the type, if it has one."""
        if dtype not in QUANTIZED:
            return Kind(dtype)
        scale = float(np.float32(2.0 ** self.rng.uniform(-7, -2)))
        low, high = QUANTIZED[dtype]
        zero_point = 0 if dtype == "int16" else int(self.one_of((0, low, 3 if low else 128, self.number(low, high))))
        return Kind(dtype, scale, zero_point)

    def axis(self, rank: int) -> int:
        """Return a dimension of a tensor, counted from either end."""
        if not rank:
            raise Discard
        return self.number(-rank, rank - 1)

    def add(self, name: str, call: Call) -> None:
        """Add an operator if LiteRT runs it. Raises Discard otherwise."""
        names = [f"n{len(self.nodes)}_{position}" for position in range(len(call.outputs))]
        blank = [
            Value(each, np.zeros(1, kind.dtype), False, kind.scale, kind.zero_point)
            for each, kind in zip(names, call.outputs, strict=True)
        ]
        draft = Node(name, call, blank)
        given = [value for value in distinct(call.inputs) if not value.is_constant]
        if not given:
            raise Discard
        arrays = run(_file([draft], given, blank), given)
        if any(array.size > MAX_ELEMENTS for array in arrays):
            raise Discard
        outputs = [value._replace(array=array) for value, array in zip(blank, arrays, strict=True)]
        self.nodes.append(Node(name, call, outputs))
        known = {value.name for value in self.values}
        self.values += [value for value in distinct(call.inputs) if value.name not in known]
        self.values += outputs

    def whole(self) -> Part:
        """Return the graph as a model; its outputs are the results that no operator reads."""
        read = {value.name for node in self.nodes for value in distinct(node.call.inputs)}
        made = [value for node in self.nodes for value in node.outputs]
        inputs = [value for value in self.values if value not in made and not value.is_constant]
        outputs = [value for value in made if value.name not in read]
        return Part([node.name for node in self.nodes], _file(self.nodes, inputs, outputs), inputs, outputs)

    def parts(self) -> Iterator[Part]:
        """Yield each operator as a model."""
        for node in self.nodes:
            inputs = [value for value in distinct(node.call.inputs) if not value.is_constant]
            yield Part([node.name], _file([node], inputs, node.outputs), inputs, node.outputs)

    def describe(self) -> Iterator[str]:
        """Yield lines of text about the graph and its operators."""
        yield f"seed {self.seed}"
        for node in self.nodes:
            yield f"{node.name} {dict(node.call.options)}"
            yield from (f"    {few(value)}" for value in node.call.inputs)
            yield from (f"  → {few(value)}" for value in node.outputs)


def generate(seed: int, operators: Mapping[str, Callable[[RandomGraph], Call]]) -> RandomGraph:
    """Return the graph of a seed, of 2 to 6 operators."""
    graph = RandomGraph(seed)
    grow(graph, operators, NODES)
    return graph


def run(content: bytes, inputs: Sequence[Value]) -> list[Array]:
    """Return the results of LiteRT's reference kernels. Raises Discard if it refuses the model or the inputs."""
    try:
        runner = Interpreter(
            model_content=content, num_threads=1, experimental_op_resolver_type=OpResolverType.BUILTIN_REF
        )
        runner.allocate_tensors()
        for detail, value in zip(runner.get_input_details(), inputs, strict=True):
            runner.set_tensor(detail["index"], value.array)
        runner.invoke()
        return [np.array(runner.get_tensor(detail["index"])) for detail in runner.get_output_details()]
    except (ValueError, RuntimeError) as error:
        raise Discard(str(error)[:200]) from error


def _file(nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]) -> bytes:
    read = [value for node in nodes for value in distinct(node.call.inputs)]
    values = distinct([*read, *(value for node in nodes for value in node.outputs)])
    places = {value.name: place for place, value in enumerate(values)}
    operators = [
        Operator(
            node.name,
            [-1 if value is None else places[value.name] for value in node.call.inputs],
            [places[value.name] for value in node.outputs],
            node.call.table,
            node.call.options,
        )
        for node in nodes
    ]
    tensors = [_tensor(value) for value in values]
    return write(tensors, operators, [places[v.name] for v in inputs], [places[v.name] for v in outputs])


def _tensor(value: Value) -> Tensor:
    scales, zeros = ((value.scale,), (value.zero_point,)) if value.scale else ((), ())
    data = value.array.tobytes() if value.is_constant else None
    return Tensor(value.name, value.array.shape, value.array.dtype.name.upper(), data, scales, zeros)
