"""Observers of preparations and executions: what the client library tells recordings and telemetry, and in which form.

An observer sees the models that are prepared after it was added; a model that nothing observed when it was prepared
costs nothing later. The client library calls observers on the application's threads and on its watcher thread, so an
observer returns immediately, and leaves files, sockets and callbacks to a thread of its own.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

from msgspec import Struct

from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import HalExecutionMode, Model

__all__ = [
    "CapturedTensor",
    "ModelObserver",
    "ObservedExecution",
    "ObservedPreparation",
    "PreparationObserver",
    "add_observer",
    "observers",
    "remove_observer",
]


class CapturedTensor(NamedTuple):
    """A copy of an input or output: its shape, and its elements as they are in memory."""

    shape: tuple[int, ...]
    data: bytes


class ObservedPreparation(Struct, frozen=True):
    """One preparation. `inputs` and `outputs` are the HAL's: those of the caller, then `state_count` states.

    `model` is None if the application has given only a signature, as for a preparation from a cache. A model that is
    divided among devices has a preparation for each step, and then one for the whole model, with `plan_devices`.
    """

    model: Model | None
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    state_count: int
    device: str
    device_version: str
    preference: int
    """An ExecutionPreference, or what the application gave instead."""
    priority: int
    """A Priority, or what the application gave instead."""
    choice: DeviceChoice
    is_cached: bool
    """Whether the application gave cache files or a directory for them."""
    status: int
    """An ErrorStatus."""
    begin_ns: int
    end_ns: int
    plan_devices: tuple[tuple[str, str], ...] = ()
    """Name and version of the device of each step; empty if one device executes the model. Otherwise `device` is ""."""


class ObservedExecution(Struct, frozen=True):
    """One execution that was sent to the driver. Times are CLOCK_MONOTONIC in ns; durations are -1 if not measured.

    The application called at `intended_ns`, the request was sent at `begin_ns`, the result was read at `end_ns`.
    `inputs` and `outputs` are None if no observer needs them, or the client library cannot read one of them.
    """

    mode: HalExecutionMode
    status: int
    """An ErrorStatus."""
    intended_ns: int
    begin_ns: int
    end_ns: int
    deadline_ns: int | None
    time_on_device_ns: int
    time_in_driver_ns: int
    inputs: tuple[CapturedTensor, ...] | None
    outputs: tuple[CapturedTensor, ...] | None


class ModelObserver(Protocol):
    """Sees the executions of one prepared model, on any thread. Neither blocks nor raises."""

    needs_tensors: bool
    """Whether inputs and outputs are copied for it."""

    def executed(self, execution: ObservedExecution, /) -> None:
        """Receive an execution that has ended."""
        ...


class PreparationObserver(Protocol):
    """Sees the preparations of this process."""

    def prepared(self, preparation: ObservedPreparation, /) -> ModelObserver | None:
        """Receive a preparation that has ended; return the observer of the model's executions, if any."""
        ...


_observers: list[PreparationObserver] = []
os.register_at_fork(after_in_child=_observers.clear)  # a child has none of the threads and files of its parent's


def observers() -> tuple[PreparationObserver, ...]:
    """Return the observers of this process."""
    return tuple(_observers)


def add_observer(observer: PreparationObserver) -> None:
    """Show `observer` all preparations from now on."""
    _observers.append(observer)


def remove_observer(observer: PreparationObserver) -> None:
    """Show `observer` no further preparations. Idempotent."""
    if observer in _observers:
        _observers.remove(observer)
