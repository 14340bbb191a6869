"""Einsum: products of two tensors after the other, as (batch, rows, summed) times (batch, summed, columns).

Indices are characters; an ellipsis is replaced by further ones. Before each product, an input loses the indices that
nothing after it reads: it is summed over them. An index that occurs twice in an input selects its diagonal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_movement import transposed
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_Term: TypeAlias = tuple[int, str]  # an operand, and an index for each of its dimensions
_TERM = re.compile(r"[a-zA-Z]*(\.\.\.)?[a-zA-Z]*")
_MAX_ELLIPSIS = 8
_ELLIPSIS = "01234567"  # the indices of its dimensions, the last one first


def _einsum(node: Node) -> None:
    terms, wanted = _parsed(node)
    sizes = _sizes(node, terms)
    if len(set(wanted)) < len(wanted) or not set(wanted) <= sizes.keys():
        raise InvalidArgument(f"{node.attributes['equation']!r} names an index of its result twice, or one of no input")
    operands = [_diagonal(node, _widest(node, position, term, sizes)) for position, term in enumerate(terms)]
    found = _kept(node, operands[0], wanted + "".join(names for _, names in operands[1:]))
    for place, other in enumerate(operands[1:], 2):
        later = wanted + "".join(names for _, names in operands[place:])
        found = _product(node, _kept(node, found, later + other[1]), _kept(node, other, later + found[1]), later, sizes)
    operand, names = _kept(node, found, wanted)
    operand = transposed(node, operand, [names.index(name) for name in wanted]) if wanted else operand
    node.result(operand, tuple(sizes[name] for name in wanted))


def _parsed(node: Node) -> tuple[list[str], str]:
    """Return the indices of each input and of the result, with characters for those of ellipses."""
    equation = node.attribute("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    written = left.split(",")
    if len(written) != len(node.inputs) or not all(_TERM.fullmatch(term) for term in (*written, right)):
        raise InvalidArgument(f"equation {equation!r} of {len(node.inputs)} inputs is malformed")
    terms = []
    for position, term in enumerate(written):
        count = len(node.value(position).shape) - len(term.replace("...", ""))
        if count < 0 or count > _MAX_ELLIPSIS or (count and "..." not in term):
            raise InvalidArgument(f"{term!r} does not fit a tensor of rank {len(node.value(position).shape)}")
        terms.append(term.replace("...", _ELLIPSIS[:count][::-1]))
    shared = "".join(sorted({name for term in terms for name in term if name in _ELLIPSIS}, reverse=True))
    names = "".join(terms)
    implicit = "".join(sorted(name for name in set(names) if names.count(name) == 1 and name not in _ELLIPSIS))
    return terms, right.replace("...", shared) if arrow else shared + implicit


def _sizes(node: Node, terms: Sequence[str]) -> dict[str, int]:
    """Return the extent of each index; where it is 1, an input is repeated."""
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        for name, extent in zip(term, node.value(position).shape, strict=True):
            known = sizes.get(name, 1)
            if 1 not in (known, extent) and known != extent:
                raise InvalidArgument(f"an index has the extents {known} and {extent}")
            sizes[name] = max(known, extent)
    return sizes


def _widest(node: Node, position: int, term: str, sizes: dict[str, int]) -> _Term:
    """Return an input without the dimensions of 1 that another input has in full."""
    shape, operand = node.value(position).shape, node.operand(position)
    kept = [axis for axis, name in enumerate(term) if shape[axis] == sizes[name]]
    return node.reshaped(operand, tuple(shape[axis] for axis in kept)), "".join(term[axis] for axis in kept)


def _diagonal(node: Node, given: _Term) -> _Term:
    """Return a tensor in which no index occurs twice."""
    operand, term = given
    for name in dict.fromkeys(term):
        axes = [axis for axis, other in enumerate(term) if other == name]
        if len(axes) == 1:
            continue
        rest = [axis for axis in range(len(term)) if axis not in axes]
        shape = node.shape(operand)
        extent, others = shape[axes[0]], tuple(shape[axis] for axis in rest)
        flat = node.reshaped(transposed(node, operand, [*axes, *rest]), (extent ** len(axes), *others))
        step = sum(extent**power for power in range(len(axes)))
        indices = node.builder.int32_vector([place * step for place in range(extent)])
        operand = node.emit(Op.GATHER, [flat, node.builder.int32(0), indices])
        term = name + "".join(term[axis] for axis in rest)
    return operand, term


def _kept(node: Node, given: _Term, wanted: str) -> _Term:
    """Return a tensor summed over the indices that are not wanted."""
    operand, term = given
    axes = [axis for axis, name in enumerate(term) if name not in wanted]
    if not axes:
        return given
    rest = "".join(name for name in term if name in wanted)
    return node.emit(Op.REDUCE_SUM, [operand, node.builder.int32_vector(axes), node.builder.boolean(False)]), rest


def _product(node: Node, first: _Term, second: _Term, wanted: str, sizes: dict[str, int]) -> _Term:
    """Return the product of two tensors, summed over the indices that they share and nothing after it reads."""
    (a, left), (b, right) = first, second
    batch = [name for name in left if name in right and name in wanted]
    summed = [name for name in left if name in right and name not in wanted]
    rows, columns = ([name for name in term if name not in other] for term, other in ((left, right), (right, left)))
    extents = [math.prod(sizes[name] for name in names) for names in (batch, rows, summed, columns)]
    names = [*batch, *rows, *columns]
    found = _matrices(
        node,
        _arranged(node, a, left, (batch, rows, summed), (extents[0], extents[1], extents[2])),
        _arranged(node, b, right, (batch, summed, columns), (extents[0], extents[2], extents[3])),
    )
    return node.reshaped(found, tuple(sizes[name] for name in names)), "".join(names)


def _matrices(node: Node, a: int, b: int) -> int:
    """Return the products of two batches of matrices; integers, which BATCH_MATMUL does not take, are summed."""
    if node.builder[a].type != OperandType.TENSOR_INT32:
        return node.emit(Op.BATCH_MATMUL, [a, b, node.builder.boolean(False), node.builder.boolean(False)])
    batch, summed, columns = node.shape(b)
    factors = [node.reshaped(a, (*node.shape(a), 1)), node.reshaped(b, (batch, 1, summed, columns))]
    products = node.emit(Op.MUL, [*factors, node.builder.int32(0)])
    return node.emit(Op.REDUCE_SUM, [products, node.builder.int32_vector([2]), node.builder.boolean(False)])


def _arranged(node: Node, operand: int, term: str, groups: Sequence[Sequence[str]], shape: tuple[int, ...]) -> int:
    order = [term.index(name) for group in groups for name in group]
    return node.reshaped(transposed(node, operand, order), shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {"Einsum": _einsum}
