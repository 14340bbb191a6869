"""Client: a connection to a driver, its devices, and reconnecting after the driver's death."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, Unpack

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument
from nnfmq.hal.types import DeviceStatus
from nnfmq.runtime.client_device import Device, PrepareOptions
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.device_validation import valid_devices
from nnfmq.runtime.prepare_arguments import ModelArgument, name_for_display, to_model
from nnfmq.serialize import messages
from nnfmq.serialize.messages import DeviceInfo
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    import subprocess

    from nnfmq.hal.types import Model
    from nnfmq.observe.driver_statistics import DriverStatistics
    from nnfmq.runtime.plan_execution.partitioned_model import PartitionedModel
    from nnfmq.runtime.prepare_arguments import NamedModel
    from nnfmq.runtime.prepared_model import PreparedModel

    CompiledModel: TypeAlias = PreparedModel | PartitionedModel
    """A model on one device, or on several."""


class Compilation(Protocol):
    """Prepares models on the devices that suit them, as `ClientCompilation`."""

    def prepare(
        self, client: Client, infos: Sequence[DeviceInfo], model: Model | NamedModel, options: PrepareOptions
    ) -> CompiledModel:
        """Return the prepared model; blocks."""
        ...

    def close(self) -> None:
        """End the processes that were started for it. Idempotent."""
        ...


class Client(Uncopyable):
    """A connection to a driver. Close it, or use `with`; the models and bursts made through it are closed with it.

    Thread-safe. When the driver dies, all calls raise DeadObject immediately; `reconnect` then makes the client usable
    again.
    """

    def __init__(
        self,
        connection: Connection,
        process: subprocess.Popen[bytes] | None,
        connect_again: Callable[[int | None], Client] | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        self._connection = connection
        self._process = process
        self._connect_again = connect_again
        self._compilation = compilation
        self._pid = os.getpid()
        self._is_closed = False
        self._reconnecting = threading.Lock()
        self._known_devices: dict[str, DeviceInfo] = {}  # as they were when they were used first
        self._lost_devices: set[str] = set()  # missing or different in the driver of a later connection

    def __repr__(self) -> str:
        connection, process = self._connection, self._process
        state = ", closed" if not connection.is_open else "" if connection.has_started else ", starting"
        kind = "embedded driver" if self.is_embedded else "driver"
        pid = f" {self.driver_pid}" if connection.has_started else f" {process.pid}" if process is not None else ""
        return f"<Client of {kind}{pid}, {self.interface}{state}>"

    @property
    def driver_pid(self) -> int:
        """The pid of the driver, `nnfmq serve`, as the driver knows it; of an embedded driver that of its process."""
        return self._connection.wait_until_ready().driver_pid

    @property
    def worker_pid(self) -> int:
        """The pid of the process that serves this client: the driver's worker, or the embedded driver."""
        return self._connection.wait_until_ready().worker_pid

    @property
    def driver_core(self) -> str:
        """The queue core of the driver, as `nnfmq doctor` names it."""
        return self._connection.wait_until_ready().core

    @property
    def connection(self) -> Connection:
        """The connection, for `runtime.hidl`."""
        return self._connection

    @property
    def interface(self) -> str:
        """The HAL version of this connection, as passed to `connect`."""
        return self._connection.interface

    @property
    def is_embedded(self) -> bool:
        """True if the driver is a private process of this application."""
        return self._process is not None

    def devices(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> list[DeviceInfo]:
        """Return the driver's devices: name, type, version, feature level, status, extensions; blocks.

        A device whose description is invalid is left out and logged (DEV-10).
        """
        message = messages.ListDevices(self._connection.next_call_id())
        reply = self._connection.exchange(message, messages.DeviceList, (), deadline_after(timeout))
        return valid_devices(reply.devices)

    def set_device_status(
        self, name: str, status: DeviceStatus, *, keep: bool = False, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """Make a device AVAILABLE, BUSY or OFFLINE for all clients of this driver; blocks.

        While it is not AVAILABLE, every call on it, its models, buffers and bursts raises DeviceUnavailable. When this
        client is closed or dies, the device gets back the status that was last kept, AVAILABLE at first. With `keep`
        the change outlives this client; AVAILABLE is always kept. The driver must have been started with
        `nnfmq serve --allow-device-status`, or be embedded.

        Raises:
            InvalidArgument: If there is no such device, or the status is another one.
            GeneralFailure: If the driver does not allow it, or this user is neither the driver's nor root.
        """
        message = messages.SetDeviceStatus(self._connection.next_call_id(), name, status, keep)
        self._connection.call(message, messages.Reply, (), deadline_after(timeout))

    def statistics(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> DriverStatistics:
        """Return what the driver counts: its clients, their models and bursts, latencies, caches; blocks.

        Other clients of the driver are included. An execution may be counted some microseconds after its result has
        arrived.

        Raises:
            GeneralFailure: If this user is neither the driver's nor root.
        """
        from nnfmq.runtime.statistics_memory import driver_statistics

        return driver_statistics(self._connection, deadline_after(timeout))

    def device(self, name: str, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Device:
        """Return the device named `name`; blocks.

        Raises:
            InvalidArgument: If there is none. The message lists the driver's devices.
            DeviceUnavailable: If the driver has died, and its successor has another device of that name.
        """
        return self._device(name, self.devices(timeout=timeout))

    def _device(self, name: str, devices: list[DeviceInfo]) -> Device:
        infos = {info.name: info for info in devices}
        if name in self._lost_devices:
            raise DeviceUnavailable(f"device {name!r} has changed since the driver died; connect again to use it")
        if name not in infos:
            raise InvalidArgument(f"there is no device {name!r}; this driver has: {', '.join(sorted(infos))}")
        self._known_devices.setdefault(name, infos[name])
        return Device(infos[name], self._connection)

    def prepare(self, model: ModelArgument, **options: Unpack[PrepareOptions]) -> CompiledModel:
        """Prepare a model, or a model file, on the best available device; blocks. The caller closes the result.

        That is `compiled`, which generates machine code, if it is available, otherwise `reference`, with one warning in
        the log; devices of plug-ins that are faster at some operations execute these. If the devices fail, the CPU
        device executes the model, in an embedded driver (docs/how-to/partitioning.md). `device` chooses one device.

        Takes the keyword arguments of `Device.prepare`. Cache files and a timeout need a model on one device.

        Raises:
            InvalidArgument: If the model, its file or an option is not valid.
            OSError: If the model's file cannot be read.
            NnfmqError: As `Device.prepare`, if the CPU device may not be used instead.
        """
        options["name"] = name_for_display(model, options.get("name"))
        model = to_model(model)  # while an embedded driver starts
        timeout = options.get("timeout")
        devices = self.devices(timeout=DEFAULT_TIMEOUT_S if timeout is None else timeout)
        if self._compilation is None:
            raise InvalidArgument("this client has no runtime: call nnfmq.connect(), or `device` to choose a device")
        for info in devices:
            self._known_devices.setdefault(info.name, info)
        usable = [info for info in devices if info.name not in self._lost_devices]
        return self._compilation.prepare(self, usable, model, options)

    def reconnect(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Connect again to a driver that has died, or its successor; blocks until it listens. No effect while it lives.

        Earlier devices, models and bursts remain dead: call `device` and prepare the models again. A device that has
        changed, except in its status, is unavailable to this client from then on (LIFE-6).

        Raises:
            DeviceUnavailable: If no driver can be reached within `timeout` seconds (None = no limit).
            MissedDeadlineTransient: If the timeout passes while connecting.
            InvalidArgument: If the client is closed, or in a forked child.
        """
        if os.getpid() != self._pid or self._connect_again is None:
            raise InvalidArgument("this client cannot reconnect: call nnfmq.connect()")
        with self._reconnecting:
            if self._is_closed:
                raise InvalidArgument("this client is closed")
            if not self._connection.is_open:
                self._replace_connection(self._connect_again(deadline_after(timeout)))
            if self._is_closed:  # by another thread, meanwhile
                self.close()
                raise InvalidArgument("this client is closed")

    def _replace_connection(self, new: Client) -> None:
        """Use the connection and the process of `new` from now on, and close the old ones."""
        try:
            infos = {info.name: info for info in new.devices()}
        except BaseException:
            new.close()
            raise
        for name, known in self._known_devices.items():
            if not is_same_device(known, infos.get(name)):
                self._lost_devices.add(name)
        old, self._connection = self._connection, new._connection
        process, self._process = self._process, new._process
        old.close()
        if process is not None:
            _end(process)

    def close(self) -> None:
        """Hang up; an embedded driver exits and is reaped. Idempotent, also in a forked child."""
        self._is_closed = True
        has_started = self._connection.has_started
        self._connection.close()
        if self._compilation is not None:
            self._compilation.close()
        process, self._process = self._process, None
        if process is not None and os.getpid() == self._pid:
            if not has_started:
                process.kill()  # it does not read its connection yet
            _end(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an embedded driver."""
    from nnfmq.runtime.embedded_driver import end_embedded_driver  # imports subprocess

    end_embedded_driver(process)


def is_same_device(old: DeviceInfo, new: DeviceInfo | None) -> bool:
    """Return True if the descriptions are equal except for the status."""
    names = [name for name in old.__struct_fields__ if name != "status"]
    return new is not None and all(getattr(old, name) == getattr(new, name) for name in names)
