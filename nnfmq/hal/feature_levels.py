"""Feature levels, and since which of them each value of the vocabulary exists.

One table: what is not in it exists since HAL 1.0. Times, names and numbers differ between HIDL (levels 1 to 4) and
AIDL (5 to 8); the functions below give the HIDL form of the few that do. `validation.interface_conversion` moves whole
values between levels, because only validation knows what a model needs.
Spec: HAL 1.0-1.3 and AIDL v1-v4; Android's feature levels 1 to 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extension_codes import AIDL_PREFIX_BITS, HIDL_PREFIX_BITS, is_extension
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
    "lifetime_name",
    "number_of_consumers",
    "prefix_bits",
]


class FeatureLevel(IntEnum):
    """The interface versions in order; the numbers are Android's feature levels."""

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
    """Return the interface version's name: "HIDL 1.2", "AIDL v4"."""
    return _NAMES[level - 1]


def interface_level(name: str) -> FeatureLevel:
    """Return the level of the interface that `interface_name` calls so. Raises InvalidArgument with all names."""
    if name not in _NAMES:
        raise InvalidArgument(f"there is no interface {name!r}; there are {', '.join(_NAMES)}")
    return FeatureLevel(_NAMES.index(name) + 1)


def api_level(level: FeatureLevel) -> int:
    """Return the number by which Android's API names the feature level."""
    return _API_LEVELS[level - 1]


def is_aidl(level: FeatureLevel) -> bool:
    """Return True for AIDL v1 and later."""
    return level >= FeatureLevel.AIDL_V1


_TYPES_SINCE: Mapping[type[IntEnum], FeatureLevel] = {
    ExecutionPreference: FeatureLevel.V1_1,
    MeasureTiming: FeatureLevel.V1_2,
    DeviceType: FeatureLevel.V1_2,
    Priority: FeatureLevel.V1_3,
    LoopTimeoutDurationNs: FeatureLevel.V1_3,
}

# Last code of each level; the codes of OEM and of extensions lie above all of these.
_LAST_OPERANDS = (
    (OperandType.TENSOR_QUANT8_ASYMM, FeatureLevel.V1_0),
    (OperandType.TENSOR_QUANT8_SYMM, FeatureLevel.V1_2),
    (OperandType.SUBGRAPH, FeatureLevel.V1_3),
    (OperandType.TENSOR_OEM_BYTE, FeatureLevel.V1_0),
)
_LAST_OPERATIONS = (
    (OperationType.TANH, FeatureLevel.V1_0),
    (OperationType.TRANSPOSE, FeatureLevel.V1_1),
    (OperationType.RESIZE_NEAREST_NEIGHBOR, FeatureLevel.V1_2),
    (OperationType.RANK, FeatureLevel.V1_3),
    (OperationType.PACK, FeatureLevel.AIDL_V2),
    (OperationType.REVERSE, FeatureLevel.AIDL_V3),
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
    """Return the level that brought a member of one of the HAL's enumerations.

    Raises KeyError for DEAD_OBJECT, which is in no interface.
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


_OLD_NAMES: Mapping[LifeTime, str] = {
    LifeTime.SUBGRAPH_INPUT: "MODEL_INPUT",
    LifeTime.SUBGRAPH_OUTPUT: "MODEL_OUTPUT",
}


def lifetime_name(lifetime: LifeTime, level: FeatureLevel) -> str:
    """Return what the interface of `level` calls a lifetime; the numbers never changed."""
    if lifetime == LifeTime.CONSTANT_REFERENCE and is_aidl(level):
        return "CONSTANT_POOL"
    return _OLD_NAMES.get(lifetime, lifetime.name) if level < FeatureLevel.V1_3 else lifetime.name


def prefix_bits(level: FeatureLevel) -> int:
    """Return how many bits an extension's prefix has."""
    return AIDL_PREFIX_BITS if is_aidl(level) else HIDL_PREFIX_BITS


def number_of_consumers(subgraph: Subgraph) -> list[int]:
    """Return what HIDL states with each operand: how often operations read it. Indexes of no operand do not count."""
    counts = [0] * len(subgraph.operands)
    for operation in subgraph.operations:
        for index in operation.inputs:
            if index < len(counts):
                counts[index] += 1
    return counts
