"""Shared by all HIDL objects: method tables, callbacks, and conversion of statuses and times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from nnfmq.hal.errors import DeadObject, ErrorStatus
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.timing import HIDL_NO_TIME, to_microseconds
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.future import Future
from nnfmq.serialize import messages
from nnfmq.uncopyable import Uncopyable
from nnfmq.validation.interface_conversion import convert_to

UINT64_MAX = HIDL_NO_TIME
V1_0, V1_1, V1_2, V1_3 = FeatureLevel.V1_0, FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3
NONE, INVALID = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT
CallT = TypeVar("CallT", bound=messages.Call)


class HidlTiming(NamedTuple):
    """HIDL's Timing, in µs; UINT64_MAX = not available."""

    timeOnDevice: int = UINT64_MAX
    timeInDriver: int = UINT64_MAX

    @classmethod
    def from_ns(cls, device_ns: int, driver_ns: int) -> HidlTiming:
        """Return two times, in ns (-1 = not available), as HIDL has them."""
        return cls(to_microseconds(device_ns), to_microseconds(driver_ns))


NO_HIDL_TIMING = HidlTiming()


class Method(NamedTuple):
    """One method: the interface version that introduced it, and the function, which gets that version's level."""

    level: FeatureLevel
    run: Callable[..., Any]


class NamedDevice(Protocol):
    """A device, for calls about objects that it creates."""

    connection: Connection
    name: str


class ModelReference(Protocol):
    """A prepared model, for calls about objects that refer to it."""

    connection: Connection
    model_id: int


class VersionedObject(Uncopyable):
    """An object of the driver. It has those of its `methods` that the connection's interface version has."""

    methods: Mapping[str, Method]
    connection: Connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method, level = type(self).methods.get(name), FeatureLevel(self.connection.level)
        if method is None or method.level > level:
            raise AttributeError(f"{type(self).__name__} of {interface_name(level)} has no {name}")
        return partial(method.run, self, method.level)

    def __dir__(self) -> list[str]:
        level = self.connection.level
        return [*super().__dir__(), *(name for name, method in type(self).methods.items() if method.level <= level)]


def status_at(level: FeatureLevel, status: ErrorStatus) -> ErrorStatus:
    """Return a status converted to the interface version of `level`."""
    return convert_to(status, level).value


def reject(callback: Callable[..., None] | None, *results: Any) -> ErrorStatus:
    """Call `callback` with INVALID_ARGUMENT and `results`, and return INVALID_ARGUMENT: the launch failed."""
    if callback is not None:
        callback(INVALID, *results)
    return INVALID


def notify_when_done(reply: messages.Reply, future: Future[CallT], notify: Callable[[CallT | None], None]) -> None:
    """Call `notify` once with the callback's message, or with None if the driver dies before it.

    On this thread if the launch failed, otherwise on a new one.
    """
    if reply.status is not NONE:  # then the driver has sent the callback before the reply
        notify(future.result(None))
    else:
        threading.Thread(target=_wait_and_notify, args=(future, notify), name="nnfmq-callback", daemon=True).start()


def _wait_and_notify(future: Future[CallT], notify: Callable[[CallT | None], None]) -> None:
    try:
        message: CallT | None = future.result(None)
    except DeadObject:
        message = None
    notify(message)
