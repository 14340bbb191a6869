"""Calls about devices: which there are, how fast they are, and what an administrator makes of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nnfmq.hal.errors import ErrorStatus, GeneralFailure
from nnfmq.serialize.messages import (
    DeviceCapabilities,
    DeviceList,
    GetCapabilities,
    ListDevices,
    Message,
    SetDeviceStatus,
    capabilities_to_data,
)
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_reply, reply

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _list_devices(session: Session, message: ListDevices, _fds: list[int]) -> None:
    session.send(DeviceList(message.call, tuple(device.info for device in session.devices.values())))


def _get_capabilities(session: Session, message: GetCapabilities, _fds: list[int], _seen_ns: int) -> None:
    found = capabilities_to_data(session.devices.find(message.device).get_capabilities())
    session.send(DeviceCapabilities(message.call, ErrorStatus.NONE, "", found))


def _refuse_capabilities(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (DeviceCapabilities(call, status, text),)


def _set_device_status(session: Session, message: SetDeviceStatus, _fds: list[int], _seen_ns: int) -> None:
    if session.client_uid not in (os.getuid(), 0):  # whom else a driver may serve, nobody else administers it
        raise GeneralFailure(f"uid {session.client_uid} does not administer this driver, which runs as {os.getuid()}")
    session.devices.set_status(message.device, message.status)
    session.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ListDevices: _list_devices,
    GetCapabilities: BlockingHandler(_get_capabilities, _refuse_capabilities),
    SetDeviceStatus: BlockingHandler(_set_device_status, error_as_reply),
}
