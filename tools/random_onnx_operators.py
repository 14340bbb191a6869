"""The operators of random ONNX graphs: a function for each one draws a node, with all attributes of its definition.

`OPERATORS` has every operator of ONNX on tensors of numbers that ONNX Runtime runs on the CPU, except control flow and
random numbers. A function may draw a node that ONNX Runtime refuses: it is drawn again then. The module is
long because it is one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from random_choices import Discard, Value
from random_onnx import FLOATS, Call, RandomGraph

Rule: TypeAlias = Callable[[RandomGraph], Call]

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_EXTENTS = (1, 2, 3, 4)
_SPATIAL = range(3, 6)  # ranks of images: 1 to 3 spatial dimensions


def _alpha(g: RandomGraph) -> float:
    return float(np.float32(g.one_of((0.0, 0.01, 0.2, 0.5, 1.0, 1.5, 2.0, -0.5))))


def _unary(g: RandomGraph, operator: str, **attributes: Callable[[RandomGraph], Any]) -> Call:
    drawn = {name: partial(draw, g) for name, draw in attributes.items()}
    return Call([g.pick(g.types(operator))], g.some(**drawn))


def _binary(g: RandomGraph, operator: str) -> Call:
    first = g.pick(g.types(operator))
    pair = [first, g.broadcast_partner(first)]
    return Call(pair[:: g.one_of((1, -1))])


def _variadic(g: RandomGraph, operator: str) -> Call:
    first = g.pick(g.types(operator))
    return Call([first, *(g.broadcast_partner(first) for _ in range(g.number(0, 2)))])


def _pow(g: RandomGraph) -> Call:
    base = g.pick(g.types("Pow"))
    exponent = g.broadcast_partner(base)
    if g.opset >= 12 and g.chance():
        exponent = g.new(g.elements(g.one_of(g.types("Pow", 1)), exponent.array.shape))
    if g.chance(0.6):
        exponent = g.new(g.rng.integers(-2, 4, exponent.array.shape).astype(exponent.array.dtype))
    return Call([base, exponent])


def _mod(g: RandomGraph) -> Call:
    call = _binary(g, "Mod")
    first = call.inputs[0]
    is_float = first is not None and first.array.dtype.kind == "f"
    return Call(call.inputs, {"fmod": 1} if is_float else g.some(fmod=lambda: g.number(0, 1)))


def _bit_shift(g: RandomGraph) -> Call:
    first = g.pick(g.types("BitShift"))
    amount = g.rng.integers(0, 8, first.array.shape).astype(first.array.dtype)
    return Call([first, g.new(amount)], {"direction": g.one_of(("LEFT", "RIGHT"))})


def _clip(g: RandomGraph) -> Call:
    data = g.pick(g.types("Clip"))
    if g.opset < 11:
        return Call([data], g.some(min=lambda: _alpha(g) - 1, max=lambda: _alpha(g) + 1))
    name = data.array.dtype.name
    low, high = (g.new(g.elements(name, ())) if g.chance(0.7) else None for _ in range(2))
    return Call([data, low, high])


def _prelu(g: RandomGraph) -> Call:
    data = g.pick(g.types("PRelu"))
    shape = [1 if g.chance(0.4) else extent for extent in data.array.shape]
    return Call([data, g.like(data, shape[g.number(0, len(shape)) :])])


def _where(g: RandomGraph) -> Call:
    first = g.pick(g.types("Where", 1))
    second = g.broadcast_partner(first)
    shape = np.broadcast_shapes(first.array.shape, second.array.shape)
    return Call([g.pick(("bool",), shape=shape[g.number(0, len(shape)) :]), first, second])


def _cast(g: RandomGraph) -> Call:
    from onnx import helper

    targets = (*FLOATS, "int32", "int64", "int8", "uint8", "int16", "uint16", "uint32", "bool")
    target = np.dtype(g.one_of(("float32", "int32", "float16", "bool", *targets)))
    return Call([g.pick(g.types("Cast"))], {"to": int(helper.np_dtype_to_tensor_dtype(target))})


def _cast_like(g: RandomGraph) -> Call:
    return Call([g.pick(g.types("CastLike")), g.pick(("float32", "int32", "float16", "bool", "uint8"))])


def _is_inf(g: RandomGraph) -> Call:
    flag = partial(g.number, 0, 1)
    return Call([g.pick(g.types("IsInf"))], g.some(detect_negative=flag, detect_positive=flag))


# ------------------------------------------------------------------------------------------------------- reductions


def _reduce(g: RandomGraph, operator: str) -> Call:
    data = g.pick(g.types(operator))
    axes = g.axes(data.array.ndim) if data.array.ndim and g.chance(0.75) else None
    attributes = g.some(keepdims=lambda: g.number(0, 1))
    as_input = g.opset >= (13 if operator == "ReduceSum" else 18)
    if as_input:
        attributes |= g.some(noop_with_empty_axes=lambda: g.number(0, 1))
        return Call([data, None if axes is None else g.constant(axes)], attributes)
    return Call([data], attributes | ({} if axes is None else {"axes": axes}))


def _arg(g: RandomGraph, operator: str) -> Call:
    data = g.pick(g.types(operator), rank=range(1, 6))
    attributes = g.some(axis=lambda: g.axis(data.array.ndim), keepdims=lambda: g.number(0, 1))
    attributes |= g.some(select_last_index=lambda: g.number(0, 1)) if g.opset >= 12 else {}
    return Call([data], attributes)


def _along_axis(g: RandomGraph, operator: str, **attributes: Callable[[RandomGraph], Any]) -> Call:
    data = g.pick(g.types(operator), rank=range(1, 6))
    drawn = {name: partial(draw, g) for name, draw in attributes.items()}
    return Call([data], g.some(axis=lambda: g.axis(data.array.ndim), **drawn))


def _cumsum(g: RandomGraph) -> Call:
    data = g.pick(g.types("CumSum"), rank=range(1, 6))
    axis = g.constant(g.number(-data.array.ndim, data.array.ndim - 1), g.one_of(("int32", "int64")))
    return Call([data, axis], g.some(exclusive=lambda: g.number(0, 1), reverse=lambda: g.number(0, 1)))


def _top_k(g: RandomGraph) -> Call:
    data = g.pick(g.types("TopK"), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    count = g.number(0 if g.chance(0.05) else 1, max(data.array.shape[axis], 1))
    attributes: dict[str, Any] = {"axis": axis} if axis != -1 or g.chance() else {}
    if g.opset < 10:
        return Call([data], {**attributes, "k": count}, 2)
    if g.opset >= 11:
        attributes |= g.some(largest=lambda: g.number(0, 1))
    return Call([data, g.constant([count])], attributes, 2)


# --------------------------------------------------------------------------------------------------------- products


def _matmul(g: RandomGraph, operator: str = "MatMul") -> Call:
    first = g.pick(g.types(operator), rank=range(1, 6))
    depth = first.array.shape[-1]
    batch = [1 if g.chance(0.3) else extent for extent in first.array.shape[:-2]]
    batch = batch[g.number(0, len(batch)) :]
    shape = (depth,) if g.chance(0.1) else (*batch, depth, int(g.one_of((1, 2, 3, 5, 8))))
    second = g.pick(g.types(operator, 1), shape=shape)
    if operator == "MatMul":
        second = g.like(first, shape)
        return Call([first, second])
    zeros = [_zero_point(g, each) for each in (first, second)]
    return Call([first, second, *zeros])


def _zero_point(g: RandomGraph, value: Value) -> Value | None:
    name = value.array.dtype.name
    return g.constant(g.number(0, 20), name) if g.chance(0.7) else None


def _gemm(g: RandomGraph) -> Call:
    transposes = [g.number(0, 1), g.number(0, 1)]
    first = g.pick(g.types("Gemm"), rank=2)
    rows, depth = first.array.shape[:: -1 if transposes[0] else 1]
    columns = int(g.one_of((1, 2, 3, 5)))
    second = g.like(first, (columns, depth) if transposes[1] else (depth, columns))
    shapes = [(rows, columns), (columns,), (1, columns), (rows, 1), (1,), ()]
    third = g.like(first, g.one_of(shapes)) if g.opset < 11 or g.chance(0.7) else None
    attributes = g.some(alpha=lambda: _alpha(g), beta=lambda: _alpha(g))
    return Call([first, second, third], {"transA": transposes[0], "transB": transposes[1], **attributes})


_EQUATIONS = (
    "ij,jk->ik", "ij,jk", "bij,bjk->bik", "...ij,...jk->...ik", "ii->i", "ii", "ij->ji", "ij->", "ij->j", "i,j->ij",
    "i,i->", "bi,i->b", "...k,kd->...d", "bhid,bhjd->bhij", "bij,bkj->bik", "ij,ij->ij", "ij,jk,kl->il", "...->...",
    "abc->cab", "ij,kj->ik", "bii->bi", "i,ij,j->", "...i->...",
)  # fmt: skip


def _einsum(g: RandomGraph) -> Call:
    equation = str(g.one_of(_EQUATIONS))
    terms = equation.split("->")[0].split(",")
    extents = {letter: int(g.one_of((1, 2, 3, 4))) for letter in sorted(set(equation)) if letter.isalpha()}
    ellipsis = g.shape(g.number(0, 2))
    shapes = [
        (*(ellipsis if "..." in term else ()), *(extents[letter] for letter in term if letter.isalpha()))
        for term in terms
    ]
    first = g.pick(g.types("Einsum"), shape=shapes[0])
    return Call([first, *(g.like(first, shape) for shape in shapes[1:])], {"equation": equation})


def _q_linear_matmul(g: RandomGraph) -> Call:
    rows, depth, columns = (int(g.one_of((1, 2, 3, 5))) for _ in range(3))
    kind = "uint8" if g.chance(0.7) else "int8"
    first, second = g.pick((kind,), shape=(rows, depth)), g.pick((kind,), shape=(depth, columns))
    scales = [_scale(g) for _ in range(3)]
    zeros = [g.constant(g.number(0, 20), kind) for _ in range(3)]
    return Call([first, scales[0], zeros[0], second, scales[1], zeros[1], scales[2], zeros[2]])


def _scale(g: RandomGraph, shape: Sequence[int] = (), dtype: str = "float32") -> Value:
    return g.new(np.asarray(2.0 ** g.rng.uniform(-6, 0, tuple(shape))).astype(dtype), True)


# ------------------------------------------------------------------------------------------- convolutions and pools


def _windows(g: RandomGraph, spatial: Sequence[int], kernel: Sequence[int], dilates: bool = True) -> dict[str, Any]:
    """Return attributes of a window: padding, strides and dilations."""
    rank = len(spatial)
    found: dict[str, Any] = g.some(strides=lambda: [g.number(1, 3) for _ in range(rank)])
    if dilates:
        found |= g.some(dilations=lambda: [int(g.one_of((1, 1, 2, 3))) for _ in range(rank)])
    kind = g.one_of(("none", "pads", "pads", "auto"))
    if kind == "pads":
        found["pads"] = [g.number(0, max(0, kernel[axis % rank] - 1)) for axis in range(2 * rank)]
    elif kind == "auto":
        found["auto_pad"] = g.one_of(_AUTO_PADS)
    return found


def _kernel(g: RandomGraph, spatial: Sequence[int]) -> list[int]:
    return [g.number(1, max(1, min(3, extent))) for extent in spatial]


def _conv(g: RandomGraph, operator: str = "Conv") -> Call:
    data = g.pick(g.types(operator), rank=_SPATIAL)
    channels, spatial = data.array.shape[1], data.array.shape[2:]
    groups = int(g.one_of([n for n in (1, 1, 1, 2, 3, 4, channels) if n and channels % n == 0]))
    kernel = _kernel(g, spatial)
    outputs = groups * g.number(1, 3)
    shape = (outputs, channels // groups, *kernel)
    attributes = {**_windows(g, spatial, kernel), **({"group": groups} if groups > 1 else {})}
    attributes |= g.some(kernel_shape=kernel)
    if operator == "ConvInteger":
        weights = g.pick(g.types(operator, 1), shape=shape)
        return Call([data, weights, _zero_point(g, data), _zero_point(g, weights)], attributes)
    weights = g.like(data, shape)
    return Call([data, weights, g.like(data, (outputs,)) if g.chance() else None], attributes)


def _q_linear_conv(g: RandomGraph) -> Call:
    kind = "uint8" if g.chance(0.7) else "int8"
    data = g.pick((kind,), rank=_SPATIAL)
    channels, spatial = data.array.shape[1], data.array.shape[2:]
    kernel, outputs = _kernel(g, spatial), g.number(1, 4)
    weights = g.new(g.elements(kind, (outputs, channels, *kernel)), True)
    zeros = [g.constant(g.number(0, 20), kind) for _ in range(3)]
    per_channel = g.chance(0.3) and kind == "int8"
    if per_channel:
        zeros[1] = g.new(np.zeros(outputs, kind), True)
    scale = _scale(g, (outputs,) if per_channel else ())
    bias = g.new(g.rng.integers(-50, 50, outputs).astype(np.int32), True) if g.chance() else None
    inputs = [data, _scale(g), zeros[0], weights, scale, zeros[1], _scale(g), zeros[2], bias]
    return Call(inputs, _windows(g, spatial, kernel))


def _conv_transpose(g: RandomGraph) -> Call:
    data = g.pick(g.types("ConvTranspose"), rank=_SPATIAL)
    channels, spatial = data.array.shape[1], data.array.shape[2:]
    groups = int(g.one_of([n for n in (1, 1, 2, 3, channels) if n and channels % n == 0]))
    kernel = [g.number(1, 3) for _ in spatial]
    outputs = g.number(1, 3)
    attributes = {**_windows(g, spatial, kernel), **({"group": groups} if groups > 1 else {})}
    strides = attributes.get("strides", [1] * len(spatial))
    attributes |= g.some(kernel_shape=kernel)
    if g.chance(0.3):
        attributes["output_padding"] = [g.number(0, stride - 1) for stride in strides]
    elif g.chance(0.15):
        attributes["output_shape"] = [extent * stride for extent, stride in zip(spatial, strides, strict=True)]
    weights = g.like(data, (channels, outputs, *kernel))
    return Call([data, weights, g.like(data, (outputs * groups,)) if g.chance() else None], attributes)


def _pool(g: RandomGraph, operator: str) -> Call:
    data = g.pick(g.types(operator), rank=_SPATIAL)
    spatial = data.array.shape[2:]
    kernel = _kernel(g, spatial)
    dilates = g.opset >= {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[operator]
    attributes = {"kernel_shape": kernel, **_windows(g, spatial, kernel, dilates)}
    if g.opset >= {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}[operator]:
        attributes |= g.some(ceil_mode=lambda: g.number(0, 1))
    if operator == "AveragePool":
        attributes |= g.some(count_include_pad=lambda: g.number(0, 1))
    if operator == "LpPool":
        attributes |= g.some(p=lambda: g.number(1, 3))
    has_indices = operator == "MaxPool" and g.opset >= 8 and g.chance(0.1)
    return Call([data], attributes, 2 if has_indices else 1)


def _global_pool(g: RandomGraph, operator: str) -> Call:
    attributes = g.some(p=lambda: g.number(1, 3)) if operator == "GlobalLpPool" else {}
    return Call([g.pick(g.types(operator), rank=_SPATIAL)], attributes)


def _max_unpool(g: RandomGraph) -> Call:
    channels, extent = g.number(1, 2), 2
    data = g.pick(("float32",), shape=(1, channels, extent, extent))
    indices = np.arange(channels * 4).reshape(1, channels, 2, 2) * 4
    return Call([data, g.new(indices)], {"kernel_shape": [2, 2], "strides": [2, 2]})


def _max_roi_pool(g: RandomGraph) -> Call:
    data = g.pick(("float32",), rank=4)
    rois = np.array([[0, 0, 0, g.number(0, 3), g.number(0, 3)] for _ in range(g.number(1, 2))], np.float32)
    return Call([data, g.new(rois)], {"pooled_shape": [g.number(1, 2), g.number(1, 2)]})


def _roi_align(g: RandomGraph) -> Call:
    data = g.pick(g.types("RoiAlign"), rank=4)
    count = g.number(1, 2)
    rois = g.new((np.sort(g.rng.uniform(0, 4, (count, 2, 2)), axis=1).reshape(count, 4)).astype(data.array.dtype))
    attributes = {"output_height": g.number(1, 3), "output_width": g.number(1, 3), "sampling_ratio": 2}
    return Call([data, rois, g.new(np.zeros(count, np.int64))], {**attributes, **g.some(mode="max")})


def _col2im(g: RandomGraph) -> Call:
    rows, columns, kernel = g.number(2, 4), g.number(2, 4), [2, 2]
    data = g.pick(g.types("Col2Im"), shape=(1, 4 * g.number(1, 2), (rows - 1) * (columns - 1)))
    return Call([data, g.constant([rows, columns]), g.constant(kernel)])


def _deform_conv(g: RandomGraph) -> Call:
    channels, size = g.number(1, 2), g.number(2, 4)
    data = g.pick(("float32",), shape=(1, channels, size, size))
    weights = g.like(data, (2, channels, 2, 2))
    return Call([data, weights, g.like(data, (1, 8, size - 1, size - 1))])


# ---------------------------------------------------------------------------------------------------- normalization


def _batch_norm(g: RandomGraph) -> Call:
    data = g.pick(g.types("BatchNormalization"), rank=range(2, 6))
    channels = (data.array.shape[1],)
    variance = g.new(np.abs(g.rng.standard_normal(channels)).astype(data.array.dtype))
    inputs = [data, g.like(data, channels), g.like(data, channels), g.like(data, channels), variance]
    return Call(inputs, g.some(epsilon=lambda: g.one_of((1e-5, 1e-3)), momentum=0.8))


def _instance_norm(g: RandomGraph) -> Call:
    data = g.pick(g.types("InstanceNormalization"), rank=range(3, 6))
    channels = (data.array.shape[1],)
    inputs = [data, g.like(data, channels), g.like(data, channels)]
    return Call(inputs, g.some(epsilon=lambda: g.one_of((1e-5, 1e-3))))


def _layer_norm(g: RandomGraph) -> Call:
    data = g.pick(g.types("LayerNormalization"), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    shape = data.array.shape[axis % data.array.ndim :]
    bias = g.like(data, shape) if g.chance(0.7) else None
    return Call([data, g.like(data, shape), bias], {"axis": axis, **g.some(epsilon=lambda: g.one_of((1e-5, 1e-3)))})


def _group_norm(g: RandomGraph) -> Call:
    groups = g.number(1, 3)
    shape = (g.number(1, 2), groups * g.number(1, 2), *g.shape(g.number(1, 2)))
    data = g.pick(("float32", "float16"), shape=shape)
    per = (shape[1] if g.opset >= 21 else groups,)
    return Call([data, g.like(data, per), g.like(data, per)], {"num_groups": groups})


def _lrn(g: RandomGraph) -> Call:
    data = g.pick(g.types("LRN"), rank=4)
    attributes = g.some(alpha=lambda: abs(_alpha(g)), beta=0.75, bias=lambda: g.one_of((1.0, 2.0)))
    return Call([data], {"size": g.one_of((1, 3, 5)), **attributes})


def _mvn(g: RandomGraph) -> Call:
    data = g.pick(g.types("MeanVarianceNormalization"), rank=4)
    return Call([data], g.some(axes=lambda: sorted({axis % 4 for axis in g.axes(4)})))


def _lp_norm(g: RandomGraph) -> Call:
    return _along_axis(g, "LpNormalization", p=lambda g: g.number(1, 2))


# -------------------------------------------------------------------------------------------------------- recurrent


def _recurrent(g: RandomGraph, operator: str, gates: int) -> Call:
    steps, batch, size, hidden = g.number(1, 4), g.number(1, 3), g.number(1, 3), g.number(1, 4)
    direction = str(g.one_of(("forward", "reverse", "bidirectional")))
    count = 2 if direction == "bidirectional" else 1
    data = g.pick(("float32",), shape=(steps, batch, size))
    make = partial(_weights, g)
    inputs: list[Value | None] = [data, make((count, gates * hidden, size)), make((count, gates * hidden, hidden))]
    inputs.append(make((count, 2 * gates * hidden)) if g.chance(0.7) else None)
    inputs.append(g.new(g.rng.integers(1, steps + 1, batch).astype(np.int32)) if g.chance(0.1) else None)
    inputs.append(make((count, batch, hidden)) if g.chance() else None)
    attributes: dict[str, Any] = {"hidden_size": hidden, **g.some(direction=direction)}
    if count == 2:
        attributes["direction"] = direction
    if operator == "GRU":
        attributes |= g.some(linear_before_reset=lambda: g.number(0, 1))
    if operator == "LSTM":
        inputs.append(make((count, batch, hidden)) if g.chance() else None)
        inputs.append(make((count, 3 * hidden)) if g.chance(0.2) else None)
        attributes |= {"input_forget": 1} if g.chance(0.1) else {}
    attributes |= {"clip": 0.5} if g.chance(0.1) else {}
    if g.chance(0.2):
        functions = {"RNN": ["Relu"], "GRU": ["HardSigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Relu"]}[operator]
        attributes["activations"] = functions * count
    return Call(inputs, attributes, g.number(1, 3 if operator == "LSTM" else 2))


def _weights(g: RandomGraph, shape: Sequence[int]) -> Value:
    return g.new((g.rng.standard_normal(tuple(shape)) * 0.5).astype(np.float32), True)


# --------------------------------------------------------------------------------------------------------- movement


def _concat(g: RandomGraph) -> Call:
    first = g.pick(g.types("Concat"), rank=range(1, 6))
    axis = g.axis(first.array.ndim)
    others = []
    for _ in range(g.number(0, 2)):
        shape = list(first.array.shape)
        shape[axis] = int(g.one_of((0, 1, 2, 3))) if g.chance(0.2) else g.number(1, 3)
        others.append(g.like(first, shape))
    return Call([first, *others], {"axis": axis})


def _constant_of_shape(g: RandomGraph) -> Call:
    from onnx import numpy_helper

    value = numpy_helper.from_array(g.elements(g.one_of(("float32", "int32", "int64", "bool", "float16")), (1,)))
    return Call([g.constant(g.shape())], g.some(value=value))


def _expand(g: RandomGraph) -> Call:
    data = g.pick(g.types("Expand"))
    shape = [int(g.one_of(_EXTENTS)) if extent == 1 else g.one_of((1, extent)) for extent in data.array.shape]
    return Call([data, g.constant([*g.shape(g.number(0, 5 - len(shape)) if len(shape) < 5 else 0), *shape])])


def _flatten(g: RandomGraph) -> Call:
    data = g.pick(g.types("Flatten"))
    return Call([data], g.some(axis=lambda: g.axis(data.array.ndim) if data.array.ndim else 0))


def _gather(g: RandomGraph) -> Call:
    data = g.pick(g.types("Gather"), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    extent = data.array.shape[axis]
    low = -extent if g.opset >= 11 else 0
    if not extent:
        raise Discard
    indices = g.integers(("int32", "int64"), g.shape(g.number(0, 2)), low, extent - 1)
    return Call([data, indices], {"axis": axis} if axis or g.chance() else {})


def _gather_elements(g: RandomGraph) -> Call:
    data = g.pick(g.types("GatherElements"), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    extent = data.array.shape[axis]
    if not data.array.size:
        raise Discard
    shape = [g.number(1, each) for each in data.array.shape]
    return Call([data, g.integers(("int32", "int64"), shape, -extent, extent - 1)], {"axis": axis})


def _gather_nd(g: RandomGraph) -> Call:
    data = g.pick(g.types("GatherND"), rank=range(1, 6))
    shape = data.array.shape
    batch = g.number(0, min(2, data.array.ndim - 1)) if g.opset >= 12 and g.chance(0.3) else 0
    depth = g.number(1, data.array.ndim - batch)
    if not data.array.size:
        raise Discard
    leading = (*shape[:batch], *g.shape(g.number(0, 2)))
    columns = [g.rng.integers(-extent, extent, leading) for extent in shape[batch : batch + depth]]
    return Call([data, g.new(np.stack(columns, axis=-1))], {"batch_dims": batch} if batch else {})


def _scatter_elements(g: RandomGraph, operator: str) -> Call:
    data = g.pick(g.types(operator), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    if not data.array.size:
        raise Discard
    shape = [g.number(1, extent) for extent in data.array.shape]
    extent = data.array.shape[axis]
    indices = np.argsort(
        g.rng.random((*shape[: axis % len(shape)], extent, *shape[axis % len(shape) + 1 :])), axis=axis
    )
    taken = np.take(indices, range(shape[axis]), axis=axis)
    attributes = {"axis": axis, **(g.some(reduction=lambda: _reduction(g)) if g.opset >= 16 else {})}
    return Call([data, g.new(taken.astype(g.one_of(("int32", "int64")))), g.like(data, shape)], attributes)


def _reduction(g: RandomGraph) -> str:
    return str(g.one_of(("none", "add", "mul", *(("max", "min") if g.opset >= 18 else ()))))


def _scatter_nd(g: RandomGraph) -> Call:
    data = g.pick(g.types("ScatterND"), rank=range(1, 6))
    depth = g.number(1, data.array.ndim)
    shape = data.array.shape
    places = int(np.prod(shape[:depth]))
    if not data.array.size:
        raise Discard
    count = g.number(1, places)
    chosen = g.rng.permutation(places)[:count]
    indices = np.stack(np.unravel_index(chosen, shape[:depth]), axis=-1)
    attributes = g.some(reduction=lambda: _reduction(g)) if g.opset >= 16 else {}
    return Call([data, g.new(indices.astype(np.int64)), g.like(data, (count, *shape[depth:]))], attributes)


def _pad(g: RandomGraph) -> Call:
    data = g.pick(g.types("Pad"), rank=range(1, 6))
    rank = data.array.ndim
    modes = ("constant", "constant", "edge", "reflect", *(("wrap",) if g.opset >= 19 else ()))
    mode = str(g.one_of(modes))
    low = -1 if g.chance(0.2) else 0
    attributes = {"mode": mode} if mode != "constant" or g.chance() else {}
    if g.opset < 11:
        pads = [g.number(low, 2) for _ in range(2 * rank)]
        return Call([data], {**attributes, "pads": pads, **g.some(value=lambda: _alpha(g))})
    axes = g.axes(rank) if g.opset >= 18 and g.chance(0.4) else None
    pads = [g.number(low, 2) for _ in range(2 * (rank if axes is None else len(axes)))]
    value = g.new(g.elements(data.array.dtype.name, ()), True) if g.chance(0.6) else None
    return Call([data, g.constant(pads), value, None if axes is None else g.constant(axes)], attributes)


def _reshape(g: RandomGraph) -> Call:
    data = g.pick(g.types("Reshape"))
    size, shape = data.array.size, []
    rest = size
    for _ in range(g.number(0, 4)):
        factor = int(g.one_of([n for n in range(1, 9) if rest and rest % n == 0] or [1]))
        shape.append(factor)
        rest //= factor or 1
    shape.insert(g.number(0, len(shape)), rest)
    shape = list(data.array.shape) if not size else shape
    if size and g.chance(0.4):
        shape[g.number(0, len(shape) - 1)] = -1
    if g.chance(0.2) and shape and data.array.ndim and shape[0] == data.array.shape[0]:
        shape[0] = 0
    return Call([data, g.constant(shape)], g.some(allowzero=lambda: g.number(0, 1)) if g.opset >= 14 else {})


def _slice(g: RandomGraph) -> Call:
    data = g.pick(g.types("Slice"), rank=range(1, 6))
    axes = sorted(axis % data.array.ndim for axis in g.axes(data.array.ndim))
    starts = [g.number(-data.array.shape[axis] - 1, data.array.shape[axis]) for axis in axes]
    ends = [int(g.one_of((g.number(-9, 9), 2**31 - 1, -1))) for _ in axes]
    if g.opset < 10:
        return Call([data], {"starts": starts, "ends": ends, "axes": axes})
    if g.chance(0.4):
        steps = [int(g.one_of((1, 2, -1, -2, 3))) for _ in axes]
        ends = [g.one_of((-(2**31), -9)) if step < 0 else end for step, end in zip(steps, ends, strict=True)]
        return Call([data, *map(g.constant, (starts, ends, axes, steps))])
    return Call([data, *map(g.constant, (starts, ends, axes))])


def _split(g: RandomGraph) -> Call:
    data = g.pick(g.types("Split"), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    extent = data.array.shape[axis]
    count = g.number(1, max(1, min(3, extent)))
    if g.chance() and extent:
        cuts = sorted(int(n) for n in g.rng.integers(0, extent + 1, count - 1))
        parts = np.diff([0, *cuts, extent]).tolist()
        if g.opset < 13:
            return Call([data], {"axis": axis, "split": parts}, count)
        return Call([data, g.constant(parts)], {"axis": axis}, count)
    return Call([data], {"axis": axis, **({"num_outputs": count} if g.opset >= 18 else {})}, count)


def _squeeze(g: RandomGraph) -> Call:
    data = g.pick(g.types("Squeeze"))
    ones = [axis for axis, extent in enumerate(data.array.shape) if extent == 1]
    if not ones or g.chance(0.2):
        return Call([data])
    axes = [axis for axis in ones if g.chance(0.7)] or ones[:1]
    return Call([data], {"axes": axes}) if g.opset < 13 else Call([data, g.constant(axes)])


def _unsqueeze(g: RandomGraph) -> Call:
    data = g.pick(g.types("Unsqueeze"), rank=range(5))
    axes = [g.number(0, data.array.ndim)]
    if data.array.ndim < 4 and g.chance(0.3):
        axes.append(data.array.ndim + 1 if axes[0] <= data.array.ndim else data.array.ndim)
    return Call([data], {"axes": axes}) if g.opset < 13 else Call([data, g.constant(axes)])


def _tile(g: RandomGraph) -> Call:
    data = g.pick(g.types("Tile"))
    return Call([data, g.constant([int(g.one_of((1, 1, 2, 3))) for _ in data.array.shape])])


def _transpose(g: RandomGraph) -> Call:
    data = g.pick(g.types("Transpose"))
    return Call([data], g.some(perm=lambda: [int(axis) for axis in g.rng.permutation(data.array.ndim)]))


def _depth_to_space(g: RandomGraph) -> Call:
    size = g.number(1, 3)
    shape = (g.number(1, 2), size * size * g.number(1, 2), g.number(1, 3), g.number(1, 3))
    attributes = g.some(mode=lambda: g.one_of(("DCR", "CRD"))) if g.opset >= 11 else {}
    return Call([g.pick(g.types("DepthToSpace"), shape=shape)], {"blocksize": size, **attributes})


def _space_to_depth(g: RandomGraph) -> Call:
    size = g.number(1, 3)
    shape = (g.number(1, 2), g.number(1, 2), size * g.number(1, 3), size * g.number(1, 3))
    return Call([g.pick(g.types("SpaceToDepth"), shape=shape)], {"blocksize": size})


def _resize(g: RandomGraph) -> Call:
    data = g.pick(g.types("Resize"), rank=range(1, 6))
    shape = data.array.shape
    changed = [i for i in range(len(shape)) if (i >= len(shape) - 2 or g.chance(0.1)) and g.chance(0.8)]
    sizes = [int(g.number(1, 9)) if i in changed else extent for i, extent in enumerate(shape)]
    mode = str(g.one_of(("nearest", "nearest", "linear", "cubic")))
    scales = [float(np.float32(g.rng.uniform(0.4, 2.6))) if i in changed else 1.0 for i in range(len(shape))]
    if g.opset < 11:
        return Call([data, g.constant(scales, "float32")], {"mode": "linear" if mode == "cubic" else mode})
    modes = ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners", "tf_crop_and_resize"]
    modes += ["half_pixel_symmetric"] if g.opset >= 19 else ["tf_half_pixel_for_nn"] if g.opset < 13 else []
    attributes: dict[str, Any] = {"mode": mode, **g.some(coordinate_transformation_mode=lambda: g.one_of(modes))}
    if mode == "nearest":
        attributes |= g.some(
            nearest_mode=lambda: g.one_of(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))
        )
    if mode == "cubic":
        attributes |= g.some(cubic_coeff_a=lambda: g.one_of((-0.75, -0.5)), exclude_outside=lambda: g.number(0, 1))
    attributes |= g.some(extrapolation_value=1.5)
    if g.opset >= 18 and mode != "nearest":
        attributes |= {"antialias": 1} if g.chance(0.2) else {}
    roi = None
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = g.constant([0.1] * len(shape) + [0.9] * len(shape), "float32")
    elif g.opset < 13:
        roi = g.constant([], "float32")
    if g.chance():
        return Call([data, roi, g.constant(scales, "float32")], attributes)
    return Call([data, roi, g.constant([], "float32") if g.opset < 13 else None, g.constant(sizes)], attributes)


def _upsample(g: RandomGraph) -> Call:
    data = g.pick(g.types("Upsample"), rank=range(2, 5))
    scales = [1.0 if i < data.array.ndim - 2 else float(g.one_of((1.0, 1.5, 2.0, 3.0))) for i in range(data.array.ndim)]
    mode = {"mode": g.one_of(("nearest", "linear"))}
    return (
        Call([data], {**mode, "scales": scales}) if g.opset < 9 else Call([data, g.constant(scales, "float32")], mode)
    )


def _shape(g: RandomGraph) -> Call:
    data = g.pick(g.types("Shape"))
    ends = g.some(start=lambda: g.number(-3, 3), end=lambda: g.number(-3, 3)) if g.opset >= 15 else {}
    return Call([data], ends)


def _range(g: RandomGraph) -> Call:
    name = str(g.one_of(("float32", "int32", "int64")))
    start, step = g.number(-3, 3), int(g.one_of((1, 2, -1)))
    return Call([g.constant(number, name) for number in (start, start + step * g.number(0, 5), step)])


def _one_hot(g: RandomGraph) -> Call:
    depth = g.number(1, 6)
    name = str(g.one_of(("int32", "int64", "float32")))
    indices = g.new(g.rng.integers(-depth, depth, g.shape(g.number(1, 3))).astype(name))
    values = g.constant([0, 1] if g.chance() else [2, 5], g.one_of(("float32", "int32", "int64")))
    rank = indices.array.ndim
    return Call([indices, g.constant(depth), values], g.some(axis=lambda: g.number(-rank - 1, rank)))


def _eye_like(g: RandomGraph) -> Call:
    data = g.pick(g.types("EyeLike"), rank=2)
    return Call([data], g.some(k=lambda: g.number(-2, 2), dtype=lambda: g.one_of((1, 6, 7))))


def _trilu(g: RandomGraph) -> Call:
    data = g.pick(g.types("Trilu"), rank=range(2, 6))
    return Call([data, g.constant(g.number(-2, 2)) if g.chance() else None], g.some(upper=lambda: g.number(0, 1)))


def _reverse_sequence(g: RandomGraph) -> Call:
    data = g.pick(g.types("ReverseSequence"), rank=range(2, 6))
    batch_axis = g.number(0, 1)
    batch, steps = data.array.shape[batch_axis], data.array.shape[1 - batch_axis]
    if not steps:
        raise Discard
    lengths = g.integers(("int64",), (batch,), 1, steps)
    return Call([data, lengths], {"batch_axis": batch_axis, "time_axis": 1 - batch_axis})


def _compress(g: RandomGraph) -> Call:
    data = g.pick(g.types("Compress"), rank=range(1, 6))
    axis = g.axis(data.array.ndim)
    condition = g.new(g.rng.random(max(data.array.shape[axis], 1)) < 0.5)
    return Call([data, condition], {"axis": axis})


def _unique(g: RandomGraph) -> Call:
    data = g.pick(g.types("Unique"), rank=range(1, 4))
    return Call([data], g.some(sorted=lambda: g.number(0, 1)), g.number(1, 4))


def _center_crop_pad(g: RandomGraph) -> Call:
    data = g.pick(g.types("CenterCropPad"), rank=range(1, 5))
    return Call([data, g.constant([g.number(1, 5) for _ in data.array.shape])])


# ----------------------------------------------------------------------------------------------------- quantization


def _quantize(g: RandomGraph) -> Call:
    data = g.pick(g.types("QuantizeLinear"), rank=range(5))
    kind = str(g.one_of(("uint8", "int8", *(("uint16", "int16") if g.opset >= 21 else ()))))
    low = 0 if kind.startswith("u") else -20
    shape, attributes = _per_axis(g, data)
    zeros = g.new(g.rng.integers(low, 21, shape).astype(kind), True) if g.chance(0.8) else None
    name = "float32" if g.opset < 19 else data.array.dtype.name
    return Call([data, _scale(g, shape, name), zeros], attributes)


def _dequantize(g: RandomGraph) -> Call:
    kinds = ("uint8", "int8", "int32", *(("uint16", "int16") if g.opset >= 21 else ()))
    data = g.pick(kinds, rank=range(5))
    shape, attributes = _per_axis(g, data)
    kind = data.array.dtype.name
    zeros = g.new(g.rng.integers(0, 1 if kind == "int32" else 21, shape).astype(kind), True) if g.chance(0.7) else None
    return Call([data, _scale(g, shape), zeros], attributes)


def _per_axis(g: RandomGraph, data: Value) -> tuple[tuple[int, ...], dict[str, Any]]:
    if g.opset < 13 or not data.array.ndim or g.chance(0.6):
        return (), {}
    axis = g.axis(data.array.ndim)
    return (data.array.shape[axis],), {"axis": axis}


def _dynamic_quantize(g: RandomGraph) -> Call:
    return Call([g.pick(("float32",))], outputs=3)


# ------------------------------------------------------------------------------------------------------------ others


def _dropout(g: RandomGraph) -> Call:
    data = g.pick(g.types("Dropout"))
    count = g.number(1, 2)
    if g.opset < 12:
        return Call([data], g.some(ratio=0.3), count)
    return Call([data, g.constant(0.3, "float32") if g.chance() else None], {}, count)


def _grid_sample(g: RandomGraph) -> Call:
    data = g.pick(g.types("GridSample"), rank=4)
    batch = data.array.shape[0]
    grid = g.new(g.rng.uniform(-1.2, 1.2, (batch, g.number(1, 3), g.number(1, 3), 2)).astype(np.float32))
    return Call([data, grid], g.some(padding_mode=lambda: g.one_of(("zeros", "border", "reflection"))))


def _non_max_suppression(g: RandomGraph) -> Call:
    count = g.number(1, 5)
    boxes = np.sort(g.rng.random((1, count, 2, 2)), axis=2).reshape(1, count, 4).astype(np.float32)
    scores = g.pick(("float32",), shape=(1, g.number(1, 2), count))
    return Call([g.new(boxes), scores, g.constant([3]), g.constant([0.5], "float32")])


def _det(g: RandomGraph) -> Call:
    size = g.number(1, 4)
    return Call([g.pick(g.types("Det"), shape=(*g.shape(g.number(0, 2)), size, size))])


def _dft(g: RandomGraph) -> Call:
    data = g.pick(("float32",), shape=(g.number(1, 2), g.number(2, 6), g.number(1, 2)))
    return Call([data], g.some(inverse=lambda: g.number(0, 1)))


def _window(g: RandomGraph) -> Call:
    return Call([g.constant(g.number(1, 9))], g.some(periodic=lambda: g.number(0, 1)))


def _mel(g: RandomGraph) -> Call:
    sizes = [g.constant(g.number(1, 5)), g.constant(16), g.constant(8000)]
    return Call([*sizes, g.constant(0.0, "float32"), g.constant(4000.0, "float32")])


def _sampling_grid(g: RandomGraph) -> Call:
    theta = g.pick(("float32",), shape=(1, 2, 3))
    size = g.constant([1, 1, g.number(1, 3), g.number(1, 3)])
    return Call([theta, size], g.some(align_corners=lambda: g.number(0, 1)))


def _loss(g: RandomGraph, operator: str) -> Call:
    batch, classes = g.number(1, 3), g.number(1, 4)
    scores = g.pick(("float32",), shape=(batch, classes))
    labels = g.integers(("int32", "int64"), (batch,), 0, classes - 1)
    return Call([scores, labels], g.some(reduction=lambda: g.one_of(("none", "sum", "mean"))))


_UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Cos", "Cosh", "Erf", "Exp",
    "Floor", "HardSwish", "Identity", "IsNaN", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Sigmoid",
    "Sign", "Sin", "Sinh", "Size", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "NonZero",
)  # fmt: skip
_BINARY = (
    "Add", "Sub", "Mul", "Div", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor",
)  # fmt: skip
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")

OPERATORS: dict[str, Rule] = {
    **{name: partial(_unary, operator=name) for name in _UNARY},
    **{name: partial(_unary, operator=name, alpha=_alpha) for name in ("Elu", "Celu", "LeakyRelu", "ThresholdedRelu")},
    "Selu": partial(_unary, operator="Selu", alpha=_alpha, gamma=_alpha),
    "HardSigmoid": partial(_unary, operator="HardSigmoid", alpha=_alpha, beta=_alpha),
    "Shrink": partial(_unary, operator="Shrink", lambd=_alpha, bias=_alpha),
    "Gelu": partial(_unary, operator="Gelu", approximate=lambda g: g.one_of(("none", "tanh"))),
    **{name: partial(_binary, operator=name) for name in _BINARY},
    **{name: partial(_variadic, operator=name) for name in ("Max", "Min", "Mean", "Sum")},
    "Pow": _pow, "Mod": _mod, "BitShift": _bit_shift, "Clip": _clip, "PRelu": _prelu, "Where": _where,
    "Cast": _cast, "CastLike": _cast_like, "IsInf": _is_inf,
    **{f"Reduce{name}": partial(_reduce, operator=f"Reduce{name}") for name in _REDUCTIONS},
    **{name: partial(_arg, operator=name) for name in ("ArgMax", "ArgMin")},
    **{name: partial(_along_axis, operator=name) for name in ("Softmax", "LogSoftmax", "Hardmax")},
    "LpNormalization": _lp_norm, "CumSum": _cumsum, "TopK": _top_k,
    "MatMul": _matmul, "MatMulInteger": partial(_matmul, operator="MatMulInteger"), "Gemm": _gemm, "Einsum": _einsum,
    "QLinearMatMul": _q_linear_matmul, "Conv": _conv, "ConvInteger": partial(_conv, operator="ConvInteger"),
    "QLinearConv": _q_linear_conv, "ConvTranspose": _conv_transpose, "DeformConv": _deform_conv,
    **{name: partial(_pool, operator=name) for name in ("MaxPool", "AveragePool", "LpPool")},
    **{f"Global{kind}Pool": partial(_global_pool, operator=f"Global{kind}Pool") for kind in ("Average", "Max", "Lp")},
    "MaxUnpool": _max_unpool, "MaxRoiPool": _max_roi_pool, "RoiAlign": _roi_align, "Col2Im": _col2im,
    "BatchNormalization": _batch_norm, "InstanceNormalization": _instance_norm, "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm, "LRN": _lrn, "MeanVarianceNormalization": _mvn,
    "RNN": partial(_recurrent, operator="RNN", gates=1), "GRU": partial(_recurrent, operator="GRU", gates=3),
    "LSTM": partial(_recurrent, operator="LSTM", gates=4),
    "Concat": _concat, "ConstantOfShape": _constant_of_shape, "Expand": _expand, "Flatten": _flatten,
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd,
    **{name: partial(_scatter_elements, operator=name) for name in ("Scatter", "ScatterElements")},
    "ScatterND": _scatter_nd, "Pad": _pad, "Reshape": _reshape, "Slice": _slice, "Split": _split, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Tile": _tile, "Transpose": _transpose, "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth, "Resize": _resize, "Upsample": _upsample, "Shape": _shape, "Range": _range,
    "OneHot": _one_hot, "EyeLike": _eye_like, "Trilu": _trilu, "ReverseSequence": _reverse_sequence,
    "Compress": _compress, "Unique": _unique, "CenterCropPad": _center_crop_pad,
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "DynamicQuantizeLinear": _dynamic_quantize,
    "Dropout": _dropout, "GridSample": _grid_sample, "NonMaxSuppression": _non_max_suppression, "Det": _det,
    "DFT": _dft, "HannWindow": _window, "HammingWindow": _window, "BlackmanWindow": _window, "MelWeightMatrix": _mel,
    "AffineGrid": _sampling_grid,
    **{n: partial(_loss, operator=n) for n in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")},
}  # fmt: skip
"""A function for each operator; all have the same weight."""
