"""What an execution can only have if one device executes the whole model: measured times, and deadlines."""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument

__all__ = ["require_no_time_limits"]


def require_no_time_limits(measure: bool, timeout: float | None, duration: float | None = None) -> None:
    """Raise InvalidArgument if an execution on several devices is to be measured (TIM-1) or limited (QOS-5)."""
    arguments = {"measure": measure or None, "timeout": timeout, "duration": duration}
    for name in (key for key, value in arguments.items() if value is not None):
        raise InvalidArgument(
            f"`{name}` needs a model on one device, and this one is on several: prepare it on a device that you "
            f"choose, with client.device(name).prepare(model), or leave `{name}` out"
        )
