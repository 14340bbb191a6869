"""DriverAccess: one driver as a Runtime uses it, connected again once after it has died (LIFE-6)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from nnfmq.deadlines import deadline_after, remaining_s
from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
)
from nnfmq.hal.types import DeviceStatus
from nnfmq.runtime.client import Client, is_same_device
from nnfmq.runtime.client_device import Device, DeviceInfo
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.restart_limit import RestartLimit
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.hal.device_choice import DeviceChoice

__all__ = ["DriverAccess"]

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
        left = remaining_s(deadline_ns)
        if not self._lock.acquire(timeout=-1 if left is None else left):
            raise MissedDeadlineTransient(f"another thread still connects to driver {self.label}")
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
