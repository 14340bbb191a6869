"""Einsum of two tensors: transposed to (batch, rows, summed) and (batch, summed, columns), multiplied, and transposed.

An index of only one input that is not in the result is summed first. An index may not occur twice in an input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx_operators.onnx_movement import transposed
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_EQUATION = re.compile(r"([a-zA-Z]*)(?:,([a-zA-Z]*))?(?:->([a-zA-Z]*))?")


def _einsum(node: Node) -> None:
    equation = node.attribute("equation", "").replace(" ", "")
    found = _EQUATION.fullmatch(equation)
    terms = [term for term in found.groups()[:2] if term is not None] if found is not None else []
    if found is None or len(terms) != len(node.inputs) or any(len(set(term)) < len(term) for term in terms):
        raise InvalidArgument(f"equation {equation!r} of {len(node.inputs)} inputs is not supported")
    counts = "".join(terms)
    implicit = "".join(sorted(name for name in set(counts) if counts.count(name) == 1))
    wanted = implicit if found[3] is None else found[3]
    sizes = _sizes(node, terms)
    if len(set(wanted)) < len(wanted) or not set(wanted) <= sizes.keys():
        raise InvalidArgument(f"equation {equation!r} names an index of its result twice, or one that no input has")
    operands = []
    for position, term in enumerate(terms):
        kept = "".join(
            name for name in term if name in wanted or any(name in other for other in _others(terms, position))
        )
        operands.append((_summed(node, node.operand(position), term, kept), kept))
    operand, names = operands[0] if len(operands) == 1 else _product(node, operands[0], operands[1], wanted, sizes)
    operand = transposed(node, operand, [names.index(name) for name in wanted]) if wanted else operand
    node.result(operand, tuple(sizes[name] for name in wanted))


def _others(terms: Sequence[str], position: int) -> list[str]:
    return [term for place, term in enumerate(terms) if place != position]


def _sizes(node: Node, terms: Sequence[str]) -> dict[str, int]:
    """Return the extent of each index."""
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        shape = node.value(position).shape
        if len(shape) != len(term):
            raise InvalidArgument(f"{term!r} has {len(term)} indices for a tensor of rank {len(shape)}")
        for name, extent in zip(term, shape, strict=True):
            if sizes.setdefault(name, extent) != extent:
                raise InvalidArgument(f"index {name!r} has the extents {sizes[name]} and {extent}")
    return sizes


def _summed(node: Node, operand: int, term: str, kept: str) -> int:
    """Return an operand without the indices that are not kept, over which it is summed."""
    axes = [axis for axis, name in enumerate(term) if name not in kept]
    if not axes:
        return operand
    return node.emit(Op.REDUCE_SUM, [operand, node.builder.int32_vector(axes), node.builder.boolean(False)])


def _product(
    node: Node, first: tuple[int, str], second: tuple[int, str], wanted: str, sizes: dict[str, int]
) -> tuple[int, str]:
    """Return the product of two operands, summed over the indices that they share and the result does not have."""
    (a, left), (b, right) = first, second
    batch = [name for name in left if name in right and name in wanted]
    summed = [name for name in left if name in right and name not in wanted]
    rows, columns = ([name for name in term if name not in other] for term, other in ((left, right), (right, left)))
    extents = [math.prod(sizes[name] for name in names) for names in (batch, rows, summed, columns)]
    a = _arranged(node, a, left, (batch, rows, summed), (extents[0], extents[1], extents[2]))
    b = _arranged(node, b, right, (batch, summed, columns), (extents[0], extents[2], extents[3]))
    flags = [node.builder.boolean(False), node.builder.boolean(False)]
    found = node.emit(Op.BATCH_MATMUL, [a, b, *flags])
    names = [*batch, *rows, *columns]
    return node.reshaped(found, tuple(sizes[name] for name in names)), "".join(names)


def _arranged(node: Node, operand: int, term: str, groups: Sequence[Sequence[str]], shape: tuple[int, ...]) -> int:
    order = [term.index(name) for group in groups for name in group]
    return node.reshaped(transposed(node, operand, order), shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {"Einsum": _einsum}
