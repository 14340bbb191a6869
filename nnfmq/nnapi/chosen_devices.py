"""The devices that an application chooses for a compilation: those of a Client, or of a Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from nnfmq.hal.errors import InvalidArgument
from nnfmq.nnapi.required_arguments import required
from nnfmq.runtime.client_device import Device
from nnfmq.runtime.devices.runtime_device import RuntimeDevice

__all__ = ["ChosenDevice", "checked_devices", "device_name", "driver_device", "extension_names", "runtime_devices"]

ChosenDevice: TypeAlias = Device | RuntimeDevice


def checked_devices(devices: Sequence[ChosenDevice]) -> tuple[ChosenDevice, ...]:
    """Return the devices of an application's list (N-API-13).

    Raises:
        InvalidArgument: If the list is empty, or has None or a device twice.
    """
    found = tuple(devices)
    for device in found:
        required(device, "a device")
    if not found:
        raise InvalidArgument("the list of devices is empty; None lets the runtime choose among all devices")
    names = [device_name(device) for device in found]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"a device is listed twice: {', '.join(names)}")
    return found


def runtime_devices(devices: Sequence[ChosenDevice]) -> list[RuntimeDevice]:
    """Return the devices of a compilation with a runtime.

    Raises:
        InvalidArgument: If one is a device of a Client, which the runtime does not have.
    """
    found = [device for device in devices if isinstance(device, RuntimeDevice)]
    if len(found) != len(devices):
        raise InvalidArgument("a device of a Client is compiled for without `runtime`, and as the only device")
    return found


def device_name(device: ChosenDevice) -> str:
    """Return the name of a device."""
    return device.info.name if isinstance(device, Device) else device.name


def extension_names(device: ChosenDevice) -> list[str]:
    """Return the names of the extensions that a device supports."""
    extensions = device.info.extensions if isinstance(device, Device) else device.extensions
    return [extension.name for extension in extensions]


def driver_device(device: ChosenDevice) -> Device:
    """Return the device of a driver's connection; blocks while it connects. Raises as `RuntimeDevice.connected`."""
    return device if isinstance(device, Device) else device.connected()
