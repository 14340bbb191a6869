"""The limits of an execution on several devices: its deadline holds for all steps, and times are not measured."""

from __future__ import annotations

from nnfmq.deadlines import has_passed
from nnfmq.hal.errors import InvalidArgument, MissedDeadlinePersistent, MissedDeadlineTransient

__all__ = ["require_time_left", "require_unmeasured"]


def require_unmeasured(measure: bool) -> None:
    """Raise InvalidArgument if an execution on several devices is to be measured (TIM-1)."""
    if measure:
        raise InvalidArgument(
            "`measure` needs a model on one device, and this one is on several: prepare it on a device that you "
            "choose, with client.device(name).prepare(model), or leave `measure` out"
        )


def require_time_left(deadline_ns: int | None, *, has_begun: bool) -> None:
    """Raise MissedDeadline if an execution's deadline has passed (QOS-2, QOS-3).

    Raises:
        MissedDeadlinePersistent: If the execution has not begun.
        MissedDeadlineTransient: If it has.
    """
    if not has_passed(deadline_ns):
        return
    if has_begun:
        raise MissedDeadlineTransient("the deadline passed between two steps of the model")
    raise MissedDeadlinePersistent("the deadline had passed before the execution began")
