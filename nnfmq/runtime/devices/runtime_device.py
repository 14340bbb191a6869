"""RuntimeDevice: a device of any driver under a name that is unique in its Runtime, and the CPU device."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Self, Unpack

from nnfmq.deadlines import deadline_after, remaining_s
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, uniform_capabilities
from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import DeviceStatus, DeviceType, OperationType
from nnfmq.installed_version import installed_version
from nnfmq.runtime.client_device import Device, DeviceInfo
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.devices.driver_access import DriverAccess
from nnfmq.runtime.prepare_arguments import ModelArgument, to_hal_model, to_model
from nnfmq.runtime.prepare_options import PrepareOptions, with_time_left
from nnfmq.runtime.prepared_model import PreparedModel

if TYPE_CHECKING:
    from nnfmq.hal.device_choice import DeviceChoice
    from nnfmq.serialize.messages import ExtensionData

__all__ = ["CPU_DEVICE_NAME", "CpuDevice", "RuntimeDevice"]

CPU_DEVICE_NAME = "nnapi-reference"
_COMPILED, _REFERENCE = "compiled", "reference"
_CPU_CAPABILITIES = uniform_capabilities(CPU_PERFORMANCE)


class RuntimeDevice:
    """A device of a Runtime: `name` is unique among all drivers, `driver` says which one has it.

    The other attributes are the driver's description when the Runtime first saw the device. If the driver has died and
    runs again, the next call connects to it (LIFE-6). Thread-safe.
    """

    is_cpu = False
    _deadline_ns: int | None = None

    def __init__(self, name: str, access: DriverAccess, info: DeviceInfo) -> None:
        self.name = name
        self._access = access
        self._info = info

    def until(self, deadline_ns: int | None) -> Self:
        """Return this device for one compilation: queries of its driver end at that deadline, too."""
        limited = copy(self)
        limited._deadline_ns = deadline_ns
        return limited

    def _query_limit_ns(self) -> int | None:
        limits = (self._deadline_ns, deadline_after(self._access.timeout))
        return min((limit for limit in limits if limit is not None), default=None)

    def __repr__(self) -> str:
        return f"<RuntimeDevice {self.name!r} of {self.driver}: {self.version_string}>"

    @property
    def driver(self) -> str:
        """The name of the driver: that of its socket without `.sock`, or "embedded"."""
        return self._access.label

    @property
    def info(self) -> DeviceInfo:
        """The driver's description."""
        return self._info

    @property
    def type(self) -> DeviceType:
        """The kind of processor."""
        return self._info.type

    @property
    def version_string(self) -> str:
        """The version; that of the CPU device says which kernels it has."""
        return self._info.version

    @property
    def feature_level(self) -> int:
        """The highest feature level (1 to 8) whose models the device understands."""
        return self._info.feature_level

    @property
    def extensions(self) -> tuple[ExtensionData, ...]:
        """The vendor extensions that the device supports."""
        return self._info.extensions

    def supports_extension(self, name: str) -> bool:
        """Return whether the device supports the vendor extension of that name."""
        return any(extension.name == name for extension in self.extensions)

    @property
    def capabilities(self) -> Capabilities:
        """How fast the device is, relative to the CPU. Blocks when it is read first.

        Raises:
            DeviceUnavailable: If the device is not available.
            DeadObject: If the driver has died and cannot be reached.
            GeneralFailure: If the driver sent invalid performance info.
        """
        limit_ns = self._query_limit_ns()
        return self._access.capabilities(self._name_in_driver(limit_ns), limit_ns)

    def status(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> DeviceStatus:
        """Return the status now; OFFLINE if the driver cannot be reached, or the device has changed. Blocks."""
        return self._access.status(self._name_in_driver(), deadline_after(timeout))

    def supported_operations(self, model: ModelArgument) -> Sequence[bool]:
        """Return for each operation of the main subgraph whether the device can execute it; blocks.

        Raises:
            InvalidArgument: If the model is not valid.
            DeviceUnavailable: If the device is not available, or has changed since its driver died.
            DeadObject: If the driver has died and cannot be reached.
            MissedDeadline: If it does not reply within the Runtime's timeout.
        """
        loaded = to_model(model)
        limit_ns = self._query_limit_ns()
        return self._access.call(
            self._name_in_driver(limit_ns),
            lambda device: device.supported_operations(loaded, timeout=remaining_s(limit_ns)),
            limit_ns,
        )

    def prepare(self, model: ModelArgument, **options: Unpack[PrepareOptions]) -> PreparedModel:
        """Prepare a model on this device alone; blocks. The caller closes the result, or the Runtime does.

        Takes the keyword arguments of `Device.prepare`, and raises as it does.
        """
        return self.prepare_as("application", model, options)

    def prepare_as(self, choice: DeviceChoice, model: ModelArgument, options: PrepareOptions) -> PreparedModel:
        """Prepare a model as `prepare`; `choice` says who chose this device, for observers."""
        deadline_ns = deadline_after(options.get("timeout"))

        prepared = self._access.call(
            self._name_in_driver(deadline_ns),
            lambda device: device.prepare(model, **with_time_left(options, deadline_ns)),
            deadline_ns,
            choice,
        )
        prepared.device = self.name
        return prepared

    def connected(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Device:
        """Return the driver's Device, of its current connection; blocks while it connects.

        Raises:
            DeadObject: If the driver has died and cannot be reached.
            DeviceUnavailable: If the device has changed since its driver died.
        """
        deadline_ns = deadline_after(timeout)
        return self._access.device(self._name_in_driver(deadline_ns), deadline_ns)

    def _name_in_driver(self, _deadline_ns: int | None = None) -> str:
        return self._info.name


class CpuDevice(RuntimeDevice):
    """The CPU device, `nnapi-reference`: it executes every operation of the HAL, but none of vendors (PART-13, EXT-5).

    It is a device of an embedded driver, which starts when the first model is prepared on it: the compiling one if
    llvmlite is installed, otherwise the reference interpreter.
    """

    is_cpu = True

    def __init__(self, access: DriverAccess) -> None:
        info = DeviceInfo(CPU_DEVICE_NAME, DeviceType.CPU, "", FeatureLevel.AIDL_V4, DeviceStatus.AVAILABLE, ())
        super().__init__(CPU_DEVICE_NAME, access, info)
        self._device_name: str | None = None

    @property
    def version_string(self) -> str:
        """Nnfmq's release and the kernels: the version of llvmlite, which generates machine code, or `NumPy`."""
        release, llvmlite = installed_version("nnfmq") or "source", installed_version("llvmlite")
        return f"nnfmq-{release} {f'llvmlite-{llvmlite}' if llvmlite else 'NumPy'}"

    @property
    def capabilities(self) -> Capabilities:
        """1.0 for everything: other devices are compared with this one. Does not block."""
        return _CPU_CAPABILITIES

    def status(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> DeviceStatus:
        """Return AVAILABLE."""
        return DeviceStatus.AVAILABLE

    def supported_operations(self, model: ModelArgument) -> Sequence[bool]:
        """Return True for each operation that no vendor has defined. Does not block."""
        return [_is_of_the_hal(operation.type) for operation in to_hal_model(to_model(model)).main.operations]

    def close(self) -> None:
        """End the driver. Idempotent."""
        self._access.close()

    def _name_in_driver(self, deadline_ns: int | None = None) -> str:
        if self._device_name is None:
            infos = self._access.known_devices(deadline_ns)
            is_compiled = any(info.name == _COMPILED and info.status is DeviceStatus.AVAILABLE for info in infos)
            self._device_name = _COMPILED if is_compiled else _REFERENCE
        return self._device_name


def _is_of_the_hal(operation: OperationType) -> bool:
    return not is_extension(operation) and operation is not OperationType.OEM_OPERATION
