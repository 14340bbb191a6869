"""A model that LiteRT runs in the driver, because nnfmq's own engine refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nnfmq.compat.litert.allocations import AllocatedModel
from nnfmq.compat.litert.tensors import stored_dtype
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.hosted import OPERAND_TYPES

if TYPE_CHECKING:
    from nnfmq.hal.errors import GeneralFailure, InvalidArgument
    from nnfmq.importers.file_format import ModelSource
    from nnfmq.importers.tflite.interface import FileSignature, FileSubgraph

__all__ = ["HostedAllocation", "HostedSubgraph"]


class HostedSubgraph(NamedTuple):
    """A subgraph of a file for LiteRT in the driver.

    Attributes:
        source: The file.
        subgraph: What the file says of the subgraph.
        signature: A signature of the subgraph, and its key; None: the file's first subgraph.
        options: Options of the device `litert`: arguments of LiteRT's Interpreter.
    """

    source: ModelSource
    subgraph: FileSubgraph
    signature: tuple[str, FileSignature] | None
    options: Mapping[str, Any]

    @property
    def inputs(self) -> Sequence[int]:
        """The tensors of the model's inputs."""
        return self.subgraph.inputs if self.signature is None else [*self.signature[1].inputs.values()]

    @property
    def outputs(self) -> Sequence[int]:
        """The tensors of the model's outputs; with `experimental_preserve_all_tensors` all that operators write."""
        main = self.subgraph.outputs if self.signature is None else [*self.signature[1].outputs.values()]
        if not self.options.get("experimental_preserve_all_tensors"):
            return main
        written = dict.fromkeys(index for operator in self.subgraph.operators for index in operator.outputs)
        return [*main, *(index for index in written if index not in main and self._crosses(index))]

    def _crosses(self, index: int) -> bool:
        tensor = self.subgraph.tensors[index]
        return tensor.type.lower() in OPERAND_TYPES and tensor.type != "BFLOAT16" and not tensor.is_variable

    @property
    def variables(self) -> Sequence[int]:
        """The variable tensors, in the order in which operators use them."""
        used = dict.fromkeys(index for operator in self.subgraph.operators for index in operator.inputs)
        return [index for index in used if index >= 0 and self.subgraph.tensors[index].is_variable]


class HostedAllocation(AllocatedModel):
    """One model on the device `litert` and its burst; `arrays` has a value of each input and output, by tensor.

    An output whose shape follows from the data has none before the first execution.
    """

    def __init__(
        self,
        share: DriverShare,
        file: HostedSubgraph,
        refusal: InvalidArgument | GeneralFailure,
        shapes: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Prepare the model for these shapes of the inputs; blocks. Raises NnfmqError."""
        self._share, self._file = share, file
        self._arguments = file, refusal, shapes
        self.variables = file.variables
        key = file.signature[0] if file.signature else None
        sizes: dict[str | int, Sequence[int]] = {place: shapes[index] for place, index in enumerate(file.inputs)}
        self._model = share.adopt(
            share.client().prepare_hosted(
                "litert",
                file.source,
                refusal,
                shapes=sizes,
                signature=key,
                runtime_options=file.options,
            )
        )
        self._burst = share.adopt(self._model.burst())
        self.arrays = {}
        for index in file.inputs:
            self.arrays[index] = np.zeros(shapes[index], stored_dtype(file.subgraph.tensors[index]))
        for index, info in zip(file.outputs, self._model.outputs, strict=True):
            tensor = file.subgraph.tensors[index]
            shape = tensor.shape if info.has_unknown_shape else info.shape
            if tensor.data is None and index not in self.arrays and (0 in shape or not info.has_unknown_shape):
                self.arrays[index] = np.zeros(shape, stored_dtype(tensor))

    def shape(self, index: int) -> tuple[int, ...] | None:
        """See `AllocatedModel.shape`: those of inputs and outputs are known."""
        array = self.arrays.get(index)
        return None if array is None else array.shape

    def invoke(self) -> None:
        """See `AllocatedModel.invoke`."""
        arrays, file = self.arrays, self._file
        results = self._burst.execute(*(arrays[index] for index in file.inputs))
        for index, result in zip(file.outputs, results, strict=True):
            if file.subgraph.tensors[index].data is None and index not in file.inputs:
                if index in arrays and arrays[index].shape == result.shape:
                    arrays[index][...] = result
                else:
                    arrays[index] = np.array(result)

    def renewed(self) -> HostedAllocation:
        """See `AllocatedModel.renewed`."""
        new = HostedAllocation(self._share, *self._arguments)
        new.arrays, new._burst.state = self.arrays, self._burst.state
        self.close()
        return new
