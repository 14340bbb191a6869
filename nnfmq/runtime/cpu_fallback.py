"""CpuFallback: the runtime's CPU device for a model whose own device fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
)
from nnfmq.hal.types import ExecutionPreference, Model
from nnfmq.runtime.client_device import Device
from nnfmq.runtime.prepare_arguments import NamedModel
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.verbose_log import vlog

__all__ = ["CpuFallback"]

_NO_FALLBACK = (InvalidArgument, BadState, OutputInsufficientSize)


class CpuFallback:
    """Prepares a model, or single steps of its plan, on `nnapi-reference` when they are first needed there.

    Thread-safe. Close it after the models that use it.

    Args:
        open_device: Returns the CPU device; blocks while its driver starts. Whoever passes it owns that driver.
        model: The whole model.
        step_models: The sub-models of the plan's execution steps.
        survives_driver: Whether the CPU executes after the driver of another device has died.
    """

    def __init__(
        self,
        open_device: Callable[[], Device],
        model: Model | NamedModel,
        step_models: Sequence[Model] = (),
        *,
        survives_driver: bool = True,
    ) -> None:
        self.executions = 0
        """How often the CPU was asked to execute the model or a step."""
        self._survives_driver = survives_driver
        self._open_device = open_device
        self._models = (model, *step_models)
        self._lock = threading.Lock()
        self._prepared: dict[int, PreparedModel] = {}
        self._is_closed = False

    @property
    def is_used(self) -> bool:
        """Whether something of the model is prepared on the CPU device, because another device failed."""
        return bool(self._prepared)

    def applies_to(self, error: NnfmqError, deadline_ns: int | None = None) -> bool:
        """Return whether the CPU is tried after `error`.

        It is not after a mistake of the application, nor when the application's own deadline is missed.
        """
        if isinstance(error, MissedDeadline) and deadline_ns is not None:
            return False
        if isinstance(error, DeadObject) and not self._survives_driver:
            return False
        return not isinstance(error, _NO_FALLBACK)

    def whole_model(self) -> PreparedModel:
        """Return the whole model on the CPU device; blocks while it is prepared. This object owns it.

        Raises:
            BadState: If this is closed.
            NnfmqError: As `Device.prepare`.
        """
        return self._model(0)

    def step_model(self, index: int) -> PreparedModel:
        """Return the sub-model of execution step `index` on the CPU device. Otherwise as `whole_model`."""
        return self._model(index + 1)

    def _model(self, index: int) -> PreparedModel:
        with self._lock:
            if self._is_closed:
                raise BadState("this prepared model is closed")
            self.executions += 1
            found = self._prepared.get(index)
            if found is None or not found.handle.is_open:
                # Telemetry has a record of a plan for all that its steps do, here as well.
                device = self._open_device().chosen_by("fallback" if len(self._models) == 1 else "step")
                vlog("execution", "device %s is the CPU of the fallback", device.info.name)
                found = device.prepare(self._models[index], preference=ExecutionPreference.SUSTAINED_SPEED)
                found.handle.is_of_fallback = True
                self._prepared[index] = found
            return found

    def close(self) -> None:
        """Release the models. Idempotent."""
        with self._lock:
            self._is_closed = True
            models, self._prepared = self._prepared, {}
        for model in models.values():
            model.close()
