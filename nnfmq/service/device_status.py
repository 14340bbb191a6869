"""Whether a device takes calls: one byte, 0 while an administrator has it AVAILABLE (DEV-14).

All workers of a driver share the bytes, and whatever a device has made keeps a view of its own, which costs an
execution next to nothing to look at.
"""

from __future__ import annotations

from nnfmq.hal.errors import DeviceUnavailable

UNAVAILABLE = "the device is busy or offline"
ALWAYS = memoryview(bytes(1))  # of what no driver made


def require_available(status_byte: memoryview) -> None:
    """Raise DeviceUnavailable while the device is BUSY or OFFLINE."""
    if status_byte[0]:
        raise DeviceUnavailable(UNAVAILABLE)
