"""The HAL's data types: frozen structs and enumerations with the HAL's values.

Names and values are those of the Neural Networks HAL 1.0 to 1.3 and AIDL v1 to v4. Where they differ, AIDL's form is
used for all versions. Nothing here validates (`validation` does) or serializes (`serialize` does). OperationType is in
`hal.operation_type` because of its length, durations are in `hal.timing`.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Protocol, Self

from msgspec import Struct

from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.summaries import TensorRow, code_name, html_tables, listed, tensor_text

__all__ = [
    "BASE_MAX",
    "CLAMPS",
    "DEFAULT_PREFERENCE",
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
    "HalExecutionMode",
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
    "has_unspecified_dimensions",
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
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or not BASE_MAX < value < 1 << 32:
            return None
        member = int.__new__(cls, value)  # not stored in the enum: a peer could fill it with 2^32 members
        member._name_, member._value_ = f"EXTENSION_{value:#x}", value
        return member


class LifeTime(IntEnum):
    """The source of an operand's value (HAL 1.3 names)."""

    TEMPORARY_VARIABLE = 0
    SUBGRAPH_INPUT = 1
    SUBGRAPH_OUTPUT = 2
    CONSTANT_COPY = 3
    CONSTANT_REFERENCE = 4
    NO_VALUE = 5
    SUBGRAPH = 6


class ExecutionPreference(IntEnum):
    """The goal of a compilation."""

    LOW_POWER = 0
    FAST_SINGLE_ANSWER = 1
    SUSTAINED_SPEED = 2


DEFAULT_PREFERENCE = ExecutionPreference.SUSTAINED_SPEED
"""The preference of a preparation that names none. Android's is FAST_SINGLE_ANSWER, with which the device `compiled`
changes a model's program, and so the last bits of its results, while the model is in use."""


class Priority(IntEnum):
    """Priority of a model relative to the client's other models."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


class DeviceType(IntEnum):
    """The kind of processor of a device."""

    OTHER = 1
    CPU = 2
    GPU = 3
    ACCELERATOR = 4


class DeviceStatus(IntEnum):
    """The result of HIDL's IDevice.getStatus."""

    AVAILABLE = 0
    BUSY = 1
    OFFLINE = 2
    UNKNOWN = 3


class FusedActivationFunc(IntEnum):
    """The activation function that ADD, CONV_2D and other operations apply to their result.

    Attributes:
        operation: The operation that applies it to a tensor; NONE has none.
        low: The minimum of its results, as a real number.
        high: The maximum of its results.
    """

    operation: OperationType | None
    low: float
    high: float

    NONE = 0
    RELU = 1, OperationType.RELU, 0.0
    RELU1 = 2, OperationType.RELU1, -1.0, 1.0
    RELU6 = 3, OperationType.RELU6, 0.0, 6.0

    def __new__(
        cls, code: int, operation: OperationType | None = None, low: float = -math.inf, high: float = math.inf
    ) -> Self:
        """Return the member whose value is the HAL's `code`."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.operation, member.low, member.high = operation, low, high
        return member

    @property
    def bounds(self) -> tuple[float, float]:
        """The minimum and maximum of its results."""
        return self.low, self.high


CLAMPS: Mapping[OperationType, FusedActivationFunc] = {
    function.operation: function for function in FusedActivationFunc if function.operation is not None
}
"""The operations that only clamp a tensor, each with the fused activation that does the same."""


class PaddingScheme(IntEnum):
    """Implicit padding schemes of convolutions and pooling."""

    SAME = 1
    VALID = 2


class HalExecutionMode(IntEnum):
    """The execution modes of a prepared model. The HAL has no values for them; these are those of recordings."""

    SYNCHRONOUS = 0
    ASYNCHRONOUS = 1
    BURST = 2
    FENCED = 3
    REUSABLE = 4
    AIDL_BURST = 5


class MeasureTiming(IntEnum):
    """Whether to measure the duration of an execution."""

    NO = 0
    YES = 1


class Protection(IntFlag):
    """The allowed access to a memory: mmap(2)'s PROT_READ and PROT_WRITE, the only flags that the HAL has."""

    NONE = 0
    READ = 1
    WRITE = 2
    READ_WRITE = 3


class FenceState(IntEnum):
    """The state of a fence: work in progress, finished, or failed; UNKNOWN if the fd is no fence."""

    ACTIVE = 0
    SIGNALED = 1
    ERROR = 2
    UNKNOWN = 3


class LoopTimeoutDurationNs(IntEnum):
    """The default and the maximum time limit of one WHILE loop."""

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

QUANTIZED_TYPES = (
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_QUANT8_SYMM,
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
    OperandType.TENSOR_QUANT16_ASYMM,
    OperandType.TENSOR_QUANT16_SYMM,
)


class ExtensionOperandTypeInformation(Struct, frozen=True):
    """One operand type of an extension: its type within it, tensor or scalar, and the size of an element in bytes."""

    type: int
    is_tensor: bool
    byte_size: int


# The operand types of the extensions that this process can execute, by this process's codes for them;
# `operations.extensions` fills it.
EXTENSION_TYPES: dict[OperandType, ExtensionOperandTypeInformation] = {}


def element_bytes(operand_type: OperandType) -> int:
    """Return the size of an element in bytes; 0 for SUBGRAPH, OEM, and extension types unknown to this process."""
    if operand_type > BASE_MAX:
        known = EXTENSION_TYPES.get(operand_type)
        return known.byte_size if known else 0
    return _ELEMENT_BYTES[operand_type]


def is_scalar(operand_type: OperandType) -> bool:
    """Return whether a type never has dimensions; False for extension types unknown to this process."""
    if operand_type > BASE_MAX:
        known = EXTENSION_TYPES.get(operand_type)
        return known is not None and not known.is_tensor
    return operand_type in _SCALARS


def has_unspecified_dimensions(operand_type: OperandType, dimensions: Sequence[int]) -> bool:
    """Return whether the rank or a dimension of a tensor is unknown; False for a scalar."""
    return not is_scalar(operand_type) and (not dimensions or 0 in dimensions)


class Pool(Protocol):
    """A memory pool of a Model or Request: `nnfmq.base.memory.Memory`, or a test double."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def view(self) -> memoryview:
        """The content as a memoryview of bytes ("B"); valid until the pool is closed."""
        ...


class SharedPool(Pool, Protocol):
    """A pool that can be sent to another process: `size_bytes` of a file, from `offset` on."""

    @property
    def offset(self) -> int:
        """Offset of the pool in its file."""
        ...

    @property
    def protection(self) -> Protection:
        """The access that the receiver is allowed."""
        ...

    def fileno(self) -> int:
        """Return the file's fd, which the pool still owns."""
        ...


class BufferToken(Struct, frozen=True):
    """A driver-managed buffer among a request's pools (AIDL RequestMemoryPool); tokens are above 0."""

    token: int


class DataLocation(Struct, frozen=True):
    """A byte range of a pool; or, for CONSTANT_COPY, with pool_index 0, of the model's operand_values."""

    pool_index: int = 0
    offset: int = 0
    length: int = 0
    padding: int = 0


class ChannelQuant(Struct, frozen=True):
    """Per-channel scales of TENSOR_QUANT8_SYMM_PER_CHANNEL along dimension `channel_dim`."""

    scales: tuple[float, ...]
    channel_dim: int

    def __repr__(self) -> str:
        return f"<ChannelQuant: {len(self.scales)} scales along dimension {self.channel_dim}>"


class Operand(Struct, frozen=True):
    """One value of a subgraph. `dimensions` () = scalar or unknown rank; a dimension of 0 = unknown.

    `extension_data` are opaque parameters of an extension's type; empty for other types.
    """

    type: OperandType
    dimensions: tuple[int, ...] = ()
    scale: float = 0.0
    zero_point: int = 0
    lifetime: LifeTime = LifeTime.TEMPORARY_VARIABLE
    location: DataLocation = DataLocation()
    channel_quant: ChannelQuant | None = None
    extension_data: bytes = b""

    def __repr__(self) -> str:
        parts = [tensor_text(code_name(self.type), self.dimensions), code_name(self.lifetime)]
        if self.scale or self.zero_point:
            parts.append(f"scale {self.scale:g}, zero point {self.zero_point}")
        if self.channel_quant is not None:
            parts.append(f"{len(self.channel_quant.scales)} scales along dimension {self.channel_quant.channel_dim}")
        if self.location.length:
            place = f"pool {self.location.pool_index}, " if self.lifetime == LifeTime.CONSTANT_REFERENCE else ""
            parts.append(f"{place}{self.location.length} bytes from {self.location.offset} on")
        if self.extension_data:
            parts.append(f"{len(self.extension_data)} bytes of extension data")
        return f"<Operand: {', '.join(parts)}>"


class Operation(Struct, frozen=True):
    """One operation: its code, and its operands as indexes into the subgraph's operands."""

    type: OperationType
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __repr__(self) -> str:
        inputs, outputs = (listed(indexes[:8], len(indexes)) for indexes in (self.inputs, self.outputs))
        return f"<Operation: {code_name(self.type)} of operands ({inputs}) → ({outputs})>"


class Subgraph(Struct, frozen=True):
    """Operands, operations in topological order, and the operands that are inputs and outputs."""

    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    input_indexes: tuple[int, ...]
    output_indexes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<Subgraph: {self.summary()}>"

    def summary(self) -> str:
        """Return types and shapes of inputs and outputs, and the numbers of operations and operands, in a line."""
        sides = (
            listed([tensor_text(row.dtype, row.shape) for row in map(self.row, indexes[:2])], len(indexes))
            for indexes in (self.input_indexes, self.output_indexes)
        )
        return f"{' → '.join(sides)}; {len(self.operations)} operations, {len(self.operands)} operands"

    def row(self, index: int) -> TensorRow:
        """Return the row of tables for operand `index`; also if a model that nobody has validated lacks it."""
        if not 0 <= index < len(self.operands):
            return TensorRow(f"no operand {index}")
        operand = self.operands[index]
        name = f"operand {index}"
        return TensorRow(name, operand.dimensions, code_name(operand.type), operand.scale, operand.zero_point)


class ExtensionNameAndPrefix(Struct, frozen=True):
    """The prefix of an extension's codes in one model, or in one list of hints."""

    name: str
    prefix: int


class Model(Struct, frozen=True):
    """A model: main and referenced subgraphs, small constants, pools with large constants, and its extensions."""

    main: Subgraph
    referenced: tuple[Subgraph, ...] = ()
    operand_values: bytes = b""
    pools: tuple[Pool, ...] = ()
    relax_computation_float32_to_float16: bool = False
    extensions: tuple[ExtensionNameAndPrefix, ...] = ()

    def __repr__(self) -> str:
        return f"<Model: {self._summary()}>"

    def _summary(self) -> str:
        constants = len(self.operand_values) + sum(pool.size_bytes for pool in self.pools)
        more = f", {len(self.referenced)} more subgraphs" if self.referenced else ""
        return f"{self.main.summary()}{more}, {constants} bytes of constants"

    def _repr_html_(self) -> str:
        """Return tables of inputs, outputs and operations, for notebooks."""
        main = self.main
        inputs, outputs = ([main.row(i) for i in indexes] for indexes in (main.input_indexes, main.output_indexes))
        operations = [code_name(operation.type) for operation in main.operations]
        return html_tables(f"Model: {len(operations)} operations", inputs, outputs, operations)


class RequestArgument(Struct, frozen=True):
    """One input or output of a request; `dimensions` () = those of the model."""

    has_no_value: bool = False
    location: DataLocation = DataLocation()
    dimensions: tuple[int, ...] = ()


class Request(Struct, frozen=True):
    """The arguments of one execution; `location.pool_index` is an index of `pools`.

    An argument in a driver-managed buffer is the whole buffer: its location has offset, length and padding 0.
    """

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[Pool | BufferToken, ...] = ()

    def __repr__(self) -> str:
        return f"<Request: {len(self.inputs)} inputs, {len(self.outputs)} outputs, {len(self.pools)} pools>"


class TokenValuePair(Struct, frozen=True):
    """An extension's hint for a compilation or execution: prefix << 16 | token of the extension, and opaque bytes."""

    token: int
    value: bytes = b""


class ExecutionConfig(Struct, frozen=True):
    """The options of an execution, which a reusable execution keeps; `extensions` has the prefixes used in `hints`."""

    measure: MeasureTiming = MeasureTiming.NO
    loop_timeout_ns: int = LoopTimeoutDurationNs.DEFAULT
    hints: tuple[TokenValuePair, ...] = ()
    extensions: tuple[ExtensionNameAndPrefix, ...] = ()


class OutputShape(Struct, frozen=True):
    """The dimensions of an output after an execution (0 = unknown), and whether its buffer was large enough."""

    dimensions: tuple[int, ...]
    is_sufficient: bool = True


def merge_dimensions(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """Return dimensions that satisfy both; 0 = unknown dimension, () = unknown rank. None if they contradict."""
    if not first or not second:
        return tuple(first or second)
    agree = len(first) == len(second) and all(a == b or 0 in (a, b) for a, b in zip(first, second, strict=True))
    return tuple(a or b for a, b in zip(first, second, strict=True)) if agree else None


def operand_bytes(operand: Operand, dimensions: tuple[int, ...] = ()) -> int:
    """Return the size of an operand in bytes; 0 if unknown. Non-empty `dimensions` replace the operand's."""
    shape = dimensions or operand.dimensions
    if not shape and not is_scalar(operand.type):
        return 0
    return math.prod(shape) * element_bytes(operand.type)
