"""Device capabilities, buffer roles and descriptions, and the constants of NNAPI's C API.

Performance is relative to the CPU; UNKNOWN_PERFORMANCE, the largest float32, means that a device should not be chosen
for an operand type. `validation.values` validates these values.

Source: HAL 1.2 and 1.3 `Capabilities`, 1.3 `BufferRole`, AIDL `BufferDesc`, NeuralNetworks.h.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import BadState, ErrorStatus, status_for_error
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
    "result_code_for_error",
    "result_code_for_status",
    "status_for_result_code",
    "uniform_capabilities",
    "with_performance",
]

BYTE_SIZE_OF_CACHE_TOKEN = 32
MAX_NUMBER_OF_CACHE_FILES = 32  # of each kind
MAX_SIZE_OF_IMMEDIATELY_COPIED_VALUES = 128
LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")


class ResultCode(IntEnum):
    """The result codes of NNAPI's C functions."""

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
    """The values of `Priority` in NNAPI's C API."""

    LOW = 90
    MEDIUM = 100
    HIGH = 110
    DEFAULT = 100


class DurationCode(IntEnum):
    """The durations of an execution that NNAPI's C API can return."""

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
    """Return the HAL status of a result code; codes without one become GENERAL_FAILURE."""
    return _STATUS_OF.get(code, ErrorStatus.GENERAL_FAILURE)


_RESULT_OF: dict[ErrorStatus, ResultCode] = {
    ErrorStatus.GENERAL_FAILURE: ResultCode.OP_FAILED,
    ErrorStatus.INVALID_ARGUMENT: ResultCode.BAD_DATA,
    ErrorStatus.DEVICE_UNAVAILABLE: ResultCode.UNAVAILABLE_DEVICE,
    **{status: ResultCode[status.name] for status in ErrorStatus if status.name in ResultCode.__members__},
    ErrorStatus.NONE: ResultCode.NO_ERROR,
}


def result_code_for_status(status: ErrorStatus) -> ResultCode:
    """Return the result code that an application gets for a status that a driver reported (API-14)."""
    return _RESULT_OF[status]


def result_code_for_error(error: BaseException) -> ResultCode:
    """Return the result code that stands for an exception of nnfmq; OP_FAILED for those of other packages."""
    if isinstance(error, BadState):
        return ResultCode.BAD_STATE
    if isinstance(error, MemoryError):
        return ResultCode.OUT_OF_MEMORY
    return result_code_for_status(status_for_error(error))


def is_device_name(name: str) -> bool:
    """Return whether `name` is printable and has at most one hyphen, with text on both sides of it.

    HIDL requires `vendor-name` (DEV-8); AIDL accepts names without a hyphen.
    """
    parts = name.split("-")
    return name.isprintable() and len(parts) <= 2 and all(parts)


class PerformanceInfo(Struct, frozen=True):
    """Execution time and power, each as a multiple of the CPU's: lower is better."""

    exec_time: float
    power_usage: float


UNKNOWN_PERFORMANCE = PerformanceInfo(LARGEST_FLOAT32, LARGEST_FLOAT32)
CPU_PERFORMANCE = PerformanceInfo(1.0, 1.0)  # by definition


class OperandPerformance(Struct, frozen=True):
    """The performance info of operations on one operand type."""

    type: OperandType
    info: PerformanceInfo


class Capabilities(Struct, frozen=True):
    """A device's performance: for each operand type (ascending, unique), relaxed float32, and control flow."""

    operand_performance: tuple[OperandPerformance, ...] = ()
    relaxed_float32_to_float16_scalar: PerformanceInfo = UNKNOWN_PERFORMANCE
    relaxed_float32_to_float16_tensor: PerformanceInfo = UNKNOWN_PERFORMANCE
    if_performance: PerformanceInfo = UNKNOWN_PERFORMANCE
    while_performance: PerformanceInfo = UNKNOWN_PERFORMANCE

    def __repr__(self) -> str:
        return f"<Capabilities: performance for {len(self.operand_performance)} operand types>"


def uniform_capabilities(info: PerformanceInfo) -> Capabilities:
    """Return capabilities with `info` for every operand type, relaxed or not, and for control flow."""
    types = sorted(set(OperandType) - {OperandType.SUBGRAPH})
    return Capabilities(tuple(OperandPerformance(type, info) for type in types), info, info, info, info)


def performance_of(capabilities: Capabilities, type: OperandType) -> PerformanceInfo:
    """Return the performance info of an operand type; UNKNOWN_PERFORMANCE if the device does not list it."""
    return next((entry.info for entry in capabilities.operand_performance if entry.type == type), UNKNOWN_PERFORMANCE)


def with_performance(capabilities: Capabilities, types: Iterable[OperandType], info: PerformanceInfo) -> Capabilities:
    """Return capabilities with `info` for each of `types`; types that were not listed are added."""
    entries = {entry.type: entry for entry in capabilities.operand_performance}
    entries.update({type: OperandPerformance(type, info) for type in types})
    return replace(capabilities, operand_performance=tuple(entries[type] for type in sorted(entries)))


class NumberOfCacheFiles(Struct, frozen=True):
    """The files of each kind that a device needs to save one compilation; 0 of both means that it cannot save any."""

    model: int = 0
    data: int = 0


class BufferDesc(Struct, frozen=True):
    """The requested shape of a driver-managed buffer; () = the shape of its roles."""

    dimensions: tuple[int, ...] = ()


class BufferRole(Struct, frozen=True):
    """A use of a buffer as input or output `io_index` of prepared model `model_index`; probability in (0, 1]."""

    model_index: int
    io_index: int
    probability: float = 1.0
