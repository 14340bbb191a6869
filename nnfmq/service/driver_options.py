"""DriverOptions: what the supervisor tells each worker about the driver."""

from __future__ import annotations

from msgspec import Struct


class DriverOptions(Struct, frozen=True):
    """What a session needs to know of its driver. The defaults are those of an embedded driver.

    Attributes:
        supervisor_pid: The pid of the supervisor; None if this process is the whole driver.
        allows_device_status: Whether clients may set the status of devices. An embedded driver has only one client.
    """

    supervisor_pid: int | None = None
    allows_device_status: bool = True
