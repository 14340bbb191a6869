"""Attention, MultiHeadAttention and RotaryEmbedding of ONNX Runtime: products, masks that are added, and a softmax.

Heads are tensors of the shape (batch, heads, length, size). Keys and values of earlier steps ("past") come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "self_attention"]

_HEADS_FIRST = (0, 2, 1, 3)
_MASK, _PAST, _BIAS = 3, 4, 5  # positions of inputs of Attention
_QUERY_BIAS, _PADDING, _ADDED, _PAST_KEY, _PAST_VALUE = 3, 4, 5, 6, 7  # of MultiHeadAttention
_ELEMENTS = 1 << 24  # of a causal mask


def _attention(node: Node) -> None:
    compose = Composition(node)
    found = compose("MatMul", node.value(0), node.value(1))
    if node.given(2):
        found = compose("Add", found, node.value(2))
    self_attention(node, found, _MASK, _PAST, _BIAS)


def self_attention(node: Node, projected: Value, mask: int, past: int, bias: int | None) -> None:
    """Make the attention between the parts of `projected`, (batch, length, query + key + value), the first output.

    `mask`, `past` and `bias` are the positions of inputs that may be omitted.

    Raises:
        InvalidArgument: If the node has an attribute or an input that is not supported.
    """
    compose = Composition(node)
    for name in ("do_rotary", "past_present_share_buffer", "rotary_embedding_dim"):
        if node.attribute(name, 0):
            raise InvalidArgument(f"{name} is not supported")
    if len(projected.shape) != 3:
        raise InvalidArgument(f"an input of rank {len(projected.shape)} is not supported: rank 3 is")
    size = projected.shape[2] // 3
    ends = np.cumsum((0, *node.attribute("qkv_hidden_sizes", (size, size, size))))
    parts = [compose.part(projected, 2, int(begin), int(end)) for begin, end in pairwise(ends)]
    query, key, value = (_heads(node, compose, part) for part in parts)
    if node.given(past):
        halves = (compose.part(node.value(past), 0, place, place + 1) for place in (0, 1))
        earlier = [compose.reshape(half, *half.shape[1:]) for half in halves]
        key, value = (compose("Concat", old, new, axis=2) for old, new in zip(earlier, (key, value), strict=True))
    if node.used(1):
        both = [compose.reshape(each, 1, *each.shape) for each in (key, value)]
        node.results[1] = compose("Concat", *both, axis=0)
    added = _masks(node, compose, mask, query, key)
    if bias is not None and node.given(bias):
        added.append(node.value(bias))
    node.results[0] = _attended(node, compose, (query, key, value), added)


def _multi_head(node: Node) -> None:
    compose, query = Composition(node), node.value(0)
    if not node.given(1) or not node.given(2) or len(query.shape) != 3:
        raise InvalidArgument("packed queries, keys and values are not supported")
    if any(node.given(position) for position in range(_PAST_VALUE + 1, len(node.inputs))):
        raise InvalidArgument("past_sequence_length and cache_indirection are not supported")
    parts = [query, node.value(1), node.value(2)]
    if node.given(_QUERY_BIAS):
        parts = _with_bias(node, compose, parts)
    query, key, value = (part if len(part.shape) == 4 else _heads(node, compose, part) for part in parts)
    if node.given(_PAST_KEY):
        key = compose("Concat", node.value(_PAST_KEY), key, axis=2)
        value = compose("Concat", node.value(_PAST_VALUE), value, axis=2)
    node.results[1], node.results[2] = key, value
    earlier = node.value(_PAST_KEY).shape[2] if node.given(_PAST_KEY) else 0
    if node.attribute("unidirectional", 0) and key.shape[2] != earlier + query.shape[2]:
        raise InvalidArgument("unidirectional is supported with as many keys as queries: others have no order")
    added = _masks(node, compose, _PADDING, query, key)
    if node.given(_ADDED):
        added.append(node.value(_ADDED))
    node.results[0] = _attended(node, compose, (query, key, value), added)


def _with_bias(node: Node, compose: Composition, parts: Sequence[Value]) -> list[Value]:
    """Return queries, keys and values plus their parts of the bias; those that have heads already have none."""
    found, begin = [], 0
    for part in parts:
        extent = part.shape[-1] if len(part.shape) == 3 else part.shape[1] * part.shape[3]
        bias = compose.part(node.value(_QUERY_BIAS), 0, begin, begin + extent)
        found.append(compose("Add", part, bias) if len(part.shape) == 3 else part)
        begin += extent
    return found


def _heads(node: Node, compose: Composition, value: Value) -> Value:
    """Return (batch, length, size) as (batch, heads, length, size / heads)."""
    batch, length, size = value.shape
    count = node.attribute("num_heads", 0)
    if count < 1 or size % count:
        raise InvalidArgument(f"{size} elements cannot be split into {count} heads")
    return compose.transpose(compose.reshape(value, batch, length, count, size // count), *_HEADS_FIRST)


def _attended(node: Node, compose: Composition, heads: Sequence[Value], added: Sequence[Value]) -> Value:
    """Return the values' means, weighted by the softmax of query · key plus masks: (batch, length, size)."""
    query, key, value = heads
    scale = node.attribute("scale", 0.0) or query.shape[-1] ** -0.5
    scores = compose("MatMul", compose("Mul", query, compose.like(scale, query)), compose.transpose(key, 0, 1, 3, 2))
    for mask in added:
        scores = compose("Add", scores, mask)
    found = compose("MatMul", compose("Softmax", scores, axis=-1), value)
    batch, count, length, size = found.shape
    return compose.reshape(compose.transpose(found, *_HEADS_FIRST), batch, length, count * size)


def _masks(node: Node, compose: Composition, position: int, query: Value, key: Value) -> list[Value]:
    """Return the terms that are added to the scores, (batch, heads, length, all): of the mask, and of later positions.

    For a later position that is the lowest number, whatever the mask says of it.
    """
    found, (length, total) = [], (query.shape[2], key.shape[2])
    filtered = node.attribute("mask_filter_value", -10000.0)
    if node.given(position):
        allowed = _allowed(compose, node.value(position), query.shape[0], length, total)
        found.append(compose("Where", allowed, compose.like(0.0, query), compose.like(filtered, query)))
    if node.attribute("unidirectional", 0) == 1:
        if length * total > _ELEMENTS:
            raise InvalidArgument(f"a mask of {length} × {total} elements is not supported")
        is_later, lowest = np.triu(np.ones((length, total), bool), total - length + 1), np.finfo(query.dtype).min
        if not found:
            return [Value.of(np.where(is_later, lowest, 0).astype(query.dtype))]
        found = [compose("Where", Value.of(is_later), compose.like(lowest, query), found[0])]
    return found


def _allowed(compose: Composition, mask: Value, batch: int, length: int, total: int) -> Value:
    """Return the positions at which a mask, in any of its forms, allows attention: BOOL that broadcasts to scores."""
    positions = Value.of(np.arange(total, dtype=np.int32).reshape(1, 1, 1, total))
    if mask.shape == (batch,):
        return compose("Less", positions, compose.reshape(mask, batch, 1, 1, 1))
    if mask.shape == (2 * batch,):
        ends, begins = (
            compose.reshape(compose.part(mask, 0, first, first + batch), batch, 1, 1, 1) for first in (0, batch)
        )
        return compose("And", compose("Less", positions, ends), compose("GreaterOrEqual", positions, begins))
    shapes = {(batch, total): (batch, 1, 1, total), (batch, length, total): (batch, 1, length, total)}
    if mask.shape not in shapes:
        raise InvalidArgument(f"a mask of the shape {mask.shape} is not supported")
    return compose("Greater", compose.reshape(mask, *shapes[mask.shape]), compose.like(0, mask))


def _rotary(node: Node) -> None:
    """Convert the rotation of pairs of elements: (first · cos − second · sin, second · cos + first · sin)."""
    compose, x = Composition(node), node.value(0)
    width = node.attribute("rotary_embedding_dim", 0) or 2 * node.value(2).shape[1]
    if node.attribute("scale", 1.0) != 1.0 or node.attribute("is_packed_batching", 0):
        raise InvalidArgument("scale and is_packed_batching are not supported")
    count, shape = node.attribute("num_heads", 0), x.shape
    if len(shape) == 3:
        count = count or shape[2] // width
        x = compose.transpose(compose.reshape(x, shape[0], shape[1], count, shape[2] // count), *_HEADS_FIRST)
    if not 0 < width <= x.shape[3] or width % 2:
        raise InvalidArgument(f"{width} of {x.shape[3]} elements cannot be rotated")
    rest = compose.part(x, 3, width, x.shape[3]) if width < x.shape[3] else None
    order = np.arange(width)
    if node.attribute("interleaved", 0) == 1:
        order = order.reshape(-1, 2).T.reshape(-1)
    rotated = _rotated(node, compose, compose.part(x, 3, 0, width), order)
    found = rotated if rest is None else compose("Concat", rotated, rest, axis=3)
    if len(shape) == 3:
        found = compose.reshape(compose.transpose(found, *_HEADS_FIRST), *shape)
    node.results[0] = found


def _rotated(node: Node, compose: Composition, x: Value, order: np.ndarray) -> Value:
    """Return heads whose elements, in this order, are halves of the pairs, rotated."""
    half, is_reordered = x.shape[3] // 2, bool((np.diff(order) != 1).any())
    if is_reordered:
        x = compose("Gather", x, Value.of(order), axis=3)
    cos, sin = (_angles(node, compose, position, x) for position in (2, 3))
    first, second = (compose.part(x, 3, begin, begin + half) for begin in (0, half))
    left = compose("Sub", compose("Mul", first, cos), compose("Mul", second, sin))
    right = compose("Add", compose("Mul", second, cos), compose("Mul", first, sin))
    found = compose("Concat", left, right, axis=3)
    return compose("Gather", found, Value.of(np.argsort(order)), axis=3) if is_reordered else found


def _angles(node: Node, compose: Composition, position: int, x: Value) -> Value:
    """Return the cosines or sines for the positions of all tokens: (batch or 1, 1, length, half)."""
    ids, (batch, _, length, size) = node.value(1), x.shape
    if ids.shape == (1,):  # the position of the first token
        ids = compose("Add", Value.of(np.arange(length, dtype=np.int64)), compose.reshape(ids, 1))
    elif ids.shape != (batch, length):
        raise InvalidArgument(f"positions of the shape {ids.shape} for {batch} × {length} tokens")
    found = compose("Gather", node.value(position), ids)
    return compose.reshape(found, found.shape[0] if len(found.shape) == 3 else 1, 1, length, size // 2)


_MICROSOFT = "com.microsoft."
CONVERTERS: dict[str, Callable[[Node], None]] = {
    f"{_MICROSOFT}Attention": _attention,
    f"{_MICROSOFT}MultiHeadAttention": _multi_head,
    f"{_MICROSOFT}RotaryEmbedding": _rotary,
}
