"""DescribedModel: the part of LiteRT's Interpreter that tells what is in the file."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from nnfmq.compat.litert.litert_tensors import element_type, tensor_details

if TYPE_CHECKING:
    from nnfmq.importers.file_format import FileContent
    from nnfmq.importers.tflite_interface import FileTensor

__all__ = ["DescribedModel", "as_index"]


class DescribedModel:
    """The tensors, operators and signatures of a file, as LiteRT describes them."""

    def __init__(self, content: FileContent, subgraph: int = 0) -> None:
        """Read the file; with `subgraph` as if it had no subgraph but this one.

        Raises:
            InvalidArgument: If it is no .tflite file, or corrupt.
        """
        from nnfmq.importers.tflite_interface import read_interface  # while an embedded driver starts

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
