"""Validation of a model: every rule of the HAL, checked before anything is prepared.

The main subgraph and the referenced ones are validated operand by operand, then operation by operation. Rule ids are
those of docs/contributing/requirements.md: N-MOD-* are families of HAL test cases, N-VAL-* rules beyond it,
S1 to S5 come from `operations.declaration`. Sizes are Python ints compared with 32- and 64-bit limits, so a hostile
model cannot make a sum overflow or cause an allocation.

OEM_OPERATION, and types and operations of extensions that are not installed in this process, are validated for their
structure only: a device reports them as unsupported. If extensions are installed, the model must have passed
`operations.extensions.to_local_prefixes` before. The boundaries of IF and WHILE are checked last
(`validate_boundaries`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import extension_prefix, is_extension
from nnfmq.hal.feature_levels import introduced_in
from nnfmq.hal.types import (
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Pool,
    Subgraph,
    element_bytes,
    has_unspecified_dimensions,
    is_scalar,
)
from nnfmq.operations import REGISTRY
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT
from nnfmq.operations.declaration import V1_0, V1_1, V1_2, V1_3, match
from nnfmq.validation.values import require, validate_extensions

__all__ = [
    "RuleViolation",
    "model_problems",
    "operand_level",
    "operand_size",
    "operation_level",
    "require_counts",
    "size_of_elements",
    "validate_boundaries",
    "validate_channel_quant",
    "validate_model",
    "validate_operand_type",
]


# ----------------------------------------------------------------------------------------------------------------------
# Validation of IF and WHILE against the subgraphs that they call: operand counts, and operands that match.
#
# `validate_model` has validated all subgraphs before, so indexes and subgraph references are valid here.
# Two operands match if type, scale, zero point, per-channel scales, extension data and dimensions are equal. The HAL
# requires all dimensions at a boundary to be known. An omitted outer operand (NO_VALUE) needs no known size.
#
#     N-VAL-18 IF: counts, condition, operands of a branch
#     N-VAL-19 WHILE: counts, the condition model's output, operands of condition and body
#     N-VAL-20 an operand at a boundary has an unknown size


_RULES = {OperationType.IF: "N-VAL-18", OperationType.WHILE: "N-VAL-19"}


def require_counts(operation: Operation, where: str) -> None:
    """Require that an IF or WHILE has at least 3 inputs and 1 output. Accept every other operation."""
    rule = _RULES.get(operation.type)
    if rule is not None:
        counts = len(operation.inputs), len(operation.outputs)
        require(counts[0] >= 3, rule, f"{where}: {counts[0]} inputs, at least 3 are required")
        require(counts[1] >= 1, rule, f"{where}: no output, at least 1 is required")


def validate_boundaries(model: Model, allow_unspecified: bool) -> None:
    """Validate every IF and WHILE against the subgraphs that it calls.

    Args:
        allow_unspecified: Accept operands of unknown size at a boundary.

    Raises:
        InvalidArgument: If an IF or WHILE does not match its subgraphs.
    """
    for index, subgraph in enumerate((model.main, *model.referenced)):
        graph = "" if index == 0 else f"referenced subgraph {index - 1}, "
        for position, operation in enumerate(subgraph.operations):
            if operation.type in _RULES:
                where = f"{graph}operation {position} ({operation.type.name})"
                _validate(model, subgraph, operation, where, allow_unspecified)


def _validate(model: Model, subgraph: Subgraph, operation: Operation, where: str, allow_unspecified: bool) -> None:
    arguments = [subgraph.operands[index] for index in operation.inputs]
    first = FIRST_OUTER_INPUT[operation.type]
    callees = [model.referenced[operand.location.offset] for operand in arguments[first - 2 : first]]
    outputs = [subgraph.operands[index] for index in operation.outputs]
    boundary = _Boundary(_RULES[operation.type], where, allow_unspecified)
    if operation.type == OperationType.IF:
        boundary.check_if(arguments[0], callees, arguments[first:], outputs)
    else:
        boundary.check_while(callees, arguments[first:], outputs)


class _Boundary(Struct, frozen=True):
    """Checks of one IF or WHILE: the rule's id, the operation's name in messages, whether sizes may be unknown."""

    rule: str
    where: str
    allow_unspecified: bool

    def check_if(
        self, condition: Operand, branches: Sequence[Subgraph], inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> None:
        """Require that both branches take all outer inputs and return all outer outputs."""
        self._check_condition(condition, "the condition")
        for name, branch in zip(("then", "else"), branches, strict=True):
            self._check_pairs(f"{name}-model, input", inputs, _inputs(branch))
            self._check_pairs(f"{name}-model, output", outputs, _outputs(branch))

    def check_while(self, callees: Sequence[Subgraph], inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Require that condition and body take all outer inputs, and that the outputs match the loop's state.

        The body's outputs replace the first outer inputs in the next iteration; the WHILE's outputs are the first of
        the body's outputs.
        """
        condition, body = callees
        self._check_pairs("condition model, input", inputs, _inputs(condition))
        self._check_pairs("body model, input", inputs, _inputs(body))
        condition_outputs, body_outputs = _outputs(condition), _outputs(body)
        count = len(condition_outputs)
        self._require(count == 1, f"the condition model has {count} outputs, exactly 1 is required")
        self._check_condition(condition_outputs[0], "the condition model's output")
        self._require(
            len(inputs) >= len(body_outputs) >= len(outputs),
            f"{len(inputs)} inputs, {len(body_outputs)} outputs of the body model, {len(outputs)} outputs; "
            "each count may be at most the one before it",
        )
        self._check_pairs("body model, output", inputs[: len(body_outputs)], body_outputs)
        self._check_pairs("body model, output", outputs, body_outputs[: len(outputs)])

    def _require(self, condition: bool, message: str) -> None:
        require(condition, self.rule, f"{self.where}: {message}")

    def _check_condition(self, operand: Operand, name: str) -> None:
        self._require(
            operand.type == OperandType.TENSOR_BOOL8, f"{name} is {operand.type.name}, TENSOR_BOOL8 is required"
        )
        self._check_size(operand, name)
        known = bool(operand.dimensions) and 0 not in operand.dimensions
        one = not known or math.prod(operand.dimensions) == 1
        self._require(one, f"{name} has dimensions {operand.dimensions}, exactly 1 element is required")

    def _check_pairs(self, name: str, outer: Sequence[Operand], inner: Sequence[Operand]) -> None:
        counts = f"{len(inner)} in the subgraph, {len(outer)} outside"
        self._require(len(outer) == len(inner), f"{name}s: {counts}")
        for index, (operand, other) in enumerate(zip(outer, inner, strict=True)):
            self._check_size(operand, f"the outer operand of {name} {index}")
            self._check_size(other, f"{name} {index}")
            self._require(_match(operand, other), f"{name} {index} is {_kind(other)}, outside it is {_kind(operand)}")

    def _check_size(self, operand: Operand, name: str) -> None:
        if self.allow_unspecified or operand.lifetime == LifeTime.NO_VALUE:
            return
        if is_extension(operand.type) and not element_bytes(operand.type):
            return  # an unknown extension: only its vendor knows whether the type is a scalar
        require(
            not has_unspecified_dimensions(operand.type, operand.dimensions),
            "N-VAL-20",
            f"{self.where}: {name} has dimensions {operand.dimensions}, all must be known at boundaries",
        )


def _inputs(subgraph: Subgraph) -> list[Operand]:
    return [subgraph.operands[index] for index in subgraph.input_indexes]


def _outputs(subgraph: Subgraph) -> list[Operand]:
    return [subgraph.operands[index] for index in subgraph.output_indexes]


def _kind(operand: Operand) -> str:
    channels = "" if operand.channel_quant is None else f", {operand.channel_quant}"
    scale = f"scale {operand.scale}, zero point {operand.zero_point}"
    return f"{operand.type.name} {operand.dimensions} ({scale}{channels})"


def _match(first: Operand, second: Operand) -> bool:
    """Return True if types and quantization are equal, and dimensions too as far as both are known."""
    same = (first.type, first.scale, first.zero_point, first.channel_quant, first.extension_data)
    if same != (second.type, second.scale, second.zero_point, second.channel_quant, second.extension_data):
        return False
    if not first.dimensions or not second.dimensions:
        return True
    pairs = zip(first.dimensions, second.dimensions, strict=False)
    return len(first.dimensions) == len(second.dimensions) and all(a == b or 0 in (a, b) for a, b in pairs)


# ----------------------------------------------------------------------------------------------------------------------
# Validation of a model: every rule of the HAL, checked before anything is prepared.


_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_OEM_TYPES = (OperandType.OEM, OperandType.TENSOR_OEM_BYTE)

_ZERO_POINTS: Mapping[OperandType, tuple[int, int]] = {
    OperandType.TENSOR_QUANT8_ASYMM: (0, 255),
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (-128, 127),
    OperandType.TENSOR_QUANT16_ASYMM: (0, 65535),
}
_SCALED = (*_ZERO_POINTS, OperandType.TENSOR_QUANT8_SYMM, OperandType.TENSOR_QUANT16_SYMM)


def validate_model(model: Model, *, allow_unspecified_boundaries: bool = False) -> int:
    """Return the feature level that `model` needs: the lowest interface version that allows it, 1 (HAL 1.0) to 8.

    Args:
        allow_unspecified_boundaries: Accept operands of unknown size as inputs and outputs of the subgraphs of IF and
            WHILE. No HAL version allows them; a framework that executes the model itself may.

    Raises:
        InvalidArgument: If a rule is violated; the message names the operand or operation and the rule.
    """
    for index, pool in enumerate(model.pools):
        _validate_pool(index, pool)
    level: int = validate_extensions(model.extensions)
    for index, subgraph in enumerate((model.main, *model.referenced)):
        where = "" if index == 0 else f"referenced subgraph {index - 1}, "
        level = max(level, _validate_subgraph(model, subgraph, where))
    _require_no_cycle(model)
    validate_boundaries(model, allow_unspecified_boundaries)
    return max(level, V1_3 if model.referenced else V1_0, V1_1 if model.relax_computation_float32_to_float16 else V1_0)


def _validate_pool(index: int, pool: Pool) -> None:
    message = f"pool {index}: size {pool.size_bytes} bytes, it must be greater than 0"
    require(pool.size_bytes > 0, "N-VAL-13", message)


def _validate_subgraph(model: Model, subgraph: Subgraph, where: str) -> int:
    _require_content(subgraph, where)
    levels = [
        _validate_operand(model, operand, f"{where}operand {index}") for index, operand in enumerate(subgraph.operands)
    ]
    _validate_index_lists(subgraph, where)
    _validate_indexes(subgraph, where)
    _validate_order(subgraph, where)
    levels += [
        _validate_operation(model, subgraph, operation, f"{where}operation {position}")
        for position, operation in enumerate(subgraph.operations)
    ]
    return max(levels)


def _require_content(subgraph: Subgraph, where: str) -> None:
    require(bool(subgraph.operands), "N-VAL-15", f"{where}a subgraph without operands")
    require(bool(subgraph.operations), "N-VAL-15", f"{where}a subgraph without operations")


# -- all problems of a model ------------------------------------------------------------------------------------------


class RuleViolation(NamedTuple):
    """A rule that a model violates: its id, and which operand, operation or other part violates it in which way."""

    rule: str
    text: str


def model_problems(model: Model, *, allow_unspecified_boundaries: bool = False) -> list[RuleViolation]:
    """Return the violated rules: none exactly if `validate_model` accepts the model, whose arguments these are.

    Of each part of the model it is the first rule. What depends on an invalid part is not checked: operations with an
    invalid operand, and the order and the boundaries of subgraphs that have one.
    """
    checks = _Checks()
    for index, pool in enumerate(model.pools):
        checks.hold(_validate_pool, index, pool)
    checks.hold(validate_extensions, model.extensions)
    for index, subgraph in enumerate((model.main, *model.referenced)):
        _check_subgraph(checks, model, subgraph, "" if index == 0 else f"referenced subgraph {index - 1}, ")
    if not checks.problems and checks.hold(_require_no_cycle, model):
        checks.hold(validate_boundaries, model, allow_unspecified_boundaries)
    return checks.problems


class _Checks:
    """Collects the messages of checks that fail."""

    def __init__(self) -> None:
        self.problems: list[RuleViolation] = []

    def hold(self, check: Callable[..., object], *arguments: object) -> bool:
        """Return whether a check accepts its arguments."""
        try:
            check(*arguments)
        except InvalidArgument as error:
            text, _, rule = str(error).rpartition(" (")
            self.problems.append(RuleViolation(rule.rstrip(")"), text))
            return False
        return True


def _check_subgraph(checks: _Checks, model: Model, subgraph: Subgraph, where: str) -> None:
    checks.hold(_require_content, subgraph, where)
    valid = [
        checks.hold(_validate_operand, model, operand, f"{where}operand {index}")
        for index, operand in enumerate(subgraph.operands)
    ]
    if not checks.hold(_validate_indexes, subgraph, where):
        return
    if all(valid) and checks.hold(_validate_index_lists, subgraph, where):
        checks.hold(_validate_order, subgraph, where)
    for position, operation in enumerate(subgraph.operations):
        if all(valid[index] for index in (*operation.inputs, *operation.outputs)):
            checks.hold(_validate_operation, model, subgraph, operation, f"{where}operation {position}")


# -- operands ---------------------------------------------------------------------------------------------------------


def _validate_operand(model: Model, operand: Operand, where: str) -> int:
    level = validate_operand_type(operand, where)
    if is_extension(operand.type):
        _validate_extension_operand(model, operand, where)
    extra = is_extension(operand.type) or not operand.extension_data
    require(extra, "N-VAL-10", f"{where}: extension data on {operand.type.name}, which is not an extension type")
    validate_channel_quant(operand, where)
    require(operand.location.padding == 0, "N-VAL-8", f"{where}: padding {operand.location.padding}, it must be 0")
    _LOCATION_RULES.get(operand.lifetime, _validate_no_location)(model, operand, where)
    return level


def validate_operand_type(operand: Operand, where: str) -> int:
    """Return the feature level of an operand's type, and validate type, dimensions, scale and zero point.

    An extension's type must have this process's code.

    Raises:
        InvalidArgument: If one is invalid; `where` begins the message.
    """
    level = _validate_type(operand, where)
    _validate_dimensions(operand, where)
    if not is_extension(operand.type) and operand.type not in _OEM_TYPES:
        _validate_scale(operand, where)
        _validate_zero_point(operand, where)
    return level


def _validate_type(operand: Operand, where: str) -> int:
    require(isinstance(operand.type, OperandType), "N-MOD-2", f"{where}: unknown type code {operand.type}")
    require(isinstance(operand.lifetime, LifeTime), "N-MOD-6", f"{where}: unknown lifetime code {operand.lifetime}")
    is_subgraph = (operand.type == OperandType.SUBGRAPH, operand.lifetime == LifeTime.SUBGRAPH)
    require(
        is_subgraph[0] == is_subgraph[1],
        "N-VAL-1",
        f"{where}: type {operand.type.name} with lifetime {operand.lifetime.name}, both or neither must be SUBGRAPH",
    )
    return operand_level(operand)


def operand_level(operand: Operand) -> int:
    """Return the feature level that an operand needs, whatever reads or writes it."""
    is_unranked = not operand.dimensions and not is_scalar(operand.type) and operand.lifetime != LifeTime.NO_VALUE
    return max(introduced_in(operand.type), V1_2 if is_unranked else V1_0)  # before 1.2 the rank must be known (MOD-5)


def _validate_extension_operand(model: Model, operand: Operand, where: str) -> None:
    _require_prefix(model, operand.type, where)
    plain = operand.scale == operand.zero_point == 0 and operand.channel_quant is None
    require(plain, "N-VAL-10", f"{where}: a scale, zero point or channelQuant on extension type {operand.type.name}")


def _is_unknown(type: OperandType) -> bool:
    """Return True for a type of an extension that is not installed here: only its vendor can validate it (VAL-5)."""
    return is_extension(type) and not element_bytes(type)


def _require_prefix(model: Model, code: int, where: str) -> None:
    prefix, known = extension_prefix(code), [extension.prefix for extension in model.extensions]
    require(prefix in known, "N-VAL-11", f"{where}: extension prefix {prefix}, the model declares {known}")


def _validate_dimensions(operand: Operand, where: str) -> None:
    if is_scalar(operand.type):
        require(not operand.dimensions, "N-MOD-3", f"{where}: a scalar with dimensions {operand.dimensions}")
    for dimension in operand.dimensions:
        require(0 <= dimension < 1 << 32, "N-VAL-3", f"{where}: dimension {dimension}, it must be 0 to 2^32 - 1")
    operand_size(operand.type, operand.dimensions, where)
    if operand.lifetime in _CONSTANTS:
        known = (
            is_scalar(operand.type)
            or _is_unknown(operand.type)
            or (bool(operand.dimensions) and 0 not in operand.dimensions)
        )
        require(known, "N-VAL-2", f"{where}: a constant with unknown dimensions {operand.dimensions}")


def operand_size(type: OperandType, dimensions: Sequence[int], where: str) -> int:
    """Return the size of an operand in bytes, 0 if unknown.

    Raises:
        InvalidArgument: If the product of the dimensions, taken from left to right, ever exceeds 32 bits.
    """
    if not dimensions:
        return element_bytes(type) if is_scalar(type) else 0
    return size_of_elements(element_bytes(type), dimensions, where)


def size_of_elements(element_size: int, dimensions: Sequence[int], where: str) -> int:
    """Return the size in bytes of a tensor with elements of `element_size` bytes. Raises as `operand_size`."""
    size = element_size
    for dimension in dimensions:
        size *= dimension
        require(size < 1 << 32, "N-VAL-3", f"{where}: dimensions {tuple(dimensions)} need more than 2^32 - 1 bytes")
    return size


def _validate_scale(operand: Operand, where: str) -> None:
    scale = operand.scale
    if operand.type in _SCALED:
        allowed = "a positive, finite scale"
        fits = math.isfinite(scale) and scale > 0
    elif operand.type == OperandType.TENSOR_INT32:
        allowed = "a finite scale of 0 or more"
        fits = math.isfinite(scale) and scale >= 0
    else:
        allowed = "scale 0"
        fits = scale == 0
    require(fits, "N-MOD-4", f"{where}: scale {scale}, {operand.type.name} requires {allowed}")


def _validate_zero_point(operand: Operand, where: str) -> None:
    low, high = _ZERO_POINTS.get(operand.type, (0, 0))
    message = f"{where}: zero point {operand.zero_point}, {operand.type.name} allows {low} to {high}"
    require(low <= operand.zero_point <= high, "N-MOD-5", message)


def validate_channel_quant(operand: Operand, where: str) -> None:
    """Validate the per-channel scales of an operand; a type without them must have none.

    Raises:
        InvalidArgument: If they are invalid or missing; `where` begins the message.
    """
    quant, dimensions = operand.channel_quant, operand.dimensions
    needed = operand.type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    require(
        (quant is not None) == needed,
        "N-VAL-9",
        f"{where}: channelQuant {'missing' if needed else 'given'} for type {operand.type.name}",
    )
    if quant is None:
        return
    message = f"{where}: channelDim {quant.channel_dim}, the operand has {len(dimensions)} dimensions"
    require(0 <= quant.channel_dim < len(dimensions), "N-VAL-9", message)
    channels = dimensions[quant.channel_dim]
    message = f"{where}: {len(quant.scales)} scales for {channels} channels"
    require(channels != 0 and len(quant.scales) == channels, "N-VAL-9", message)
    positive = all(math.isfinite(scale) and scale > 0 for scale in quant.scales)
    require(positive, "N-VAL-9", f"{where}: a scale of channelQuant is not positive and finite")


# -- locations of values ----------------------------------------------------------------------------------------------


def _validate_no_location(model: Model, operand: Operand, where: str) -> None:
    location = operand.location
    unused = location.pool_index == location.offset == location.length == 0
    require(unused, "N-VAL-6", f"{where}: {operand.lifetime.name} with location {location}, all fields must be 0")


def _validate_copy(model: Model, operand: Operand, where: str) -> None:
    require(
        operand.location.pool_index == 0, "N-VAL-4", f"{where}: pool index {operand.location.pool_index}, it must be 0"
    )
    _require_range(operand, len(model.operand_values), "N-VAL-4", where)


def _validate_reference(model: Model, operand: Operand, where: str) -> None:
    index = operand.location.pool_index
    require(0 <= index < len(model.pools), "N-VAL-5", f"{where}: pool {index}, the model has {len(model.pools)}")
    _require_range(operand, model.pools[index].size_bytes, "N-VAL-5", where)


def _require_range(operand: Operand, size_bytes: int, rule: str, where: str) -> None:
    location = operand.location
    inside = location.offset >= 0 and location.length >= 0 and location.offset + location.length <= size_bytes
    message = f"{where}: {location.length} bytes at offset {location.offset}, the memory has {size_bytes} bytes"
    require(inside, rule, message)
    required = operand_size(operand.type, operand.dimensions, where)
    fits = location.length == required or operand.type in _OEM_TYPES or _is_unknown(operand.type)
    message = f"{where}: {location.length} bytes, {operand.type.name} {operand.dimensions} requires {required}"
    require(fits, "N-VAL-3", message)


def _validate_subgraph_location(model: Model, operand: Operand, where: str) -> None:
    location, count = operand.location, len(model.referenced)
    inside = location.pool_index == location.length == 0 and 0 <= location.offset < count
    message = f"{where}: subgraph {location.offset}, the model has {count} referenced subgraphs; location {location}"
    require(inside, "N-VAL-7", message)


_LOCATION_RULES: Mapping[LifeTime, Callable[[Model, Operand, str], None]] = {
    LifeTime.CONSTANT_COPY: _validate_copy,
    LifeTime.CONSTANT_REFERENCE: _validate_reference,
    LifeTime.SUBGRAPH: _validate_subgraph_location,
}


# -- references among operands and operations -------------------------------------------------------------------------


def _validate_index_lists(subgraph: Subgraph, where: str) -> None:
    lists = ((LifeTime.SUBGRAPH_INPUT, subgraph.input_indexes), (LifeTime.SUBGRAPH_OUTPUT, subgraph.output_indexes))
    for lifetime, indexes in lists:
        for index in indexes:
            exists = 0 <= index < len(subgraph.operands)
            require(exists, "N-VAL-15", f"{where}{lifetime.name} index {index} is not an operand")
            found = subgraph.operands[index].lifetime
            message = f"{where}operand {index} is listed as {lifetime.name}, its lifetime is {found.name}"
            require(found == lifetime, "N-MOD-7", message)
        unique = len(set(indexes)) == len(indexes)
        require(unique, "N-VAL-14", f"{where}an operand is listed twice as {lifetime.name}")
        marked = sum(operand.lifetime == lifetime for operand in subgraph.operands)
        message = f"{where}{marked} operands have lifetime {lifetime.name}, {len(indexes)} are listed"
        require(marked == len(indexes), "N-MOD-7", message)


def _validate_indexes(subgraph: Subgraph, where: str) -> None:
    count = len(subgraph.operands)
    for position, operation in enumerate(subgraph.operations):
        for index in operation.inputs:
            require(
                0 <= index < count, "N-MOD-12", f"{where}operation {position}: input index {index} is not an operand"
            )
        for index in operation.outputs:
            message = f"{where}operation {position}: output index {index} is not an operand"
            require(0 <= index < count, "N-MOD-13", message)


def _validate_order(subgraph: Subgraph, where: str) -> None:
    """Require that each operand is written by one operation before it is read, and only if its lifetime allows it."""
    writable = (LifeTime.TEMPORARY_VARIABLE, LifeTime.SUBGRAPH_OUTPUT)
    has_value = [operand.lifetime not in writable for operand in subgraph.operands]
    for position, operation in enumerate(subgraph.operations):
        name = f"{where}operation {position}"
        for index in operation.inputs:
            require(has_value[index], "N-MOD-1", f"{name} reads operand {index} before it is written")
        for index in operation.outputs:
            lifetime = subgraph.operands[index].lifetime
            require(
                lifetime in writable, "N-MOD-9", f"{name} writes operand {index}, whose lifetime is {lifetime.name}"
            )
            require(not has_value[index], "N-MOD-9", f"{name} writes operand {index} a second time")
            has_value[index] = True
    for index, written in enumerate(has_value):
        require(written, "N-VAL-16", f"{where}operand {index} is never written")


# -- operations -------------------------------------------------------------------------------------------------------


def _validate_operation(model: Model, subgraph: Subgraph, operation: Operation, where: str) -> int:
    require(isinstance(operation.type, OperationType), "N-MOD-11", f"{where}: unknown operation code {operation.type}")
    if is_extension(operation.type):
        _require_prefix(model, operation.type, where)
    require_counts(operation, f"{where} ({operation.type.name})")
    try:
        return operation_level(subgraph, operation)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where} ({operation.type.name}): {error}") from error


def operation_level(subgraph: Subgraph, operation: Operation) -> int:
    """Return the feature level that an operation needs, without its operands and the subgraphs that it calls.

    Raises:
        InvalidArgument: If the operation does not take these operands.
    """
    declaration = REGISTRY.get(operation.type)
    if declaration is None:
        # An OEM operation or one of an unknown extension: only its vendor knows its rules.
        return introduced_in(operation.type)
    operands = subgraph.operands
    return match(declaration, [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs]).level


def _require_no_cycle(model: Model) -> None:
    """Require that no subgraph references itself, directly or through others.

    A depth-first search with an explicit stack, because a hostile model could exceed Python's recursion limit. An edge
    to a subgraph that is still on the stack closes a cycle.
    """
    edges = [
        [operand.location.offset for operand in subgraph.operands if operand.lifetime == LifeTime.SUBGRAPH]
        for subgraph in model.referenced
    ]
    done: set[int] = set()
    for start in range(len(edges)):
        on_stack, stack = {start}, [(start, iter(edges[start]))]
        while stack:
            node, remaining = stack[-1]
            following = next(remaining, None)
            if following is None:
                done.add(node)
                on_stack.discard(node)
                stack.pop()
                continue
            require(following not in on_stack, "N-VAL-17", f"referenced subgraph {following} references itself")
            if following not in done:
                on_stack.add(following)
                stack.append((following, iter(edges[following])))
