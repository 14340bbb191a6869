"""The handler of each message that a client may send; and the calls about the driver itself.

These are the handshake, devices and their status, statistics, and traces. The calls about models, executions, bursts
and buffers are in a module each. A handler gets the session, a message, the fds that came with it, and the time at
which it was received (`session.Handler`).
"""

from __future__ import annotations

import os

from nnfmq.driver.cache.shared import shared_cache
from nnfmq.driver.devices.interface_versions import InterfaceVersion
from nnfmq.driver.process.pending_clients import check_hello
from nnfmq.driver.process.trace import WORKER_TRACE
from nnfmq.driver.session import buffer_calls, burst_calls, execution_calls, model_calls
from nnfmq.driver.session.session import Handler, HandlerThread, Session
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import DeviceUnavailable, ErrorStatus, GeneralFailure
from nnfmq.hal.feature_levels import interface_level
from nnfmq.hal.types import Protection
from nnfmq.queue import core
from nnfmq.serialize import control_protocol, messages

__all__ = ["HANDLERS"]


def _hello(session: Session, message: messages.Hello, *_: object) -> None:
    reason = check_hello(message)
    if reason:
        session.send(messages.Refused(ErrorStatus.GENERAL_FAILURE, reason))
        session.stop()
        return
    session.is_monitor = message.is_monitor
    session.interface = InterfaceVersion(interface_level(message.interface))
    if session.options.supervisor_pid is None:  # otherwise the supervisor has decided
        session.statistics_area.set_client_class(0, message.client_class or ClientClass.NORMAL)
    WORKER_TRACE.label = f"driver of pid {session.client_pid}"
    worker_pid = os.getpid()
    driver_pid = session.options.supervisor_pid or worker_pid
    page = session.statistics_area.page
    reply = messages.HelloReply(
        control_protocol.PROTOCOL, message.interface, session.driver_name, driver_pid, worker_pid, core.core_name,
        0 if page is None else 1,
    )  # fmt: skip
    session.send(reply, [] if page is None else [page.fileno()])


def _leave(session: Session, *_: object) -> None:
    session.drain()


def _goodbye(session: Session, *_: object) -> None:
    session.stop()


def _list_devices(session: Session, message: messages.ListDevices, *_: object) -> None:
    session.send(messages.DeviceList(message.call, tuple(device.info for device in session.devices.values())))


def _get_capabilities(session: Session, message: messages.GetCapabilities, *_: object) -> None:
    capabilities = messages.capabilities_to_data(session.devices.find(message.device).get_capabilities())
    session.send(messages.DeviceCapabilities(message.call, ErrorStatus.NONE, "", capabilities))


def _set_device_status(session: Session, message: messages.SetDeviceStatus, *_: object) -> None:
    _require_administrator(session)
    if not session.options.allows_device_status:
        raise GeneralFailure(
            "this driver lets no client set the status of devices: start it with `nnfmq serve --allow-device-status`"
        )
    session.devices.set_status(message.device, message.status, is_kept=message.is_kept)
    session.send_success(message.call)


def _require_administrator(session: Session) -> None:
    """Reject a client that may not act on, or see, what other users' clients do."""
    driver_uid = session.options.uid
    if session.client_uid not in (driver_uid, 0):  # a driver may serve other users, too
        raise GeneralFailure(f"uid {session.client_uid} does not administer this driver, which runs as {driver_uid}")


def _set_client_class(session: Session, message: messages.SetClientClass, *_: object) -> None:
    """Let the supervisor, which decides about classes, change one; the only client of an embedded driver has it."""
    if session.options.supervisor_pid is None and message.worker_pid in (0, os.getpid()):
        session.statistics_area.set_client_class(0, message.client_class)
    else:
        supervisor = shared_cache()
        if supervisor is None and session.options.supervisor_pid is not None:
            raise DeviceUnavailable("the supervisor of this driver was killed; connect to the driver again")
        if supervisor is None:
            raise GeneralFailure("this driver has no supervisor, which would know its clients")
        reason = supervisor.set_class(message.worker_pid, message.client_class)
        if reason:
            raise GeneralFailure(reason)
    session.send_success(message.call)


def _get_statistics(session: Session, message: messages.GetStatistics, *_: object) -> None:
    if not session.statistics_area.is_for_everybody:
        _require_administrator(session)
    fd, size_bytes = session.statistics_area.open_for_reading()
    try:
        data = messages.MemoryData(size_bytes, 0, Protection.READ.value)
        session.send(messages.StatisticsMemory(message.call, ErrorStatus.NONE, "", (data,)), [fd])
    finally:
        os.close(fd)


def _start_trace(session: Session, message: messages.StartTrace, fds: list[int], _received_ns: int) -> None:
    (memory,) = session.quota.adopt_mapped(fds)
    WORKER_TRACE.record_to(memory)
    session.send_success(message.call)


def _trace_driver(session: Session, message: messages.TraceDriver, *_: object) -> None:
    _require_administrator(session)
    fd = WORKER_TRACE.open_area()
    try:
        session.send(messages.DriverTraced(message.call, ErrorStatus.NONE, "", 1), [fd])
    finally:
        os.close(fd)


_WATCHER, _LAUNCHES = HandlerThread.WATCHER, HandlerThread.LAUNCHES

HANDLERS: dict[type[messages.Message], Handler] = {
    messages.Hello: Handler(_hello, _WATCHER),
    messages.Leave: Handler(_leave, _WATCHER),
    messages.Goodbye: Handler(_goodbye, _WATCHER),
    messages.ListDevices: Handler(_list_devices, _WATCHER),
    messages.GetCapabilities: Handler(_get_capabilities),
    messages.SetDeviceStatus: Handler(_set_device_status),
    messages.SetClientClass: Handler(_set_client_class),
    messages.GetStatistics: Handler(_get_statistics),
    messages.StartTrace: Handler(_start_trace, _LAUNCHES),
    messages.TraceDriver: Handler(_trace_driver),
    messages.GetSupportedOperations: Handler(model_calls.get_supported_operations),
    messages.DescribeFile: Handler(model_calls.describe_file),
    messages.PrepareModel: Handler(model_calls.prepare_model, priority=model_calls.preparation_priority),
    messages.PrepareModelFromCache: Handler(model_calls.prepare_from_cache),
    messages.ReleaseModel: Handler(model_calls.release_model, _WATCHER),
    messages.Execute: Handler(execution_calls.execute, priority=execution_calls.model_priority),
    messages.ExecuteAsynchronously: Handler(execution_calls.execute_asynchronously, _LAUNCHES),
    messages.ExecuteFenced: Handler(execution_calls.execute_fenced, _LAUNCHES),
    messages.RunExecutionFenced: Handler(execution_calls.run_execution_fenced, _LAUNCHES),
    messages.GetExecutionInfo: Handler(execution_calls.get_execution_info, _WATCHER),
    messages.ReleaseCallback: Handler(execution_calls.release_callback, _WATCHER),
    messages.CreateExecution: Handler(execution_calls.create_execution, _LAUNCHES),
    messages.RunExecution: Handler(execution_calls.run_execution, priority=execution_calls.execution_priority),
    messages.ReleaseExecution: Handler(execution_calls.release_execution, _WATCHER),
    messages.ConfigureBurst: Handler(burst_calls.configure_burst),
    messages.CloseBurst: Handler(burst_calls.close_burst, _WATCHER),
    messages.GetBurstError: Handler(burst_calls.get_burst_error, _WATCHER),
    messages.FreeMemory: Handler(burst_calls.free_memory, _WATCHER),
    messages.Memories: Handler(burst_calls.receive_memories, _WATCHER),
    messages.ConfigureAidlBurst: Handler(burst_calls.configure_aidl_burst),
    messages.ExecuteAidlBurst: Handler(burst_calls.execute_aidl_burst),
    messages.ReleaseMemoryResource: Handler(burst_calls.release_memory_resource),
    messages.Allocate: Handler(buffer_calls.allocate),
    messages.CopyFrom: Handler(buffer_calls.copy_from),
    messages.CopyTo: Handler(buffer_calls.copy_to),
    messages.ReleaseBuffer: Handler(buffer_calls.release_buffer, _WATCHER),
}
