"""Validation of HAL values other than models and requests, in the order in which the HAL declares the types.

Each function returns the lowest feature level that has the value. `Raises:` is the same for all: InvalidArgument if
the value is invalid. Rule ids are those of docs/contributing/requirements.md, or VAL-4 if the type has no row there.
The client validates the values that a driver sends with the same functions (VAL-7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.capabilities import (
    BYTE_SIZE_OF_CACHE_TOKEN,
    MAX_NUMBER_OF_CACHE_FILES,
    BufferDesc,
    BufferRole,
    Capabilities,
    PerformanceInfo,
)
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extensions import HIDL_PREFIX_BITS, Extension, extension_prefix, is_extension, is_extension_name
from nnfmq.hal.feature_levels import FeatureLevel, introduced_in, number_of_consumers
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.timing import NO_TIME, Timing
from nnfmq.hal.types import (
    BASE_MAX,
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    LoopTimeoutDurationNs,
    MeasureTiming,
    Model,
    Operand,
    OperandType,
    OutputShape,
    Pool,
    Priority,
    Subgraph,
    TokenValuePair,
    is_scalar,
    merge_dimensions,
)

__all__ = [
    "DescribedType",
    "element_info",
    "require",
    "validate_buffer",
    "validate_buffer_desc",
    "validate_buffer_roles",
    "validate_cache_counts",
    "validate_cache_token",
    "validate_capabilities",
    "validate_consumers",
    "validate_device_status",
    "validate_device_type",
    "validate_duration",
    "validate_error_status",
    "validate_execution_preference",
    "validate_extension",
    "validate_extensions",
    "validate_hints",
    "validate_loop_timeout",
    "validate_measure_timing",
    "validate_memory_pool",
    "validate_output_shapes",
    "validate_performance",
    "validate_priority",
    "validate_timing",
]


# ----------------------------------------------------------------------------------------------------------------------
# The check that all validators share.


def require(condition: bool, rule: str, message: str) -> None:
    """Raise InvalidArgument with `message` and the rule's id, unless `condition` holds.

    `rule` is an id from docs/contributing/requirements.md, such as N-MOD-2.
    """
    if not condition:
        raise InvalidArgument(f"{message} ({rule})")


# ----------------------------------------------------------------------------------------------------------------------
# Validation of HAL values other than models and requests, in the order in which the HAL declares the types.


V1_0, V1_2, V1_3 = FeatureLevel.V1_0, FeatureLevel.V1_2, FeatureLevel.V1_3
Code = TypeVar("Code", bound=IntEnum)


def _validate_code(kind: type[Code], value: int, rule: str) -> FeatureLevel:
    known = [member.value for member in kind]
    require(value in known, rule, f"{kind.__name__} {int(value)}, allowed are {known}")
    return introduced_in(kind(value))


# -- enumerations -----------------------------------------------------------------------------------------------------


def validate_execution_preference(value: ExecutionPreference) -> FeatureLevel:
    """Validate an ExecutionPreference."""
    return _validate_code(ExecutionPreference, value, "N-MOD-21")


def validate_priority(value: Priority) -> FeatureLevel:
    """Validate a Priority."""
    return _validate_code(Priority, value, "N-MOD-22")


def validate_error_status(value: ErrorStatus) -> FeatureLevel:
    """Validate an ErrorStatus. DEAD_OBJECT is not part of any interface version."""
    require(value != ErrorStatus.DEAD_OBJECT, "VAL-4", "ErrorStatus DEAD_OBJECT is not part of any interface version")
    return _validate_code(ErrorStatus, value, "VAL-4")


def validate_measure_timing(value: MeasureTiming) -> FeatureLevel:
    """Validate a MeasureTiming."""
    return _validate_code(MeasureTiming, value, "VAL-4")


def validate_device_type(value: DeviceType) -> FeatureLevel:
    """Validate a DeviceType: exactly one value, not a combination."""
    return _validate_code(DeviceType, value, "DEV-3")


def validate_device_status(value: DeviceStatus) -> FeatureLevel:
    """Validate a DeviceStatus."""
    return _validate_code(DeviceStatus, value, "DEV-2")


# -- times ------------------------------------------------------------------------------------------------------------


def validate_timing(timing: Timing) -> FeatureLevel:
    """Validate execution times in ns: -1 (unknown) or more, and no longer on the device than in the driver."""
    device, driver = timing.time_on_device_ns, timing.time_in_driver_ns
    require(min(device, driver) >= NO_TIME, "VAL-4", f"{timing}: each time must be at least {NO_TIME}")
    ordered = NO_TIME in (device, driver) or device <= driver
    require(ordered, "TIM-4", f"{device} ns on the device, {driver} ns in the driver; the first must not be longer")
    return V1_2


def validate_duration(duration_ns: int) -> FeatureLevel:
    """Validate a deadline or duration in ns: -1 (none) to 2^63 - 1."""
    require(NO_TIME <= duration_ns < 1 << 63, "N-VAL-23", f"{duration_ns} ns, it must be {NO_TIME} to 2^63 - 1")
    return V1_3


def validate_loop_timeout(duration_ns: int) -> FeatureLevel:
    """Validate a loop timeout in ns: -1 (the default) to LoopTimeoutDurationNs.MAXIMUM."""
    allowed = NO_TIME <= duration_ns <= LoopTimeoutDurationNs.MAXIMUM
    limit = LoopTimeoutDurationNs.MAXIMUM.value
    require(allowed, "N-RQX-14", f"loop timeout {duration_ns} ns, it must be {NO_TIME} to {limit}")
    return V1_3


# -- results and memory -----------------------------------------------------------------------------------------------


def validate_output_shapes(shapes: Sequence[OutputShape]) -> FeatureLevel:
    """Validate the output shapes of an execution: each dimension must fit 32 bits."""
    for index, shape in enumerate(shapes):
        _require_dimensions(shape.dimensions, f"output {index}")
    return V1_2


def _require_dimensions(dimensions: Sequence[int], where: str) -> None:
    in_range = all(0 <= dimension < 1 << 32 for dimension in dimensions)
    require(in_range, "VAL-4", f"{where}: dimensions {tuple(dimensions)}, each must be 0 to 2^32 - 1")


def validate_memory_pool(pool: Pool) -> FeatureLevel:
    """Validate a memory pool: it must not be empty."""
    require(pool.size_bytes > 0, "N-VAL-13", f"a pool of {pool.size_bytes} bytes, it must have at least 1")
    return V1_0


def validate_buffer_desc(desc: BufferDesc) -> FeatureLevel:
    """Validate the description of a managed buffer: each dimension must fit 32 bits."""
    _require_dimensions(desc.dimensions, "buffer")
    return V1_3


def validate_buffer_roles(inputs: Sequence[BufferRole], outputs: Sequence[BufferRole]) -> FeatureLevel:
    """Validate a buffer's roles: at least one, none twice, probabilities in (0, 1].

    `validate_buffer` checks that the roles exist and agree.
    """
    require(bool(inputs or outputs), "DOM-3", "a buffer without roles, at least 1 is required")
    for roles in (inputs, outputs):
        keys = [(role.model_index, role.io_index) for role in roles]
        require(len(set(keys)) == len(keys), "N-DOM-7", f"a role is given twice: {keys}")
        for role in roles:
            require(min(role.model_index, role.io_index) >= 0, "DOM-3", f"{role}: an index must be 0 or more")
            require(0 < role.probability <= 1, "N-DOM-6", f"{role}: a probability must be greater than 0 and at most 1")
    return V1_3


def validate_consumers(subgraph: Subgraph, counts: Sequence[int]) -> FeatureLevel:
    """Validate HIDL's numberOfConsumers: how many operation inputs refer to each operand."""
    expected = number_of_consumers(subgraph)
    require(list(counts) == expected, "N-MOD-8", f"numberOfConsumers {list(counts)}, it must be {expected}")
    return V1_0


# -- device information -----------------------------------------------------------------------------------------------


def validate_performance(info: PerformanceInfo) -> FeatureLevel:
    """Validate performance info: both numbers must be finite and positive."""
    positive = all(math.isfinite(number) and number > 0 for number in (info.exec_time, info.power_usage))
    require(positive, "CAP-1", f"{info}: both numbers must be finite and greater than 0")
    return V1_0


def validate_capabilities(capabilities: Capabilities) -> FeatureLevel:
    """Validate capabilities: valid numbers, and operand types in strictly ascending order.

    SUBGRAPH and extension types must not be listed.
    """
    types = [entry.type for entry in capabilities.operand_performance]
    require(
        types == sorted(set(types)),
        "CAP-3",
        f"operand types {[int(t) for t in types]}, they must be strictly ascending",
    )
    for type in types:
        require(isinstance(type, OperandType), "CAP-3", f"unknown operand type {int(type)}")
        require(
            type != OperandType.SUBGRAPH and not is_extension(type),
            "CAP-3",
            f"an entry for {type.name}, which has no performance info",
        )
    for info in (entry.info for entry in capabilities.operand_performance):
        validate_performance(info)
    overhead = (capabilities.if_performance, capabilities.while_performance)
    relaxed = (capabilities.relaxed_float32_to_float16_scalar, capabilities.relaxed_float32_to_float16_tensor)
    for info in (*relaxed, *overhead):
        validate_performance(info)
    return max((introduced_in(type) for type in types), default=V1_0)


def validate_cache_counts(model_files: int, data_files: int) -> FeatureLevel:
    """Validate the numbers of cache files: 0 to 32 of each kind."""
    for count in (model_files, data_files):
        limit = MAX_NUMBER_OF_CACHE_FILES
        require(0 <= count <= limit, "DEV-6", f"{count} cache files, it must be 0 to {limit}")
    return V1_2


def validate_cache_token(token: bytes) -> FeatureLevel:
    """Validate a cache token: exactly 32 bytes."""
    size = BYTE_SIZE_OF_CACHE_TOKEN
    require(len(token) == size, "N-VAL-23", f"a cache token of {len(token)} bytes, it must have {size}")
    return V1_2


def validate_extension(extension: Extension) -> FeatureLevel:
    """Validate an extension: a well-formed name, unique 16-bit type codes, elements of at least 1 byte."""
    name, types = extension.name, [info.type for info in extension.operand_types]
    require(is_extension_name(name), "EXT-1", f"malformed extension name {name!r}, an example is 'com.example.name'")
    require(len(set(types)) == len(types), "EXT-1", f"extension {name}: a type is listed twice: {types}")
    for info in extension.operand_types:
        require(
            0 <= info.type <= BASE_MAX, "EXT-1", f"extension {name}: type code {info.type}, it must be 0 to {BASE_MAX}"
        )
        require(
            info.byte_size > 0,
            "EXT-1",
            f"extension {name}: type {info.type} has elements of {info.byte_size} bytes, at least 1 is required",
        )
    return V1_2


def validate_extensions(extensions: Sequence[ExtensionNameAndPrefix]) -> FeatureLevel:
    """Validate a model's extensions: unique well-formed names, unique prefixes of 1 to 2^16 - 1.

    Only HIDL allows the sixteenth bit; `interface_versions.require_prefixes` rejects it for AIDL.
    """
    names, prefixes = [e.name for e in extensions], [e.prefix for e in extensions]
    require(len(set(names)) == len(names), "N-VAL-12", f"an extension is named twice: {names}")
    require(len(set(prefixes)) == len(prefixes), "N-VAL-12", f"a prefix is given twice: {prefixes}")
    for entry in extensions:
        require(is_extension_name(entry.name), "N-VAL-12", f"malformed extension name {entry.name!r}")
        allowed = 0 < entry.prefix < 1 << HIDL_PREFIX_BITS
        require(
            allowed,
            "N-VAL-12",
            f"extension {entry.name}: prefix {entry.prefix}, it must be 1 to 2^{HIDL_PREFIX_BITS} - 1",
        )
    return V1_2 if extensions else V1_0


def validate_hints(hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]) -> FeatureLevel:
    """Validate compilation or execution hints: unique tokens whose prefixes are declared, valid extensions.

    The driver ignores hints that it does not know.
    """
    tokens, prefixes = [hint.token for hint in hints], [e.prefix for e in extensions]
    try:
        validate_extensions(extensions)
    except InvalidArgument as error:
        raise InvalidArgument(f"hints: {error} (N-VAL-22)") from error
    require(len(set(tokens)) == len(tokens), "N-VAL-22", f"hints: a token is given twice: {tokens}")
    for token in tokens:
        known = extension_prefix(token) in prefixes
        require(known, "N-VAL-22", f"hints: the prefix of token {token:#x} is not declared, declared are {prefixes}")
    return FeatureLevel.AIDL_V4 if hints or extensions else V1_0


# ----------------------------------------------------------------------------------------------------------------------
# Validation of a managed buffer's description and roles against the models that it is allocated for.
#
# Rules: N-DOM-1, 6, 7 (checked by `validate_buffer_roles`), N-DOM-4, 5 (a role that does not exist), N-DOM-8 to 12
# (roles that disagree), N-DOM-13 to 15 (a description that disagrees with the roles). The caller checks that the models
# were prepared by the same device.


def validate_buffer(
    desc: BufferDesc, models: Sequence[Model], inputs: Sequence[BufferRole], outputs: Sequence[BufferRole]
) -> Operand:
    """Return the operand that the buffer stores in all of its roles; 0 and () are dimensions that stay unknown.

    Raises:
        InvalidArgument: If a role does not exist, roles disagree, or `desc` disagrees with them.
    """
    validate_buffer_desc(desc)
    validate_buffer_roles(inputs, outputs)
    operands = [*_operands(models, inputs, "input"), *_operands(models, outputs, "output")]
    name, merged = operands[0]
    for other_name, other in operands[1:]:
        merged = _merge(merged, other, f"{name} and {other_name}")
    return _apply_desc(merged, desc)


def _operands(models: Sequence[Model], roles: Sequence[BufferRole], kind: str) -> Iterator[tuple[str, Operand]]:
    for role in roles:
        count = len(models)
        require(
            role.model_index < count, "N-DOM-4", f"{kind} role: model index {role.model_index}, {count} models given"
        )
        main = models[role.model_index].main
        indexes = main.input_indexes if kind == "input" else main.output_indexes
        name = f"{kind} {role.io_index} of model {role.model_index}"
        require(role.io_index < len(indexes), "N-DOM-5", f"{name}: the model has {len(indexes)} {kind}s")
        yield name, main.operands[indexes[role.io_index]]


def _merge(first: Operand, other: Operand, names: str) -> Operand:
    """Return `first` with the dimensions that either operand knows. All else must be equal."""
    require(first.type == other.type, "N-DOM-8", f"{names} have types {first.type.name} and {other.type.name}")
    require(first.scale == other.scale, "N-DOM-9", f"{names} have scales {first.scale} and {other.scale}")
    points = first.zero_point, other.zero_point
    require(points[0] == points[1], "N-DOM-10", f"{names} have zero points {points[0]} and {points[1]}")
    extras = [(operand.channel_quant, operand.extension_data) for operand in (first, other)]
    require(extras[0] == extras[1], "DOM-3", f"{names} have different extra parameters")
    dimensions = merge_dimensions(first.dimensions, other.dimensions)
    if dimensions is None:
        rule = "N-DOM-12" if len(first.dimensions) == len(other.dimensions) else "N-DOM-11"
        raise InvalidArgument(f"{names} have dimensions {first.dimensions} and {other.dimensions} ({rule})")
    return replace(first, dimensions=dimensions)


def _apply_desc(operand: Operand, desc: BufferDesc) -> Operand:
    scalar = is_scalar(operand.type)
    require(not scalar or not desc.dimensions, "N-DOM-15", f"a scalar buffer with dimensions {desc.dimensions}")
    dimensions = merge_dimensions(operand.dimensions, desc.dimensions)
    if dimensions is None:
        rule = "N-DOM-14" if len(operand.dimensions) == len(desc.dimensions) else "N-DOM-13"
        raise InvalidArgument(
            f"buffer dimensions {desc.dimensions} requested, the roles have {operand.dimensions} ({rule})"
        )
    return replace(operand, dimensions=dimensions)


# ----------------------------------------------------------------------------------------------------------------------
# The element types of extensions, as a device describes them. The peer that does is not trusted.


_NUMERIC_KINDS = "biufc"  # NumPy's kinds of numeric elements: no pointers, no structures


class DescribedType(Protocol):
    """An operand type of an extension, as `DeviceInfo` has it."""

    @property
    def type(self) -> int:
        """The type's number within its extension."""
        ...

    @property
    def is_tensor(self) -> bool:
        """Whether it has dimensions."""
        ...

    @property
    def byte_size(self) -> int:
        """The size of an element in bytes."""
        ...

    @property
    def dtype(self) -> str:
        """NumPy's name of the element type."""
        ...


def element_info(extension: str, kind: DescribedType) -> ElementInfo:
    """Return NumPy's element type of an operand type of `extension`.

    Raises:
        InvalidArgument: If NumPy has no numeric element of that name and size.
    """
    try:
        dtype = np.dtype(kind.dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _NUMERIC_KINDS or dtype.itemsize != kind.byte_size:
        text = f"elements of {kind.dtype!r} in {kind.byte_size} bytes"
        raise InvalidArgument(f"{text} for type {kind.type} of {extension}")
    return ElementInfo(kind.dtype, not kind.is_tensor)
