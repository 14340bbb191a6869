"""What all of HIDL's call forms share: which there are at a level, how callbacks are called, statuses and times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from nnfmq.hal.errors import DeadObject, ErrorStatus
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.timing import HIDL_NO_TIME, to_microseconds
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.future import Future
from nnfmq.serialize import messages
from nnfmq.validation.interface_conversion import convert_to

UINT64_MAX = HIDL_NO_TIME
V1_0, V1_1, V1_2, V1_3 = FeatureLevel.V1_0, FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3
NONE, INVALID = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT
CallT = TypeVar("CallT", bound=messages.Call)


class Timing(NamedTuple):
    """HIDL's Timing, in microseconds."""

    timeOnDevice: int = UINT64_MAX
    timeInDriver: int = UINT64_MAX

    @classmethod
    def of(cls, device_ns: int, driver_ns: int) -> Timing:
        """Return what HIDL says of two times in ns."""
        return cls(to_microseconds(device_ns), to_microseconds(driver_ns))


NO_TIMING = Timing()


class Form(NamedTuple):
    """One method: the interface that brought it, and what it does, given that interface's level."""

    level: FeatureLevel
    run: Callable[..., Any]


class HasForms:
    """An object of the driver's whose methods are in `forms`, as far as the connection's interface has them."""

    forms: Mapping[str, Form]
    connection: Connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found, level = type(self).forms.get(name), FeatureLevel(self.connection.level)
        if found is None or found.level > level:
            raise AttributeError(f"{type(self).__name__} of {interface_name(level)} has no {name}")
        return partial(found.run, self, found.level)

    def __dir__(self) -> list[str]:
        level = self.connection.level
        return [*super().__dir__(), *(name for name, form in type(self).forms.items() if form.level <= level)]


def status_of(status: ErrorStatus, level: FeatureLevel) -> ErrorStatus:
    """Return what the interface of `level` says of a status."""
    return convert_to(status, level).value


def refused(callback: Callable[..., None] | None, *answer: Any) -> ErrorStatus:
    """Call back with `answer`, which begins with INVALID_ARGUMENT, and return that: the launch failed."""
    if callback is not None:
        callback(INVALID, *answer)
    return INVALID


def call_back(reply: messages.Reply, waiting: Future[CallT], notify: Callable[[CallT | None], None]) -> None:
    """Have `notify` called once with the callback's answer, None where the driver died before it."""
    if reply.status is not NONE:  # then the callback came first
        notify(waiting.wait(None))
    else:
        threading.Thread(target=_notify, args=(waiting, notify), name="nnfmq-callback", daemon=True).start()


def _notify(waiting: Future[CallT], notify: Callable[[CallT | None], None]) -> None:
    try:
        answer: CallT | None = waiting.wait(None)
    except DeadObject:
        answer = None
    notify(answer)
