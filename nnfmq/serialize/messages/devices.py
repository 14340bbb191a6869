"""Messages about devices and their capabilities, and about what a driver does for all its clients."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.summaries import clipped, code_name
from nnfmq.hal.types import DeviceStatus, DeviceType, OperandType
from nnfmq.serialize.messages.common import U32, Call, Data, FdCount, MemoryList, Name, StatusReply

__all__ = [
    "CapabilitiesData",
    "DeviceCapabilities",
    "DeviceInfo",
    "DeviceList",
    "DriverTraced",
    "ExtensionData",
    "GetCapabilities",
    "GetStatistics",
    "ListDevices",
    "OperandPerformanceData",
    "OperandTypeData",
    "PerformanceData",
    "SetClientClass",
    "SetDeviceStatus",
    "StartTrace",
    "StatisticsMemory",
    "TraceDriver",
    "capabilities_from_data",
    "capabilities_to_data",
]


class OperandTypeData(Data, frozen=True):
    """An operand type of an extension; `dtype` is NumPy's name of its element type."""

    type: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    is_tensor: bool
    byte_size: U32
    dtype: Name


class ExtensionData(Data, frozen=True):
    """An extension that a device supports."""

    name: Name
    operand_types: Annotated[tuple[OperandTypeData, ...], Meta(max_length=65536)]


class DeviceInfo(Data, frozen=True):
    """A device of the driver, the extensions that it supports, and the number of cache files that it needs."""

    name: Name
    type: DeviceType
    version: Name
    feature_level: U32
    status: DeviceStatus
    extensions: Annotated[tuple[ExtensionData, ...], Meta(max_length=1024)]
    model_cache_files: U32 = 0
    data_cache_files: U32 = 0

    def __repr__(self) -> str:
        return f"<DeviceInfo {self.summary()}>"

    def summary(self) -> str:
        """Return name, type, version, feature level, status and the number of extensions in a short line."""
        kinds = f"{code_name(self.type)}, {code_name(self.status)}"
        parts = [kinds, clipped(repr(self.version)), f"feature level {self.feature_level}"]
        count = len(self.extensions)
        parts += [f"{count} extension{'s' * (count != 1)}"] if count else []
        return f"{clipped(repr(self.name))}: {', '.join(parts)}"


class PerformanceData(Data, frozen=True):
    """The HAL's PerformanceInfo."""

    exec_time: float
    power_usage: float


class OperandPerformanceData(Data, frozen=True):
    """The HAL's OperandPerformance."""

    type: OperandType
    info: PerformanceData


class CapabilitiesData(Data, frozen=True):
    """The HAL's Capabilities."""

    operand_performance: Annotated[tuple[OperandPerformanceData, ...], Meta(max_length=256)]
    relaxed_float32_to_float16_scalar: PerformanceData
    relaxed_float32_to_float16_tensor: PerformanceData
    if_performance: PerformanceData
    while_performance: PerformanceData


def capabilities_to_data(capabilities: Capabilities) -> CapabilitiesData:
    """Return the wire form of valid capabilities."""
    return msgspec.convert(capabilities, CapabilitiesData, from_attributes=True)


def capabilities_from_data(data: CapabilitiesData) -> Capabilities:
    """Return received capabilities, which are not validated yet."""
    return msgspec.convert(data, Capabilities, from_attributes=True)


msgspec.convert((), tuple[Capabilities, ...])  # while there is one thread, see `common`


class ListDevices(Call, frozen=True):
    """Request the list of devices."""

    trace_phase: ClassVar = "PI"


class DeviceList(Call, frozen=True):
    """The devices of the driver."""

    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=256)]


class GetCapabilities(Call, frozen=True):
    """Request the capabilities of a device (IDevice.getCapabilities)."""

    trace_phase: ClassVar = "PI"
    device: Name


class DeviceCapabilities(StatusReply, frozen=True):
    """The capabilities of a device, or None if `status` is an error."""

    capabilities: CapabilitiesData | None = None


class SetDeviceStatus(Call, frozen=True):
    """Make a device available, busy or offline for all clients of the driver; unless `is_kept`, until this one ends."""

    trace_phase: ClassVar = "PU"
    device: Name
    status: DeviceStatus
    is_kept: bool


class SetClientClass(Call, frozen=True):
    """Give a client of the driver another class: the one that the worker `worker_pid` serves, this one if that is 0."""

    trace_phase: ClassVar = "PU"
    worker_pid: U32
    client_class: ClientClass


class GetStatistics(Call, frozen=True):
    """Request the memory of the driver's statistics."""

    trace_phase: ClassVar = "PU"


class StatisticsMemory(StatusReply, frozen=True):
    """The memory of the driver's statistics, which comes with the message; none if `status` is an error.

    The receiver can map it for reading only.
    """

    memories: MemoryList = ()


# ----------------------------------------------------------------------------------------------------------------------
# Messages about traces: a client gives its worker a ring to record in, or reads what all workers record.


class StartTrace(Call, frozen=True):
    """Record what the worker does for this client in a trace ring, the memory that comes with the message."""

    trace_phase: ClassVar = "PU"


class TraceDriver(Call, frozen=True):
    """Record what all workers do, until this client ends."""

    trace_phase: ClassVar = "PU"


class DriverTraced(StatusReply, frozen=True):
    """The trace area with the rings of all workers, whose fd comes with the message; none after an error."""

    fd_count: FdCount = 0
