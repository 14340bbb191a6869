"""The order in which a subgraph's operations can run one after the other.

Source: NNAPI, ANeuralNetworksModel_addOperation and _finish (API-4, N-API-10, N-API-11).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import code_name, tensor_text
from nnfmq.hal.types import LifeTime, Operation, Subgraph

__all__ = ["in_run_order"]

_COMPUTED = (LifeTime.TEMPORARY_VARIABLE, LifeTime.SUBGRAPH_OUTPUT)
_NAMED_OF_CYCLE = 8  # operations


def in_run_order(subgraph: Subgraph, where: str = "") -> Subgraph:
    """Return the subgraph with each operation after those whose outputs it reads.

    Operations that can run keep their order; a subgraph that is in order already is returned itself.

    Args:
        subgraph: The subgraph; it need not be valid.
        where: Begins the messages of errors.

    Raises:
        InvalidArgument: If an index is no operand, two operations write an operand, none writes one that must be
            written, or operations need each other's outputs.
    """
    _require_indexes(subgraph, where)
    writers = _writers(subgraph, where)
    _require_written(subgraph, writers, where)
    # Nobody waits for the writer of an input or a constant, which validation rejects.
    writers = {index: writer for index, writer in writers.items() if subgraph.operands[index].lifetime in _COMPUTED}
    order = _order(subgraph, writers)
    if len(order) < len(subgraph.operations):
        cycle = _cycle(subgraph, writers, set(order))
        shown = " → ".join(_name(subgraph, position) for position in cycle[:_NAMED_OF_CYCLE])
        more = " → …" if len(cycle) > _NAMED_OF_CYCLE else ""
        raise InvalidArgument(f"{where}operations need each other's outputs: {shown}{more} (N-API-10)")
    if order == list(range(len(order))):
        return subgraph
    return replace(subgraph, operations=tuple(subgraph.operations[position] for position in order))


def _require_indexes(subgraph: Subgraph, where: str) -> None:
    count = len(subgraph.operands)
    for position, operation in enumerate(subgraph.operations):
        for index in (*operation.inputs, *operation.outputs):
            if not 0 <= index < count:
                name = _name(subgraph, position)
                raise InvalidArgument(f"{where}{name} has operand {index}, there are {count} (N-API-8)")


def _writers(subgraph: Subgraph, where: str) -> dict[int, int]:
    """Return the position of the operation that writes each operand."""
    writers: dict[int, int] = {}
    for position, operation in enumerate(subgraph.operations):
        for index in operation.outputs:
            if index in writers:
                names = f"{_name(subgraph, writers[index])} and {_name(subgraph, position)}"
                raise InvalidArgument(f"{where}{_operand(subgraph, index)} is written twice, by {names} (N-API-10)")
            writers[index] = position
    return writers


def _require_written(subgraph: Subgraph, writers: Mapping[int, int], where: str) -> None:
    missing = {
        index
        for index, operand in enumerate(subgraph.operands)
        if operand.lifetime in _COMPUTED and index not in writers
    }
    if not missing:
        return
    readers = (
        (index, position)
        for position, operation in enumerate(subgraph.operations)
        for index in operation.inputs
        if index in missing
    )
    index, reader = next(readers, (min(missing), None))
    read = "" if reader is None else f" and {_name(subgraph, reader)} reads it"
    remedy = "make it an input, or set its value (N-API-10)"
    raise InvalidArgument(f"{where}no operation writes {_operand(subgraph, index)}{read}: {remedy}")


def _order(subgraph: Subgraph, writers: Mapping[int, int]) -> list[int]:
    """Return the positions of the operations in run order; those on a cycle, or after one, are missing."""
    waiting: list[int] = []  # how many of its inputs each operation waits for
    readers: dict[int, list[int]] = defaultdict(list)  # of each operand that an operation writes
    for position, operation in enumerate(subgraph.operations):
        awaited = [index for index in operation.inputs if index in writers]
        waiting.append(len(awaited))
        for index in awaited:
            readers[index].append(position)
    ready = [position for position, count in enumerate(waiting) if not count]
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for reader in (reader for index in subgraph.operations[position].outputs for reader in readers[index]):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order


def _cycle(subgraph: Subgraph, writers: Mapping[int, int], ordered: set[int]) -> list[int]:
    """Return operations each of which reads an output of the next one; the last is the first again."""
    position = next(p for p in range(len(subgraph.operations)) if p not in ordered)
    path: list[int] = []
    while position not in path:
        path.append(position)
        needed = (writers[index] for index in subgraph.operations[position].inputs if index in writers)
        position = next(writer for writer in needed if writer not in ordered)
    return [*path[path.index(position) :], position]


def _name(subgraph: Subgraph, position: int) -> str:
    operation: Operation = subgraph.operations[position]
    return f"operation {position} ({code_name(operation.type)})"


def _operand(subgraph: Subgraph, index: int) -> str:
    operand = subgraph.operands[index]
    return f"operand {index} ({tensor_text(code_name(operand.type), operand.dimensions)})"
