"""Random TFLite graphs: a seed always gives the same graph, with inputs and the results of LiteRT's reference kernels.

They grow as those of `random_onnx` do. Tensors of int8, uint8 and int16 are quantized. A function for each operator
draws one, with all its options; it may draw what LiteRT refuses, which is drawn again then. LiteRT has no reference
kernels of CEIL, ELU and ROUND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from peer_models import litert
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


def run(content: bytes, inputs: Sequence[Value]) -> list[Array]:
    """Return the results of LiteRT's reference kernels. Raises Discard if it refuses the model or the inputs."""
    try:
        return [np.array(array) for array in litert(content, is_reference=True).run([v.array for v in inputs])]
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


# ---- the operators


Rule: TypeAlias = Callable[[RandomGraph], Call]

F, NUMBERS = ("float32",), ("float32", "int8", "uint8", "int16", "int32", "int64")
ANY = (*NUMBERS, "bool")
BYTES = ("int8", "uint8")
REALS = ("float32", *BYTES, "int16")


def _kind(value: Value) -> Kind:
    return Kind(value.array.dtype.name, value.scale, value.zero_point)


def _out(g: RandomGraph, value: Value, *, is_same: float = 0.3) -> Kind:
    """Return the kind of a result: the type of `value`, with the same quantization or another one."""
    return _kind(value) if g.chance(is_same) else g.kind(value.array.dtype.name)


def _unary(g: RandomGraph, dtypes: Sequence[str] = F, table: str = "", **options: Callable[[RandomGraph], Any]) -> Call:
    data = g.pick(dtypes)
    return Call([data], [_out(g, data)], table, {name: draw(g) for name, draw in options.items()})


def _fixed_output(g: RandomGraph, scale: float, zero_point: dict[str, int], **given: Any) -> Call:
    call = _unary(g, ("float32", *zero_point), **given)
    dtype = call.outputs[0].dtype
    return (
        call._replace(outputs=[Kind(dtype, scale if dtype != "int16" else 1 / 32768, zero_point[dtype])])
        if (dtype in zero_point)
        else call
    )


def _moved(g: RandomGraph, data: Value, *more: Value, table: str = "", **options: Any) -> Call:
    return Call([data, *more], [_kind(data)], table, options)


def _activation(g: RandomGraph) -> int:
    return int(g.one_of((0, 0, 1, 2, 3)))


def _binary(g: RandomGraph, dtypes: Sequence[str], table: str = "", has_activation: bool = False) -> Call:
    first = g.pick(dtypes)
    second = g.broadcast_partner(first)
    pair = [first, second] if g.chance() else [second, first]
    options = {"FusedActivationFunction": _activation(g)} if has_activation else {}
    return Call(pair, [_out(g, first)], table, options)


def _atan2(g: RandomGraph) -> Call:
    first = g.pick(F)
    return Call([first, g.like(first)], [_kind(first)])  # LiteRT does not broadcast: it reads what is beyond one


def _comparison(g: RandomGraph) -> Call:
    first = g.pick(NUMBERS)
    return Call([first, g.broadcast_partner(first)], [Kind("bool")])


def _same_kind_binary(g: RandomGraph, dtypes: Sequence[str], table: str = "") -> Call:
    first = g.pick(dtypes)
    second = g.broadcast_partner(first)._replace(scale=first.scale, zero_point=first.zero_point)
    known = any(value.name == second.name for value in g.values)
    if known and second not in g.values:
        raise Discard
    return Call([first, second], [_kind(first)], table)


def _prelu(g: RandomGraph) -> Call:
    data = g.pick(REALS, rank=range(1, 5))
    shape = [1] * (data.array.ndim - 1) + [data.array.shape[-1]]
    return Call(
        [data, g.new(g.elements(data.array.dtype.name, shape[-g.number(1, len(shape)) :]), True)], [_out(g, data)]
    )


def _add_n(g: RandomGraph) -> Call:
    first = g.pick(("float32", "int32"))
    return Call([first, *(g.like(first) for _ in range(g.number(1, 2)))], [_kind(first)])


def _select(g: RandomGraph, broadcasts: bool) -> Call:
    first = g.pick(ANY)
    second = (g.broadcast_partner(first) if broadcasts else g.like(first))._replace(
        scale=first.scale, zero_point=first.zero_point
    )
    if any(value.name == second.name and value != second for value in g.values):
        raise Discard
    condition = g.pick(("bool",), shape=first.array.shape)
    return Call([condition, first, second], [_kind(first)])


def _cast(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int32", "int64", "bool"))
    return Call([data], [Kind(g.one_of(("float32", "int32", "int64", "bool")))], "CastOptions")


def _quantize(g: RandomGraph) -> Call:
    data = g.pick(("float32", *BYTES))
    return Call([data], [g.kind(g.one_of(BYTES))], "QuantizeOptions")


def _dequantize(g: RandomGraph) -> Call:
    return Call([g.pick((*BYTES, "int16"))], [Kind("float32")], "DequantizeOptions")


# ------------------------------------------------------------------------------------------------- reductions


def _reduce(g: RandomGraph, dtypes: Sequence[str] = NUMBERS) -> Call:
    data = g.pick(dtypes, rank=range(1, 5))
    axes = [int(axis) for axis in g.rng.permutation(data.array.ndim)[: g.number(1, data.array.ndim)]]
    axes = [axis - data.array.ndim if g.chance(0.3) else axis for axis in axes]
    place = g.plain(axes[0] if len(axes) == 1 and g.chance(0.3) else axes)
    return Call([data, place], [_out(g, data, is_same=0.6)], "ReducerOptions", {"KeepDims": g.chance()})


def _arg(g: RandomGraph, table: str) -> Call:
    data = g.pick(("float32", "int8", "uint8", "int32"), rank=range(1, 5))
    return Call([data, g.plain(g.axis(data.array.ndim))], [Kind("int32")], table, {"OutputType": 2})


def _cumsum(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int32", "int64"), rank=range(1, 5))
    options = {"Exclusive": g.chance(), "Reverse": g.chance()}
    return Call([data, g.plain(g.axis(data.array.ndim))], [_kind(data)], "CumsumOptions", options)


def _top_k(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int32", *BYTES), rank=range(1, 5))
    count = g.plain(g.number(1, max(1, data.array.shape[-1])))
    return Call([data, count], [_kind(data), Kind("int32")], "TopKV2Options")


# ---------------------------------------------------------------------------------------------------- products


def _window(g: RandomGraph) -> dict[str, Any]:
    strides = {"StrideW": g.number(1, 2), "StrideH": g.number(1, 2)}
    return {"Padding": g.number(0, 1), **strides, "FusedActivationFunction": _activation(g)}


def _kernel(g: RandomGraph, data: Value) -> tuple[int, int]:
    return g.number(1, max(1, min(3, data.array.shape[1]))), g.number(1, max(1, min(3, data.array.shape[2])))


def _weights(g: RandomGraph, data: Value, shape: Sequence[int]) -> Value:
    dtype = data.array.dtype.name
    if dtype == "float32":
        return g.new(g.rng.standard_normal(tuple(shape)).astype(np.float32), True)
    symmetric = g.new(g.rng.integers(-127, 128, tuple(shape)).astype(np.int8), True)._replace(zero_point=0)
    if dtype != "uint8":
        return symmetric
    return g.new(g.rng.integers(0, 256, tuple(shape)).astype(np.uint8), True)


def _bias(g: RandomGraph, data: Value, weights: Value, count: int) -> Value | None:
    if g.chance(0.3):
        return None
    if not data.scale:
        return g.new(g.rng.standard_normal(count).astype(np.float32), True)
    numbers = g.rng.integers(-500, 500, count).astype(np.int32)
    return g.new(numbers, True)._replace(scale=float(np.float32(data.scale) * np.float32(weights.scale)))


_PRODUCTS = ("float32", "int8", "uint8")


def _conv(g: RandomGraph) -> Call:
    data = g.pick(_PRODUCTS, rank=4)
    channels, outputs = data.array.shape[3], g.number(1, 4)
    weights = _weights(g, data, (outputs, *_kernel(g, data), channels))
    dilations = {"DilationWFactor": g.number(1, 2), "DilationHFactor": g.number(1, 2)}
    inputs = [data, weights, _bias(g, data, weights, outputs)]
    return Call(inputs, [_out(g, data)], "Conv2DOptions", {**_window(g), **dilations})


def _depthwise(g: RandomGraph) -> Call:
    data = g.pick(_PRODUCTS, rank=4)
    multiplier = g.number(1, 2)
    outputs = data.array.shape[3] * multiplier
    weights = _weights(g, data, (1, *_kernel(g, data), outputs))
    options = {**_window(g), "DepthMultiplier": multiplier, "DilationWFactor": 1, "DilationHFactor": 1}
    options["StrideH"] = options["StrideW"]
    inputs = [data, weights, _bias(g, data, weights, outputs)]
    return Call(inputs, [_out(g, data)], "DepthwiseConv2DOptions", options)


def _transpose_conv(g: RandomGraph) -> Call:
    data = g.pick(_PRODUCTS, rank=4)
    batch, height, width, channels = data.array.shape
    stride, kernel, outputs = g.number(1, 2), g.number(1, 3), g.number(1, 3)
    is_valid = g.chance()
    extra = max(kernel - stride, 0) if is_valid else 0
    shape = g.plain([batch, height * stride + extra, width * stride + extra, outputs])
    weights = _weights(g, data, (outputs, kernel, kernel, channels))
    options = {"Padding": int(is_valid), "StrideW": stride, "StrideH": stride}
    return Call([shape, weights, data], [_out(g, data)], "TransposeConvOptions", options)


def _fully_connected(g: RandomGraph) -> Call:
    data = g.pick(_PRODUCTS, rank=range(1, 5))
    depth, outputs = data.array.shape[-1], g.number(1, 5)
    weights = _weights(g, data, (outputs, depth))
    options = {"FusedActivationFunction": _activation(g), "KeepNumDims": g.chance()}
    inputs = [data, weights, _bias(g, data, weights, outputs)]
    return Call(inputs, [_out(g, data)], "FullyConnectedOptions", options)


def _batch_matmul(g: RandomGraph) -> Call:
    first = g.pick(("float32", "int8"), rank=range(2, 5))
    transposes = {"AdjX": g.chance(0.3), "AdjY": g.chance(0.3)}
    depth = first.array.shape[-2 if transposes["AdjX"] else -1]
    batch = [1 if g.chance(0.3) else extent for extent in first.array.shape[:-2]]
    batch = batch[g.number(0, len(batch)) :]
    columns = g.number(1, 4)
    shape = (*batch, columns, depth) if transposes["AdjY"] else (*batch, depth, columns)
    return Call([first, g.like(first, shape)], [_out(g, first)], "BatchMatMulOptions", transposes)


def _pool(g: RandomGraph, dtypes: Sequence[str]) -> Call:
    data = g.pick(dtypes, rank=4)
    height, width = _kernel(g, data)
    return Call([data], [_kind(data)], "Pool2DOptions", {**_window(g), "FilterHeight": height, "FilterWidth": width})


# ---------------------------------------------------------------------------------------------------- movement


def _concat(g: RandomGraph) -> Call:
    first = g.pick(ANY, rank=range(1, 5))
    axis = g.axis(first.array.ndim)
    others = []
    for _ in range(g.number(1, 2)):
        shape = list(first.array.shape)
        shape[axis] = g.number(1, 3)
        others.append(g.like(first, shape))
    return Call([first, *others], [_kind(first)], "ConcatenationOptions", {"Axis": axis})


def _pack(g: RandomGraph) -> Call:
    first = g.pick(ANY, rank=range(4))
    count = g.number(1, 3)
    axis = g.number(-first.array.ndim - 1, first.array.ndim)
    values = [first, *(g.like(first) for _ in range(count - 1))]
    return Call(values, [_kind(first)], "PackOptions", {"Axis": axis, "ValuesCount": count})


def _unpack(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(1, 5))
    axis = g.axis(data.array.ndim)
    count = data.array.shape[axis]
    if not count:
        raise Discard
    return Call([data], [_kind(data)] * count, "UnpackOptions", {"Axis": axis, "Num": count})


def _split(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int8", "uint8", "int32", "int16"), rank=range(1, 5))
    axis = g.axis(data.array.ndim)
    count = int(g.one_of([n for n in (1, 2, 3) if data.array.shape[axis] % n == 0]))
    return Call([g.plain(axis), data], [_kind(data)] * count, "SplitOptions", {"NumSplits": count})


def _split_v(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int8", "uint8", "int32", "int64"), rank=range(1, 5))
    axis = g.axis(data.array.ndim)
    cut = g.number(0, data.array.shape[axis])
    sizes = g.plain([cut, data.array.shape[axis] - cut])
    return Call([data, sizes, g.plain(axis)], [_kind(data)] * 2, "SplitVOptions", {"NumSplits": 2})


def _reshape(g: RandomGraph) -> Call:
    data = g.pick(ANY)
    rest, shape = data.array.size, []
    for _ in range(g.number(0, 3)):
        factor = int(g.one_of([n for n in range(1, 9) if rest and rest % n == 0] or [1]))
        shape.append(factor)
        rest //= factor
    shape.insert(g.number(0, len(shape)), rest)
    if data.array.size and g.chance(0.4):
        shape[g.number(0, len(shape) - 1)] = -1
    return _moved(g, data, g.plain(shape), table="ReshapeOptions", NewShape=shape)


def _squeeze(g: RandomGraph) -> Call:
    data = g.pick(ANY)
    ones = [axis for axis, extent in enumerate(data.array.shape) if extent == 1 and g.chance(0.7)]
    return _moved(g, data, table="SqueezeOptions", SqueezeDims=ones)


def _expand_dims(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(5))
    return _moved(g, data, g.plain(g.number(-data.array.ndim - 1, data.array.ndim)), table="ExpandDimsOptions")


def _transpose(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(1, 6))
    return _moved(g, data, g.plain(g.rng.permutation(data.array.ndim)), table="TransposeOptions")


def _pad(g: RandomGraph, has_value: bool = False, table: str = "PadOptions", **options: Any) -> Call:
    data = g.pick(("float32", "int8", "uint8", "int32"), rank=range(1, 5))
    pads = g.plain(g.rng.integers(0, 3 if not options else 2, (data.array.ndim, 2)))
    if not has_value:
        return _moved(g, data, pads, table=table, **options)
    value = g.plain(g.elements(data.array.dtype.name, ()), data.array.dtype.name)
    return _moved(g, data, pads, value._replace(scale=data.scale, zero_point=data.zero_point), table="PadV2Options")


def _mirror_pad(g: RandomGraph) -> Call:
    return _pad(g, table="MirrorPadOptions", Mode=g.number(0, 1))


def _slice(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(1, 5))
    begin = [g.number(0, max(0, extent - 1)) for extent in data.array.shape]
    size = [-1 if g.chance(0.3) else g.number(1, max(1, e - b)) for e, b in zip(data.array.shape, begin, strict=True)]
    return _moved(g, data, g.plain(begin), g.plain(size), table="SliceOptions")


def _strided_slice(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(1, 5))
    rank = data.array.ndim
    steps = [int(g.one_of((1, 1, 2, -1, -2))) for _ in range(rank)]
    begin = [g.number(-extent - 1, extent) for extent in data.array.shape]
    end = [g.number(-extent - 1, extent + 1) for extent in data.array.shape]
    masks = {name: g.number(0, 2**rank - 1) for name in ("BeginMask", "EndMask")}
    masks["ShrinkAxisMask"] = g.number(0, 2**rank - 1) if g.chance(0.2) else 0
    for axis, extent in enumerate(data.array.shape):
        if masks["ShrinkAxisMask"] >> axis & 1 and extent:  # LiteRT reads what is beyond the tensor
            begin[axis], steps[axis] = g.number(-extent, extent - 1), 1
            masks["BeginMask"] &= ~(1 << axis)
    return _moved(g, data, *map(g.plain, (begin, end, steps)), table="StridedSliceOptions", **masks)


def _gather(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(1, 5))
    axis = g.axis(data.array.ndim)
    if not data.array.size:
        raise Discard
    indices = g.integers(("int32", "int64"), g.shape(g.number(0, 2)), 0, data.array.shape[axis] - 1)
    return _moved(g, data, indices, table="GatherOptions", Axis=axis)


def _gather_nd(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int8", "uint8", "int32", "int64"), rank=range(1, 5))
    depth = g.number(1, data.array.ndim)
    if not data.array.size:
        raise Discard
    leading = g.shape(g.number(0, 2))
    columns = [g.rng.integers(0, extent, leading) for extent in data.array.shape[:depth]]
    return _moved(g, data, g.new(np.stack(columns, axis=-1).astype(np.int32)), table="GatherNdOptions")


def _scatter_nd(g: RandomGraph) -> Call:
    shape = [g.number(1, 4) for _ in range(g.number(1, 3))]
    depth = g.number(1, len(shape))
    places = int(np.prod(shape[:depth]))
    chosen = g.rng.permutation(places)[: g.number(1, places)]
    indices = np.stack(np.unravel_index(chosen, shape[:depth]), axis=-1).astype(np.int32)
    updates = g.pick(("float32", "int32", "int64", "bool"), shape=(len(chosen), *shape[depth:]))
    return Call([g.plain(indices), updates, g.plain(shape)], [_kind(updates)], "ScatterNdOptions")


def _tile(g: RandomGraph) -> Call:
    data = g.pick(ANY, rank=range(1, 5))
    return _moved(g, data, g.plain([int(g.one_of((1, 1, 2, 3))) for _ in data.array.shape]), table="TileOptions")


def _broadcast_to(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int32", "int8", "bool"), rank=range(1, 5))
    shape = [g.number(1, 3) if extent == 1 else extent for extent in data.array.shape]
    return _moved(g, data, g.plain([*g.shape(g.number(0, 1)), *shape]), table="BroadcastToOptions")


def _reverse(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int32", "int64", "uint8", "bool"), rank=range(1, 5))
    return _moved(g, data, g.plain([g.number(0, data.array.ndim - 1)]), table="ReverseV2Options")


def _one_hot(g: RandomGraph) -> Call:
    depth, name = g.number(1, 5), str(g.one_of(("float32", "int32", "bool")))
    indices = g.integers(("int32",), g.shape(g.number(1, 3)), -1, depth)
    on_off = [g.plain(number, name) for number in (1, 0)]
    axis = g.number(-1, indices.array.ndim)
    return Call([indices, g.plain(depth), *on_off], [Kind(name)], "OneHotOptions", {"Axis": axis})


def _space(g: RandomGraph, table: str, is_depth: bool) -> Call:
    size = g.number(1, 3)
    channels = size * size * g.number(1, 2) if is_depth else g.number(1, 2)
    extents = [g.number(1, 3) if is_depth else size * g.number(1, 3) for _ in range(2)]
    data = g.pick(("float32", "int8", "uint8", "int32"), shape=(g.number(1, 2), *extents, channels))
    return _moved(g, data, table=table, BlockSize=size)


def _resize(g: RandomGraph, table: str) -> Call:
    data = g.pick(("float32", "int8", "uint8"), rank=4)
    sizes = g.plain([g.number(1, 7), g.number(1, 7)])
    flags = g.one_of(((False, False), (True, False), (False, True)))
    return _moved(g, data, sizes, table=table, AlignCorners=flags[0], HalfPixelCenters=flags[1])


def _fill(g: RandomGraph) -> Call:
    value = g.pick(("float32", "int32", "int64", "bool"), shape=())
    return Call([g.plain(g.shape(g.number(1, 3))), value], [_kind(value)], "FillOptions")


def _shape_of(g: RandomGraph) -> Call:
    return Call([g.pick(ANY, rank=range(1, 5))], [Kind("int32")], "ShapeOptions", {"OutType": 2})


def _reverse_sequence(g: RandomGraph) -> Call:
    data = g.pick(("float32", "int32", "uint8"), rank=range(2, 5))
    lengths = g.integers(("int32",), (data.array.shape[0],), 1, max(1, data.array.shape[1]))
    return _moved(g, data, lengths, table="ReverseSequenceOptions", SeqDim=1, BatchDim=0)


_OUT_LOGISTIC = {"int8": -128, "uint8": 0, "int16": 0}
_OUT_TANH = {"int8": 0, "uint8": 128, "int16": 0}

OPERATORS: dict[str, Rule] = {
    **dict.fromkeys(("COS", "FLOOR", "SIN", "SIGN"), _unary),
    **{name: partial(_unary, dtypes=("float32", "int8", "int16")) for name in ("EXP", "LOG", "SQRT", "RSQRT")},
    "ABS": partial(_unary, dtypes=("float32", "int8", "int16", "int32")),
    "NEG": partial(_unary, dtypes=("float32", "int32", "int64"), table="NegOptions"),
    "SQUARE": partial(_unary, table="SquareOptions"),
    **{name: partial(_unary, dtypes=REALS) for name in ("RELU", "RELU6", "RELU_N1_TO_1")},
    "RELU_0_TO_1": partial(_unary, dtypes=("float32", *BYTES)),
    "LEAKY_RELU": partial(
        _unary, dtypes=REALS, table="LeakyReluOptions", Alpha=lambda g: float(g.one_of((0.0, 0.1, 0.5, 1.5, -0.5)))
    ),
    "HARD_SWISH": partial(_unary, dtypes=("float32", *BYTES), table="HardSwishOptions"),
    "GELU": partial(_unary, dtypes=F, table="GeluOptions", Approximate=lambda g: g.chance()),
    "LOGISTIC": partial(_fixed_output, scale=1 / 256, zero_point=_OUT_LOGISTIC),
    "TANH": partial(_fixed_output, scale=1 / 128, zero_point=_OUT_TANH),
    "SOFTMAX": partial(
        _fixed_output, scale=1 / 256, zero_point={"int8": -128, "uint8": 0}, table="SoftmaxOptions",
        Beta=lambda g: float(g.one_of((1.0, 0.5, 2.0))),
    ),
    "LOG_SOFTMAX": partial(_fixed_output, scale=16 / 256, zero_point={"int8": 127, "uint8": 255}),
    "L2_NORMALIZATION": partial(
        _fixed_output, scale=1 / 128, zero_point={"int8": 0, "uint8": 128}, table="L2NormOptions"
    ),
    "LOGICAL_NOT": partial(_unary, dtypes=("bool",)),
    "ZEROS_LIKE": partial(_unary, dtypes=("float32", "int32", "int64"), table="ZerosLikeOptions"),
    **{
        name: partial(_binary, dtypes=NUMBERS, table=f"{name.title()}Options", has_activation=True)
        for name in ("ADD", "SUB", "MUL")
    },
    "DIV": partial(_binary, dtypes=("float32", "uint8", "int32"), table="DivOptions", has_activation=True),
    "POW": partial(_binary, dtypes=("float32", "int32"), table="PowOptions"),
    "FLOOR_DIV": partial(_binary, dtypes=("float32", "int32"), table="FloorDivOptions"),
    "FLOOR_MOD": partial(_binary, dtypes=("float32", "int32", "int64"), table="FloorModOptions"),
    "SQUARED_DIFFERENCE": partial(_binary, dtypes=("float32", "int32", "int8"), table="SquaredDifferenceOptions"),
    "ATAN2": _atan2,
    "MAXIMUM": partial(_same_kind_binary, dtypes=NUMBERS, table="MaximumMinimumOptions"),
    "MINIMUM": partial(_same_kind_binary, dtypes=NUMBERS, table="MaximumMinimumOptions"),
    **{name: partial(_binary, dtypes=("bool",)) for name in ("LOGICAL_AND", "LOGICAL_OR")},
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"), _comparison),
    "PRELU": _prelu, "ADD_N": _add_n, "SELECT": partial(_select, broadcasts=False),
    "SELECT_V2": partial(_select, broadcasts=True), "CAST": _cast, "QUANTIZE": _quantize, "DEQUANTIZE": _dequantize,
    **dict.fromkeys(("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN"), _reduce),
    "REDUCE_PROD": partial(_reduce, dtypes=("float32", "int32", "int64")),
    **{name: partial(_reduce, dtypes=("bool",)) for name in ("REDUCE_ANY", "REDUCE_ALL")},
    "ARG_MAX": partial(_arg, table="ArgMaxOptions"), "ARG_MIN": partial(_arg, table="ArgMinOptions"),
    "CUMSUM": _cumsum, "TOPK_V2": _top_k, "CONV_2D": _conv, "DEPTHWISE_CONV_2D": _depthwise,
    "TRANSPOSE_CONV": _transpose_conv, "FULLY_CONNECTED": _fully_connected, "BATCH_MATMUL": _batch_matmul,
    **{name: partial(_pool, dtypes=("float32", *BYTES)) for name in ("AVERAGE_POOL_2D", "MAX_POOL_2D")},
    "L2_POOL_2D": partial(_pool, dtypes=F), "CONCATENATION": _concat, "PACK": _pack, "UNPACK": _unpack,
    "SPLIT": _split, "SPLIT_V": _split_v, "RESHAPE": _reshape, "SQUEEZE": _squeeze, "EXPAND_DIMS": _expand_dims,
    "TRANSPOSE": _transpose, "PAD": _pad, "PADV2": partial(_pad, has_value=True), "MIRROR_PAD": _mirror_pad,
    "SLICE": _slice, "STRIDED_SLICE": _strided_slice, "GATHER": _gather, "GATHER_ND": _gather_nd,
    "SCATTER_ND": _scatter_nd, "TILE": _tile, "BROADCAST_TO": _broadcast_to, "REVERSE_V2": _reverse,
    "ONE_HOT": _one_hot, "FILL": _fill, "SHAPE": _shape_of, "REVERSE_SEQUENCE": _reverse_sequence,
    "DEPTH_TO_SPACE": partial(_space, table="DepthToSpaceOptions", is_depth=True),
    "SPACE_TO_DEPTH": partial(_space, table="SpaceToDepthOptions", is_depth=False),
    "RESIZE_BILINEAR": partial(_resize, table="ResizeBilinearOptions"),
    "RESIZE_NEAREST_NEIGHBOR": partial(_resize, table="ResizeNearestNeighborOptions"),
}  # fmt: skip
"""A function for each operator; all have the same weight."""


def generate(seed: int) -> RandomGraph:
    """Return the graph of a seed, of 2 to 6 operators."""
    graph = RandomGraph(seed)
    grow(graph, OPERATORS, NODES)
    return graph
