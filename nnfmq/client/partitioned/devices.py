"""Devices of several drivers under unique names, and the access to these drivers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from nnfmq.base.deadlines import acquire, deadline_after, remaining_s
from nnfmq.base.ownership import Uncopyable
from nnfmq.base.packages import installed_version
from nnfmq.client.connection.client import Client, is_same_device
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.connection.device import Device, DeviceInfo
from nnfmq.client.connection.hosted_choice import Host
from nnfmq.client.connection.prepare_arguments import (
    ModelArgument,
    PrepareOptions,
    to_hal_model,
    to_model,
    with_time_left,
)
from nnfmq.client.connection.recovery import RestartLimit
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, uniform_capabilities
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    NnfmqError,
)
from nnfmq.hal.extensions import is_extension
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import DeviceStatus, DeviceType, OperationType

if TYPE_CHECKING:
    from nnfmq.hal.preparation import DeviceChoice
    from nnfmq.importers.hosted import HostedSource
    from nnfmq.importers.loaded_model import LoadedModel
    from nnfmq.serialize.messages import ExtensionData

__all__ = ["CPU_DEVICE_NAME", "ClientAccess", "CpuDevice", "DriverAccess", "RuntimeDevice"]


# ----------------------------------------------------------------------------------------------------------------------
# DriverAccess: one driver as a Runtime uses it, connected again once after it has died (LIFE-6).


ResultT = TypeVar("ResultT")
_log = logging.getLogger("nnfmq.runtime")


class DriverAccess(Uncopyable):
    """The connection of a Runtime to one driver. Close it; the models made through it are closed with it.

    Thread-safe. A device whose description or capabilities differ after a reconnection is unavailable from then on.

    Args:
        label: Names the driver in messages and in names of devices.
        open_client: Connects, and returns a client, which this object owns. Takes a deadline.
        timeout: Limit for a query of the driver, in seconds; None = no limit.
    """

    def __init__(
        self,
        label: str,
        open_client: Callable[[int | None], Client],
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.label = label
        self.timeout = timeout
        self._open_client = open_client
        self._lock = threading.Lock()  # held while connecting
        self._pid = os.getpid()
        self._is_closed = False
        self._client: Client | None = None
        self._limit = RestartLimit()
        self._known: dict[str, DeviceInfo] = {}  # as they were at first
        self._capabilities: dict[str, Capabilities] = {}
        self._changed: set[str] = set()

    def __repr__(self) -> str:
        return f"<DriverAccess {self.label}>"

    def known_devices(self, deadline_ns: int | None = None) -> list[DeviceInfo]:
        """Return the devices as the driver described them first; connect if that has not happened yet."""
        self.client(deadline_ns)
        return list(self._known.values())

    def status(self, device: str, deadline_ns: int | None = None) -> DeviceStatus:
        """Return the status of a device now; OFFLINE if the driver cannot be reached or the device has changed."""
        try:
            infos = self.client(deadline_ns).devices(timeout=self._left(deadline_ns))
        except NnfmqError:
            return DeviceStatus.OFFLINE
        found = (info.status for info in infos if info.name == device and device not in self._changed)
        return next(found, DeviceStatus.OFFLINE)

    def capabilities(self, device: str, deadline_ns: int | None = None) -> Capabilities:
        """Return the capabilities of a device; blocks when they are asked for first. Raises as `call`."""
        found = self._capabilities.get(device)
        if found is None:
            deadline_ns = deadline_after(self.timeout) if deadline_ns is None else deadline_ns
            found = self.call(device, lambda made: made.capabilities(timeout=self._left(deadline_ns)), deadline_ns)
            self._capabilities[device] = found
        return found

    def call(
        self,
        device: str,
        function: Callable[[Device], ResultT],
        deadline_ns: int | None = None,
        choice: DeviceChoice = "application",
    ) -> ResultT:
        """Return `function(device)`; if the driver has died, connect once and call it again.

        `choice` says who chose the device, for observers.

        Raises:
            DeadObject: If the driver has died and cannot be reached, or dies again.
            DeviceUnavailable: If the device has changed since the driver died.
            NnfmqError: What `function` raises.
        """
        before = self._client
        client = self.client(deadline_ns)
        try:
            return function(self._device(client, device, choice))
        except DeadObject:
            if client is not before:
                raise
        return function(self._device(self.client(deadline_ns, instead_of=client), device, choice))

    def device(self, name: str, deadline_ns: int | None = None) -> Device:
        """Return a device of the driver's current connection. Raises as `call`."""
        return self._device(self.client(deadline_ns), name)

    def _device(self, client: Client, name: str, choice: DeviceChoice = "application") -> Device:
        if name in self._changed:
            raise DeviceUnavailable(
                f"device {name!r} of driver {self.label} has changed since the driver died; make a new nnfmq.Runtime"
            )
        return client.device_of(self._known[name], choice)

    def client(self, deadline_ns: int | None = None, instead_of: Client | None = None) -> Client:
        """Return a client that is connected; blocks while it connects. This object owns it.

        `instead_of` is a client whose driver has died, even if it does not know that yet.

        Raises:
            DeadObject: If the driver has died and cannot be reached.
            NnfmqError: As `nnfmq.connect`, if it was never reached.
            InvalidArgument: If the runtime is closed, or belongs to a process that forked this one.
        """
        with self._locked(deadline_ns):
            self._require_open()
            client = self._client
            if client is None or client is instead_of or not client.connection.is_open:
                client = self._connect(deadline_ns)
                self._require_open()  # another thread may have closed this meanwhile
            return client

    def _require_open(self) -> None:
        if self._is_closed:
            self.close()
            raise BadState("this runtime is closed")

    @contextmanager
    def _locked(self, deadline_ns: int | None) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise InvalidArgument(f"this runtime belongs to process {self._pid}, which forked; make a new one")
        acquire(self._lock, deadline_ns, f"another thread still connects to driver {self.label}")
        try:
            yield
        finally:
            self._lock.release()

    def _connect(self, deadline_ns: int | None) -> Client:
        deadline_ns = deadline_after(self.timeout) if deadline_ns is None else deadline_ns
        if self._client is not None:
            self._limit.require_allowed(self._client.connection.ended_ns)
        try:
            client = self._open_client(deadline_ns)
        except DeviceUnavailable as error:
            if self._client is None:
                raise
            raise DeadObject(f"driver {self.label} has died and cannot be reached: {error}") from error
        try:
            infos: dict[str, DeviceInfo] = {}
            for info in client.devices(timeout=self._left(deadline_ns)):
                infos.setdefault(info.name, info)  # of two devices with one name, the first
            self._compare(client, infos, deadline_ns)
        except BaseException:
            client.close()
            raise
        if self._client is not None:
            self._client.close()
        self._client, self._known = client, self._known or infos
        self._limit.begin()
        return client

    def _compare(self, client: Client, infos: dict[str, DeviceInfo], deadline_ns: int | None) -> None:
        """Remember the devices that differ from what was known of them."""
        for name, known in self._known.items():
            if not is_same_device(known, infos.get(name)) or not self._has_same_speed(client, infos[name], deadline_ns):
                self._changed.add(name)
                _log.warning("device %r of driver %s has changed: it is not used any more", name, self.label)

    def _has_same_speed(self, client: Client, info: DeviceInfo, deadline_ns: int | None) -> bool:
        known = self._capabilities.get(info.name)
        if known is None or info.status is not DeviceStatus.AVAILABLE:
            return True
        return client.device_of(info).capabilities(timeout=self._left(deadline_ns)) == known

    def _left(self, deadline_ns: int | None) -> float | None:
        return self.timeout if deadline_ns is None else remaining_s(deadline_ns)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._is_closed = True
        client = self._client
        if client is not None:
            client.close()


# ----------------------------------------------------------------------------------------------------------------------
# RuntimeDevice: a device of any driver under a name that is unique in its Runtime, and the CPU device.


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
        """The speed and the power of the device, relative to the CPU. Blocks when it is read first.

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

    def host(self, choice: DeviceChoice) -> Host:
        """Return this device, which hosts a runtime, for the choice of one; `choice` as in `prepare_as`."""
        return Host(self.name, self.info.name, self._load, self._supports_hosted, partial(self.prepare_as, choice))

    def _load(self, file: HostedSource, **options: Any) -> LoadedModel:
        return self._access.call(self._name_in_driver(), lambda device: device.load(file, **options))

    def _supports_hosted(self, model: ModelArgument, *, timeout: float | None) -> Sequence[bool]:
        return self.until(deadline_after(timeout)).supported_operations(model)

    def why_absent(self, name: str) -> str:
        """Return advice to get a device that this one's driver does not have; blocks. See `Client.why_absent`."""
        return self._access.client(self._query_limit_ns()).why_absent(name, timeout=self._access.timeout)

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


# ----------------------------------------------------------------------------------------------------------------------
# ClientAccess: the driver of a Client, for devices that are used through that client only.


class ClientAccess(DriverAccess):
    """A driver whose connection belongs to a client, which connects again or does not. `infos` are its devices."""

    def __init__(self, client: Client, infos: Sequence[DeviceInfo]) -> None:
        super().__init__("of this client", lambda _deadline_ns: client)
        self._owner = client
        self._known = {info.name: info for info in infos}

    def client(self, _deadline_ns: int | None = None, instead_of: Client | None = None) -> Client:
        """Return the client, even if its driver has died. Does not block."""
        return self._owner

    def close(self) -> None:
        """Do nothing: the client is its owner's."""
