"""Feature levels (HAL interface versions), and the level that introduced each value of the HAL's enumerations.

A value that no table here lists exists since HAL 1.0. The functions at the end return the names and counts that differ
between HIDL (levels 1 to 4) and AIDL (5 to 8); `validation.interface_versions` converts whole values.

Source: HAL 1.0 to 1.3 and AIDL v1 to v4; Android's feature levels 1 to 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extensions import AIDL_PREFIX_BITS, HIDL_PREFIX_BITS, is_extension
from nnfmq.hal.operation_type import LAST_OPERATION_OF_LEVEL
from nnfmq.hal.summaries import nearest
from nnfmq.hal.types import (
    DeviceType,
    ExecutionPreference,
    LifeTime,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OperandType,
    OperationType,
    Priority,
    Subgraph,
)

__all__ = [
    "FeatureLevel",
    "api_level",
    "interface_level",
    "interface_name",
    "introduced_in",
    "is_aidl",
    "number_of_consumers",
    "prefix_bits",
]


class FeatureLevel(IntEnum):
    """The HAL's interface versions in order; the values are Android's feature levels."""

    V1_0 = 1
    V1_1 = 2
    V1_2 = 3
    V1_3 = 4
    AIDL_V1 = 5
    AIDL_V2 = 6
    AIDL_V3 = 7
    AIDL_V4 = 8


_NAMES = ("HIDL 1.0", "HIDL 1.1", "HIDL 1.2", "HIDL 1.3", "AIDL v1", "AIDL v2", "AIDL v3", "AIDL v4")
_API_LEVELS = (27, 28, 29, 30, 31, 1_000_006, 1_000_007, 1_000_008)


def interface_name(level: FeatureLevel) -> str:
    """Return the name of the interface version: "HIDL 1.2", "AIDL v4"."""
    return _NAMES[level - 1]


def interface_level(name: str) -> FeatureLevel:
    """Return the level of the interface of that name.

    Raises:
        InvalidArgument: If there is no such interface. The text lists all names.
    """
    if name not in _NAMES:
        raise InvalidArgument(f"there is no interface {name!r}; there are {', '.join(_NAMES)}{nearest(name, _NAMES)}")
    return FeatureLevel(_NAMES.index(name) + 1)


def api_level(level: FeatureLevel) -> int:
    """Return the feature level's value in Android's API (ANEURALNETWORKS_FEATURE_LEVEL_n)."""
    return _API_LEVELS[level - 1]


def is_aidl(level: FeatureLevel) -> bool:
    """Return whether `level` is AIDL v1 or later."""
    return level >= FeatureLevel.AIDL_V1


_TYPES_SINCE: Mapping[type[IntEnum], FeatureLevel] = {
    ExecutionPreference: FeatureLevel.V1_1,
    MeasureTiming: FeatureLevel.V1_2,
    DeviceType: FeatureLevel.V1_2,
    Priority: FeatureLevel.V1_3,
    LoopTimeoutDurationNs: FeatureLevel.V1_3,
}

# The last code that each level introduced. The codes of OEM and extensions are above all others.
_LAST_OPERANDS = (
    (OperandType.TENSOR_QUANT8_ASYMM, FeatureLevel.V1_0),
    (OperandType.TENSOR_QUANT8_SYMM, FeatureLevel.V1_2),
    (OperandType.SUBGRAPH, FeatureLevel.V1_3),
    (OperandType.TENSOR_OEM_BYTE, FeatureLevel.V1_0),
)
_LAST_OPERATIONS = (
    *((last, FeatureLevel[name]) for name, last in LAST_OPERATION_OF_LEVEL.items()),
    (OperationType.OEM_OPERATION, FeatureLevel.V1_0),
)
_LAST_STATUSES = (
    (ErrorStatus.INVALID_ARGUMENT, FeatureLevel.V1_0),
    (ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT, FeatureLevel.V1_3),
)
_LAST_LIFETIMES = ((LifeTime.NO_VALUE, FeatureLevel.V1_0), (LifeTime.SUBGRAPH, FeatureLevel.V1_3))
_LAST: Mapping[type[IntEnum], tuple[tuple[IntEnum, FeatureLevel], ...]] = {
    OperandType: _LAST_OPERANDS,
    OperationType: _LAST_OPERATIONS,
    ErrorStatus: _LAST_STATUSES,
    LifeTime: _LAST_LIFETIMES,
}


def introduced_in(value: IntEnum) -> FeatureLevel:
    """Return the level that introduced a member of one of the HAL's enumerations.

    Raises:
        KeyError: If `value` is DEAD_OBJECT, which no interface has.
    """
    kind = type(value)
    if kind in (OperandType, OperationType) and is_extension(value):
        return FeatureLevel.V1_2
    if kind not in _LAST:
        return _TYPES_SINCE.get(kind, FeatureLevel.V1_0)
    found = next((level for last, level in _LAST[kind] if value <= last), None)
    if found is None:
        raise KeyError(f"{value.name} is in no version of the interface")
    return found


def prefix_bits(level: FeatureLevel) -> int:
    """Return how many bits an extension's prefix has in the interface of `level`."""
    return AIDL_PREFIX_BITS if is_aidl(level) else HIDL_PREFIX_BITS


def number_of_consumers(subgraph: Subgraph) -> list[int]:
    """Return HIDL's numberOfConsumers: for each operand, how many operation inputs it is. Ignores invalid indexes."""
    counts = [0] * len(subgraph.operands)
    for operation in subgraph.operations:
        for index in operation.inputs:
            if index < len(counts):
                counts[index] += 1
    return counts
