"""OrtValue: a tensor in this process, over the memory of a NumPy array; and the descriptions of its place."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from nnfmq.compat.onnxruntime.errors import ort_error
from nnfmq.compat.onnxruntime.interface import NodeArg, check_shape
from nnfmq.compat.onnxruntime.shape_plans import Array
from nnfmq.compat.onnxruntime.types import (
    BFLOAT16,
    STRING_KINDS,
    element_dtype,
    element_number,
    require_element_type,
    tensor_type,
)

__all__ = [
    "IOBinding",
    "OrtDevice",
    "OrtValue",
    "OrtValueVector",
    "array_at",
    "copy_tensors",
    "require_cpu",
    "require_numpy_type",
]

_DEVICE_TYPES = {"cpu": 0, "cuda": 1, "gpu": 1, "dml": 1, "webgpu": 1, "npu": 2, "cann": 2}
_NO_DEVICE_MEMORY = (
    "Can't allocate memory on the device using this package of OnnxRuntime. Please use the appropriate package of "
    "OnnxRuntime for your hardware to use this feature."
)


class OrtDevice:
    """A kind of device and its number. Tensors are only in the memory of the CPU."""

    def __init__(self, kind: int, number: int = 0, vendor: int = 0) -> None:
        self._kind, self._number, self._vendor = kind, number, vendor

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """Return the device of this name: "cpu", "cuda", ..."""
        if ort_device_name not in _DEVICE_TYPES:
            raise Exception(f"the device {ort_device_name!r} does not exist here")
        return OrtDevice(_DEVICE_TYPES[ort_device_name], device_id, max(vendor_id, 0))

    def device_id(self) -> int:
        """Return the number of the device."""
        return self._number

    def device_type(self) -> int:
        """Return 0 for the CPU."""
        return self._kind

    def device_vendor_id(self) -> int:
        """Return the PCI id of the vendor."""
        return self._vendor

    def device_mem_type(self) -> int:
        """Return 0: memory of the device itself."""
        return 0


def require_cpu(device_type: str, device_id: int = 0, vendor_id: int = -1) -> None:
    """Raise RuntimeError unless the device is the CPU; TypeError if a name or a number has another type."""
    if not isinstance(device_type, str):
        raise TypeError(f"a device is named by a str, not {device_type!r:.80}")
    operator.index(device_id)
    if OrtDevice.make(device_type.lower(), device_id, vendor_id).device_type() != 0:
        raise RuntimeError(_NO_DEVICE_MEMORY)


class OrtValue:
    """A tensor. It shares its memory with the array that it was made of."""

    _array: Array

    def __init__(self, ortvalue: OrtValue, numpy_obj: Array | None = None, session: Any = None) -> None:
        """Make another object of a tensor, such as one in an OrtValueVector. Raises ValueError if it is none."""
        if not isinstance(ortvalue, OrtValue):
            raise ValueError(f"`Provided ortvalue` needs to be of type `{OrtValue.__module__}.OrtValue`")
        self._array = ortvalue._array

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: Array, /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return a tensor over the memory of an array; over a copy if its elements are not contiguous.

        Raises:
            RuntimeError: If the device is not the CPU, or the array has strings.
        """
        require_cpu(device_type, device_id, vendor_id)
        _require_numbers(numpy_obj.dtype if isinstance(numpy_obj, np.ndarray) else np.dtype(object))
        return value_over(np.ascontiguousarray(numpy_obj).reshape(numpy_obj.shape))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: Array, /, onnx_element_type: int) -> OrtValue:
        """Return a tensor of ONNX's element type, which has the size of the array's, over the memory of an array.

        Raises:
            TypeError: If `data` is no array.
            RuntimeError: If elements of this type have another size, or there are none.
        """
        if not isinstance(data, np.ndarray):
            raise TypeError(f"data is a {type(data).__name__}: it must be an array")
        dtype = element_dtype(onnx_element_type)
        if dtype.itemsize != data.itemsize:
            raise RuntimeError(f"elements of {data.itemsize} bytes are no {dtype} of {dtype.itemsize} bytes")
        return value_over(data.view(dtype))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: npt.DTypeLike | int,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: Any = None,
    ) -> OrtValue:
        """Return a tensor with unspecified elements. Raises RuntimeError if the device is not the CPU."""
        if memory_info is not None and (device_type, device_id, vendor_id) != ("cpu", 0, -1):
            warnings.warn(
                "device_type, device_id, and vendor_id are ignored when memory_info is provided.", stacklevel=2
            )
        require_cpu(device_type, device_id, vendor_id)
        if any(size < 0 for size in shape):
            raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : the shape {list(shape)} has a negative size")
        try:
            dtype = element_dtype(element_type)
        except TypeError:
            raise RuntimeError("Not a valid numpy type") from None
        _require_numbers(dtype)
        return value_over(np.empty(tuple(shape), dtype))

    @classmethod
    def ort_value_from_sparse_tensor(cls, sparse_tensor: Any) -> NoReturn:
        """Raise NotImplemented: there are no sparse tensors."""
        raise ort_error("NotImplemented", "nnfmq has no sparse tensors")

    @classmethod
    def from_dlpack(cls, data: Any, /) -> OrtValue:
        """Return a tensor over the memory of an object with the DLPack protocol."""
        array: Array = np.from_dlpack(data)
        _require_numbers(array.dtype)
        return value_over(array)

    def as_sparse_tensor(self) -> NoReturn:
        """Raise RuntimeError: this is a dense tensor."""
        raise RuntimeError("this OrtValue is a tensor, not a sparse tensor")

    @property
    def _ortvalue(self) -> OrtValue:
        """This tensor: scripts put ONNX Runtime's inner object into an OrtValueVector."""
        return self

    def numpy(self) -> Array:
        """Return the array over the tensor's memory. Raises RuntimeError for bfloat16, which NumPy lacks."""
        require_numpy_type(self._array)
        return self._array

    @property
    def elements(self) -> Array:
        """The array over the tensor's memory, of BFLOAT16 for bfloat16."""
        return self._array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy:
            return np.array(self.numpy(), dtype=dtype)
        return np.asarray(self.numpy(), dtype=dtype)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._array.__dlpack_device__()
        return int(kind), int(number)

    def shape(self) -> list[int]:
        """Return the dimensions."""
        return list(self._array.shape)

    def data_type(self) -> str:
        """Return the type, such as "tensor(float)"."""
        return tensor_type(self._array.dtype)

    def element_type(self) -> int:
        """Return ONNX's number of the element type."""
        return element_number(self._array.dtype)

    def device_name(self) -> str:
        """Return "cpu"."""
        return "cpu"

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        address: int = self._array.__array_interface__["data"][0]
        return address

    def tensor_size_in_bytes(self) -> int:
        """Return the size of all elements."""
        return self._array.nbytes

    def has_value(self) -> bool:
        """Return True."""
        return True

    def is_tensor(self) -> bool:
        """Return True."""
        return True

    def is_sparse_tensor(self) -> bool:
        """Return False."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Return False."""
        return False

    def update_inplace(self, data: Array | OrtValue) -> None:
        """Copy an array, or another tensor, into this one's memory.

        Raises:
            RuntimeError: If it has another size, or elements of another type.
            TypeError: If it is neither.
        """
        if not isinstance(data, (np.ndarray, OrtValue)):
            raise TypeError(f"data is a {type(data).__name__}: it must be an array or an OrtValue")
        array = data.elements if isinstance(data, OrtValue) else data
        _require_numbers(array.dtype, "Inplace update")
        if array.dtype.newbyteorder("=") != self._array.dtype.newbyteorder("="):
            raise RuntimeError("The source and destination OrtValues must have the same data type")
        if array.size != self._array.size:
            raise RuntimeError("The input size of numpy arrays does not match the size of the OrtValue.")
        self._array[...] = array.reshape(self._array.shape)


def value_over(array: Array) -> OrtValue:
    """Return a tensor over the memory of an array, whose elements a tensor can have."""
    value = OrtValue.__new__(OrtValue)
    value._array = array
    return value


def _require_numbers(dtype: np.dtype[Any], what: str = "Creation") -> None:
    """Raise RuntimeError, with ONNX Runtime's text, if no OrtValue has such elements."""
    if dtype.kind in f"{STRING_KINDS}Mm" and dtype != BFLOAT16:
        raise RuntimeError(f"{what} of OrtValues is currently only supported from non-string numpy arrays")
    require_element_type(dtype)


class OrtValueVector(list[OrtValue]):
    """Tensors, as the inputs and outputs of `InferenceSession.run_with_ortvaluevector`."""

    def push_back(self, value: OrtValue) -> None:
        """Append a tensor. Raises TypeError if it is none."""
        if not isinstance(value, OrtValue):
            raise TypeError(f"a {type(value).__name__} is no OrtValue")
        self.append(value)

    def reserve(self, count: int) -> None:
        """Do nothing: the list grows by itself."""

    def shrink_to_fit(self) -> None:
        """Do nothing: the list has no memory to return."""

    def element_type_at(self, index: int) -> int:
        """Return ONNX's number of the element type of a tensor."""
        return self[index].element_type()


def require_numpy_type(*arrays: Array) -> None:
    """Raise RuntimeError, with ONNX Runtime's text, if an array is of bfloat16."""
    if any(array.dtype == BFLOAT16 for array in arrays):
        raise RuntimeError("No corresponding Numpy type for Tensor Type. bfloat16")


def copy_tensors(src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: Any = None) -> None:
    """Copy each tensor of `src` into the one of `dst` at its place."""
    for source, target in zip(src, dst, strict=True):
        target.update_inplace(source)


class _Address:
    """Memory at an address, in the form that NumPy takes."""

    def __init__(self, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "typestr": dtype.str,
            "version": 3,
        }


def array_at(address: int, shape: Sequence[int], element_type: npt.DTypeLike | int) -> Array:
    """Return an array over memory that the caller owns, which must outlive the array.

    Raises:
        RuntimeError: If no tensor has such elements, with ONNX Runtime's text.
    """
    dtype = element_dtype(element_type)
    if dtype.kind in STRING_KINDS and dtype != BFLOAT16:
        raise RuntimeError("Only binding non-string Tensors is currently supported")
    require_element_type(dtype)
    return np.asarray(_Address(address, shape, dtype)).view(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# IOBinding: arrays of the caller that are a session's inputs and outputs.


class _Session(Protocol):
    def get_inputs(self) -> list[NodeArg]: ...
    def get_outputs(self) -> list[NodeArg]: ...
    def get_overridable_initializers(self) -> list[NodeArg]: ...


class IOBinding:
    """The inputs and outputs of the runs of one session. Only memory of the CPU can be bound."""

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, OrtValue | None] = {}
        """For each bound output, in order, the tensor to fill; None = a new one for each run."""
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Use an array, with its content at the time of each run, as an input.

        Raises:
            RuntimeError: If there is no such input, it is no array of NumPy, or no tensor has elements of its type.
        """
        _require_name(name)
        if name not in {node.name for node in self.session.get_inputs()}:
            raise RuntimeError(f"Failed to find NodeArg with name: {name} in the def list")
        if not isinstance(arr_on_cpu, np.ndarray):
            raise RuntimeError("Unable to create OrtValue from the given python object")
        require_element_type(arr_on_cpu.dtype)
        self.inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Use memory at an address, which the caller owns, as an input. Raises RuntimeError if there is none."""
        self._require_input(name)
        require_cpu(device_type, device_id)
        self.inputs[name] = array_at(buffer_ptr, shape, element_type)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Use a tensor as an input. Raises RuntimeError if there is no such input."""
        self._require_input(name)
        self.inputs[name] = ortvalue.elements

    def _require_input(self, name: str) -> None:
        nodes = (*self.session.get_inputs(), *self.session.get_overridable_initializers())
        if name not in {node.name for node in nodes}:
            raise RuntimeError(f"Error when binding input: Failed to find input name in the mapping: {name}")

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Have an output computed: into memory at an address, which the caller owns, or into a new tensor."""
        _require_name(name)
        require_cpu(device_type, device_id)
        if buffer_ptr is None:
            self.outputs[name] = None
            return
        if element_type is None or shape is None:
            raise ValueError("buffer_ptr needs element_type and shape")
        self.outputs[name] = value_over(array_at(buffer_ptr, shape, element_type))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Have an output written into a tensor."""
        self.outputs[name] = ortvalue._ortvalue

    def fill(self, results: Sequence[Array]) -> None:
        """Store the results of a run, in the order of `outputs`.

        Raises:
            Exception: InvalidArgument if a bound tensor has another shape or type.
        """
        found = []
        nodes = {node.name: node for node in self.session.get_outputs()}
        for (name, target), array in zip(self.outputs.items(), results, strict=True):
            if target is None:
                found.append(value_over(array))
                continue
            given = target.elements
            _require_place(nodes[name], given, array)
            given[...] = array
            found.append(target)
        self._results = found

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last run, in the order in which they were bound."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Return copies of the outputs of the last run."""
        return [value.numpy().copy() for value in self._results]

    def clear_binding_inputs(self) -> None:
        """Forget all inputs."""
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget all outputs."""
        self.outputs.clear()

    def synchronize_inputs(self) -> None:
        """Do nothing: the inputs are in the CPU's memory."""

    def synchronize_outputs(self) -> None:
        """Do nothing: a run ends when its outputs are written."""

    def get_outputs_as_ortvaluevector(self) -> OrtValueVector:
        """Return the tensors of the last run."""
        return OrtValueVector(self.get_outputs())


def _require_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of an input or output is a str, not {name!r:.80}")


def _require_place(node: NodeArg, given: Array, array: Array) -> None:
    """Raise InvalidArgument, with ONNX Runtime's text, unless an output fits into the array that is bound to it."""
    if given.dtype != array.dtype:
        types = f"Actual: ({tensor_type(given.dtype)}) , expected: ({tensor_type(array.dtype)})"
        raise ort_error("InvalidArgument", f"Unexpected output data type. {types}")
    if node.shape:
        check_shape("output", node.name, node.shape, given.shape)
    if given.shape != array.shape:
        ours, theirs = (f"{{{','.join(map(str, each.shape))}}}" for each in (given, array))
        text = f"has shape {ours} but the computed output shape for this run is {theirs}"
        raise ort_error("InvalidArgument", f"The output OrtValue provided for output '{node.name}' {text}")
