"""validate_model: every rule that a model must keep, checked in the order of the types, before anything is built.

Rules carry the ids of the requirements: N-MOD-* are the HAL test suite's families, N-VAL-* those beyond it; ids
S1-S5 come from `operations.signature`. Sums and products are Python ints compared with 32- and 64-bit limits, so no
claim of a hostile model overflows or allocates. OEM_OPERATION, and types and operations of extensions that this
process has not, are checked for structure only: a device says that they cannot run. A model has
been `operations.extensions.translated` where extensions are installed. What IF and WHILE hand to subgraphs is checked
last (`validation.subgraph_boundaries`). Answer: the least feature level (1 = HAL 1.0 ... 8 = AIDL v4) whose interface
allows the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extension_codes import extension_prefix, is_extension
from nnfmq.hal.feature_levels import introduced_in
from nnfmq.hal.types import (
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    element_bytes,
    is_scalar,
)
from nnfmq.operations import REGISTRY
from nnfmq.operations.signature import V1_0, V1_1, V1_3, match
from nnfmq.validation.subgraph_boundaries import require_counts, validate_boundaries
from nnfmq.validation.values import validate_extensions

__all__ = ["operand_size", "validate_model"]

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_OEM_TYPES = (OperandType.OEM, OperandType.TENSOR_OEM_BYTE)

_ZERO_POINTS: Mapping[OperandType, tuple[int, int]] = {
    OperandType.TENSOR_QUANT8_ASYMM: (0, 255),
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (-128, 127),
    OperandType.TENSOR_QUANT16_ASYMM: (0, 65535),
}
_SCALED = (*_ZERO_POINTS, OperandType.TENSOR_QUANT8_SYMM, OperandType.TENSOR_QUANT16_SYMM)


def validate_model(model: Model, *, allow_unspecified_boundaries: bool = False) -> int:
    """Return the feature level that `model` needs. Raises InvalidArgument with the rule and the operand's number.

    `allow_unspecified_boundaries` lets operands of unknown size go into and out of the subgraphs of IF and WHILE. No
    HAL allows that; a framework may, where it executes the model itself.
    """
    level = max(_validate_pools(model), validate_extensions(model.extensions))
    for number, subgraph in enumerate((model.main, *model.referenced)):
        where = "" if number == 0 else f"referenced subgraph {number - 1}, "
        level = max(level, _validate_subgraph(model, subgraph, where))
    _require_no_cycle(model)
    validate_boundaries(model, allow_unspecified_boundaries)
    return max(level, V1_3 if model.referenced else V1_0, V1_1 if model.relax_computation_float32_to_float16 else V1_0)


def _require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{rule}: {message}")


def _validate_pools(model: Model) -> int:
    for number, pool in enumerate(model.pools):
        _require(pool.size_bytes > 0, "N-VAL-13", f"pool {number} has size {pool.size_bytes}")
    return V1_0


def _validate_subgraph(model: Model, subgraph: Subgraph, where: str) -> int:
    _require(bool(subgraph.operands), "N-VAL-15", f"{where}no operands")
    _require(bool(subgraph.operations), "N-VAL-15", f"{where}no operations")
    levels = [
        _validate_operand(model, operand, f"{where}operand {index}") for index, operand in enumerate(subgraph.operands)
    ]
    _validate_index_lists(subgraph, where)
    _validate_indexes(subgraph, where)
    _validate_order(subgraph, where)
    levels += [
        _validate_operation(model, subgraph, operation, f"{where}operation {number}")
        for number, operation in enumerate(subgraph.operations)
    ]
    return max(levels)


# -- operands ---------------------------------------------------------------------------------------------------------


def _validate_operand(model: Model, operand: Operand, where: str) -> int:
    level = _validate_type(operand, where)
    _validate_dimensions(operand, where)
    if is_extension(operand.type):
        _validate_extension_operand(model, operand, where)
    elif operand.type not in _OEM_TYPES:
        _validate_scale(operand, where)
        _validate_zero_point(operand, where)
    extra = is_extension(operand.type) or not operand.extension_data
    _require(extra, "N-VAL-10", f"{where}: extension data on a {operand.type.name}")
    _validate_channel_quant(operand, where)
    _require(
        operand.location.padding == 0, "N-VAL-8", f"{where}: padding {operand.location.padding}, only 0 is allowed"
    )
    _LOCATION_RULES.get(operand.lifetime, _validate_no_location)(model, operand, where)
    return level


def _validate_type(operand: Operand, where: str) -> int:
    _require(isinstance(operand.type, OperandType), "N-MOD-2", f"{where}: type code {operand.type}")
    _require(isinstance(operand.lifetime, LifeTime), "N-MOD-6", f"{where}: lifetime code {operand.lifetime}")
    is_graph = (operand.type == OperandType.SUBGRAPH, operand.lifetime == LifeTime.SUBGRAPH)
    _require(
        is_graph[0] == is_graph[1], "N-VAL-1", f"{where}: type {operand.type.name}, lifetime {operand.lifetime.name}"
    )
    return introduced_in(operand.type)


def _validate_extension_operand(model: Model, operand: Operand, where: str) -> None:
    _require_prefix(model, operand.type, where)
    plain = operand.scale == operand.zero_point == 0 and operand.channel_quant is None
    _require(plain, "N-VAL-10", f"{where}: a scale, zero point or channelQuant on {operand.type.name}")


def _is_unknown(type: OperandType) -> bool:
    """Return True for a type of an extension that this process has not: only its owner could check it (VAL-5)."""
    return is_extension(type) and not element_bytes(type)


def _require_prefix(model: Model, code: int, where: str) -> None:
    prefix, known = extension_prefix(code), [extension.prefix for extension in model.extensions]
    _require(prefix in known, "N-VAL-11", f"{where}: extension prefix {prefix}, the model names {known}")


def _validate_dimensions(operand: Operand, where: str) -> None:
    if is_scalar(operand.type):
        _require(not operand.dimensions, "N-MOD-3", f"{where}: a scalar with dimensions {operand.dimensions}")
    for extent in operand.dimensions:
        _require(0 <= extent < 1 << 32, "N-VAL-3", f"{where}: extent {extent}")
    operand_size(operand.type, operand.dimensions, where)
    if operand.lifetime in _CONSTANTS:
        known = (
            is_scalar(operand.type)
            or _is_unknown(operand.type)
            or (bool(operand.dimensions) and 0 not in operand.dimensions)
        )
        _require(known, "N-VAL-2", f"{where}: a constant with dimensions {operand.dimensions}")


def operand_size(type: OperandType, dimensions: Sequence[int], where: str) -> int:
    """Return the bytes of an operand, 0 while unknown; the product must fit 32 bits at each extent, left to right."""
    if not dimensions:
        return element_bytes(type) if is_scalar(type) else 0
    size = element_bytes(type)
    for extent in dimensions:
        size *= extent
        _require(size < 1 << 32, "N-VAL-3", f"{where}: dimensions {tuple(dimensions)} need more than 2^32 - 1 bytes")
    return size


def _validate_scale(operand: Operand, where: str) -> None:
    scale = operand.scale
    if operand.type in _SCALED:
        fits = math.isfinite(scale) and scale > 0
    elif operand.type == OperandType.TENSOR_INT32:
        fits = math.isfinite(scale) and scale >= 0
    else:
        fits = scale == 0
    _require(fits, "N-MOD-4", f"{where}: scale {scale} of a {operand.type.name}")


def _validate_zero_point(operand: Operand, where: str) -> None:
    low, high = _ZERO_POINTS.get(operand.type, (0, 0))
    message = f"{where}: zero point {operand.zero_point}, {operand.type.name} allows {low} to {high}"
    _require(low <= operand.zero_point <= high, "N-MOD-5", message)


def _validate_channel_quant(operand: Operand, where: str) -> None:
    quant, dimensions = operand.channel_quant, operand.dimensions
    needed = operand.type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    _require((quant is not None) == needed, "N-VAL-9", f"{where}: channelQuant and type {operand.type.name}")
    if quant is None:
        return
    _require(0 <= quant.channel_dim < len(dimensions), "N-VAL-9", f"{where}: channelDim {quant.channel_dim}")
    extent = dimensions[quant.channel_dim]
    message = f"{where}: {len(quant.scales)} scales for an extent of {extent}"
    _require(extent != 0 and len(quant.scales) == extent, "N-VAL-9", message)
    positive = all(math.isfinite(scale) and scale > 0 for scale in quant.scales)
    _require(positive, "N-VAL-9", f"{where}: a scale of channelQuant is not positive")


# -- where values lie -------------------------------------------------------------------------------------------------


def _validate_no_location(model: Model, operand: Operand, where: str) -> None:
    place = operand.location
    unused = place.pool_index == place.offset == place.length == 0
    _require(unused, "N-VAL-6", f"{where}: {operand.lifetime.name} with location {place}")


def _validate_copy(model: Model, operand: Operand, where: str) -> None:
    _require(operand.location.pool_index == 0, "N-VAL-4", f"{where}: pool index {operand.location.pool_index}")
    _require_range(operand, len(model.operand_values), "N-VAL-4", where)


def _validate_reference(model: Model, operand: Operand, where: str) -> None:
    index = operand.location.pool_index
    _require(0 <= index < len(model.pools), "N-VAL-5", f"{where}: pool {index} of {len(model.pools)}")
    _require_range(operand, model.pools[index].size_bytes, "N-VAL-5", where)


def _require_range(operand: Operand, size_bytes: int, rule: str, where: str) -> None:
    place = operand.location
    inside = place.offset >= 0 and place.length >= 0 and place.offset + place.length <= size_bytes
    _require(inside, rule, f"{where}: {place.length} bytes at {place.offset} of {size_bytes}")
    needed = operand_size(operand.type, operand.dimensions, where)
    fits = place.length == needed or operand.type in _OEM_TYPES or _is_unknown(operand.type)
    _require(fits, "N-VAL-3", f"{where}: {place.length} bytes, {operand.type.name} {operand.dimensions} has {needed}")


def _validate_graph_location(model: Model, operand: Operand, where: str) -> None:
    place = operand.location
    inside = place.pool_index == place.length == 0 and 0 <= place.offset < len(model.referenced)
    _require(inside, "N-VAL-7", f"{where}: subgraph {place.offset} of {len(model.referenced)}, location {place}")


_LOCATION_RULES: Mapping[LifeTime, Callable[[Model, Operand, str], None]] = {
    LifeTime.CONSTANT_COPY: _validate_copy,
    LifeTime.CONSTANT_REFERENCE: _validate_reference,
    LifeTime.SUBGRAPH: _validate_graph_location,
}


# -- how operands and operations are joined ---------------------------------------------------------------------------


def _validate_index_lists(subgraph: Subgraph, where: str) -> None:
    lists = ((LifeTime.SUBGRAPH_INPUT, subgraph.input_indexes), (LifeTime.SUBGRAPH_OUTPUT, subgraph.output_indexes))
    for lifetime, indexes in lists:
        for index in indexes:
            _require(0 <= index < len(subgraph.operands), "N-VAL-15", f"{where}{lifetime.name} {index} is no operand")
            found = subgraph.operands[index].lifetime
            _require(
                found == lifetime, "N-MOD-7", f"{where}operand {index} is listed as {lifetime.name}, it is {found.name}"
            )
        _require(
            len(set(indexes)) == len(indexes), "N-VAL-14", f"{where}an operand is twice in the {lifetime.name} list"
        )
        marked = sum(operand.lifetime == lifetime for operand in subgraph.operands)
        _require(
            marked == len(indexes), "N-MOD-7", f"{where}{marked} operands are {lifetime.name}, {len(indexes)} listed"
        )


def _validate_indexes(subgraph: Subgraph, where: str) -> None:
    count = len(subgraph.operands)
    for number, operation in enumerate(subgraph.operations):
        for index in operation.inputs:
            _require(0 <= index < count, "N-MOD-12", f"{where}operation {number}: input {index} is no operand")
        for index in operation.outputs:
            _require(0 <= index < count, "N-MOD-13", f"{where}operation {number}: output {index} is no operand")


def _validate_order(subgraph: Subgraph, where: str) -> None:
    """Each operand is written before it is read, by one operation, and only where its lifetime lets it."""
    writable = (LifeTime.TEMPORARY_VARIABLE, LifeTime.SUBGRAPH_OUTPUT)
    known = [operand.lifetime not in writable for operand in subgraph.operands]
    for number, operation in enumerate(subgraph.operations):
        for index in operation.inputs:
            _require(known[index], "N-MOD-1", f"{where}operation {number} reads operand {index} before it is written")
        for index in operation.outputs:
            lifetime = subgraph.operands[index].lifetime
            message = f"{where}operation {number} writes operand {index}, which is {lifetime.name}"
            _require(lifetime in writable, "N-MOD-9", message)
            _require(not known[index], "N-MOD-9", f"{where}operation {number} writes operand {index} a second time")
            known[index] = True
    for index, written in enumerate(known):
        _require(written, "N-VAL-16", f"{where}operand {index} is never written")


# -- operations -------------------------------------------------------------------------------------------------------


def _validate_operation(model: Model, subgraph: Subgraph, operation: Operation, where: str) -> int:
    _require(isinstance(operation.type, OperationType), "N-MOD-11", f"{where}: code {operation.type}")
    if is_extension(operation.type):
        _require_prefix(model, operation.type, where)
    require_counts(operation, f"{where} ({operation.type.name})")
    declaration = REGISTRY.get(operation.type)
    if declaration is None:
        return introduced_in(operation.type)  # an OEM's or an unknown extension's: what it means is its vendor's
    operands = subgraph.operands
    try:
        found = match(declaration, [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs])
    except InvalidArgument as error:
        raise InvalidArgument(f"{where} ({operation.type.name}) {error}") from error
    return found.level


def _require_no_cycle(model: Model) -> None:
    """Walk the references among subgraphs, without recursion: one that is met while still open closes a cycle."""
    edges = [_referred(subgraph) for subgraph in model.referenced]
    done: set[int] = set()
    for start in range(len(edges)):
        open_ones, stack = {start}, [(start, iter(edges[start]))]
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                done.add(node)
                open_ones.discard(node)
                stack.pop()
                continue
            _require(following not in open_ones, "N-VAL-17", f"referenced subgraph {following} leads back to itself")
            if following not in done:
                open_ones.add(following)
                stack.append((following, iter(edges[following])))


def _referred(subgraph: Subgraph) -> tuple[int, ...]:
    operands = subgraph.operands
    return tuple(operand.location.offset for operand in operands if operand.lifetime == LifeTime.SUBGRAPH)
