"""HIDL's methods, for tests of drivers that were written against android.hardware.neuralnetworks 1.0 to 1.3.

    with nnfmq.connect(interface="HIDL 1.2") as client:
        device = hidl.IDevice(client, "reference")
        status, capabilities = device.getCapabilities_1_2()
        status = device.prepareModel_1_2(model, preference, [[model_fd]], [[data_fd]], token, callback)
        status, shapes, timing = prepared.executeSynchronously(request, measure)

Methods have the HAL's names and order of parameters, and return what the HAL's `generates` lists: a status instead of
an exception. An object has the methods of the connection's interface version; one of a later version is an
AttributeError. The tables DEVICE, PREPARED_MODEL and BUFFER list all.

A callback is called exactly once with the arguments of the HAL's `notify`, `notify_1_2` or `notify_1_3`: on the
caller's thread if the launch was rejected, otherwise on a new thread.

Times are in µs, UINT64_MAX if not available. A deadline is None or a time of the monotonic clock in ns; a duration is
None or in ns. A handle of a cache file is the sequence of its fds.

Only DeadObject is raised, if the driver has exited, as a HIDL transaction fails. The client checks what the driver
cannot know: whether a method that is older than the connection's interface version could carry a value, handles, and
null references (DEV-13, EXE-15, TIM-2, CAP-2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

from nnfmq.base import watcher
from nnfmq.base.fence import Fence, HasFileno
from nnfmq.base.ownership import Uncopyable
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.execution.fenced import DeviceFencedExecution, FencedExecution, FencedTiming, fence_fds
from nnfmq.client.execution.requests import memory_fds, to_wire_descriptor
from nnfmq.client.model.handle import ModelLocation
from nnfmq.client.waiting import Future
from nnfmq.hal.capabilities import (
    BYTE_SIZE_OF_CACHE_TOKEN,
    MAX_NUMBER_OF_CACHE_FILES,
    BufferDesc,
    BufferRole,
    Capabilities,
    PerformanceInfo,
    performance_of,
)
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    NnfmqError,
    error_for_status,
    status_for_error,
)
from nnfmq.hal.feature_levels import FeatureLevel, interface_name, number_of_consumers
from nnfmq.hal.timing import HIDL_NO_TIME, to_limit_field, to_microseconds
from nnfmq.hal.types import (
    DEFAULT_PREFERENCE,
    DeviceStatus,
    DeviceType,
    LoopTimeoutDurationNs,
    MeasureTiming,
    Model,
    OperandType,
    OutputShape,
    Pool,
    Priority,
    Request,
)
from nnfmq.queue import MessageQueue, PeerDeathFlag
from nnfmq.serialize import messages
from nnfmq.serialize.models import encode_model
from nnfmq.validation.interface_versions import convert_to

__all__ = [
    "BUFFER",
    "DEVICE",
    "NO_HIDL_TIMING",
    "PREPARED_MODEL",
    "UINT64_MAX",
    "BurstContext",
    "FencedCallback",
    "HidlTiming",
    "IBuffer",
    "IDevice",
    "IPreparedModel",
    "Method",
    "ModelReference",
    "NamedDevice",
    "VersionedObject",
    "allocate",
    "configure_burst",
    "notify_when_done",
    "reject",
    "status_at",
]


# ----------------------------------------------------------------------------------------------------------------------
# Shared by all HIDL objects: method tables, callbacks, and conversion of statuses and times.


UINT64_MAX = HIDL_NO_TIME
V1_0, V1_1, V1_2, V1_3 = FeatureLevel.V1_0, FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3
NONE, INVALID = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT
CallT = TypeVar("CallT", bound=messages.Call)


class HidlTiming(NamedTuple):
    """HIDL's Timing, in µs; UINT64_MAX = not available."""

    timeOnDevice: int = UINT64_MAX
    timeInDriver: int = UINT64_MAX

    @classmethod
    def from_ns(cls, device_ns: int, driver_ns: int) -> HidlTiming:
        """Return two times, in ns (-1 = not available), as HIDL has them."""
        return cls(to_microseconds(device_ns), to_microseconds(driver_ns))


NO_HIDL_TIMING = HidlTiming()


class Method(NamedTuple):
    """One method: the interface version that introduced it, and the function, which gets that version's level."""

    level: FeatureLevel
    run: Callable[..., Any]


class NamedDevice(Protocol):
    """A device, for calls about objects that it creates."""

    connection: Connection
    name: str


class ModelReference(Protocol):
    """A prepared model, for calls about objects that refer to it."""

    connection: Connection
    model_id: int


class VersionedObject(Uncopyable):
    """An object of the driver. It has those of its `methods` that the connection's interface version has."""

    methods: Mapping[str, Method]
    connection: Connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method, level = type(self).methods.get(name), FeatureLevel(self.connection.level)
        if method is None or method.level > level:
            raise AttributeError(f"{type(self).__name__} of {interface_name(level)} has no {name}")
        return partial(method.run, self, method.level)

    def __dir__(self) -> list[str]:
        level = self.connection.level
        return [*super().__dir__(), *(name for name, method in type(self).methods.items() if method.level <= level)]


def status_at(level: FeatureLevel, status: ErrorStatus) -> ErrorStatus:
    """Return a status converted to the interface version of `level`."""
    return convert_to(status, level).value


def reject(callback: Callable[..., None] | None, *results: Any) -> ErrorStatus:
    """Call `callback` with INVALID_ARGUMENT and `results`, and return INVALID_ARGUMENT: the launch failed."""
    if callback is not None:
        callback(INVALID, *results)
    return INVALID


def notify_when_done(reply: messages.Reply, future: Future[CallT], notify: Callable[[CallT | None], None]) -> None:
    """Call `notify` once with the callback's message, or with None if the driver dies before it.

    On this thread if the launch failed, otherwise on a new one.
    """
    if reply.status is not NONE:  # then the driver has sent the callback before the reply
        notify(future.result(None))
    else:
        threading.Thread(target=_wait_and_notify, args=(future, notify), name="nnfmq-callback", daemon=True).start()


def _wait_and_notify(future: Future[CallT], notify: Callable[[CallT | None], None]) -> None:
    try:
        message: CallT | None = future.result(None)
    except DeadObject:
        message = None
    notify(message)


# ----------------------------------------------------------------------------------------------------------------------
# IBurst and IBurstContext: HIDL's bursts, over the caller's queues and with the caller's callback (BUR-2).


class BurstContext(Uncopyable):
    """IBurstContext: a burst over two queues, which it borrows. Close it before them."""

    def __init__(self, connection: Connection, callback: Any, queues: tuple[MessageQueue, MessageQueue]) -> None:
        self._connection = connection
        self._callback = callback
        self._queues = queues
        self._burst_id = 0
        self.peer = watcher.DeathRecipients(flag := PeerDeathFlag())
        for queue in queues:
            queue.peer_death = flag  # ends all waits when the driver dies
        self.peer.add(*queues)

    def on_configured(self, reply: messages.BurstConfigured) -> None:
        """Store the id, and serve the driver's GetMemories calls from now on."""
        self._burst_id = reply.burst_id
        if reply.status is NONE:
            self._connection.add_burst(reply.burst_id, self)

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories that the callback returns. Runs on the connection's thread."""
        status, memories = self._callback.getMemories(list(slots))
        if status is not NONE:
            raise error_for_status(status, "returned by the callback's getMemories")
        return list(memories)

    def freeMemory(self, slot: int) -> None:
        """Make the driver unmap the memory of a slot; blocks until it has. An unknown slot has no effect."""
        self._connection.send(messages.FreeMemory(self._burst_id, slot))
        # FreeMemory has no reply. The driver handles messages in order, so a later call's reply follows it.
        message = messages.ListDevices(self._connection.next_call_id())
        self._connection.exchange(message, messages.DeviceList)

    def close(self) -> None:
        """Drop the reference: the burst ends in the driver. Idempotent."""
        if self._burst_id and self._connection.is_open:
            message = messages.CloseBurst(self._connection.next_call_id(), self._burst_id)
            self._connection.exchange(message, messages.Reply)
        self._connection.discard_burst(self._burst_id, self.peer)
        self.peer.discard(*self._queues)
        self._burst_id = 0


def configure_burst(
    model: ModelReference,
    level: FeatureLevel,
    callback: Any,
    requests: MessageQueue,
    results: MessageQueue,
) -> tuple[ErrorStatus, BurstContext | None]:
    """Return a status and a burst over two queues, or a status and None.

    Borrows the queues until the burst is closed. `callback.getMemories(slots)` returns a status and a memory for each
    slot; the thread of the client's connection calls it.
    """
    connection = model.connection
    context = BurstContext(connection, callback, (requests, results))
    connection.add_peer(context.peer)
    descriptors = to_wire_descriptor(requests), to_wire_descriptor(results)
    message = messages.ConfigureBurst(connection.next_call_id(), model.model_id, *descriptors)
    fds = [requests.memory.fileno(), results.memory.fileno()]
    reply = connection.exchange(message, messages.BurstConfigured, fds, on_reply=context.on_configured)
    if reply.status is not NONE:
        context.close()
        return status_at(level, reply.status), None
    return NONE, context


# ----------------------------------------------------------------------------------------------------------------------
# IPreparedModel: synchronous, asynchronous and fenced executions, and bursts (EXE-15, TIM-2).


def _execution(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    measure: MeasureTiming,
    deadline: int | None,
    loop_timeout: int | None,
) -> tuple[dict[str, Any], list[int]]:
    """Return the fields that all calls with a request have, and the fds.

    Raises:
        InvalidArgument: If no method of this level can carry the request: before 1.3, one with a managed buffer.
    """
    convert_to(request, level)
    timeout_ns = LoopTimeoutDurationNs.DEFAULT if loop_timeout is None else loop_timeout
    fields = {
        "call": model.connection.next_call_id(),
        "model_id": model.model_id,
        "request": messages.request_to_data(request),
        "config": messages.ConfigData(measure, timeout_ns),
        "deadline_ns": to_limit_field(deadline),
    }
    return fields, memory_fds(request.pools)


def _execute_synchronously(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    measure: MeasureTiming,
    deadline: int | None = None,
    loop_timeout: int | None = None,
) -> tuple[ErrorStatus, list[OutputShape], HidlTiming]:
    try:
        fields, fds = _execution(model, level, request, measure, deadline, loop_timeout)
        reply = model.connection.exchange(messages.Execute(**fields), messages.Executed, fds)
    except InvalidArgument:
        return INVALID, [], NO_HIDL_TIMING
    return status_at(level, reply.status), list(messages.shapes_from_data(reply.shapes)), _timing(reply)


def _timing(reply: messages.Executed | messages.ExecutionFinished) -> HidlTiming:
    return HidlTiming.from_ns(reply.time_on_device_ns, reply.time_in_driver_ns)


_EXECUTE: dict[FeatureLevel, tuple[str, ...]] = {  # the parameters after the request
    V1_0: ("callback",),
    V1_2: ("measure", "callback"),
    V1_3: ("measure", "deadline", "loopTimeoutDuration", "callback"),
}
_NO_RESULT: dict[FeatureLevel, tuple[Any, ...]] = {V1_0: (), V1_2: ([], NO_HIDL_TIMING), V1_3: ([], NO_HIDL_TIMING)}


def _execute(model: IPreparedModel, level: FeatureLevel, request: Request, *arguments: Any) -> ErrorStatus:
    args = dict(zip(_EXECUTE[level], arguments, strict=True))
    measure, callback = args.get("measure", MeasureTiming.NO), args["callback"]
    limits = args.get("deadline"), args.get("loopTimeoutDuration")
    if callback is None:
        return INVALID

    def notify(reply: messages.ExecutionFinished | None) -> None:
        status = ErrorStatus.GENERAL_FAILURE if reply is None else status_at(level, reply.status)
        if reply is None or level < V1_2:
            callback(status, *_NO_RESULT[level])
        else:
            callback(status, list(messages.shapes_from_data(reply.shapes)), _timing(reply))

    future: Future[messages.ExecutionFinished] = Future()
    try:
        fields, fds = _execution(model, level, request, measure, *limits)
        message = messages.ExecuteAsynchronously(**fields)
        reply = model.connection.call_with_callback(message, messages.ExecutionFinished, future, fds)
    except InvalidArgument:
        return reject(callback, *_NO_RESULT[level])
    notify_when_done(reply, future, notify)
    return status_at(level, reply.status)


class FencedCallback:
    """IFencedExecutionCallback. Owns the fence that came with it. Close it."""

    def __init__(self, execution: FencedExecution[FencedTiming]) -> None:
        self._execution = execution

    def getExecutionInfo(self) -> tuple[ErrorStatus, HidlTiming, HidlTiming]:
        """Return the status, the times from the launch, and the times from the last fence."""
        try:
            times = self._execution.info()
        except DeadObject:
            raise
        except NnfmqError as error:
            return status_for_error(error), NO_HIDL_TIMING, NO_HIDL_TIMING
        launched, fenced = (HidlTiming.from_ns(timing.time_on_device_ns, timing.time_in_driver_ns) for timing in times)
        return NONE, launched, fenced

    def close(self) -> None:
        """Drop the reference, and close the fence."""
        self._execution.close()


def _execute_fenced(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    wait_for: Sequence[HasFileno | int | None],
    measure: MeasureTiming,
    deadline: int | None,
    loop_timeout: int | None,
    duration: int | None,
) -> tuple[ErrorStatus, Fence | None, FencedCallback | None]:
    """A handle without an fd is None, which is INVALID_ARGUMENT (N-REQ-3)."""
    fences = [fence for fence in wait_for if fence is not None]
    if len(fences) < len(wait_for):
        return INVALID, None, None
    try:
        fields, fds = _execution(model, level, request, measure, deadline, loop_timeout)
        message = messages.ExecuteFenced(**fields, duration_ns=to_limit_field(duration), fence_count=len(fences))
        launched = DeviceFencedExecution.launch(
            ModelLocation(model.connection, None), message, [*fds, *fence_fds(fences)], None, lambda times: times
        )
    except DeadObject:
        raise
    except NnfmqError as error:
        return status_at(level, status_for_error(error)), None, None
    return NONE, launched.fence, FencedCallback(launched)


PREPARED_MODEL: dict[str, Method] = {
    "execute": Method(V1_0, _execute),
    "execute_1_2": Method(V1_2, _execute),
    "execute_1_3": Method(V1_3, _execute),
    "executeFenced": Method(V1_3, _execute_fenced),
    "executeSynchronously": Method(V1_2, _execute_synchronously),
    "executeSynchronously_1_3": Method(V1_3, _execute_synchronously),
    "configureExecutionBurst": Method(V1_2, configure_burst),
}


class IPreparedModel(VersionedObject):
    """A prepared model with the methods of the connection's HIDL version, which are in PREPARED_MODEL. Close it."""

    methods = PREPARED_MODEL

    def __init__(self, connection: Connection, model_id: int) -> None:
        self.connection = connection
        self.model_id = model_id

    def close(self) -> None:
        """Drop the reference: the driver releases the model."""
        if self.connection.is_open:
            self.connection.exchange(
                messages.ReleaseModel(self.connection.next_call_id(), self.model_id), messages.Reply
            )


# ----------------------------------------------------------------------------------------------------------------------
# IDevice.allocate and IBuffer: managed buffers, since HIDL 1.3 (DOM).


_NO_MODEL = 0  # an id that the driver never assigns


def allocate(
    device: NamedDevice,
    level: FeatureLevel,
    desc: BufferDesc,
    prepared_models: Sequence[ModelReference | None],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
) -> tuple[ErrorStatus, IBuffer | None, int]:
    """Return a status, a buffer, and its token for a request's pools; None and 0 if the status is not NONE.

    A null reference is None. It is INVALID_ARGUMENT, and so is a model of another connection (N-DOM-2, N-DOM-3).
    """
    connection = device.connection
    model_ids = (m.model_id if m is not None and m.connection is connection else _NO_MODEL for m in prepared_models)
    roles = (
        tuple(messages.RoleData(role.model_index, role.io_index, role.probability) for role in part)
        for part in (input_roles, output_roles)
    )
    call_id = connection.next_call_id()
    message = messages.Allocate(call_id, device.name, tuple(desc.dimensions), tuple(model_ids), *roles)
    try:
        reply = connection.exchange(message, messages.Allocated)
    except InvalidArgument:  # an index or a dimension is not a uint32
        return INVALID, None, 0
    if reply.status is not NONE:
        return status_at(level, reply.status), None, 0
    return NONE, IBuffer(connection, reply.buffer_id), reply.token


def _copy_from(buffer: IBuffer, level: FeatureLevel, source: Pool, dimensions: Sequence[int]) -> ErrorStatus:
    """`dimensions` is the shape of the memory's content, [] if the buffer has a fixed shape."""
    return _copy(buffer, level, source, messages.CopyFrom, tuple(dimensions))


def _copy_to(buffer: IBuffer, level: FeatureLevel, target: Pool) -> ErrorStatus:
    return _copy(buffer, level, target, messages.CopyTo)


def _copy(
    buffer: IBuffer, level: FeatureLevel, memory: Pool, call: type[messages.CopyFrom | messages.CopyTo], *more: Any
) -> ErrorStatus:
    try:
        message = call(buffer.connection.next_call_id(), buffer.buffer_id, messages.memory_to_data(memory), *more)
        reply = buffer.connection.exchange(message, messages.Reply, memory_fds([memory]))
    except InvalidArgument:
        return INVALID
    return status_at(level, reply.status)


BUFFER: dict[str, Method] = {"copyFrom": Method(V1_3, _copy_from), "copyTo": Method(V1_3, _copy_to)}


class IBuffer(VersionedObject):
    """A managed buffer; its methods are in BUFFER. Close it: its token is invalid afterwards."""

    methods = BUFFER

    def __init__(self, connection: Connection, buffer_id: int) -> None:
        self.connection = connection
        self.buffer_id = buffer_id

    def close(self) -> None:
        """Drop the reference: the driver frees the buffer after the executions that use it."""
        if self.connection.is_open:
            message = messages.ReleaseBuffer(self.connection.next_call_id(), self.buffer_id)
            with suppress(BadState, DeadObject):  # the client may be closed, or the driver exit, during the call
                self.connection.exchange(message, messages.Reply)


# ----------------------------------------------------------------------------------------------------------------------
# IDevice: queries, and preparation of models, from the model itself or from cache files (DEV-13, CACHE).


Consumers = Sequence[Sequence[int]]
Handle = Sequence[int]
PreparedCallback = Callable[[ErrorStatus, IPreparedModel | None], None]


# -- queries ----------------------------------------------------------------------------------------------------------


def _get_status(device: IDevice, _level: FeatureLevel) -> DeviceStatus:
    return device.info().status


_EMPTY_INFO = messages.DeviceInfo("", DeviceType.OTHER, "", 0, DeviceStatus.UNKNOWN, ())


def _query(read: Callable[[messages.DeviceInfo], Sequence[Any]]) -> Callable[..., tuple[Any, ...]]:
    """Return a method that returns NONE and what `read` finds, or DEVICE_UNAVAILABLE and empty values (N-BAS-5)."""

    def run(device: IDevice, _level: FeatureLevel) -> tuple[Any, ...]:
        info = device.info()
        if info.status is not DeviceStatus.AVAILABLE:
            return ErrorStatus.DEVICE_UNAVAILABLE, *read(_EMPTY_INFO)
        return NONE, *read(info)

    return run


def _get_capabilities(device: IDevice, level: FeatureLevel) -> tuple[ErrorStatus, SimpleNamespace | None]:
    message = messages.GetCapabilities(device.connection.next_call_id(), device.name)
    reply = device.connection.exchange(message, messages.DeviceCapabilities)
    if reply.capabilities is None:
        return status_at(level, reply.status), None
    found = convert_to(messages.capabilities_from_data(reply.capabilities), level).value
    fields = {name: read(found) for name, read in _CAPABILITIES[level].items()}
    return status_at(level, reply.status), SimpleNamespace(**fields)


def _performance(type: OperandType) -> Callable[[Capabilities], PerformanceInfo]:
    return lambda found: performance_of(found, type)


_PERFORMANCE_1_0: dict[str, Callable[[Capabilities], Any]] = {
    "float32Performance": _performance(OperandType.TENSOR_FLOAT32),
    "quantized8Performance": _performance(OperandType.TENSOR_QUANT8_ASYMM),
}
_PERFORMANCE_1_2: dict[str, Callable[[Capabilities], Any]] = {
    "relaxedFloat32toFloat16PerformanceScalar": lambda found: found.relaxed_float32_to_float16_scalar,
    "relaxedFloat32toFloat16PerformanceTensor": lambda found: found.relaxed_float32_to_float16_tensor,
    "operandPerformance": lambda found: list(found.operand_performance),
}
_CAPABILITIES: dict[FeatureLevel, dict[str, Callable[[Capabilities], Any]]] = {
    V1_0: _PERFORMANCE_1_0,
    V1_1: {
        **_PERFORMANCE_1_0,
        "relaxedFloat32toFloat16Performance": lambda found: found.relaxed_float32_to_float16_tensor,
    },
    V1_2: _PERFORMANCE_1_2,
    V1_3: {
        **_PERFORMANCE_1_2,
        "ifPerformance": lambda found: found.if_performance,
        "whilePerformance": lambda found: found.while_performance,
    },
}


# -- models -----------------------------------------------------------------------------------------------------------


def _consumers(model: Model, consumers: Consumers | None) -> tuple[tuple[int, ...], ...]:
    graphs = (model.main, *model.referenced)
    return tuple(map(tuple, consumers if consumers is not None else map(number_of_consumers, graphs)))


def _can_carry(device: IDevice, level: FeatureLevel, model: Model) -> bool:
    """Return False if a method older than the connection's interface version cannot carry the model unchanged."""
    if level == device.connection.level:
        return True  # the driver validates it
    try:
        return not convert_to(model, level).lost
    except InvalidArgument:
        return False


def _get_supported_operations(
    device: IDevice, level: FeatureLevel, model: Model, *, consumers: Consumers | None = None
) -> tuple[ErrorStatus, list[bool]]:
    """`consumers` is numberOfConsumers of each subgraph's operands; by default it is computed."""
    if not _can_carry(device, level, model):
        return INVALID, []
    data, pools = encode_model(model)
    pool_data, call = tuple(map(messages.memory_to_data, pools)), device.connection.next_call_id()
    message = messages.GetSupportedOperations(call, device.name, data, pool_data, _consumers(model, consumers))
    reply = device.connection.exchange(message, messages.SupportedOperations, memory_fds(pools))
    return status_at(level, reply.status), list(reply.supported)


_CACHE = ("modelCache", "dataCache", "token")
_PREPARE: dict[FeatureLevel, tuple[str, ...]] = {  # the parameters after the model
    V1_0: ("callback",),
    V1_1: ("preference", "callback"),
    V1_2: ("preference", *_CACHE, "callback"),
    V1_3: ("preference", "priority", "deadline", *_CACHE, "callback"),
}
_PREPARE_FROM_CACHE: dict[FeatureLevel, tuple[str, ...]] = {
    V1_2: (*_CACHE, "callback"),
    V1_3: ("deadline", *_CACHE, "callback"),
}
_Caches = tuple[messages.CachesData, list[int]]
_NO_CACHES: _Caches = (messages.CachesData(), [])


def _prepare_model(
    device: IDevice, level: FeatureLevel, model: Model, *arguments: Any, consumers: Consumers | None = None
) -> ErrorStatus:
    args = dict(zip(_PREPARE[level], arguments, strict=True))
    callback: PreparedCallback | None = args["callback"]
    if callback is None or not _can_carry(device, level, model):
        return reject(callback, None)
    preference: int = args.get("preference", DEFAULT_PREFERENCE)
    data, pools = encode_model(model)
    caches, cache_fds = _caches(args) or _NO_CACHES  # invalid cache files do not fail the call (CACHE-4)
    message = messages.PrepareModel(
        device.connection.next_call_id(),
        device.name,
        preference,
        args.get("priority", Priority.MEDIUM),
        to_limit_field(args.get("deadline")),
        data,
        tuple(map(messages.memory_to_data, pools)),
        _consumers(model, consumers),
        caches,
    )
    return _launch(device, level, message, [*memory_fds(pools), *cache_fds], callback)


def _prepare_model_from_cache(device: IDevice, level: FeatureLevel, *arguments: Any) -> ErrorStatus:
    args = dict(zip(_PREPARE_FROM_CACHE[level], arguments, strict=True))
    callback: PreparedCallback | None = args["callback"]
    found = _caches(args)
    if callback is None or found is None:
        return reject(callback, None)
    caches, fds = found
    call, deadline_ns = device.connection.next_call_id(), to_limit_field(args.get("deadline"))
    message = messages.PrepareModelFromCache(call, device.name, deadline_ns, caches)
    return _launch(device, level, message, fds, callback)


def _caches(args: Mapping[str, Any]) -> _Caches | None:
    """Return the cache files of a call, and their fds; None for files that no driver accepts.

    These are a handle that does not have exactly one fd, more handles than any device needs, and a token of another
    length.
    """
    kinds: list[Sequence[Handle]] = [args.get(name, ()) for name in ("modelCache", "dataCache")]
    handles = [handle for kind in kinds for handle in kind]
    if not handles:
        return _NO_CACHES  # then the token is ignored, too (CACHE-7)
    if any(len(handle) != 1 for handle in handles) or max(map(len, kinds)) > MAX_NUMBER_OF_CACHE_FILES:
        return None
    if len(args["token"]) != BYTE_SIZE_OF_CACHE_TOKEN:
        return None
    return messages.CachesData(args["token"], *map(len, kinds)), [fd for (fd,) in handles]


def _launch(
    device: IDevice,
    level: FeatureLevel,
    message: messages.PrepareModel | messages.PrepareModelFromCache,
    fds: Sequence[int],
    callback: PreparedCallback,
) -> ErrorStatus:
    """Send either call. `callback` gets the prepared model, or the status of the failure and None."""

    def notify(reply: messages.PreparedModelReady | None) -> None:
        if reply is None or reply.status is not NONE:
            callback(ErrorStatus.GENERAL_FAILURE if reply is None else status_at(level, reply.status), None)
        else:
            callback(NONE, IPreparedModel(device.connection, reply.model_id))

    future: Future[messages.PreparedModelReady] = Future()
    try:
        reply = device.connection.call_with_callback(message, messages.PreparedModelReady, future, fds)
    except InvalidArgument:  # no message can carry it: integers out of range, too many pools
        return reject(callback, None)
    notify_when_done(reply, future, notify)
    return status_at(level, reply.status)


DEVICE: dict[str, Method] = {
    "getStatus": Method(V1_0, _get_status),
    "getCapabilities": Method(V1_0, _get_capabilities),
    "getCapabilities_1_1": Method(V1_1, _get_capabilities),
    "getCapabilities_1_2": Method(V1_2, _get_capabilities),
    "getCapabilities_1_3": Method(V1_3, _get_capabilities),
    "getVersionString": Method(V1_2, _query(lambda info: [info.version])),
    "getType": Method(V1_2, _query(lambda info: [info.type])),
    "getSupportedExtensions": Method(V1_2, _query(lambda info: [list(info.extensions)])),
    "getNumberOfCacheFilesNeeded": Method(V1_2, _query(lambda info: [info.model_cache_files, info.data_cache_files])),
    "getSupportedOperations": Method(V1_0, _get_supported_operations),
    "getSupportedOperations_1_1": Method(V1_1, _get_supported_operations),
    "getSupportedOperations_1_2": Method(V1_2, _get_supported_operations),
    "getSupportedOperations_1_3": Method(V1_3, _get_supported_operations),
    "prepareModel": Method(V1_0, _prepare_model),
    "prepareModel_1_1": Method(V1_1, _prepare_model),
    "prepareModel_1_2": Method(V1_2, _prepare_model),
    "prepareModel_1_3": Method(V1_3, _prepare_model),
    "prepareModelFromCache": Method(V1_2, _prepare_model_from_cache),
    "prepareModelFromCache_1_3": Method(V1_3, _prepare_model_from_cache),
    "allocate": Method(V1_3, allocate),
}


class IDevice(VersionedObject):
    """A device with the methods of the connection's HIDL version, which are in DEVICE.

    Raises:
        InvalidArgument: If the client's interface version is AIDL's, or there is no such device.
    """

    methods = DEVICE

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = client.device(name).info.name
        self.connection = client.connection
        if self.connection.is_aidl:
            raise InvalidArgument(
                f"this client uses {client.interface}; connect with interface='HIDL 1.3' or an older one"
            )

    def info(self) -> messages.DeviceInfo:
        """Return the device's current description."""
        return self._client.device(self.name).info
