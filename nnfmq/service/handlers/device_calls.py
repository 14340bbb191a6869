"""Calls about devices: their list, capabilities, and the status that an administrator sets; and the statistics."""

from __future__ import annotations

import os

from nnfmq.hal.errors import ErrorStatus, GeneralFailure
from nnfmq.hal.types import Protection
from nnfmq.serialize.messages import (
    DeviceCapabilities,
    DeviceList,
    GetCapabilities,
    GetStatistics,
    ListDevices,
    MemoryData,
    Message,
    SetDeviceStatus,
    StatisticsMemory,
    capabilities_to_data,
)
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_reply, reply
from nnfmq.service.session_context import SessionContext


def _list_devices(context: SessionContext, message: ListDevices, _fds: list[int]) -> None:
    context.send(DeviceList(message.call, tuple(device.info for device in context.devices.values())))


def _get_capabilities(context: SessionContext, message: GetCapabilities, _fds: list[int], _received_ns: int) -> None:
    capabilities = capabilities_to_data(context.devices.find(message.device).get_capabilities())
    context.send(DeviceCapabilities(message.call, ErrorStatus.NONE, "", capabilities))


def _capabilities_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (DeviceCapabilities(call, status, text),)


def _set_device_status(context: SessionContext, message: SetDeviceStatus, _fds: list[int], _received_ns: int) -> None:
    _require_administrator(context)
    if not context.options.allows_device_status:
        raise GeneralFailure(
            "this driver lets no client set the status of devices: start it with `nnfmq serve --allow-device-status`"
        )
    context.devices.set_status(message.device, message.status, is_kept=message.is_kept)
    context.send(reply(message.call))


def _require_administrator(context: SessionContext) -> None:
    if context.client_uid not in (os.getuid(), 0):  # a driver may serve other users, too
        raise GeneralFailure(f"uid {context.client_uid} does not administer this driver, which runs as {os.getuid()}")


def _get_statistics(context: SessionContext, message: GetStatistics, _fds: list[int], _received_ns: int) -> None:
    _require_administrator(context)
    fd, size_bytes = context.statistics_area.open_for_reading()
    try:
        data = MemoryData(size_bytes, 0, Protection.READ.value)
        context.send(StatisticsMemory(message.call, ErrorStatus.NONE, "", (data,)), [fd])
    finally:
        os.close(fd)


def _statistics_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (StatisticsMemory(call, status, text),)


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ListDevices: _list_devices,
    GetCapabilities: BlockingHandler(_get_capabilities, _capabilities_error),
    SetDeviceStatus: BlockingHandler(_set_device_status, error_as_reply),
    GetStatistics: BlockingHandler(_get_statistics, _statistics_error),
}
