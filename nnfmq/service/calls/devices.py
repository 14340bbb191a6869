"""Calls about devices: which there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnfmq.serialize.messages import DeviceList, ListDevices, Message
from nnfmq.service.calls.answering import Handler, Pooled
from nnfmq.service.device import DEVICES

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _list_devices(session: Session, message: ListDevices, _fds: list[int]) -> None:
    session.send(DeviceList(message.call, tuple(device.info for device in DEVICES.values())))


HANDLERS: dict[type[Message], Handler | Pooled] = {ListDevices: _list_devices}
