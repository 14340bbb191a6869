"""ModelHandle: a prepared model as every execution mode uses it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.summaries import signature
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.runtime.connection import Connection
from nnfmq.serialize import messages
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.runtime.request_observation import ObservedModel

_RELEASE_TIMEOUT_NS = 1_000_000_000


class CallSignature(Protocol):
    """The inputs and outputs of a model: the caller's, and those of HAL requests, which the states follow."""

    caller_inputs: tuple[TensorInfo, ...]
    caller_outputs: tuple[TensorInfo, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...]


class ModelHandle(Uncopyable):
    """A prepared model's id in the driver, its signature, and the device that prepared it. Thread-safe.

    `device` is the device's name, and `extensions` has the names of the extensions that it supports. `inputs` and
    `outputs` are those of HAL requests: the caller's, `caller_inputs` and `caller_outputs`, followed by the states.

    `observed` has the observers of its executions, None if there are none.

    `model_id` is None until the driver has replied to the prepare call, which is followed by `on_prepared`.
    """

    def __init__(
        self,
        connection: Connection,
        model_id: int | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        device: str,
        extensions: frozenset[str] = frozenset(),
        states: tuple[StateInfo, ...] = (),
    ) -> None:
        self.connection = connection
        self.caller_inputs = inputs
        self.caller_outputs = outputs
        self.states = states
        tensors = tuple(state.tensor for state in states)
        self.inputs = (*inputs, *tensors)
        self.outputs = (*outputs, *tensors)
        self.device = device
        self.extensions = extensions
        self.observed: ObservedModel | None = None
        self._model_id = model_id

    def on_prepared(self, reply: messages.PreparedModelReady) -> None:
        """Store the id that the driver returned."""
        if reply.status is ErrorStatus.NONE:
            self._model_id = reply.model_id

    @property
    def model_id(self) -> int:
        """The model's id in the driver. Raises InvalidArgument once it is released."""
        if self._model_id is None:
            raise InvalidArgument("this prepared model is closed")
        return self._model_id

    @property
    def signature(self) -> str:
        """The names, shapes and dtypes of inputs and outputs in a short line."""
        return signature(self.caller_inputs, self.caller_outputs)

    @property
    def is_open(self) -> bool:
        """True until the model or its connection is closed, or the driver has exited."""
        return self._model_id is not None and self.connection.is_open

    def require_open(self) -> None:
        """Raise InvalidArgument if the model is released."""
        _ = self.model_id

    def require_usable(self) -> None:
        """Raise DeadObject or InvalidArgument if the driver has exited, or the connection is closed."""
        self.connection.raise_if_closed()

    def release(self) -> None:
        """Release the model in the driver. Idempotent. Blocks up to 1 s. Does nothing if the driver has exited."""
        model_id, self._model_id = self._model_id, None
        if model_id is None or not self.connection.is_open:
            return
        try:
            message = messages.ReleaseModel(self.connection.next_call_id(), model_id)
            self.connection.exchange(message, messages.Reply, (), time.monotonic_ns() + _RELEASE_TIMEOUT_NS)
        except NnfmqError:
            pass  # the driver has exited, which released the model
