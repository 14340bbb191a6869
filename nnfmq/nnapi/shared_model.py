"""SharedModel: a compiled model that several objects of this package use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnfmq.nnapi.user_count import UserCount
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.runtime.compiled_model import CompiledModel

__all__ = ["SharedModel"]


class SharedModel(Uncopyable):
    """A compiled model that a compilation, its executions and its bursts share: its `users`.

    `inputs` and `outputs` are those of requests: with the states.
    """

    def __init__(self, model: CompiledModel) -> None:
        states = tuple(state.tensor for state in model.states)
        self.model = model
        self.inputs = (*model.inputs, *states)
        self.outputs = (*model.outputs, *states)
        self.users = UserCount("model", model.close)

    @property
    def sends_padding(self) -> bool:
        """Whether a request tells the driver of an argument's padding: HIDL has no field for it (MEM-6)."""
        return self.model.memory_preference("output", 0).padding > 1
