"""LiteRT's view of a file's tensors: NumPy types, detail dictionaries, and the checks of values that are set."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from nnfmq.importers.file_format import FileContent
    from nnfmq.importers.tflite.interface import FileTensor

__all__ = [
    "Array",
    "DescribedModel",
    "as_index",
    "as_tensor_value",
    "constant_value",
    "element_type",
    "stored_dtype",
    "tensor_details",
]

Array: TypeAlias = npt.NDArray[Any]

_ELEMENT_TYPES: dict[str, Any] = {
    "FLOAT32": np.float32,
    "FLOAT16": np.float16,
    "INT32": np.int32,
    "UINT8": np.uint8,
    "INT64": np.int64,
    "STRING": np.bytes_,
    "BOOL": np.bool_,
    "INT16": np.int16,
    "COMPLEX64": np.complex64,
    "INT8": np.int8,
    "FLOAT64": np.float64,
    "COMPLEX128": np.complex128,
    "UINT64": np.uint64,
    "RESOURCE": np.void,
    "VARIANT": np.void,
    "UINT32": np.uint32,
    "UINT16": np.uint16,
    "INT4": np.int8,
}
_TYPE_NAMES = {np.dtype(kind).str: name for name, kind in _ELEMENT_TYPES.items() if name not in ("INT4", "VARIANT")}


def element_type(tensor: FileTensor) -> Any:
    """Return the NumPy type that LiteRT gives as `dtype`; None if it has none."""
    return _ELEMENT_TYPES.get(tensor.type)


def stored_dtype(tensor: FileTensor) -> np.dtype[Any]:
    """Return the dtype of a tensor's elements. Raises ValueError if they are no numbers."""
    kind = element_type(tensor)
    if kind is None or kind in (np.bytes_, np.void):
        raise ValueError(f"tensor {tensor.name!r} has elements of type {tensor.type}, which are no numbers")
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


def constant_value(tensor: FileTensor) -> Array | None:
    """Return a view of the tensor's value in the file; None if it has none, or one that is not stored plainly."""
    if tensor.data is None or tensor.type == "INT4":
        return None
    dtype = stored_dtype(tensor)
    if len(tensor.data) % dtype.itemsize or len(tensor.data) // dtype.itemsize != int(np.prod(tensor.shape)):
        return None
    return np.frombuffer(tensor.data, dtype.newbyteorder("<")).reshape(tensor.shape)


def tensor_details(tensor: FileTensor, index: int, shape: Sequence[int]) -> dict[str, Any]:
    """Return the dictionary with which LiteRT describes a tensor; `shape` is its shape now.

    Raises:
        ValueError: If the tensor's type is unknown.
    """
    kind = element_type(tensor)
    if kind is None:
        raise ValueError(f"tensor {index} has the unknown type {tensor.type}")
    return {
        "name": tensor.name,
        "index": index,
        "shape": np.array(shape, np.int32),
        "shape_signature": np.array(tensor.shape_signature or shape, np.int32),
        "dtype": kind,
        "quantization": _one_scale(tensor),
        "quantization_parameters": {
            "scales": np.array(tensor.scales, np.float32),
            "zero_points": np.array(tensor.zero_points, np.int32),
            "quantized_dimension": tensor.quantized_dimension,
            "block_size": 0,
        },
        "sparsity_parameters": {},
    }


def _one_scale(tensor: FileTensor) -> tuple[float, int]:
    if len(tensor.scales) != 1 or len(tensor.zero_points) != 1:
        return 0.0, 0
    return tensor.scales[0], tensor.zero_points[0]


def as_tensor_value(value: Any, index: int, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return `value` as an array with the type and shape of a tensor.

    Raises:
        ValueError: If it has another type or shape.
    """
    array = np.asarray(value)
    if array.dtype.newbyteorder("=") != dtype:
        given, wanted = _type_name(array.dtype), _type_name(dtype)
        raise ValueError(
            f"Cannot set tensor: Got value of type {given} but expected type {wanted} for input {index}, name: {name} "
        )
    if array.ndim != len(shape):
        raise ValueError(
            f"Cannot set tensor: Dimension mismatch. Got {array.ndim} but expected {len(shape)} for input {index}."
        )
    for axis, (found, expected) in enumerate(zip(array.shape, shape, strict=True)):
        if found != expected:
            raise ValueError(
                f"Cannot set tensor: Dimension mismatch. Got {found} but expected {expected} for dimension {axis} "
                f"of input {index}."
            )
    return array


def _type_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "USO":
        return "STRING"
    return _TYPE_NAMES.get(dtype.newbyteorder("=").str, "NOTYPE")


# ----------------------------------------------------------------------------------------------------------------------
# DescribedModel: the part of LiteRT's Interpreter that tells what is in the file.


class DescribedModel:
    """The tensors, operators and signatures of a file, as LiteRT describes them."""

    def __init__(self, content: FileContent, subgraph: int = 0) -> None:
        """Read the file; with `subgraph` as if it had no subgraph but this one.

        Raises:
            InvalidArgument: If it is no .tflite file, or corrupt.
        """
        from nnfmq.importers.tflite.interface import read_interface  # while an embedded driver starts

        self._file = read_interface(content)
        if subgraph:
            from msgspec.structs import replace

            self._file = replace(self._file, subgraphs=(self._file.subgraphs[subgraph],))
        self._subgraph = self._file.subgraphs[0]
        self._signature_defs = self.get_signature_list()

    def get_input_details(self) -> list[dict[str, Any]]:
        """Return a dictionary for each input: name, index, shape, shape_signature, dtype, quantization."""
        return [self._get_tensor_details(index, 0) for index in self._subgraph.inputs]

    def get_output_details(self) -> list[dict[str, Any]]:
        """Return a dictionary for each output, as `get_input_details`."""
        return [self._get_tensor_details(index, 0) for index in self._subgraph.outputs]

    def get_tensor_details(self, subgraph_index: int = 0) -> list[dict[str, Any]]:
        """Return a dictionary for each tensor of the file, as `get_input_details`. Raises ValueError."""
        if not 0 <= subgraph_index < self.num_subgraphs():
            raise ValueError(f"subgraph index {subgraph_index} is not in 0..{self.num_subgraphs() - 1}")
        tensors = self._file.subgraphs[subgraph_index].tensors
        known = [index for index, tensor in enumerate(tensors) if element_type(tensor) is not None]
        return [self._get_tensor_details(index, subgraph_index) for index in known]

    def num_subgraphs(self) -> int:
        """Return the number of subgraphs in the file."""
        return len(self._file.subgraphs)

    def _get_tensor_details(self, tensor_index: int, subgraph_index: int) -> dict[str, Any]:
        tensor_index, subgraph_index = int(tensor_index), int(subgraph_index)
        tensor = self._tensor(tensor_index, subgraph_index)
        shape = self._shape(tensor_index) if subgraph_index == 0 else tensor.shape
        return tensor_details(tensor, tensor_index, shape)

    def _shape(self, index: int) -> tuple[int, ...]:
        """Return the shape that a tensor of the first subgraph has now."""
        return self._subgraph.tensors[index].shape

    def _tensor(self, index: int, subgraph_index: int) -> FileTensor:
        if not 0 <= as_index(subgraph_index) < self.num_subgraphs():
            raise ValueError(f"subgraph index {subgraph_index} is not in 0..{self.num_subgraphs() - 1}")
        tensors = self._file.subgraphs[subgraph_index].tensors
        if not 0 <= as_index(index) < len(tensors):
            raise ValueError(f"tensor index {index} is not in 0..{len(tensors) - 1}")
        return tensors[index]

    def _get_op_details(self, op_index: int) -> dict[str, Any]:
        operators = self._subgraph.operators
        if not 0 <= as_index(op_index) < len(operators):
            raise ValueError(f"operator index {op_index} is not in 0..{len(operators) - 1}")
        found = operators[op_index]
        return {
            "index": int(op_index),
            "op_name": found.name,
            "inputs": np.array(found.inputs, np.int32),
            "outputs": np.array(found.outputs, np.int32),
            "operand_types": [element_type(self._subgraph.tensors[index]) for index in found.inputs if index != -1],
            "result_types": [element_type(self._subgraph.tensors[index]) for index in found.outputs if index != -1],
        }

    def _get_ops_details(self) -> list[dict[str, Any]]:
        """Return a dictionary for each operator of the file."""
        return [self._get_op_details(index) for index in range(len(self._subgraph.operators))]

    def get_signature_list(self) -> dict[str, dict[str, list[str]]]:
        """Return the names of the inputs and outputs of each signature, by its key."""
        return {
            key: {"inputs": list(found["inputs"]), "outputs": list(found["outputs"])}
            for key, found in self._get_full_signature_list().items()
        }

    def _get_full_signature_list(self) -> dict[str, dict[str, dict[str, int]]]:
        return {
            key: {"inputs": dict(found.inputs), "outputs": dict(found.outputs)}
            for key, found in self._file.signatures.items()
        }

    def _subgraph_of(self, signature_key: str) -> int:
        return self._file.signatures[signature_key].subgraph


def as_index(value: Any) -> int:
    """Return an index as an int. Raises TypeError if it is no integer."""
    return operator.index(value)
