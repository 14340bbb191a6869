"""Runtime: the devices of all drivers, and models that are prepared on one or several of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, Unpack

from nnfmq.base import settings
from nnfmq.base.deadlines import deadline_after, has_passed, remaining_s
from nnfmq.base.ownership import Closable
from nnfmq.base.paths import SOCKET_NAME, default_socket, runtime_directory
from nnfmq.base.threads import Thread
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect, connect_cpu_driver
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.connection.device import hosts_runtime
from nnfmq.client.connection.hosted_choice import GivenModel, Hosting
from nnfmq.client.connection.prepare_arguments import (
    ModelArgument,
    Preference,
    PrepareOptions,
    to_hal_model,
    to_model,
    with_time_left,
)
from nnfmq.client.connection.switches import Switches
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.partitioned.compilation import (
    DeviceSelection,
    compile_model,
    plan_model,
    supported_in_slice,
    valid_model,
)
from nnfmq.client.partitioned.devices import CPU_DEVICE_NAME, CpuDevice, DriverAccess, RuntimeDevice
from nnfmq.hal.errors import BadState, DeviceUnavailable, InvalidArgument, NnfmqError
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.hosted import is_hosted
from nnfmq.hal.summaries import nearest
from nnfmq.hal.types import DEFAULT_PREFERENCE
from nnfmq.planning.plan import ExecutionPlan, simple_plan

__all__ = ["DeviceArgument", "DriverDiscovery", "Runtime", "listening_sockets"]


# ----------------------------------------------------------------------------------------------------------------------
# DriverDiscovery: the drivers that listen in the runtime directory, or at given sockets.


_SUFFIX = ".sock"
_EMBEDDED = "embedded"
_log = logging.getLogger("nnfmq.runtime")


def listening_sockets() -> list[Path]:
    """Return the paths of drivers' sockets: $NNFMQ_SOCKET, then those of the runtime directory, `nnfmq.sock` first.

    A driver may no longer listen there.
    """
    directory = runtime_directory()
    try:
        found = [directory / name for name in os.listdir(directory) if name.endswith(_SUFFIX)]
    except OSError:  # there is no directory: no driver was ever started
        found = []
    found.sort(key=lambda path: (path.name != SOCKET_NAME, path.name))
    return list(dict.fromkeys([*([default_socket()] if settings.SOCKET.value() else []), *found]))


class DriverDiscovery:
    """Finds drivers and keeps them. Not thread-safe. Whoever calls it closes the drivers that it returned.

    Args:
        sockets: The sockets of drivers; None = those of `listening_sockets`.
        embedded: Whether an embedded driver is one of them.
        timeout: Limit for a query of a driver, in seconds; None = no limit.
    """

    def __init__(self, sockets: Sequence[str | os.PathLike[str]] | None, embedded: bool, timeout: float | None) -> None:
        self._sockets = None if sockets is None else list(dict.fromkeys(map(Path, sockets)))
        self._found: dict[Path | None, DriverAccess] = {}
        self._complaints: dict[Path | None, str] = {}
        self._embedded = embedded
        self._timeout = timeout

    def new_drivers(self, deadline_ns: int | None) -> list[DriverAccess]:
        """Return the drivers that earlier calls did not return; blocks while it connects to all of them concurrently.

        A driver that cannot be reached, or whose replies are not valid, is left out and logged; it is tried again the
        next time.
        """
        paths: list[Path | None] = [*(listening_sockets() if self._sockets is None else self._sockets)]
        paths += [None] if self._embedded else []
        missing = [path for path in paths if path not in self._found]
        accesses = [DriverAccess(self._label(path), partial(_open, path), self._timeout) for path in missing]
        errors = _for_each(accesses, lambda access: access.client(deadline_ns))
        new = []
        for path, access, error in zip(missing, accesses, errors, strict=True):
            if error is None:
                self._found[path] = access
                new.append(access)
            else:
                access.close()
                self._complain(path, error)
        return new

    @staticmethod
    def _label(path: Path | None) -> str:
        return _EMBEDDED if path is None else path.name.removesuffix(_SUFFIX)

    def _complain(self, path: Path | None, error: BaseException) -> None:
        text = str(error)
        if self._complaints.get(path) != text:  # once, not at each call
            self._complaints[path] = text
            _log.warning("the driver at %s is left out: %s", path or "an embedded process", text)


def _open(path: Path | None, deadline_ns: int | None) -> Client:
    timeout = remaining_s(deadline_ns)
    return connect(path, embedded=path is None, timeout=timeout, recover=False)  # DriverAccess connects again


def _for_each(
    accesses: Sequence[DriverAccess], function: Callable[[DriverAccess], object]
) -> list[BaseException | None]:
    """Call `function` for all at the same time; return the error of each, or None."""
    errors: list[BaseException | None] = [None] * len(accesses)

    def call(index: int) -> None:
        try:
            function(accesses[index])
        except (NnfmqError, OSError) as error:
            errors[index] = error

    threads = [Thread(target=call, args=[index], name="nnfmq-probe") for index in range(1, len(accesses))]
    for thread in threads:
        thread.start()
    if accesses:
        call(0)
    for thread in threads:
        thread.join()
    return errors


# ----------------------------------------------------------------------------------------------------------------------
# Runtime: the devices of all drivers, and models that are prepared on one or several of them.


DeviceArgument: TypeAlias = str | RuntimeDevice
"""A device, or its name."""
_RETRY_S = 0.02  # between two looks for a device that is not there yet


def _has_own(selection: DeviceSelection) -> bool:
    return any(not hosts_runtime(device.info) for device in selection.devices)


class Runtime(Closable):
    """The devices of all drivers, and the CPU device `nnapi-reference`. Close it, or use `with`. Thread-safe.

    Its models are closed with it. The drivers are those that listen in the runtime directory, `$XDG_RUNTIME_DIR/nnfmq`,
    and at `$NNFMQ_SOCKET`; a driver that is started later is found by the next call that needs devices.

    Args:
        drivers: The sockets of the drivers to use instead.
        embedded: Whether the devices of an embedded driver, a process that ends with this Runtime, are used as well.
        timeout: Limit for reaching the drivers and for a query of a device, in seconds; None = no limit. A device that
            does not reply in time is not used.
    """

    def __init__(
        self,
        drivers: Sequence[str | os.PathLike[str]] | None = None,
        *,
        embedded: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        deadline_after(timeout)  # check it
        self._timeout = timeout
        self._lock = threading.Lock()  # held while looking for drivers
        self._is_closed = False
        self._discovery = DriverDiscovery(drivers, embedded, timeout)
        self._accesses: list[DriverAccess] = []
        self._devices: dict[str, RuntimeDevice] = {}
        cpu_driver = DriverAccess(CPU_DEVICE_NAME, connect_cpu_driver)
        self._accesses.append(cpu_driver)
        self._cpu = CpuDevice(cpu_driver)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<Runtime: {', '.join([*self._devices, CPU_DEVICE_NAME])}{state}>"

    @property
    def runtime_feature_level(self) -> FeatureLevel:
        """The feature level of this library, which a model may need at most (API-15)."""
        return FeatureLevel.AIDL_V4

    @property
    def cpu(self) -> RuntimeDevice:
        """The CPU device, `nnapi-reference`."""
        return self._cpu

    def devices(self) -> list[RuntimeDevice]:
        """Return the devices of all drivers, and the CPU device as the last one; blocks (API-1).

        If a name is taken by another driver's device, the driver's name is appended: `reference@gpu`. A driver that
        cannot be reached, or reports what is not valid, is left out and logged.

        Raises:
            BadState: If this is closed.
        """
        deadline_ns = deadline_after(self._timeout)
        with self._lock:
            self._require_open()
            for access in self._discovery.new_drivers(deadline_ns):
                self._accesses.append(access)
                for info in access.known_devices(deadline_ns):
                    name = self._free_name(info.name, access.label)
                    self._devices[name] = RuntimeDevice(name, access, info)
            self._require_open()  # another thread may have closed this meanwhile
            return [*self._devices.values(), self._cpu]

    def _require_open(self) -> None:
        if self._is_closed:
            self.close()
            raise BadState("this runtime is closed")

    def _free_name(self, name: str, driver: str) -> str:
        taken = {*self._devices, CPU_DEVICE_NAME}
        candidates = [name, f"{name}@{driver}", *(f"{name}@{driver}.{count}" for count in range(2, len(taken) + 3))]
        return next(candidate for candidate in candidates if candidate not in taken)

    def device(self, name: str) -> RuntimeDevice:
        """Return the device of that name; blocks.

        Raises:
            InvalidArgument: If there is none. The message lists all devices.
        """
        devices = {device.name: device for device in self.devices()}
        if name not in devices:
            raise InvalidArgument(
                f"there is no device {name!r}; there are: {', '.join(devices)}{nearest(name, devices)}"
            )
        return devices[name]

    def wait_for_device(self, name: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> RuntimeDevice:
        """Return the device of that name as soon as its driver listens; blocks up to `timeout` seconds.

        Raises:
            DeviceUnavailable: If it is not there in time.
        """
        deadline_ns = deadline_after(timeout)
        while True:
            devices = {device.name: device for device in self.devices()}
            if name in devices:
                return devices[name]
            if has_passed(deadline_ns):
                raise DeviceUnavailable(
                    f"no device {name!r} within {timeout} s; there are: {', '.join(devices)}{nearest(name, devices)}"
                )
            time.sleep(_RETRY_S)

    def supported_operations(self, model: ModelArgument, devices: Sequence[DeviceArgument]) -> list[bool]:
        """Return for each operation of the main subgraph whether one of `devices` can execute it; blocks (API-2).

        Raises:
            InvalidArgument: If `devices` is empty, names a device twice or one that does not exist, or the model is not
                valid.
            DeviceUnavailable: If a device is not available.
        """
        hal_model = valid_model(to_model(model))
        found = [supported_in_slice(hal_model, device) for device in self.explicit_devices(devices)]
        return [any(supported) for supported in zip(*found, strict=True)]

    def explicit_devices(self, devices: Sequence[DeviceArgument]) -> list[RuntimeDevice]:
        """Return the devices of a list that an application has given; blocks.

        Raises:
            InvalidArgument: If it is empty, names a device twice (N-API-13), or one that does not exist.
        """
        if isinstance(devices, str) or not devices:
            raise InvalidArgument(f"devices are a list of at least one device or name, not {devices!r}")
        found = [self.device(device) if isinstance(device, str) else device for device in devices]
        names = [device.name for device in found]
        repeated = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if repeated is not None:
            raise InvalidArgument(f"device {repeated!r} is listed twice; list each device once")
        return found

    def prepare(
        self,
        model: ModelArgument,
        devices: Sequence[DeviceArgument] | None = None,
        **options: Unpack[PrepareOptions],
    ) -> CompiledModel:
        """Prepare a model, or a model file, on the devices that suit it best; blocks. The caller closes the result.

        Args:
            model: As for `Device.prepare`.
            devices: The devices, or their names, that may be used; the CPU device is used only if it is listed. None =
                all devices, and the CPU device if they fail. Those that host another runtime are used for hosted
                models, for a file that the others do not support, and if no other one is listed.
            options: The keyword arguments of `Device.prepare`.

        Raises:
            InvalidArgument: If the model, its file, an option or the list of devices is not valid, or no listed device
                supports an operation.
            MissedDeadline: If the timeout, which holds for all devices together, passes.
            NnfmqError: As `Device.prepare`, if the CPU device may not be used instead.
        """
        deadline_ns = deadline_after(options.get("timeout"))
        selection, hosting = self._selection(devices)
        given = GivenModel.of(model, options, is_imported=_has_own(selection))
        return hosting.prepare(
            given, with_time_left(options, deadline_ns), lambda model, left: compile_model(model, selection, left)
        )

    def plan(
        self,
        model: ModelArgument,
        devices: Sequence[DeviceArgument] | None = None,
        *,
        preference: Preference = DEFAULT_PREFERENCE,
    ) -> ExecutionPlan:
        """Return the plan with which `prepare` would begin, but prepare nothing; blocks while devices are asked.

        Arguments and errors as for `prepare`. `nnfmq.planning.text.plan_text` describes a plan.
        """
        selection, hosting = self._selection(devices)
        given, deadline_ns = GivenModel.of(model, {}, is_imported=_has_own(selection)), deadline_after(None)
        if given.model is None:
            return hosting.first(given, deadline_ns, lambda host, loaded: simple_plan(loaded.model, host.name))
        if is_hosted(to_hal_model(given.model)):
            return simple_plan(to_hal_model(given.model), hosting.host_of(given.model, deadline_ns).name)
        return plan_model(given.model, selection, {"preference": preference})

    def _selection(self, devices: Sequence[DeviceArgument] | None) -> tuple[DeviceSelection, Hosting]:
        """Return the devices for what nnfmq's own engine supports, and those that host runtimes."""
        is_explicit = devices is not None
        usable = self.devices() if devices is None else self.explicit_devices(devices)
        own = [device for device in usable if not hosts_runtime(device.info)]
        switches = Switches.read()
        hosts = [
            device.host("application" if is_explicit else "best")
            for device in usable
            if hosts_runtime(device.info)
            and (is_explicit or (switches.is_enabled(device.name) and not switches.uses_only_cpu))
        ]
        return (
            DeviceSelection(own or usable, self._cpu, is_explicit),
            Hosting(hosts, partial(self._why_absent, own), switches.is_synchronous),
        )

    def _why_absent(self, devices: Sequence[RuntimeDevice], runtime: str) -> str:
        """Return advice to get a runtime, in the words of the driver of the first of these devices."""
        drivers = [device for device in devices if not device.is_cpu]
        if drivers:
            return drivers[0].why_absent(runtime)
        return f"start a driver where it is installed: pip install 'nnfmq[{runtime}]'"

    def close(self) -> None:
        """Hang up; an embedded driver exits, and all models are closed. Idempotent."""
        self._is_closed = True
        for access in tuple(self._accesses):
            access.close()
