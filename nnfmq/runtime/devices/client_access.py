"""ClientAccess: the driver of a Client, for devices that are used through that client only."""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.runtime.client import Client
from nnfmq.runtime.client_device import DeviceInfo
from nnfmq.runtime.devices.driver_access import DriverAccess

__all__ = ["ClientAccess"]


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
