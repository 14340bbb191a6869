"""All mutations of a legal model in the HAL's test suite, one fault at a time (requirements N-MOD-1 to 20).

`mutants` yields them for all subgraphs of a model; each must be rejected as an invalid argument. A family is a function
from a subgraph to (description, mutated subgraph) pairs. A mutated operand gets everything else that it needs to be
legal (location, scale, zero point, dimensions), so that the fault is the only one. Conditions exclude mutations that
yield another legal model. Nothing here validates, and the given model is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from msgspec.structs import replace

from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_scalar,
    operand_bytes,
)

Mutations: TypeAlias = Iterator[tuple[str, Subgraph]]
Family: TypeAlias = Callable[[Subgraph], Mutations]
T, Op, L = OperandType, OperationType, LifeTime

_COPY_BYTES = 1 << 19  # operands over this size are not made constants
_WRITTEN = (L.TEMPORARY_VARIABLE, L.SUBGRAPH_OUTPUT)
_CONSTANTS = (L.CONSTANT_COPY, L.CONSTANT_REFERENCE)
_BASE_TYPES = [kind for kind in OperandType if kind <= OperandType.SUBGRAPH]
_ALL_TENSORS = frozenset(kind for kind in _BASE_TYPES if not is_scalar(kind))
_REALS = frozenset((T.TENSOR_FLOAT16, T.TENSOR_FLOAT32))
_BYTES = frozenset((T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED))
_NUMBERS = _REALS | _BYTES | {T.TENSOR_INT32}
_FILTERS = _BYTES | {T.TENSOR_QUANT8_SYMM_PER_CHANNEL}
_FORM_SWITCHES = {Op.CONV_2D: (10, 7), Op.DEPTHWISE_CONV_2D: (11, 8)}
"""With this many arguments, this one tells explicit padding (INT32) from implicit padding with a layout (BOOL)."""
_OPTIONAL_OUTPUTS = (
    Op.UNIDIRECTIONAL_SEQUENCE_LSTM,
    Op.UNIDIRECTIONAL_SEQUENCE_RNN,
    Op.BIDIRECTIONAL_SEQUENCE_LSTM,
    Op.BIDIRECTIONAL_SEQUENCE_RNN,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutated model, with the requirement's id and a description of the mutation."""

    rule: str
    what: str
    model: Model


def mutants(model: Model, *rules: str) -> Iterator[Mutant]:
    """Yield each mutation of `model`, which must be legal: main subgraph first, then the referenced ones.

    `rules` are the requested families; none = all.
    """
    for number, subgraph in enumerate((model.main, *model.referenced)):
        where = "" if number == 0 else f"referenced subgraph {number - 1}, "
        for rule in rules or FAMILIES:
            for what, mutated in FAMILIES[rule](subgraph):
                yield Mutant(rule, where + what, _joined(model, number, mutated))


def _joined(model: Model, number: int, subgraph: Subgraph) -> Model:
    """Return the model with one subgraph replaced; operand_values grow if a mutated operand became a constant."""
    places = [operand.location for operand in subgraph.operands if operand.lifetime is L.CONSTANT_COPY]
    missing = max((place.offset + place.length for place in places), default=0) - len(model.operand_values)
    values = model.operand_values + bytes(missing) if missing > 0 else model.operand_values
    if number == 0:
        return replace(model, main=subgraph, operand_values=values)
    referenced = (*model.referenced[: number - 1], subgraph, *model.referenced[number:])
    return replace(model, referenced=referenced, operand_values=values)


# -- pieces -----------------------------------------------------------------------------------------------------------


def _with_operand(graph: Subgraph, index: int, operand: Operand) -> Subgraph:
    return replace(graph, operands=(*graph.operands[:index], operand, *graph.operands[index + 1 :]))


def _with_operation(graph: Subgraph, number: int, operation: Operation) -> Subgraph:
    return replace(graph, operations=(*graph.operations[:number], operation, *graph.operations[number + 1 :]))


def _substituted(indexes: Sequence[int], position: int, *new: int) -> tuple[int, ...]:
    return (*indexes[:position], *new, *indexes[position + 1 :])


def _consumers(graph: Subgraph) -> list[int]:
    counts = [0] * len(graph.operands)
    for operation in graph.operations:
        for index in operation.inputs:
            counts[index] += 1
    return counts


def _changed(fields: Callable[[Operand], Iterator[tuple[str, Operand]]]) -> Family:
    """Return the family that applies the mutations of `fields` to each operand."""

    def family(graph: Subgraph) -> Mutations:
        for index, operand in enumerate(graph.operands):
            for what, mutated in fields(operand):
                yield f"operand {index} ({operand.type.name}): {what}", _with_operand(graph, index, mutated)

    return family


# -- order of execution (N-MOD-1) -------------------------------------------------------------------------------------


def _execution_order(graph: Subgraph) -> Mutations:
    consumers = _consumers(graph)
    for number, operation in enumerate(graph.operations):
        others = (*graph.operations[:number], *graph.operations[number + 1 :])
        if any(graph.operands[index].lifetime in _WRITTEN for index in operation.inputs):
            yield f"reader {number} is the first operation", replace(graph, operations=(operation, *others))
        if any(consumers[index] for index in operation.outputs):
            yield f"writer {number} is the last operation", replace(graph, operations=(*others, operation))


# -- operands by themselves (N-MOD-2 to 5) ----------------------------------------------------------------------------


def _types(operand: Operand) -> Iterator[tuple[str, Operand]]:
    for code in (-1, T.SUBGRAPH + 1, T.OEM - 1, T.TENSOR_OEM_BYTE + 1):
        yield f"type {code}", replace(operand, type=cast(OperandType, code))


def _ranks(operand: Operand) -> Iterator[tuple[str, Operand]]:
    if is_scalar(operand.type):
        yield "dimensions (0,)", replace(operand, dimensions=(0,))


_SCALED = (
    T.TENSOR_QUANT8_ASYMM,
    T.TENSOR_QUANT8_ASYMM_SIGNED,
    T.TENSOR_QUANT8_SYMM,
    T.TENSOR_QUANT16_ASYMM,
    T.TENSOR_QUANT16_SYMM,
)


def _scales(operand: Operand) -> Iterator[tuple[str, Operand]]:
    bad = (0.0, -1.0) if operand.type in _SCALED else (-1.0,) if operand.type is T.TENSOR_INT32 else (1.0,)
    for scale in bad:
        yield f"scale {scale}", replace(operand, scale=scale)


_BAD_ZERO_POINTS: Mapping[OperandType, tuple[int, ...]] = {
    T.TENSOR_QUANT8_ASYMM: (-1, 256),
    T.TENSOR_QUANT8_ASYMM_SIGNED: (-129, 128),
    T.TENSOR_QUANT8_SYMM: (-129, -1, 1, 128),
    T.TENSOR_QUANT16_ASYMM: (-1, 65536),
    T.TENSOR_QUANT16_SYMM: (-32769, -1, 1, 32768),
}


def _zero_points(operand: Operand) -> Iterator[tuple[str, Operand]]:
    for zero_point in _BAD_ZERO_POINTS.get(operand.type, (1,)):
        yield f"zero point {zero_point}", replace(operand, zero_point=zero_point)


# -- lifetimes and lists (N-MOD-6, 7) ---------------------------------------------------------------------------------


def _as(operand: Operand, lifetime: LifeTime) -> Operand | None:
    """Return the operand with another lifetime and the place that goes with it; None where its size is not known."""
    size = operand_bytes(operand)
    if lifetime in _CONSTANTS:
        known = 0 < size <= _COPY_BYTES
        return replace(operand, lifetime=lifetime, location=DataLocation(0, 0, size)) if known else None
    return replace(operand, lifetime=lifetime, location=DataLocation())


def _listed(indexes: Sequence[int], index: int, is_listed: bool) -> tuple[int, ...]:
    others = tuple(other for other in indexes if other != index)
    return (*others, index) if is_listed else others


def _lifetimes(graph: Subgraph) -> Mutations:
    """Give each operand the lifetimes under which it should have a writer and has none, or the reverse."""
    for index, operand in enumerate(graph.operands):
        if operand.lifetime is L.SUBGRAPH:
            continue
        unwritten = (L.SUBGRAPH_INPUT, *_CONSTANTS, L.NO_VALUE, L.SUBGRAPH)
        for lifetime in unwritten if operand.lifetime in _WRITTEN else (*_WRITTEN, L.SUBGRAPH):
            mutated = _as(operand, lifetime)
            if mutated is not None:
                listed = replace(
                    _with_operand(graph, index, mutated),
                    input_indexes=_listed(graph.input_indexes, index, lifetime is L.SUBGRAPH_INPUT),
                    output_indexes=_listed(graph.output_indexes, index, lifetime is L.SUBGRAPH_OUTPUT),
                )
                yield f"operand {index}: {lifetime.name} instead of {operand.lifetime.name}", listed


_UNLISTED = {
    L.CONSTANT_COPY: L.SUBGRAPH_INPUT,
    L.CONSTANT_REFERENCE: L.SUBGRAPH_INPUT,
    L.SUBGRAPH_INPUT: L.CONSTANT_COPY,
    L.SUBGRAPH_OUTPUT: L.TEMPORARY_VARIABLE,
    L.TEMPORARY_VARIABLE: L.SUBGRAPH_OUTPUT,
}


def _index_lists(graph: Subgraph) -> Mutations:
    """Change lifetimes without the lists, then the lists without lifetimes."""
    for index, operand in enumerate(graph.operands):
        lifetime = _UNLISTED.get(operand.lifetime)
        mutated = None if lifetime is None else _as(operand, lifetime)
        if lifetime is not None and mutated is not None:
            what = f"operand {index}: {lifetime.name} instead of {operand.lifetime.name}, lists unchanged"
            yield what, _with_operand(graph, index, mutated)
        if operand.lifetime is L.SUBGRAPH_INPUT:
            yield f"input {index} not listed", replace(graph, input_indexes=_listed(graph.input_indexes, index, False))
        else:
            yield f"operand {index} in the inputs", replace(graph, input_indexes=(*graph.input_indexes, index))
        if operand.lifetime is L.SUBGRAPH_OUTPUT:
            left = _listed(graph.output_indexes, index, False)
            yield f"output {index} not listed", replace(graph, output_indexes=left)
        else:
            yield f"operand {index} in the outputs", replace(graph, output_indexes=(*graph.output_indexes, index))


# -- writers (N-MOD-9, 14) --------------------------------------------------------------------------------------------


def _fresh(operand: Operand) -> Operand:
    """Return the operand again, as nobody's output."""
    return replace(operand, lifetime=L.TEMPORARY_VARIABLE)


def _second_writers(graph: Subgraph) -> Mutations:
    """Add a copy of each operation behind all others: one of its outputs is an operand that has its value already."""
    for number, operation in enumerate(graph.operations):
        count = len(graph.operands)
        added = tuple(_fresh(graph.operands[index]) for index in operation.outputs)
        wider = replace(graph, operands=graph.operands + added)
        outputs = tuple(range(count, count + len(added)))
        for position, written in enumerate(operation.outputs):
            for target in (written, *_with_values(graph)):
                copy = replace(operation, outputs=_substituted(outputs, position, target))
                trimmed = _without_unused(wider, outputs[position], copy)
                yield f"a copy of operation {number} writes operand {target}", trimmed


def _with_values(graph: Subgraph) -> Iterator[int]:
    """Yield the first input and the first constant."""
    for kinds in ((L.SUBGRAPH_INPUT,), _CONSTANTS):
        yield from [index for index, operand in enumerate(graph.operands) if operand.lifetime in kinds][:1]


def _without_unused(wider: Subgraph, unused: int, added: Operation) -> Subgraph:
    """Append an operation, and take away the one fresh operand that it does not write."""
    operands = wider.operands[:unused] + wider.operands[unused + 1 :]
    outputs = tuple(index - (index > unused) for index in added.outputs)
    return replace(wider, operands=operands, operations=(*wider.operations, replace(added, outputs=outputs)))


def _removed_writes(graph: Subgraph) -> Mutations:
    consumers = _consumers(graph)
    for number, operation in enumerate(graph.operations):
        for position, index in enumerate(operation.outputs):
            if consumers[index]:
                starved = replace(graph, operands=(*graph.operands, _fresh(graph.operands[index])))
                outputs = _substituted(operation.outputs, position, len(graph.operands))
                what = f"operation {number} does not write operand {index}"
                yield what, _with_operation(starved, number, replace(operation, outputs=outputs))


# -- types of arguments (N-MOD-10) ------------------------------------------------------------------------------------


def _argument_types(graph: Subgraph) -> Mutations:
    for index, operand in enumerate(graph.operands):
        for kind in _BASE_TYPES:
            if kind is not operand.type and not any(_is_legal(op, index, kind) for op in graph.operations):
                what = f"operand {index}: {kind.name} instead of {operand.type.name}"
                yield what, _with_operand(graph, index, _retyped(operand, kind))


def _is_legal(operation: Operation, index: int, kind: OperandType) -> bool:
    """Return True if an operation accepts several types for this argument."""
    first = operation.inputs[0] == index
    second = len(operation.inputs) > 1 and operation.inputs[1] == index
    output = operation.outputs[0] == index
    match operation.type:
        case Op.LSH_PROJECTION:
            return second
        case Op.CAST | Op.ARGMAX | Op.ARGMIN:
            return kind in _NUMBERS
        case Op.QUANTIZE:
            return (first and kind in _REALS) or (output and kind in _BYTES)
        case Op.RANDOM_MULTINOMIAL:
            return first and kind in _REALS
        case Op.DEQUANTIZE:
            return (first and kind in _FILTERS | {T.TENSOR_QUANT8_SYMM}) or (output and kind in _REALS)
        case Op.CONV_2D | Op.DEPTHWISE_CONV_2D | Op.GROUPED_CONV_2D | Op.TRANSPOSE_CONV_2D:
            return (second and kind in _FILTERS) or (kind in (T.BOOL, T.INT32) and _tells_forms_apart(operation, index))
        case Op.AXIS_ALIGNED_BBOX_TRANSFORM:
            return second and kind in _BYTES
        case Op.RANK:
            return first and kind in _ALL_TENSORS
    return False


def _tells_forms_apart(operation: Operation, index: int) -> bool:
    count, position = _FORM_SWITCHES.get(operation.type, (0, 0))
    return len(operation.inputs) == count and operation.inputs[position] == index


def _retyped(operand: Operand, kind: OperandType) -> Operand:
    """Return the operand as a legal one of another type."""
    dimensions = () if is_scalar(kind) else operand.dimensions or (1,)
    low, high = {T.TENSOR_QUANT8_ASYMM: (0, 255), T.TENSOR_QUANT8_ASYMM_SIGNED: (-128, 127),
                 T.TENSOR_QUANT16_ASYMM: (0, 65535)}.get(kind, (0, 0))  # fmt: skip
    quant = None
    if kind is T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        quant = ChannelQuant((1.0,) * dimensions[0], 0)
    changed = replace(
        operand,
        type=kind,
        dimensions=dimensions,
        scale=(operand.scale or 1.0) if kind in _SCALED else 0.0,
        zero_point=min(max(operand.zero_point, low), high),
        channel_quant=quant,
    )
    if operand.lifetime in _CONSTANTS:
        place = replace(operand.location, length=operand_bytes(changed))
        return replace(changed, location=place, lifetime=L.CONSTANT_COPY)
    return changed


# -- operations (N-MOD-11 to 13, 15 to 20) ----------------------------------------------------------------------------


def _codes(graph: Subgraph) -> Mutations:
    for number, operation in enumerate(graph.operations):
        for code in (-1, max(o for o in Op if o < Op.OEM_OPERATION) + 1, Op.OEM_OPERATION - 1, Op.OEM_OPERATION + 1):
            mutated = replace(operation, type=cast(OperationType, code))
            yield f"operation {number}: code {code}", _with_operation(graph, number, mutated)


def _input_indexes(graph: Subgraph) -> Mutations:
    beyond = len(graph.operands)
    for number, operation in enumerate(graph.operations):
        for position in range(len(operation.inputs)):
            mutated = replace(operation, inputs=_substituted(operation.inputs, position, beyond))
            yield f"operation {number}: input {position} is {beyond}", _with_operation(graph, number, mutated)


def _output_indexes(graph: Subgraph) -> Mutations:
    beyond = len(graph.operands)
    for number, operation in enumerate(graph.operations):
        for position in range(len(operation.outputs)):
            mutated = replace(operation, outputs=_substituted(operation.outputs, position, beyond))
            yield f"operation {number}: output {position} is {beyond}", _with_operation(graph, number, mutated)


def _removed_operands(graph: Subgraph) -> Mutations:
    """Take away each operand that is read, except where all that read it may lose the argument."""
    free = {i for o in graph.operations if o.type in (Op.SPLIT, *_OPTIONAL_OUTPUTS) for i in o.outputs}
    for index in range(len(graph.operands)):
        uses = [(o, p) for o in graph.operations for p, i in enumerate(o.inputs) if i == index]
        if uses and index not in free and not all(_may_lose(operation, position) for operation, position in uses):
            yield f"operand {index} removed", _without_operand(graph, index)


def _without_operand(graph: Subgraph, index: int) -> Subgraph:
    def renumbered(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(other - (other > index) for other in indexes if other != index)

    operations = (Operation(o.type, renumbered(o.inputs), renumbered(o.outputs)) for o in graph.operations)
    return Subgraph(
        graph.operands[:index] + graph.operands[index + 1 :],
        tuple(operations),
        renumbered(graph.input_indexes),
        renumbered(graph.output_indexes),
    )


def _removed_operations(graph: Subgraph) -> Mutations:
    for number in range(len(graph.operations)):
        left = graph.operations[:number] + graph.operations[number + 1 :]
        yield f"operation {number} removed", replace(graph, operations=left)


_LAST_INPUT_IS_OPTIONAL: Mapping[OperationType, tuple[int, ...]] = {
    Op.DEPTHWISE_CONV_2D: (12, 9),
    **dict.fromkeys((Op.CONV_2D, Op.AVERAGE_POOL_2D, Op.MAX_POOL_2D, Op.L2_POOL_2D), (11, 8)),
    **dict.fromkeys((Op.SPACE_TO_DEPTH, Op.DEPTH_TO_SPACE, Op.BATCH_TO_SPACE_ND, Op.SOFTMAX), (3,)),
    Op.SPACE_TO_BATCH_ND: (4,),
    Op.L2_NORMALIZATION: (2,),
    Op.LOCAL_RESPONSE_NORMALIZATION: (6,),
}
"""Operations that are legal without their last argument, where they have this many."""


def _may_lose(operation: Operation, position: int) -> bool:
    count = len(operation.inputs)
    match operation.type:
        case Op.CONCATENATION:
            return count > 2 and position != count - 1
        case Op.PACK:
            return count > 2 and position != 0
        case Op.RESIZE_BILINEAR:
            return count >= 4 and position >= 3
        case Op.RESIZE_NEAREST_NEIGHBOR:
            return count >= 5 and position >= 3
    return position == count - 1 and count in _LAST_INPUT_IS_OPTIONAL.get(operation.type, ())


def _removed_inputs(graph: Subgraph) -> Mutations:
    for number, operation in enumerate(graph.operations):
        for position in range(len(operation.inputs)):
            if not _may_lose(operation, position):
                mutated = replace(operation, inputs=_substituted(operation.inputs, position))
                yield f"operation {number}: input {position} removed", _with_operation(graph, number, mutated)


def _removed_outputs(graph: Subgraph) -> Mutations:
    for number, operation in enumerate(graph.operations):
        for position in range(len(operation.outputs)):
            mutated = replace(operation, outputs=_substituted(operation.outputs, position))
            yield f"operation {number}: output {position} removed", _with_operation(graph, number, mutated)


_MAY_HAVE_MORE: Mapping[OperationType, range] = {
    Op.L2_NORMALIZATION: range(1, 2),
    Op.LOCAL_RESPONSE_NORMALIZATION: range(5, 6),
    Op.SOFTMAX: range(2, 3),
    Op.RESIZE_BILINEAR: range(6),
    Op.RESIZE_NEAREST_NEIGHBOR: range(6),
}
"""Operations that take another argument, where they have this many."""


def _added_inputs(graph: Subgraph) -> Mutations:
    new = len(graph.operands)
    wider = replace(
        graph,
        operands=(*graph.operands, Operand(T.INT32, lifetime=L.SUBGRAPH_INPUT)),
        input_indexes=(*graph.input_indexes, new),
    )
    for number, operation in enumerate(graph.operations):
        if len(operation.inputs) not in _MAY_HAVE_MORE.get(operation.type, ()):
            mutated = replace(operation, inputs=(*operation.inputs, new))
            yield f"operation {number}: an input added", _with_operation(wider, number, mutated)


def _added_outputs(graph: Subgraph) -> Mutations:
    new = len(graph.operands)
    wider = replace(
        graph,
        operands=(*graph.operands, Operand(T.INT32, lifetime=L.SUBGRAPH_OUTPUT)),
        output_indexes=(*graph.output_indexes, new),
    )
    for number, operation in enumerate(graph.operations):
        mutated = replace(operation, outputs=(*operation.outputs, new))
        yield f"operation {number}: an output added", _with_operation(wider, number, mutated)


FAMILIES: Mapping[str, Family] = {
    "N-MOD-1": _execution_order,
    "N-MOD-2": _changed(_types),
    "N-MOD-3": _changed(_ranks),
    "N-MOD-4": _changed(_scales),
    "N-MOD-5": _changed(_zero_points),
    "N-MOD-6": _lifetimes,
    "N-MOD-7": _index_lists,
    "N-MOD-9": _second_writers,
    "N-MOD-10": _argument_types,
    "N-MOD-11": _codes,
    "N-MOD-12": _input_indexes,
    "N-MOD-13": _output_indexes,
    "N-MOD-14": _removed_writes,
    "N-MOD-15": _removed_operands,
    "N-MOD-16": _removed_operations,
    "N-MOD-17": _removed_inputs,
    "N-MOD-18": _removed_outputs,
    "N-MOD-19": _added_inputs,
    "N-MOD-20": _added_outputs,
}
"""The families by their ids; N-MOD-8 is about numbers that this form of a model does not have."""
