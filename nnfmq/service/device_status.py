"""Device status as executions see it: one byte, 0 while the administrator has the device AVAILABLE (DEV-14).

All workers of a driver map the same bytes. Every prepared model and buffer keeps a view of its device's byte, so that
each execution can check it at almost no cost.
"""

from __future__ import annotations

from nnfmq.hal.errors import DeviceUnavailable

UNAVAILABLE_MESSAGE = "the device is busy or offline"
ALWAYS_AVAILABLE = memoryview(bytes(1))
"""The status byte of prepared models and buffers that belong to no device, as in tests."""


def require_available(status_byte: memoryview) -> None:
    """Check the device's status.

    Raises:
        DeviceUnavailable: If the device is BUSY or OFFLINE.
    """
    if status_byte[0]:
        raise DeviceUnavailable(UNAVAILABLE_MESSAGE)
