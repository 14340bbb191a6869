"""ONNX Runtime's names of tensor types, and its enumerations."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

# The names of ONNX Runtime, which the package has as well; other modules here import further ones.
__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "ModelPackageWriteMode",
    "OrtAllocatorType",
    "OrtCompileApiFlags",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtExecutionProviderDevicePolicy",
    "OrtHardwareDeviceType",
    "OrtMemType",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
]

_ELEMENT_NUMBERS = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "uint32": 12, "uint64": 13,
}  # fmt: skip
"""TensorProto's number of each NumPy type that ONNX Runtime has; it has no complex ones."""
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""What stands here for bfloat16, which NumPy lacks: 16-bit words that are no uint16."""
_BFLOAT16_NUMBER = 16
_UNSUPPORTED = (0, 14, 15)  # none, and the complex ones
_DTYPES = {number: np.dtype(name) for name, number in _ELEMENT_NUMBERS.items()} | {_BFLOAT16_NUMBER: BFLOAT16}
STRING_KINDS = "USOV"
"""`dtype.kind` of the arrays that ONNX Runtime takes for strings."""
_NAMES = {"float32": "float", "float64": "double"}
_DTYPES_OF_TYPES = {f"tensor({_NAMES.get(name, name)})": np.dtype(name) for name in _ELEMENT_NUMBERS}
_DTYPES_OF_TYPES["tensor(bfloat16)"] = BFLOAT16
_DTYPES_OF_TYPES["tensor(int64)"] = np.dtype(np.longlong)  # as ONNX Runtime's: equal, but an array prints its name


def element_number(dtype: np.dtype[Any]) -> int:
    """Return TensorProto's number of an element type; 0 if it has none."""
    return _BFLOAT16_NUMBER if dtype == BFLOAT16 else _ELEMENT_NUMBERS.get(dtype.name, 0)


def require_element_type(dtype: np.dtype[Any]) -> None:
    """Raise RuntimeError, with ONNX Runtime's text, if it has neither numbers nor strings of this type."""
    if dtype.kind not in STRING_KINDS and not element_number(dtype):
        raise RuntimeError(f"Numpy_type {dtype.num} can't be converted to MLDataType.")


def tensor_type(dtype: np.dtype[Any]) -> str:
    """Return the name of the type of a tensor with these elements, such as "tensor(float)"."""
    if dtype == BFLOAT16:
        return type_name("bfloat16")
    return "tensor(string)" if dtype.kind in STRING_KINDS else type_name(dtype.name)


def type_name(element: str) -> str:
    """Return the name of the type of a tensor, given NumPy's name of its elements, or "bfloat16"."""
    return f"tensor({_NAMES.get(element, element)})"


def dtype_of_type(name: str) -> np.dtype[Any] | None:
    """Return NumPy's element type of a type such as "tensor(float)"; None if NumPy has none."""
    return _DTYPES_OF_TYPES.get(name)


def element_dtype(element_type: npt.DTypeLike | int) -> np.dtype[Any]:
    """Return NumPy's type of an element type that is given as NumPy or as ONNX names it.

    Raises:
        NotImplementedError: If NumPy has no such type.
        RuntimeError: If ONNX Runtime has none.
    """
    if isinstance(element_type, int):
        if element_type in _UNSUPPORTED:
            raise RuntimeError(f"tensor type {element_type} is not supported")
        if element_type not in _DTYPES:
            raise NotImplementedError(f"NumPy has no type for ONNX's element type {element_type}")
        return _DTYPES[element_type]
    return np.dtype(element_type)


class _OrtEnum(Enum):
    """An enumeration that converts to an integer and equals it, as pybind11's do."""

    def __eq__(self, other: object) -> bool:
        return hasattr(other, "__index__") and bool(self.value == int(other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class ExecutionMode(_OrtEnum):
    """The order in which the nodes of a graph are executed; without effect."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(_OrtEnum):
    """The order of the nodes; without effect."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class GraphOptimizationLevel(_OrtEnum):
    """The optimization of a graph; without effect."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class OrtAllocatorType(_OrtEnum):
    """The kind of an allocator."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(_OrtEnum):
    """The memory of an argument of a kernel."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtSparseFormat(_OrtEnum):
    """The format of a sparse tensor."""

    ORT_SPARSE_UNDEFINED = 0
    ORT_SPARSE_COO = 1
    ORT_SPARSE_CSRC = 2
    ORT_SPARSE_BLOCK_SPARSE = 4


class OrtExecutionProviderDevicePolicy(_OrtEnum):
    """The rule by which devices are selected; without effect."""

    DEFAULT = 0
    PREFER_CPU = 1
    PREFER_NPU = 2
    PREFER_GPU = 3
    MAX_PERFORMANCE = 4
    MAX_EFFICIENCY = 5
    MIN_OVERALL_POWER = 6


class OrtHardwareDeviceType(_OrtEnum):
    """The kind of a device."""

    CPU = 0
    GPU = 1
    NPU = 2


class OrtDeviceMemoryType(_OrtEnum):
    """The memory of a device."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtMemoryInfoDeviceType(_OrtEnum):
    """The kind of the device of a memory."""

    CPU = 0
    GPU = 1
    FPGA = 2
    NPU = 3


class OrtCompileApiFlags(_OrtEnum):
    """Flags of ModelCompiler."""

    NONE = 0
    ERROR_IF_NO_NODES_COMPILED = 1
    ERROR_IF_OUTPUT_FILE_EXISTS = 2


class ModelPackageWriteMode(_OrtEnum):
    """The form in which a model package is written."""

    PRESERVE = 0
    DENSE = 1


class ArenaExtendStrategy(_OrtEnum):
    """The steps in which an arena of memory grows."""

    kNextPowerOfTwo = 0
    kSameAsRequested = 1


class OrtDeviceVendorId(IntEnum):
    """PCI vendor ids."""

    NONE = 0x0000
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086
