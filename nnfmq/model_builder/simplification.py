"""The changes that NNAPI makes to a model when it is finished (API-4): order, default arguments, dead parts."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.models import without_unused_operands
from nnfmq.hal.summaries import code_name, tensor_text
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph
from nnfmq.operations.extensions import to_local_prefixes
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_extensions

__all__ = ["in_run_order", "prepare_for_compilation", "without_dead_parts", "without_default_arguments"]


# ----------------------------------------------------------------------------------------------------------------------
# Removal of the parts of a model that do not affect its outputs.


def without_dead_parts(model: Model) -> Model:
    """Return a valid model without unused operands, subgraphs that nothing calls, and pools without constants.

    If there are none, that is `model` itself. All operations remain, and so do the bytes of `operand_values`, of which
    many would be copied to save few.
    """
    main, *referenced = (without_unused_operands(subgraph) for subgraph in (model.main, *model.referenced))
    called = _called(main, referenced)
    kept = [main, *(referenced[index] for index in called)]
    pools = sorted({pool for subgraph in kept for pool in _numbers(subgraph, LifeTime.CONSTANT_REFERENCE)})
    if len(called) < len(referenced) or len(pools) < len(model.pools):
        subgraph_numbers = {index: number for number, index in enumerate(called)}
        pool_numbers = {index: number for number, index in enumerate(pools)}
        kept = [_renumbered(subgraph, subgraph_numbers, pool_numbers) for subgraph in kept]
    elif all(new is old for new, old in zip(kept, (model.main, *model.referenced), strict=True)):
        return model
    return replace(model, main=kept[0], referenced=tuple(kept[1:]), pools=tuple(model.pools[index] for index in pools))


def _called(main: Subgraph, referenced: Sequence[Subgraph]) -> list[int]:
    """Return the indexes of the referenced subgraphs that `main` calls, directly or through others, in order."""
    found: set[int] = set()
    unvisited = [main]
    while unvisited:
        new = _numbers(unvisited.pop(), LifeTime.SUBGRAPH) - found
        found |= new
        unvisited += [referenced[index] for index in new]
    return sorted(found)


def _numbers(subgraph: Subgraph, lifetime: LifeTime) -> set[int]:
    """Return the subgraphs or pools that operands refer to."""
    return {_number(operand) for operand in subgraph.operands if operand.lifetime == lifetime}


def _number(operand: Operand) -> int:
    is_subgraph = operand.lifetime == LifeTime.SUBGRAPH
    return operand.location.offset if is_subgraph else operand.location.pool_index


def _renumbered(subgraph: Subgraph, subgraphs: Mapping[int, int], pools: Mapping[int, int]) -> Subgraph:
    """Return a subgraph whose operands refer to subgraphs and pools by other indexes."""

    def moved(operand: Operand) -> Operand:
        if operand.lifetime == LifeTime.SUBGRAPH:
            return replace(operand, location=replace(operand.location, offset=subgraphs[operand.location.offset]))
        if operand.lifetime == LifeTime.CONSTANT_REFERENCE:
            return replace(operand, location=replace(operand.location, pool_index=pools[operand.location.pool_index]))
        return operand

    return replace(subgraph, operands=tuple(map(moved, subgraph.operands)))


# ----------------------------------------------------------------------------------------------------------------------
# Removal of trailing arguments that have their default value.
#
# Drivers of early versions reject an operation with more arguments than it had then, even if the further ones say
# nothing new. So NNAPI removes layout flags, dilations and axes that are constant and have their default.
#
# Source: NNAPI, ANeuralNetworksModel_finish; the HAL's argument lists by version (API-4).


_NHWC, _NO = b"\x00", b"\x00"  # a layout flag; align_corners and half_pixel_centers
_UNDILATED = (1).to_bytes(4, "little")
_LAST_AXIS = (-1).to_bytes(4, "little", signed=True)


@dataclass(frozen=True, slots=True)
class _OptionalArguments:
    """The optional arguments at the end of an argument list: the position of the first one, and their defaults.

    `form` is a position and a type there that distinguish the list from the operation's other one. The last `together`
    arguments are given or omitted together.
    """

    begin: int
    defaults: tuple[bytes, ...]
    form: tuple[int, OperandType] | None = None
    together: int = 1


def _windows(explicit: int, implicit: int, form_at: int, *dilations: bytes) -> tuple[_OptionalArguments, ...]:
    """Return the optional arguments of an operation on windows, with explicit and with implicit padding."""
    defaults, together = (_NHWC, *dilations), max(len(dilations), 1)
    return (
        _OptionalArguments(explicit, defaults, (form_at, OperandType.INT32), together),
        _OptionalArguments(implicit, defaults, (form_at, OperandType.BOOL), together),
    )


def _after(begin: int, *defaults: bytes) -> tuple[_OptionalArguments, ...]:
    return (_OptionalArguments(begin, defaults),)


_OPTIONAL: Mapping[OperationType, tuple[_OptionalArguments, ...]] = {
    OperationType.AVERAGE_POOL_2D: _windows(10, 7, 7),
    OperationType.L2_POOL_2D: _windows(10, 7, 7),
    OperationType.MAX_POOL_2D: _windows(10, 7, 7),
    OperationType.CONV_2D: _windows(10, 7, 7, _UNDILATED, _UNDILATED),
    OperationType.DEPTHWISE_CONV_2D: _windows(11, 8, 8, _UNDILATED, _UNDILATED),
    OperationType.DEPTH_TO_SPACE: _after(2, _NHWC),
    OperationType.SPACE_TO_DEPTH: _after(2, _NHWC),
    OperationType.BATCH_TO_SPACE_ND: _after(2, _NHWC),
    OperationType.SPACE_TO_BATCH_ND: _after(3, _NHWC),
    OperationType.RESIZE_BILINEAR: _after(3, _NHWC, _NO, _NO),
    OperationType.RESIZE_NEAREST_NEIGHBOR: _after(4, _NO, _NO),
    OperationType.L2_NORMALIZATION: _after(1, _LAST_AXIS),
    OperationType.LOCAL_RESPONSE_NORMALIZATION: _after(5, _LAST_AXIS),
    OperationType.SOFTMAX: _after(2, _LAST_AXIS),
}
_DEFAULT_TYPES = {1: OperandType.BOOL, 4: OperandType.INT32}  # of a default of so many bytes


def without_default_arguments(subgraph: Subgraph, operand_values: bytes | memoryview) -> Subgraph:
    """Return a valid subgraph without trailing arguments that are constants equal to their default.

    If there are none, that is `subgraph` itself. Constants in pools are not read. The operands remain.

    Args:
        subgraph: A subgraph that has been validated.
        operand_values: The values of its model's CONSTANT_COPY operands.
    """
    operations = tuple(
        _without_defaults(operation, subgraph.operands, operand_values) for operation in subgraph.operations
    )
    return subgraph if operations == subgraph.operations else replace(subgraph, operations=operations)


def _without_defaults(operation: Operation, operands: Sequence[Operand], values: bytes | memoryview) -> Operation:
    inputs = operation.inputs
    for optional in _OPTIONAL.get(operation.type, ()):
        if len(inputs) > optional.begin and _has_form(optional, inputs, operands):
            return replace(operation, inputs=inputs[: _kept(optional, inputs, operands, values)])
    return operation


def _has_form(optional: _OptionalArguments, inputs: Sequence[int], operands: Sequence[Operand]) -> bool:
    if optional.form is None:
        return True
    position, operand_type = optional.form
    return operands[inputs[position]].type == operand_type


def _kept(
    optional: _OptionalArguments, inputs: Sequence[int], operands: Sequence[Operand], values: bytes | memoryview
) -> int:
    """Return how many arguments remain."""
    kept = len(inputs)
    while kept > optional.begin:
        if not _is_equal(operands[inputs[kept - 1]], optional.defaults[kept - 1 - optional.begin], values):
            break
        kept -= 1
    last = optional.begin + len(optional.defaults)
    return len(inputs) if last - optional.together < kept < last else kept


def _is_equal(operand: Operand, default: bytes, values: bytes | memoryview) -> bool:
    begin, is_copy = operand.location.offset, operand.lifetime == LifeTime.CONSTANT_COPY
    return is_copy and operand.type == _DEFAULT_TYPES[len(default)] and values[begin : begin + len(default)] == default


# ----------------------------------------------------------------------------------------------------------------------
# The order in which a subgraph's operations can run one after the other.
#
# Source: NNAPI, ANeuralNetworksModel_addOperation and _finish (API-4, N-API-10, N-API-11).


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


# ----------------------------------------------------------------------------------------------------------------------
# prepare_for_compilation: what NNAPI does to a model when it is finished (API-4).


def prepare_for_compilation(model: Model) -> Model:
    """Return an equal model as a runtime compiles it: in run order, validated, without superfluous arguments and parts.

    Operations come after those whose outputs they read. Trailing arguments that are constants equal to their default
    are removed, then operands, subgraphs and pools without a use. A model that
    needs no change is returned itself. The result shares the pools with `model`.

    Raises:
        InvalidArgument: If the model is invalid. IF and WHILE may have boundaries of unknown size, because a runtime
            can execute them itself.
    """
    ordered = _in_run_order(model)
    validate_extensions(ordered.extensions)
    validate_model(to_local_prefixes(ordered), allow_unspecified_boundaries=True)
    return without_dead_parts(_without_default_arguments(ordered))


def _in_run_order(model: Model) -> Model:
    main = in_run_order(model.main)
    referenced = tuple(
        in_run_order(subgraph, f"referenced subgraph {index}, ") for index, subgraph in enumerate(model.referenced)
    )
    return _with_subgraphs(model, (main, *referenced))


def _without_default_arguments(model: Model) -> Model:
    values = model.operand_values
    subgraphs = (model.main, *model.referenced)
    return _with_subgraphs(model, tuple(without_default_arguments(subgraph, values) for subgraph in subgraphs))


def _with_subgraphs(model: Model, subgraphs: tuple[Subgraph, ...]) -> Model:
    """Return the model with other subgraphs; itself if each is the one that it has."""
    if all(new is old for new, old in zip(subgraphs, (model.main, *model.referenced), strict=True)):
        return model
    return replace(model, main=subgraphs[0], referenced=subgraphs[1:])
