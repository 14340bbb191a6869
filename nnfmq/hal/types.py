"""The HAL's data types in their one canonical form: frozen data, the HAL's numbers, no behaviour beyond arithmetic.

Names and codes are those of the Neural Networks HAL 1.0-1.3 and AIDL v1-v4; where the two differ the AIDL form is
canonical (times in nanoseconds, -1 = not available). Nothing here opens, maps, waits or validates: `validation`
judges these values, `serialize` moves them. OperationType lives in `hal.operation_type`, for its length only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Protocol

from nnfmq.hal.operation_type import OperationType

__all__ = [
    "BASE_MAX",
    "EXTENSION_TYPES",
    "BufferToken",
    "ChannelQuant",
    "DataLocation",
    "DeviceStatus",
    "DeviceType",
    "ExecutionConfig",
    "ExecutionPreference",
    "ExtensionNameAndPrefix",
    "ExtensionOperandTypeInformation",
    "FenceState",
    "FusedActivationFunc",
    "LifeTime",
    "LoopTimeoutDurationNs",
    "MeasureTiming",
    "Model",
    "Operand",
    "OperandType",
    "Operation",
    "OperationType",
    "OutputShape",
    "PaddingScheme",
    "Pool",
    "Priority",
    "Protection",
    "Request",
    "RequestArgument",
    "SharedPool",
    "Subgraph",
    "TokenValuePair",
    "element_bytes",
    "is_scalar",
    "merge_dimensions",
    "operand_bytes",
]

BASE_MAX = 0xFFFF  # operand and operation codes above it belong to extensions


class OperandType(IntEnum):
    """Operand types 0-15 and the deprecated OEM pair; OperandType(n) with n above BASE_MAX is an extension's type."""

    FLOAT32 = 0
    INT32 = 1
    UINT32 = 2
    TENSOR_FLOAT32 = 3
    TENSOR_INT32 = 4
    TENSOR_QUANT8_ASYMM = 5
    BOOL = 6
    TENSOR_QUANT16_SYMM = 7
    TENSOR_FLOAT16 = 8
    TENSOR_BOOL8 = 9
    FLOAT16 = 10
    TENSOR_QUANT8_SYMM_PER_CHANNEL = 11
    TENSOR_QUANT16_ASYMM = 12
    TENSOR_QUANT8_SYMM = 13
    TENSOR_QUANT8_ASYMM_SIGNED = 14
    SUBGRAPH = 15
    OEM = 10000
    TENSOR_OEM_BYTE = 10001

    @classmethod
    def _missing_(cls, value: object) -> OperandType | None:
        if not isinstance(value, int) or not BASE_MAX < value < 1 << 32:
            return None
        member = int.__new__(cls, value)  # kept nowhere: a peer that names many types fills no table
        member._name_, member._value_ = f"EXTENSION_{value:#x}", value
        return member


class LifeTime(IntEnum):
    """Where an operand's value comes from (HAL 1.3 names)."""

    TEMPORARY_VARIABLE = 0
    SUBGRAPH_INPUT = 1
    SUBGRAPH_OUTPUT = 2
    CONSTANT_COPY = 3
    CONSTANT_REFERENCE = 4
    NO_VALUE = 5
    SUBGRAPH = 6


class ExecutionPreference(IntEnum):
    """What a compilation is tuned for."""

    LOW_POWER = 0
    FAST_SINGLE_ANSWER = 1
    SUSTAINED_SPEED = 2


class Priority(IntEnum):
    """Relative importance among the models of one client."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


class DeviceType(IntEnum):
    """What kind of processor a device computes on."""

    OTHER = 1
    CPU = 2
    GPU = 3
    ACCELERATOR = 4


class DeviceStatus(IntEnum):
    """What HIDL's getStatus answers."""

    AVAILABLE = 0
    BUSY = 1
    OFFLINE = 2
    UNKNOWN = 3


class FusedActivationFunc(IntEnum):
    """Activation that ADD, CONV_2D and others apply to their result."""

    NONE = 0
    RELU = 1
    RELU1 = 2
    RELU6 = 3


class PaddingScheme(IntEnum):
    """Implicit padding of windows."""

    SAME = 1
    VALID = 2


class MeasureTiming(IntEnum):
    """Whether an execution is to be timed."""

    NO = 0
    YES = 1


class Protection(IntFlag):
    """What may be done with a memory, as mmap counts it; the HAL knows no more than these two."""

    NONE = 0
    READ = 1
    WRITE = 2
    READ_WRITE = 3


class FenceState(IntEnum):
    """What `fence.sync_wait` finds: work goes on, is done, has failed; or it is no fence."""

    ACTIVE = 0
    SIGNALED = 1
    ERROR = 2
    UNKNOWN = 3


class LoopTimeoutDurationNs(IntEnum):
    """How long one WHILE may run: unless the request says otherwise, and at most."""

    DEFAULT = 2_000_000_000
    MAXIMUM = 15_000_000_000


_ELEMENT_BYTES: dict[OperandType, int] = {
    OperandType.FLOAT32: 4,
    OperandType.INT32: 4,
    OperandType.UINT32: 4,
    OperandType.TENSOR_FLOAT32: 4,
    OperandType.TENSOR_INT32: 4,
    OperandType.TENSOR_QUANT8_ASYMM: 1,
    OperandType.BOOL: 1,
    OperandType.TENSOR_QUANT16_SYMM: 2,
    OperandType.TENSOR_FLOAT16: 2,
    OperandType.TENSOR_BOOL8: 1,
    OperandType.FLOAT16: 2,
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: 1,
    OperandType.TENSOR_QUANT16_ASYMM: 2,
    OperandType.TENSOR_QUANT8_SYMM: 1,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 1,
    OperandType.SUBGRAPH: 0,
    OperandType.OEM: 0,
    OperandType.TENSOR_OEM_BYTE: 1,
}

_SCALARS = frozenset(
    (OperandType.FLOAT32, OperandType.INT32, OperandType.UINT32, OperandType.BOOL, OperandType.FLOAT16,
     OperandType.SUBGRAPH, OperandType.OEM)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExtensionOperandTypeInformation:
    """One operand type of an extension: its number there, tensor or scalar, and the bytes of one element."""

    type: int
    is_tensor: bool
    byte_size: int


# The types of the extensions that this process computes, under its own numbers (`operations.extensions` fills it).
EXTENSION_TYPES: dict[OperandType, ExtensionOperandTypeInformation] = {}


def element_bytes(operand_type: OperandType) -> int:
    """Return the bytes of one element: 0 for SUBGRAPH, OEM, and types of extensions that this process has not."""
    if operand_type > BASE_MAX:
        known = EXTENSION_TYPES.get(operand_type)
        return known.byte_size if known else 0
    return _ELEMENT_BYTES[operand_type]


def is_scalar(operand_type: OperandType) -> bool:
    """Return True for types that never have dimensions; of an extension's, for those known to this process."""
    if operand_type > BASE_MAX:
        known = EXTENSION_TYPES.get(operand_type)
        return known is not None and not known.is_tensor
    return operand_type in _SCALARS


class Pool(Protocol):
    """A memory pool as Model and Request list it: `nnfmq.memory.Memory`, or a plain stand-in in tests."""

    @property
    def size_bytes(self) -> int:
        """Size of the region in bytes."""
        ...

    @property
    def view(self) -> memoryview:
        """The region as bytes ("B"); valid while the pool is open."""
        ...


class SharedPool(Pool, Protocol):
    """A pool that can be lent to another process: its bytes are `size_bytes` of a file, from `offset` on."""

    @property
    def offset(self) -> int:
        """Where in the file it begins."""
        ...

    @property
    def protection(self) -> Protection:
        """What may be done with it."""
        ...

    def fileno(self) -> int:
        """Lend the file's descriptor."""
        ...


@dataclass(frozen=True, slots=True)
class BufferToken:
    """A buffer that the driver holds, as a request lists it among its pools (AIDL RequestMemoryPool); above 0."""

    token: int


@dataclass(frozen=True, slots=True)
class DataLocation:
    """A byte range: in a pool, or (pool_index 0, CONSTANT_COPY) in the model's operand_values."""

    pool_index: int = 0
    offset: int = 0
    length: int = 0
    padding: int = 0


@dataclass(frozen=True, slots=True)
class ChannelQuant:
    """Per-channel scales of TENSOR_QUANT8_SYMM_PER_CHANNEL along dimension `channel_dim`."""

    scales: tuple[float, ...]
    channel_dim: int


@dataclass(frozen=True, slots=True)
class Operand:
    """One value of a subgraph. `dimensions` () = scalar or unknown rank; an extent of 0 = unknown.

    `extension_data` is what an extension's type is told besides, opaque bytes; empty for every other type.
    """

    type: OperandType
    dimensions: tuple[int, ...] = ()
    scale: float = 0.0
    zero_point: int = 0
    lifetime: LifeTime = LifeTime.TEMPORARY_VARIABLE
    location: DataLocation = DataLocation()
    channel_quant: ChannelQuant | None = None
    extension_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its code, and the indexes of its operands in the subgraph."""

    type: OperationType
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operands, operations in executable order, and which operands are the inputs and outputs."""

    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    input_indexes: tuple[int, ...]
    output_indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExtensionNameAndPrefix:
    """Which prefix an extension's types and operations have in one model (or in one set of hints)."""

    name: str
    prefix: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model: the main subgraph, those it refers to, constants, pools with large constants, extensions by name."""

    main: Subgraph
    referenced: tuple[Subgraph, ...] = ()
    operand_values: bytes = b""
    pools: tuple[Pool, ...] = ()
    relax_computation_float32_to_float16: bool = False
    extensions: tuple[ExtensionNameAndPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestArgument:
    """One input or output of a request; `dimensions` () = as in the model."""

    has_no_value: bool = False
    location: DataLocation = DataLocation()
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """Where one execution reads its inputs and writes its outputs; location.pool_index counts in `pools`.

    An argument in a buffer of the driver's is all of it: its location has offset, length and padding 0.
    """

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[Pool | BufferToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenValuePair:
    """A hint of an extension for a compilation or an execution: prefix << 16 | code, and opaque bytes."""

    token: int
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """How executions shall be done: what a reusable one keeps. `extensions` names the prefixes in `hints`."""

    measure: MeasureTiming = MeasureTiming.NO
    loop_timeout_ns: int = LoopTimeoutDurationNs.DEFAULT
    hints: tuple[TokenValuePair, ...] = ()
    extensions: tuple[ExtensionNameAndPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputShape:
    """What an execution made of one output: its dimensions (0 = unknown) and whether the buffer sufficed."""

    dimensions: tuple[int, ...]
    is_sufficient: bool = True


def merge_dimensions(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """Return dimensions that are both: 0 is an unknown extent, () an unknown rank. None where they contradict."""
    if not first or not second:
        return tuple(first or second)
    agree = len(first) == len(second) and all(a == b or 0 in (a, b) for a, b in zip(first, second, strict=True))
    return tuple(a or b for a, b in zip(first, second, strict=True)) if agree else None


def operand_bytes(operand: Operand, dimensions: tuple[int, ...] = ()) -> int:
    """Return the size in bytes of an operand, of `dimensions` instead of its own if given; 0 while unknown."""
    extents = dimensions or operand.dimensions
    if not extents and not is_scalar(operand.type):
        return 0
    return math.prod(extents) * element_bytes(operand.type)
