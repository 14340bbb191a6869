"""CpuFallback: the runtime's CPU device for a model whose own device fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from nnfmq.base.threads import start_daemon
from nnfmq.base.verbose_log import vlog
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.prepare_arguments import NamedModel
from nnfmq.client.model.handle import ModelHandle
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
    ResourceExhaustedTransient,
)
from nnfmq.hal.types import ExecutionPreference, Model

__all__ = ["CpuFallback"]

_NO_FALLBACK = (InvalidArgument, BadState, OutputInsufficientSize)
_log = logging.getLogger("nnfmq.client")
_CLOSED = "this prepared model is closed"


class CpuFallback:
    """Prepares a model, or single steps of its plan, on `nnapi-reference` when they are first needed there.

    Thread-safe. Close it after the models that use it. A thread of its own prepares each of them, so that calls with a
    deadline and `close` need not wait for the compiler.

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
        self._prepared: dict[int, ModelHandle] = {}
        self._preparing: dict[int, Future[ModelHandle]] = {}
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

    def whole_model(self, deadline_ns: int | None) -> ModelHandle:
        """Return the whole model on the CPU device; blocks while it is prepared. This object owns it.

        The preparation goes on if the deadline passes, for the next call.

        Raises:
            BadState: If this is closed, now or meanwhile.
            MissedDeadline: If the deadline passes.
            NnfmqError: As `Device.prepare`.
        """
        return self._model(0, deadline_ns)

    def step_model(self, index: int, deadline_ns: int | None) -> ModelHandle:
        """Return the sub-model of execution step `index` on the CPU device. Otherwise as `whole_model`."""
        return self._model(index + 1, deadline_ns)

    def _model(self, index: int, deadline_ns: int | None) -> ModelHandle:
        with self._lock:
            if self._is_closed:
                raise BadState(_CLOSED)
            self.executions += 1
            found = self._prepared.get(index)
            if found is not None and found.is_open:
                return found
            preparing = self._preparing.get(index)
            if preparing is None:
                preparing = self._start(index)
        return preparing.result(deadline_ns)

    def _start(self, index: int) -> Future[ModelHandle]:
        preparing: Future[ModelHandle] = Future()
        try:
            start_daemon(partial(self._prepare, index, preparing), "nnfmq-cpu")
        except RuntimeError as error:
            raise ResourceExhaustedTransient(f"no thread can be started: {error}") from error
        self._preparing[index] = preparing
        return preparing

    def _prepare(self, index: int, preparing: Future[ModelHandle]) -> None:
        """Prepare a model and pass it on; on its own thread."""
        try:
            # Telemetry has a record of a plan for all that its steps do, here as well.
            device = self._open_device().chosen_by("fallback" if len(self._models) == 1 else "step")
            vlog("execution", "device %s is the CPU of the fallback", device.info.name)
            found = device.prepare(self._models[index], preference=ExecutionPreference.SUSTAINED_SPEED).handle
        except NnfmqError as error:
            self._preparing.pop(index, None)
            preparing.set_exception(error)
            return
        except Exception as bug:  # noqa: BLE001  the calls that wait must get an error
            self._preparing.pop(index, None)
            _log.exception("a model was not prepared on the CPU")
            preparing.set_exception(GeneralFailure(f"internal error: {bug!r}"))
            return
        found.is_of_fallback = True
        with self._lock:
            self._preparing.pop(index, None)
            is_closed = self._is_closed
            if not is_closed:
                self._prepared[index] = found
        if is_closed:
            found.release()
        preparing.set_result(found)

    def close(self) -> None:
        """Release the models, and end the calls that wait for one. Idempotent. Blocks up to 1 s for each model."""
        with self._lock:
            self._is_closed = True
            models, self._prepared = self._prepared, {}
            waited_for, self._preparing = self._preparing, {}
        for preparing in waited_for.values():
            preparing.set_exception(BadState(_CLOSED))
        for model in models.values():
            model.release()
