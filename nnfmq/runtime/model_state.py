"""The states of a model between its executions: kept by the client, for each burst, execution and prepared model.

For the driver a model is a function. A model with states has an input and an output more for each of them, and the
client makes what an execution returned the input of the next one. So an execution that fails, or whose deadline passes,
changes no state; the death of the driver loses none; and two clients, or two bursts of one model, share none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import StateInfo
from nnfmq.runtime.array_checks import checked_arrays
from nnfmq.runtime.tensor_layout import Array

__all__ = ["HasState", "MappedState", "StateValues", "initial_values", "require_no_state"]


def initial_values(states: Sequence[StateInfo]) -> tuple[Array, ...]:
    """Return new arrays with the values that a model's states have at first."""
    return tuple(_initial(state) for state in states)


def _initial(state: StateInfo) -> Array:
    info = state.tensor
    if state.initial:
        return np.frombuffer(state.initial, info.dtype).reshape(info.shape).copy()
    return np.full(info.shape, info.zero_point, info.dtype)


class StateValues:
    """States that are arrays of the client."""

    def __init__(self, states: Sequence[StateInfo]) -> None:
        self.states = tuple(states)
        self._values = initial_values(self.states)

    def get(self) -> tuple[Array, ...]:
        """Return copies of the values that the next execution begins with."""
        return tuple(value.copy() for value in self._values)

    def set(self, values: Sequence[Array]) -> None:
        """Set the values that the next execution begins with. Keeps the arrays."""
        self._values = tuple(values)

    def detach(self) -> StateValues:
        """Return itself: it uses no memory of an execution object."""
        return self


class MappedState:
    """States in the memories of a burst or an execution.

    The states' arrays follow each other in both memories at the same distances, so one copy takes all of them from the
    outputs to the inputs: a signal handler that raises cannot leave states of two executions.

    Args:
        states: The states.
        inputs: Their arrays in the inputs' memory.
        before: The bytes in the inputs' memory from the first state to the last.
        after: The same bytes in the outputs' memory.
    """

    def __init__(self, states: Sequence[StateInfo], inputs: Sequence[Array], before: Array, after: Array) -> None:
        self.states = tuple(states)
        self._inputs = tuple(inputs)
        self._before = before
        self._after = after
        self._pending: tuple[Array, ...] | None = initial_values(self.states)

    def get(self) -> tuple[Array, ...]:
        """Return copies of the values that the next execution begins with."""
        values = self._inputs if self._pending is None else self._pending
        return tuple(value.copy() for value in values)

    def set(self, values: Sequence[Array]) -> None:
        """Set the values that the next execution begins with. Keeps the arrays, and writes no memory yet."""
        self._pending = tuple(values)

    def begin(self) -> None:
        """Write values that were set. Call it before an execution, when none is in progress."""
        if self._pending is None:
            return
        for target, value in zip(self._inputs, self._pending, strict=True):
            np.copyto(target, value)
        self._pending = None

    def advance(self) -> None:
        """Make what an execution has returned the values of the next one. Call it when an execution has succeeded."""
        self._before[...] = self._after

    def detach(self) -> StateValues:
        """Return the same values without the memories."""
        values = StateValues(self.states)
        values.set(self.get())
        return values


def require_no_state(states: Sequence[StateInfo], method: str) -> None:
    """Raise InvalidArgument, which names the method to call instead, if a model has states."""
    if states:
        raise InvalidArgument(
            f"the model has {counted(len(states), 'state')}; only synchronous calls carry states on: call {method}()"
        )


class HasState:
    """What an object that executes a model offers for its states; `_state` is None if the model has none."""

    _state: StateValues | MappedState | None = None

    @property
    def states(self) -> tuple[StateInfo, ...]:
        """Descriptions of the model's states; empty if it has none."""
        return () if self._state is None else self._state.states

    @property
    def state(self) -> tuple[Array, ...]:
        """Copies of the states with which the next execution begins, in the order of `states`.

        They may be set, too: to what was read here or from another execution object of the model, for instance after
        the driver has exited. Do not set them while another thread executes.

        Raises:
            InvalidArgument: If the number of arrays, a shape or a dtype is wrong.
        """
        return () if self._state is None else self._state.get()

    @state.setter
    def state(self, values: Sequence[ArrayLike]) -> None:
        if self._state is None:
            if len(values):
                raise InvalidArgument(f"the model has no states; {len(values)} were given")
            return
        infos = [state.tensor for state in self._state.states]
        arrays = checked_arrays(infos, values)
        self._state.set([np.array(array, info.dtype) for array, info in zip(arrays, infos, strict=True)])

    def _detach_state(self) -> None:
        """Keep the states' values when the object's memory is closed. Idempotent."""
        if self._state is not None:
            self._state = self._state.detach()

    def reset_state(self) -> None:
        """Begin the next execution with the initial states. Does nothing if the model has none."""
        if self._state is not None:
            self._state.set(initial_values(self._state.states))
