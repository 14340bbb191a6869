"""validate_*: every value of the vocabulary other than models and requests, in the order of the HAL's types.

Each answers the least feature level that has the value, or raises InvalidArgument with the rule's id: those of the
requirements' tables where a case has one, otherwise VAL-4 (any other type) and the CAP and EXT rows. What a driver
sends is judged by the same functions (VAL-7). Nothing here looks into a model; `model` and `request` do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from nnfmq.hal.capabilities import (
    BYTE_SIZE_OF_CACHE_TOKEN,
    MAX_NUMBER_OF_CACHE_FILES,
    BufferDesc,
    BufferRole,
    Capabilities,
    PerformanceInfo,
)
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extension_codes import HIDL_PREFIX_BITS, Extension, extension_prefix, is_extension, is_extension_name
from nnfmq.hal.feature_levels import FeatureLevel, introduced_in, number_of_consumers
from nnfmq.hal.types import (
    BASE_MAX,
    NO_TIME,
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OperandType,
    OutputShape,
    Pool,
    Priority,
    Subgraph,
    Timing,
    TokenValuePair,
)

__all__ = [
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

V1_0, V1_2, V1_3 = FeatureLevel.V1_0, FeatureLevel.V1_2, FeatureLevel.V1_3
Code = TypeVar("Code", bound=IntEnum)


def _require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{rule}: {message}")


def _validate_code(kind: type[Code], value: int, rule: str) -> FeatureLevel:
    known = [member.value for member in kind]
    _require(value in known, rule, f"{kind.__name__} {int(value)}, allowed are {known}")
    return introduced_in(kind(value))


# -- enumerations -----------------------------------------------------------------------------------------------------


def validate_execution_preference(value: ExecutionPreference) -> FeatureLevel:
    """Refuse what is no ExecutionPreference."""
    return _validate_code(ExecutionPreference, value, "N-MOD-21")


def validate_priority(value: Priority) -> FeatureLevel:
    """Refuse what is no Priority."""
    return _validate_code(Priority, value, "N-MOD-22")


def validate_error_status(value: ErrorStatus) -> FeatureLevel:
    """Refuse what is no ErrorStatus of the interface; DEAD_OBJECT is none."""
    _require(value != ErrorStatus.DEAD_OBJECT, "VAL-4", "ErrorStatus DEAD_OBJECT is in no version of the interface")
    return _validate_code(ErrorStatus, value, "VAL-4")


def validate_measure_timing(value: MeasureTiming) -> FeatureLevel:
    """Refuse what is no MeasureTiming."""
    return _validate_code(MeasureTiming, value, "VAL-4")


def validate_device_type(value: DeviceType) -> FeatureLevel:
    """Refuse what is not exactly one DeviceType."""
    return _validate_code(DeviceType, value, "DEV-3")


def validate_device_status(value: DeviceStatus) -> FeatureLevel:
    """Refuse what is no DeviceStatus."""
    return _validate_code(DeviceStatus, value, "DEV-2")


# -- times ------------------------------------------------------------------------------------------------------------


def validate_timing(timing: Timing) -> FeatureLevel:
    """Refuse times below -1, and a time on the device that is longer than the time in the driver."""
    device, driver = timing.time_on_device_ns, timing.time_in_driver_ns
    _require(min(device, driver) >= NO_TIME, "VAL-4", f"{timing} has a time below {NO_TIME}")
    ordered = NO_TIME in (device, driver) or device <= driver
    _require(ordered, "TIM-4", f"{device} ns on the device, only {driver} ns in the driver")
    return V1_2


def validate_duration(duration_ns: int) -> FeatureLevel:
    """Refuse a deadline or duration below -1 (none) or over 63 bits; nanoseconds."""
    _require(NO_TIME <= duration_ns < 1 << 63, "N-VAL-23", f"{duration_ns} ns, allowed are {NO_TIME} to 2^63 - 1")
    return V1_3


def validate_loop_timeout(duration_ns: int) -> FeatureLevel:
    """Refuse a loop timeout below -1 (the default) or above LoopTimeoutDurationNs.MAXIMUM."""
    allowed = NO_TIME <= duration_ns <= LoopTimeoutDurationNs.MAXIMUM
    limit = LoopTimeoutDurationNs.MAXIMUM.value
    _require(allowed, "N-RQX-14", f"loop timeout {duration_ns} ns, allowed are {NO_TIME} to {limit}")
    return V1_3


# -- results and memory -----------------------------------------------------------------------------------------------


def validate_output_shapes(shapes: Sequence[OutputShape]) -> FeatureLevel:
    """Refuse extents that are no 32-bit counts."""
    for number, shape in enumerate(shapes):
        _require_extents(shape.dimensions, f"output {number}")
    return V1_2


def _require_extents(dimensions: Sequence[int], where: str) -> None:
    counts = all(0 <= extent < 1 << 32 for extent in dimensions)
    _require(counts, "VAL-4", f"{where}: dimensions {tuple(dimensions)}, each is 0 to 2^32 - 1")


def validate_memory_pool(pool: Pool) -> FeatureLevel:
    """Refuse an empty pool."""
    _require(pool.size_bytes > 0, "N-VAL-13", f"a pool has size {pool.size_bytes}")
    return V1_0


def validate_buffer_desc(desc: BufferDesc) -> FeatureLevel:
    """Refuse extents that are no 32-bit counts."""
    _require_extents(desc.dimensions, "buffer")
    return V1_3


def validate_buffer_roles(inputs: Sequence[BufferRole], outputs: Sequence[BufferRole]) -> FeatureLevel:
    """Refuse no roles at all, a role given twice, and probabilities outside (0, 1].

    Whether a role's model and operand exist, and agree with the others, is for who holds the models.
    """
    _require(bool(inputs or outputs), "DOM-3", "a buffer without a role")
    for roles in (inputs, outputs):
        places = [(role.model_index, role.io_index) for role in roles]
        _require(len(set(places)) == len(places), "N-DOM-7", f"a role twice: {places}")
        for role in roles:
            _require(min(role.model_index, role.io_index) >= 0, "DOM-3", f"{role}: an index is negative")
            _require(0 < role.probability <= 1, "N-DOM-6", f"{role}: a probability is over 0 and at most 1")
    return V1_3


def validate_consumers(subgraph: Subgraph, counts: Sequence[int]) -> FeatureLevel:
    """Refuse HIDL's numberOfConsumers where it is not how often operations read each operand."""
    expected = number_of_consumers(subgraph)
    _require(list(counts) == expected, "N-MOD-8", f"numberOfConsumers {list(counts)}, it is {expected}")
    return V1_0


# -- what a device says of itself -------------------------------------------------------------------------------------


def validate_performance(info: PerformanceInfo) -> FeatureLevel:
    """Refuse figures that are not finite and positive."""
    positive = all(math.isfinite(figure) and figure > 0 for figure in (info.exec_time, info.power_usage))
    _require(positive, "CAP-1", f"{info}: both figures are finite and over 0")
    return V1_0


def validate_capabilities(capabilities: Capabilities) -> FeatureLevel:
    """Refuse bad figures, and a list of types that is not ascending, has duplicates, SUBGRAPH or extensions."""
    types = [entry.type for entry in capabilities.operand_performance]
    _require(types == sorted(set(types)), "CAP-3", f"operand types {[int(t) for t in types]} do not ascend")
    for type in types:
        _require(isinstance(type, OperandType), "CAP-3", f"operand type {int(type)}")
        _require(type != OperandType.SUBGRAPH and not is_extension(type), "CAP-3", f"an entry for {type.name}")
    for info in (entry.info for entry in capabilities.operand_performance):
        validate_performance(info)
    overhead = (capabilities.if_performance, capabilities.while_performance)
    relaxed = (capabilities.relaxed_float32_to_float16_scalar, capabilities.relaxed_float32_to_float16_tensor)
    for info in (*relaxed, *overhead):
        validate_performance(info)
    return max((introduced_in(type) for type in types), default=V1_0)


def validate_cache_counts(model_files: int, data_files: int) -> FeatureLevel:
    """Refuse numbers of cache files outside 0 to 32."""
    for count in (model_files, data_files):
        limit = MAX_NUMBER_OF_CACHE_FILES
        _require(0 <= count <= limit, "DEV-6", f"{count} cache files, allowed are 0 to {limit}")
    return V1_2


def validate_cache_token(token: bytes) -> FeatureLevel:
    """Refuse a token that does not have 32 bytes."""
    size = BYTE_SIZE_OF_CACHE_TOKEN
    _require(len(token) == size, "N-VAL-23", f"a cache token of {len(token)} bytes, it has {size}")
    return V1_2


def validate_extension(extension: Extension) -> FeatureLevel:
    """Refuse a malformed name, a type listed twice or out of 16 bits, and elements of no bytes."""
    name, types = extension.name, [info.type for info in extension.operand_types]
    _require(is_extension_name(name), "EXT-1", f"extension name {name!r}, e.g. 'com.example.name' is one")
    _require(len(set(types)) == len(types), "EXT-1", f"extension {name}: a type is listed twice in {types}")
    for info in extension.operand_types:
        _require(0 <= info.type <= BASE_MAX, "EXT-1", f"extension {name}: type {info.type}")
        _require(info.byte_size > 0, "EXT-1", f"extension {name}: type {info.type} has {info.byte_size} bytes")
    return V1_2


def validate_extensions(extensions: Sequence[ExtensionNameAndPrefix]) -> FeatureLevel:
    """Refuse names or prefixes listed twice, malformed names, and prefixes of 0 or of more than 16 bits.

    The sixteenth bit is HIDL's alone; `validation.interface_conversion` refuses it where AIDL is spoken.
    """
    names, prefixes = [e.name for e in extensions], [e.prefix for e in extensions]
    _require(len(set(names)) == len(names), "N-VAL-12", f"an extension is named twice in {names}")
    _require(len(set(prefixes)) == len(prefixes), "N-VAL-12", f"a prefix is given twice in {prefixes}")
    for entry in extensions:
        _require(is_extension_name(entry.name), "N-VAL-12", f"extension name {entry.name!r}")
        allowed = 0 < entry.prefix < 1 << HIDL_PREFIX_BITS
        _require(allowed, "N-VAL-12", f"extension {entry.name}: prefix {entry.prefix}")
    return V1_2 if extensions else V1_0


def validate_hints(hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]) -> FeatureLevel:
    """Refuse a token given twice, one of an extension that is not named, and malformed names.

    A hint that the driver does not know is legal: it is ignored.
    """
    tokens, prefixes = [hint.token for hint in hints], [e.prefix for e in extensions]
    try:
        validate_extensions(extensions)
    except InvalidArgument as error:
        raise InvalidArgument(f"N-VAL-22: {error}") from error
    _require(len(set(tokens)) == len(tokens), "N-VAL-22", f"a token is given twice in {tokens}")
    for token in tokens:
        known = extension_prefix(token) in prefixes
        _require(known, "N-VAL-22", f"token {token:#x}: its prefix is none of {prefixes}")
    return FeatureLevel.AIDL_V4 if hints or extensions else V1_0
