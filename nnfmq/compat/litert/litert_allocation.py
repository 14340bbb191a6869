"""TensorAllocation: a model in the driver for certain input shapes, and the memory of its tensors.

Inputs and outputs are a burst's own arrays, so that an execution copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnfmq.compat.litert.litert_tensors import Array
from nnfmq.compat.shared_client import DriverShare

if TYPE_CHECKING:
    from nnfmq.importers.tflite import TracedModel
    from nnfmq.importers.tflite_interface import FileSubgraph

__all__ = ["TensorAllocation"]


class TensorAllocation:
    """One prepared model and its burst; `arrays` has the memory of each input, output and kept result, by tensor."""

    def __init__(self, share: DriverShare, subgraph: FileSubgraph, traced: TracedModel) -> None:
        """Prepare the model; blocks. Raises NnfmqError."""
        self._share = share
        self._subgraph = subgraph
        self._traced = traced
        self._model = share.adopt(share.client().prepare(traced.loaded))
        self._burst = share.adopt(self._model.burst())
        self._outputs = self._burst.outputs
        self.arrays: dict[int, Array] = {}
        self._bind(subgraph.inputs, self._burst.inputs)
        self._bind((*subgraph.outputs, *traced.results), self._outputs)
        for array in self.arrays.values():
            array[...] = 0

    def _bind(self, tensors: Sequence[int], arrays: Sequence[Array]) -> None:
        """Enter the arrays of tensors.

        An output that is an input, a constant or another output is that tensor, and needs no array.
        """
        for index, array in zip(tensors, arrays, strict=True):
            if index not in self.arrays and self._subgraph.tensors[index].data is None:
                self.arrays[index] = array

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return the shape of a tensor that is computed; None for all others. The HAL has no results of rank 0."""
        shape = self._traced.shapes.get(index)
        if shape == (1,) and not self._subgraph.tensors[index].shape:
            return ()
        return shape

    @property
    def is_alive(self) -> bool:
        """Whether the driver that has the model lives."""
        return self._model.handle.is_open

    @property
    def variables(self) -> Sequence[int]:
        """The tensors that are states."""
        return self._traced.states

    def variable(self, index: int) -> Array:
        """Return a copy of the state of a variable tensor."""
        return self._burst.state[self._traced.states.index(index)]

    def set_variable(self, index: int, value: Array) -> None:
        """Set the state of a variable tensor."""
        states = list(self._burst.state)
        states[self._traced.states.index(index)] = value
        self._burst.state = tuple(states)

    def reset_variables(self) -> None:
        """Begin the next execution with the initial states."""
        self._burst.reset_state()

    def invoke(self) -> None:
        """Execute the model on the arrays; blocks. Raises NnfmqError."""
        self._burst.execute(out=self._outputs)

    def renewed(self) -> TensorAllocation:
        """Return the same in another driver, with the values of all tensors and states; blocks. Closes this one."""
        new = TensorAllocation(self._share, self._subgraph, self._traced)
        for index, array in self.arrays.items():
            new.arrays[index][...] = array
        new._burst.state = self._burst.state
        self.close()
        return new

    def close(self) -> None:
        """Release the model in the driver; the arrays remain. Idempotent."""
        self._share.discard(self._burst)
        self._share.discard(self._model)
