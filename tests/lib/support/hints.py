"""Devices that support an extension of hints, as their description says."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from nnfmq.client.connection.device import Device
from nnfmq.serialize import messages


def with_extension(device: Device, name: str) -> Device:
    """Return the device with one more extension in its description. The driver ignores hints that it does not know."""
    extensions = (*device.info.extensions, messages.ExtensionData(name, ()))
    return replace(device, info=msgspec.structs.replace(device.info, extensions=extensions))
