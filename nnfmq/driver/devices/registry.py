"""The devices of one driver: those that its configuration lists, then those of plug-ins.

The configuration is read once for all workers of a driver; a driver whose configuration cannot be read does not start.
The status of a device (AVAILABLE, BUSY, OFFLINE) is in a page that all workers share; see `configuration` (DEV-14).
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nnfmq.base import settings
from nnfmq.driver.devices.builtin import CompiledDevice, InterpreterDevice
from nnfmq.driver.devices.configuration import (
    DEVICES_MAX,
    WORD_BYTES,
    DeviceEntry,
    end_changes,
    keep_status,
    read_configuration,
    set_temporary_status,
)
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.devices.plugins import load_plugin_devices
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import runtime_named
from nnfmq.hal.types import DeviceStatus

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["DeviceRegistry", "load_devices", "make_devices"]

_log = logging.getLogger("nnfmq.devices")


class DeviceRegistry(Mapping[str, DeviceBase]):
    """The devices of a driver by name, in the order in which the driver lists them."""

    def __init__(self, devices: Iterable[DeviceBase]) -> None:
        self._by_name = {device.name: device for device in devices}

    def __getitem__(self, name: str) -> DeviceBase:
        return self._by_name[name]

    def __iter__(self) -> Iterable[str]:  # type: ignore[override]
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> DeviceBase:
        """Return the device with this name.

        Raises:
            InvalidArgument: If there is none; the message lists all names, or says how to get a runtime of this name.
        """
        try:
            return self._by_name[name]
        except KeyError:
            reason = _advice(name) or f"; this driver has: {', '.join(sorted(self._by_name))}"
            raise InvalidArgument(f"there is no device {name!r}{reason}") from None

    def prefetch_imports(self) -> None:
        """Let each device import what its preparations need. Blocks for milliseconds."""
        for device in self._by_name.values():
            device.prefetch_imports()

    def share_status(self, page: memoryview) -> None:
        """Store each device's status in `page`, which has STATUS_PAGE_BYTES and is mapped by all workers."""
        for index, device in enumerate(self._by_name.values()):
            device.status_word = page[index * WORD_BYTES : (index + 1) * WORD_BYTES]

    def set_status(self, name: str, status: DeviceStatus, *, is_kept: bool = True) -> None:
        """Set a device's status for all workers; unless `is_kept`, until `end_changes`. AVAILABLE is always kept.

        Raises:
            InvalidArgument: If there is no such device, or the status is not AVAILABLE, BUSY or OFFLINE.
        """
        if status not in (DeviceStatus.AVAILABLE, DeviceStatus.BUSY, DeviceStatus.OFFLINE):
            raise InvalidArgument(f"a device's status can be set to AVAILABLE, BUSY or OFFLINE, not {status.name}")
        word = self.find(name).status_word
        if is_kept or status is DeviceStatus.AVAILABLE:
            keep_status(word, status)
        else:
            set_temporary_status(word, status, os.getpid())

    def end_changes(self) -> None:
        """End this process's temporary changes of the status of devices."""
        for device in self._by_name.values():
            end_changes(device.status_word, os.getpid())


def _advice(name: str) -> str:
    """Return advice to get the device of this name, which hosts a runtime; empty if it is none of this build."""
    runtime = runtime_named(name)
    if runtime is None:
        return ""
    if find_spec(runtime.package) is None:
        install = f"{shlex.quote(sys.executable)} -m pip install '{runtime.extra}'"
        return f": its runtime is not installed in the driver's environment: {install}, and start the driver again"
    allowed = settings.RUNTIMES.effective()
    if allowed.value is not None and name not in allowed.value:
        return f": {runtime.package} is installed, but {allowed.origin} does not allow the driver to host it"
    return f": {runtime.package} is installed, but cannot be hosted; the driver's log says why"


@cache
def load_devices() -> DeviceRegistry:
    """Return this process's devices, which the first call loads. Raises as `read_configuration`."""
    return make_devices(read_configuration())


def make_devices(entries: Iterable[DeviceEntry], plugins: Iterable[EntryPoint] | None = None) -> DeviceRegistry:
    """Create the devices of a configuration and those of plug-ins, by default of all that are installed.

    A device whose name is taken, and any beyond DEVICES_MAX, is skipped with a log line.
    """
    builtin = (CompiledDevice(entry) if entry.engine == "compiled" else InterpreterDevice(entry) for entry in entries)
    devices: dict[str, DeviceBase] = {}
    for device in (*builtin, *load_plugin_devices(plugins)):
        if device.name in devices:
            _log.warning("device %r is left out: there is another one of this name", device.name)
        elif len(devices) == DEVICES_MAX:
            _log.warning("device %r is left out: a driver has at most %d devices", device.name, DEVICES_MAX)
        else:
            devices[device.name] = device
    return DeviceRegistry(devices.values())
