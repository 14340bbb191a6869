"""Observation of preparations, and of what the environment asks for: recordings and telemetry.

The settings `NNFMQ_RECORD` and `telemetry` are read when a process prepares its first model, so that an application
may set them itself. A forked child reads them again, because it has no observers.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from nnfmq.base import settings
from nnfmq.client.connection.prepare_arguments import NamedModel
from nnfmq.client.execution.observation import ObservedModel
from nnfmq.client.model.handle import ModelHandle
from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DEFAULT_PREFERENCE, Model, Priority
from nnfmq.observe.executions import ModelObserver, ObservedPreparation, PreparationObserver, observers
from nnfmq.serialize import messages
from nnfmq.serialize.messages import DeviceInfo

__all__ = ["PlanPreparation", "Preparation", "current_observers", "is_observed"]

_readers: set[int] = set()  # the processes that have read their environment: this one, and those it was forked from


def current_observers() -> tuple[PreparationObserver, ...]:
    """Return the observers of this process; the first time with those that its environment asks for.

    Raises:
        InvalidArgument: If a variable has no valid value.
        OSError: If the file of a variable cannot be created.
    """
    if os.getpid() not in _readers:
        _readers.add(os.getpid())
        if recording := settings.RECORD.value():
            from nnfmq.recording.writer import record_from_environment

            record_from_environment(recording)
        if sink := settings.TELEMETRY.value():
            from nnfmq.telemetry.environment import report_from_environment

            report_from_environment(sink)
    return observers()


class _Observation(ABC):
    """What tells the observers of one preparation, which begins now."""

    def __init__(self) -> None:
        self._observers = current_observers()
        self._begin_ns = time.monotonic_ns()

    @abstractmethod
    def _event(self, status: ErrorStatus) -> ObservedPreparation:
        """Return what to tell the observers about the preparation, which ended with `status`."""

    def fail(self, error: BaseException) -> None:
        """Report the error of nnfmq with which the preparation ended; others, such as KeyboardInterrupt, are none."""
        if isinstance(error, NnfmqError):
            self._tell(error.status)

    def _tell(self, status: ErrorStatus) -> Sequence[ModelObserver]:
        if not self._observers:
            return ()
        event = self._event(status)
        found = [observer.prepared(event) for observer in self._observers]
        return [observer for observer in found if observer is not None]


class Preparation(_Observation):
    """One preparation on a device, of which exactly one of the methods tells the observers."""

    def __init__(
        self,
        device: DeviceInfo,
        choice: DeviceChoice,
        message: messages.PrepareModel | messages.PrepareModelFromCache,
        model: object,
        handle: ModelHandle,
    ) -> None:
        super().__init__()
        self._device = device
        self._choice = choice
        self._message = message
        self._model = model
        self._handle = handle

    def finish(self) -> ObservedModel | None:
        """Report success; return the observers of the model's executions, None if there are none."""
        found = self._tell(ErrorStatus.NONE)
        return ObservedModel(found, self._handle.inputs, self._handle.outputs) if found else None

    def _event(self, status: ErrorStatus) -> ObservedPreparation:
        message, handle = self._message, self._handle
        return ObservedPreparation(
            _hal_model(self._model),
            handle.inputs,
            handle.outputs,
            len(handle.states),
            self._device.name,
            self._device.version,
            *_options(message),
            self._choice,
            isinstance(message, messages.PrepareModelFromCache) or bool(message.caches.token),
            status,
            self._begin_ns,
            time.monotonic_ns(),
        )


class PlanPreparation(_Observation):
    """The preparation of a model on several devices, of which exactly one of the methods tells the observers.

    `devices` has the name and version of the device of each step.
    """

    def __init__(
        self,
        devices: Sequence[tuple[str, str]],
        choice: DeviceChoice,
        model: Model | NamedModel,
        preference: int,
        priority: int,
        is_cached: bool,
    ) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self._choice = choice
        self._model = model
        self._preference, self._priority, self._is_cached = preference, priority, is_cached

    def finish(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> ObservedModel | None:
        """Report success; return the observers of the model's executions, None if there are none.

        `inputs` and `outputs` are those of the HAL's model: with the states.
        """
        found = self._tell(ErrorStatus.NONE)
        return ObservedModel(found, inputs, outputs) if found else None

    def _event(self, status: ErrorStatus) -> ObservedPreparation:
        inputs, outputs = tuple(getattr(self._model, "inputs", ())), tuple(getattr(self._model, "outputs", ()))
        states = len(getattr(self._model, "states", ()))
        return ObservedPreparation(
            _hal_model(self._model), inputs, outputs, states, "", "", self._preference, self._priority, self._choice,
            self._is_cached, status, self._begin_ns, time.monotonic_ns(), self._devices,
        )  # fmt: skip


def _hal_model(model: object) -> Model | None:
    found = model if isinstance(model, Model) else getattr(model, "model", None)
    return found if isinstance(found, Model) else None


def _options(message: messages.PrepareModel | messages.PrepareModelFromCache) -> tuple[int, int]:
    """Return preference and priority; the defaults for a preparation from a cache, which has none."""
    if isinstance(message, messages.PrepareModel):
        return message.preference, message.priority
    return DEFAULT_PREFERENCE, Priority.MEDIUM


# ----------------------------------------------------------------------------------------------------------------------
# is_observed: whether preparations have to be shown to observers, found out without an import of those.


_MODULE = "nnfmq.observe.executions"  # without it nothing can have added an observer


def is_observed() -> bool:
    """Return whether this process may have observers, or its settings ask for some.

    Raises:
        InvalidArgument: If a configuration file is not valid.
    """
    return _MODULE in sys.modules or bool(settings.RECORD.value() or settings.TELEMETRY.value())
