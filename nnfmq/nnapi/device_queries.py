"""NNAPI's queries of devices, by index, and those of its support library: cache files, performance, extensions."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from nnfmq.client.connection.device import Device
from nnfmq.client.partitioned.devices import RuntimeDevice
from nnfmq.client.partitioned.runtime import Runtime
from nnfmq.hal.capabilities import Capabilities, NumberOfCacheFiles, OperandPerformance, PerformanceInfo
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import ExtensionOperandTypeInformation
from nnfmq.nnapi.checks import required
from nnfmq.nnapi.compilation import ChosenDevice, driver_device, extension_names

__all__ = [
    "PerformanceInfoCode",
    "for_each_operand_performance_info",
    "for_each_vendor_extension_operand_type_information",
    "get_device",
    "get_device_count",
    "get_number_of_cache_files_needed",
    "get_performance_info",
    "get_vendor_extension_count",
    "get_vendor_extension_name",
]


class PerformanceInfoCode(IntEnum):
    """The performance of a device that does not depend on the operand type."""

    RELAXED_SCALAR = 0
    RELAXED_TENSOR = 1
    IF = 2
    WHILE = 3


def get_device_count(runtime: Runtime) -> int:
    """Return the number of devices of a runtime; blocks."""
    return len(required(runtime, "the runtime").devices())


def get_device(runtime: Runtime, index: int) -> RuntimeDevice:
    """Return a device of a runtime; blocks. The CPU device is the last one.

    Raises:
        InvalidArgument: If there is no device of this index.
    """
    devices = required(runtime, "the runtime").devices()
    if not 0 <= index < len(devices):
        raise InvalidArgument(f"there is no device {index}: the runtime has {len(devices)}")
    return devices[index]


def get_number_of_cache_files_needed(device: ChosenDevice) -> NumberOfCacheFiles:
    """Return how many cache files a compilation for a device needs; blocks while its driver is connected.

    Raises:
        DeadObject: If the driver has exited.
    """
    required(device, "the device")
    info = driver_device(device).info
    return NumberOfCacheFiles(info.model_cache_files, info.data_cache_files)


def get_performance_info(device: ChosenDevice, code: PerformanceInfoCode) -> PerformanceInfo:
    """Return the performance of a device, relative to the CPU; blocks.

    Raises:
        InvalidArgument: If there is no such performance.
        NnfmqError: As `Device.capabilities`.
    """
    capabilities = _capabilities(device)
    found = {
        PerformanceInfoCode.RELAXED_SCALAR: capabilities.relaxed_float32_to_float16_scalar,
        PerformanceInfoCode.RELAXED_TENSOR: capabilities.relaxed_float32_to_float16_tensor,
        PerformanceInfoCode.IF: capabilities.if_performance,
        PerformanceInfoCode.WHILE: capabilities.while_performance,
    }
    if code not in found:
        raise InvalidArgument(f"performance info {code!r}: allowed are 0 to {max(PerformanceInfoCode)}")
    return found[code]


def for_each_operand_performance_info(device: ChosenDevice, callback: Callable[[OperandPerformance], object]) -> None:
    """Call `callback` with the performance of a device for each operand type, in ascending order; blocks.

    Raises:
        NnfmqError: As `Device.capabilities`.
    """
    required(callback, "the callback")
    for performance in _capabilities(device).operand_performance:
        callback(performance)


def _capabilities(device: ChosenDevice) -> Capabilities:
    required(device, "the device")
    return device.capabilities() if isinstance(device, Device) else device.capabilities


def get_vendor_extension_count(device: ChosenDevice) -> int:
    """Return the number of extensions that a device supports."""
    required(device, "the device")
    return len(extension_names(device))


def get_vendor_extension_name(device: ChosenDevice, index: int) -> str:
    """Return the name of an extension that a device supports.

    Raises:
        InvalidArgument: If there is no extension of this index.
    """
    required(device, "the device")
    names = extension_names(device)
    if not 0 <= index < len(names):
        raise InvalidArgument(f"there is no extension {index}: the device has {len(names)}")
    return names[index]


def for_each_vendor_extension_operand_type_information(
    device: ChosenDevice, index: int, callback: Callable[[ExtensionOperandTypeInformation], object]
) -> None:
    """Call `callback` with each operand type of an extension.

    Raises:
        InvalidArgument: If there is no extension of this index.
    """
    required(callback, "the callback")
    name = get_vendor_extension_name(device, index)
    extensions = device.info.extensions if isinstance(device, Device) else device.extensions
    for kind in next(extension for extension in extensions if extension.name == name).operand_types:
        callback(ExtensionOperandTypeInformation(kind.type, kind.is_tensor, kind.byte_size))
