"""TensorAllocation: a model in the driver for certain input shapes, and the memory of its tensors.

Inputs and outputs are a burst's own arrays, so that an execution copies nothing. A tensor of INT64, which the driver
computes as int32, has an array of its own beside that, and is converted before or after each execution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nnfmq.compat.litert.litert_tensors import Array, stored_dtype
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import InvalidArgument
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
        self._wide_inputs = list(self._bind(subgraph.inputs, self._burst.inputs))
        self._wide_outputs = list(self._bind((*subgraph.outputs, *traced.results), self._outputs))
        for array in self.arrays.values():
            array[...] = 0

    def _bind(self, tensors: Sequence[int], arrays: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
        """Enter the arrays of tensors, and yield the pairs that are to be converted: the tensor's and the burst's."""
        for index, found in zip(tensors, arrays, strict=True):
            array = found.reshape(self.shape(index) or ())
            dtype = stored_dtype(self._subgraph.tensors[index])
            if dtype == array.dtype:
                self.arrays[index] = array
            else:
                self.arrays[index] = np.zeros(array.shape, dtype)
                yield self.arrays[index], array

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
        for wide, narrow in self._wide_inputs:
            _narrow(wide, narrow)
        self._burst.execute(out=self._outputs)
        for wide, narrow in self._wide_outputs:
            wide[...] = narrow

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


def _narrow(wide: Array, narrow: Array) -> None:
    """Copy integers into an array of a smaller type. Raises InvalidArgument if one of them does not fit."""
    narrow[...] = wide.astype(narrow.dtype)
    if not np.array_equal(narrow, wide):
        raise InvalidArgument(
            f"an input of type {wide.dtype} has values beyond {narrow.dtype}, with which the driver computes"
        )
