"""What a device says of itself, and what memory it is asked for: Capabilities, buffer roles, result codes of the API.

Figures of performance are relative to the CPU; lower is better, and UNKNOWN_PERFORMANCE stands for "never use it".
Values only: `validation.values` judges them. Spec: HAL 1.2 and 1.3 `Capabilities`, 1.3 `BufferRole`, AIDL `BufferDesc`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import OperandType

__all__ = [
    "BYTE_SIZE_OF_CACHE_TOKEN",
    "CPU_PERFORMANCE",
    "MAX_NUMBER_OF_CACHE_FILES",
    "MAX_SIZE_OF_IMMEDIATELY_COPIED_VALUES",
    "UNKNOWN_PERFORMANCE",
    "BufferDesc",
    "BufferRole",
    "Capabilities",
    "DurationCode",
    "NumberOfCacheFiles",
    "OperandPerformance",
    "PerformanceInfo",
    "PriorityCode",
    "ResultCode",
    "is_device_name",
    "performance_of",
    "status_for_result_code",
    "uniform_capabilities",
    "with_performance",
]

BYTE_SIZE_OF_CACHE_TOKEN = 32
MAX_NUMBER_OF_CACHE_FILES = 32  # of each kind
MAX_SIZE_OF_IMMEDIATELY_COPIED_VALUES = 128
LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")


class ResultCode(IntEnum):
    """What the C API's functions return."""

    NO_ERROR = 0
    OUT_OF_MEMORY = 1
    INCOMPLETE = 2
    UNEXPECTED_NULL = 3
    BAD_DATA = 4
    OP_FAILED = 5
    BAD_STATE = 6
    UNMAPPABLE = 7
    OUTPUT_INSUFFICIENT_SIZE = 8
    UNAVAILABLE_DEVICE = 9
    MISSED_DEADLINE_TRANSIENT = 10
    MISSED_DEADLINE_PERSISTENT = 11
    RESOURCE_EXHAUSTED_TRANSIENT = 12
    RESOURCE_EXHAUSTED_PERSISTENT = 13
    DEAD_OBJECT = 14


class PriorityCode(IntEnum):
    """The C API's numbers for Priority."""

    LOW = 90
    MEDIUM = 100
    HIGH = 110
    DEFAULT = 100


class DurationCode(IntEnum):
    """Which duration of an execution the C API is asked for."""

    ON_HARDWARE = 0
    IN_DRIVER = 1
    FENCED_ON_HARDWARE = 2
    FENCED_IN_DRIVER = 3


_STATUS_OF: dict[ResultCode, ErrorStatus] = {
    ResultCode.NO_ERROR: ErrorStatus.NONE,
    ResultCode.BAD_DATA: ErrorStatus.INVALID_ARGUMENT,
    ResultCode.UNEXPECTED_NULL: ErrorStatus.INVALID_ARGUMENT,
    ResultCode.OUTPUT_INSUFFICIENT_SIZE: ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
    ResultCode.UNAVAILABLE_DEVICE: ErrorStatus.DEVICE_UNAVAILABLE,
    ResultCode.MISSED_DEADLINE_TRANSIENT: ErrorStatus.MISSED_DEADLINE_TRANSIENT,
    ResultCode.MISSED_DEADLINE_PERSISTENT: ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    ResultCode.RESOURCE_EXHAUSTED_TRANSIENT: ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
    ResultCode.RESOURCE_EXHAUSTED_PERSISTENT: ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
}


def status_for_result_code(code: ResultCode) -> ErrorStatus:
    """Return the status that stands for a result code; those of the API alone become GENERAL_FAILURE."""
    return _STATUS_OF.get(code, ErrorStatus.GENERAL_FAILURE)


def is_device_name(name: str) -> bool:
    """Return True for `vendor-name`, printable, with one hyphen that is neither first nor last, or a name without one.

    The former is HIDL's form (DEV-8), which AIDL's services need not have.
    """
    parts = name.split("-")
    return name.isprintable() and len(parts) <= 2 and all(parts)


@dataclass(frozen=True, slots=True)
class PerformanceInfo:
    """Time and energy of an execution, each as a multiple of the CPU's."""

    exec_time: float
    power_usage: float


UNKNOWN_PERFORMANCE = PerformanceInfo(LARGEST_FLOAT32, LARGEST_FLOAT32)
CPU_PERFORMANCE = PerformanceInfo(1.0, 1.0)  # by definition: all figures are relative to the CPU


@dataclass(frozen=True, slots=True)
class OperandPerformance:
    """The performance of operations on one operand type."""

    type: OperandType
    info: PerformanceInfo


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How fast a device is: per operand type (ascending, each once), relaxed float32, and control flow."""

    operand_performance: tuple[OperandPerformance, ...] = ()
    relaxed_float32_to_float16_scalar: PerformanceInfo = UNKNOWN_PERFORMANCE
    relaxed_float32_to_float16_tensor: PerformanceInfo = UNKNOWN_PERFORMANCE
    if_performance: PerformanceInfo = UNKNOWN_PERFORMANCE
    while_performance: PerformanceInfo = UNKNOWN_PERFORMANCE


def uniform_capabilities(info: PerformanceInfo) -> Capabilities:
    """Return capabilities that give `info` for every operand type, relaxed or not, and for control flow."""
    types = sorted(set(OperandType) - {OperandType.SUBGRAPH})
    return Capabilities(tuple(OperandPerformance(type, info) for type in types), info, info, info, info)


def performance_of(capabilities: Capabilities, type: OperandType) -> PerformanceInfo:
    """Return the performance of one operand type; UNKNOWN_PERFORMANCE if the device does not list it."""
    return next((entry.info for entry in capabilities.operand_performance if entry.type == type), UNKNOWN_PERFORMANCE)


def with_performance(capabilities: Capabilities, types: Iterable[OperandType], info: PerformanceInfo) -> Capabilities:
    """Return capabilities with `info` for each of `types`, added where it was missing."""
    entries = {entry.type: entry for entry in capabilities.operand_performance}
    entries.update({type: OperandPerformance(type, info) for type in types})
    return replace(capabilities, operand_performance=tuple(entries[type] for type in sorted(entries)))


@dataclass(frozen=True, slots=True)
class NumberOfCacheFiles:
    """How many files of each kind a device needs to save one compilation; none of either: it saves nothing."""

    model: int = 0
    data: int = 0


@dataclass(frozen=True, slots=True)
class BufferDesc:
    """The shape of a buffer that a driver is asked for; () = as its roles say."""

    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferRole:
    """That a buffer will be input or output `io_index` of prepared model `model_index`, and how probably (0 to 1]."""

    model_index: int
    io_index: int
    probability: float = 1.0
