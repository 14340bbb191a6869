"""A model in the driver for certain input shapes, and the memory of its tensors: what `allocate_tensors` makes.

Here are those on nnfmq's own engine; `hosting` has those that LiteRT runs in the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nnfmq.compat.litert.tensors import Array
from nnfmq.compat.shared_client import DriverShare

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import ModelBurst
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.importers.tflite.interface import FileSubgraph
    from nnfmq.importers.tflite.model import TracedModel

__all__ = ["AllocatedModel", "TensorAllocation"]


class AllocatedModel:
    """A prepared model, its burst, and its states: those of variable tensors, then those of resource variables.

    Attributes:
        arrays: The memory of inputs and outputs, by tensor.
        variables: The tensors that are states, in the order of the burst's.
    """

    _share: DriverShare
    _model: CompiledModel
    _burst: ModelBurst
    arrays: dict[int, Array]
    variables: Sequence[int]

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return the shape of a tensor for the shapes of the inputs; None if it is not known."""
        raise NotImplementedError

    def invoke(self) -> None:
        """Execute the model on the arrays; blocks. Raises NnfmqError."""
        raise NotImplementedError

    def renewed(self) -> AllocatedModel:
        """Return an allocation in another driver, with the values of all tensors and states; blocks. Closes this one.

        Raises NnfmqError.
        """
        raise NotImplementedError

    def variable(self, index: int) -> Array:
        """Return a copy of the state of a variable tensor."""
        return self._burst.state[self.variables.index(index)]

    def set_variable(self, index: int, value: Array) -> None:
        """Set the state of a variable tensor."""
        states = list(self._burst.state)
        states[self.variables.index(index)] = value
        self._burst.state = tuple(states)

    def reset_variables(self) -> None:
        """Give the variable tensors their first values. Resource variables keep their values, as in LiteRT."""
        resources = self.resources
        self._burst.reset_state()
        self.resources = resources

    @property
    def resources(self) -> Mapping[str, Array]:
        """Copies of the values of resource variables, by name. Others that have one of these names may be set."""
        return dict(self._named_resources(self._burst.state))

    @resources.setter
    def resources(self, values: Mapping[str, Array]) -> None:
        states, count = self._burst.state, len(self.variables)
        if len(states) > count:
            found = (values.get(name, old).reshape(old.shape) for name, old in self._named_resources(states))
            self._burst.state = (*states[:count], *found)  # nnfmq's own engine has the shape (1,) for rank 0

    def _named_resources(self, states: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        names = (state.tensor.name for state in self._model.states)
        return zip(list(names)[len(self.variables) :], states[len(self.variables) :], strict=True)

    def close(self) -> None:
        """Release the model in the driver; the arrays remain. Idempotent."""
        self._share.discard(self._burst)
        self._share.discard(self._model)


# ----------------------------------------------------------------------------------------------------------------------
# TensorAllocation: on nnfmq's own engine. Inputs and outputs are a burst's arrays, so an execution copies nothing.


class TensorAllocation(AllocatedModel):
    """One prepared model and its burst; `arrays` has the memory of each input, output and kept result, by tensor."""

    def __init__(self, share: DriverShare, subgraph: FileSubgraph, traced: TracedModel) -> None:
        """Prepare the model; blocks. Raises NnfmqError."""
        self._share = share
        self._subgraph = subgraph
        self._traced = traced
        self.variables = traced.states
        self._model = share.adopt(share.client().prepare(traced.loaded))
        self._burst = share.adopt(self._model.burst())
        self._outputs = self._burst.outputs
        self.arrays = {}
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
        """See `AllocatedModel.shape`. The HAL has no results of rank 0."""
        shape = self._traced.shapes.get(index)
        if shape == (1,) and not self._subgraph.tensors[index].shape:
            return ()
        return shape

    def invoke(self) -> None:
        """See `AllocatedModel.invoke`."""
        self._burst.execute(out=self._outputs)

    def renewed(self) -> TensorAllocation:
        """See `AllocatedModel.renewed`."""
        new = TensorAllocation(self._share, self._subgraph, self._traced)
        for index, array in self.arrays.items():
            new.arrays[index][...] = array
        new._burst.state = self._burst.state
        self.close()
        return new
