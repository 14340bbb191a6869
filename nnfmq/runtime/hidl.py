"""HIDL's call forms, for tests of drivers that were written against android.hardware.neuralnetworks 1.0 to 1.3.

    with nnfmq.connect(interface="HIDL 1.2") as client:
        device = hidl.IDevice(client, "reference")
        status, capabilities = device.getCapabilities_1_2()
        status = device.prepareModel_1_2(model, preference, [], [], token, callback)
        status, shapes, timing = prepared.executeSynchronously(request, measure)

Methods have the HAL's names and order of arguments, and answer what it `generates`: a status, not an exception. Which
there are follows from the interface that the connection speaks: a method of a later one is an AttributeError. All are
in the tables DEVICE and PREPARED_MODEL. A callback is called exactly once with what the HAL hands to `notify`: on the
caller's thread where the launch was refused, otherwise on one of its own. Times are microseconds, UINT64_MAX where they
are not available; a deadline is None or a point of the steady clock in ns, a duration None or ns. Only a driver that is
gone raises: DeadObject, as a transaction fails in HIDL. A form that is older than the connection's interface is judged
here where the driver cannot know of it: models by their version, statuses and capabilities by what it can say.
(REQUIREMENTS DEV-13, EXE-15, TIM-2, CAP-2)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from nnfmq import watcher
from nnfmq.fence import Fence, HasFileno
from nnfmq.hal.device import Capabilities, PerformanceInfo, lookup
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument, NnfmqError, error_for
from nnfmq.hal.types import (
    NO_TIME,
    DeviceStatus,
    ExecutionPreference,
    LoopTimeoutDurationNs,
    MeasureTiming,
    Model,
    OperandType,
    OutputShape,
    Pool,
    Priority,
    Request,
)
from nnfmq.hal.versions import HIDL_NO_TIME, FeatureLevel, interface_name, microseconds, number_of_consumers
from nnfmq.queue import DeadFlag, MessageQueue
from nnfmq.runtime.answers import OneShot
from nnfmq.runtime.burst import descriptor_data
from nnfmq.runtime.client import Client
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.fenced import FencedExecution, FencedTiming, fence_fds
from nnfmq.runtime.outcomes import lent_fds
from nnfmq.serialize import messages
from nnfmq.serialize.model import encode_model
from nnfmq.validation.conversion import convert_to

__all__ = ["NO_TIMING", "UINT64_MAX", "BurstContext", "FencedCallback", "IDevice", "IPreparedModel", "Timing"]

UINT64_MAX = HIDL_NO_TIME
V1_0, V1_1, V1_2, V1_3 = FeatureLevel.V1_0, FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3
NONE = ErrorStatus.NONE
CallT = TypeVar("CallT", bound=messages.Call)
Consumers = Sequence[Sequence[int]]


class Timing(NamedTuple):
    """HIDL's Timing, in microseconds."""

    timeOnDevice: int = UINT64_MAX
    timeInDriver: int = UINT64_MAX


NO_TIMING = Timing()


class Form(NamedTuple):
    """One method: the interface that brought it, and what it does, given that interface's level."""

    level: FeatureLevel
    run: Callable[..., Any]


def _form(forms: Mapping[str, Form], owner: Any, level: FeatureLevel, name: str) -> Callable[..., Any]:
    found = forms.get(name)
    if found is None or found.level > level:
        raise AttributeError(f"{type(owner).__name__} of {interface_name(level)} has no {name}")
    return partial(found.run, owner, found.level)


def _status(status: ErrorStatus, level: FeatureLevel) -> ErrorStatus:
    return convert_to(status, level).value


def _after(reply: messages.Reply, waiting: OneShot[CallT], notify: Callable[[CallT | None], None]) -> None:
    """Have `notify` called once with the callback's answer, None where the driver died before it."""
    if reply.status is not NONE:  # then the callback came first
        notify(waiting.wait(None))
    else:
        threading.Thread(target=_notify, args=(waiting, notify), name="nnfmq-callback", daemon=True).start()


def _notify(waiting: OneShot[CallT], notify: Callable[[CallT | None], None]) -> None:
    try:
        answer: CallT | None = waiting.wait(None)
    except DeadObject:
        answer = None
    notify(answer)


# -- IDevice ----------------------------------------------------------------------------------------------------------


class IDevice:
    """A device as the connection's HIDL interface has it; its methods are in DEVICE.

    Raises InvalidArgument for a client that speaks AIDL, and for an unknown device.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = client.device(name).info.name
        self.connection = client.connection
        if self.connection.is_aidl:
            raise InvalidArgument(
                f"this client speaks {client.interface}; connect with interface='HIDL 1.3' or an older one"
            )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _form(DEVICE, self, FeatureLevel(self.connection.level), name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name, form in DEVICE.items() if form.level <= self.connection.level)]

    def info(self) -> messages.DeviceInfo:
        """Return what the device says of itself now."""
        return self._client.device(self.name).info


def _get_status(device: IDevice, _level: FeatureLevel) -> DeviceStatus:
    return device.info().status


def _get_capabilities(device: IDevice, level: FeatureLevel) -> tuple[ErrorStatus, SimpleNamespace | None]:
    message = messages.GetCapabilities(device.connection.new_call(), device.name)
    answer = device.connection.ask(message, messages.DeviceCapabilities)
    if answer.capabilities is None:
        return _status(answer.status, level), None
    found = convert_to(messages.capabilities_from_data(answer.capabilities), level).value
    fields = {name: read(found) for name, read in _CAPABILITIES[level].items()}
    return _status(answer.status, level), SimpleNamespace(**fields)


def _figure(type: OperandType) -> Callable[[Capabilities], PerformanceInfo]:
    return lambda found: lookup(found, type)


_FIRST: dict[str, Callable[[Capabilities], Any]] = {
    "float32Performance": _figure(OperandType.TENSOR_FLOAT32),
    "quantized8Performance": _figure(OperandType.TENSOR_QUANT8_ASYMM),
}
_LIST: dict[str, Callable[[Capabilities], Any]] = {
    "relaxedFloat32toFloat16PerformanceScalar": lambda found: found.relaxed_float32_to_float16_scalar,
    "relaxedFloat32toFloat16PerformanceTensor": lambda found: found.relaxed_float32_to_float16_tensor,
    "operandPerformance": lambda found: list(found.operand_performance),
}
_CAPABILITIES: dict[FeatureLevel, dict[str, Callable[[Capabilities], Any]]] = {
    V1_0: _FIRST,
    V1_1: {**_FIRST, "relaxedFloat32toFloat16Performance": lambda found: found.relaxed_float32_to_float16_tensor},
    V1_2: _LIST,
    V1_3: {
        **_LIST,
        "ifPerformance": lambda found: found.if_performance,
        "whilePerformance": lambda found: found.while_performance,
    },
}


def _consumers(model: Model, given: Consumers | None) -> tuple[tuple[int, ...], ...]:
    graphs = (model.main, *model.referenced)
    return tuple(map(tuple, given if given is not None else map(number_of_consumers, graphs)))


def _fault(device: IDevice, level: FeatureLevel, model: Model) -> NnfmqError | None:
    """Return what is wrong with a model that a form older than the connection's interface cannot carry."""
    if level < device.connection.level:
        try:
            convert_to(model, level)
        except InvalidArgument as error:
            return error
    return None


def _get_supported_operations(
    device: IDevice, level: FeatureLevel, model: Model, *, consumers: Consumers | None = None
) -> tuple[ErrorStatus, list[bool]]:
    """`consumers` is numberOfConsumers of each subgraph's operands, by default the true one."""
    if _fault(device, level, model) is not None:
        return ErrorStatus.INVALID_ARGUMENT, []
    data, pools = encode_model(model)
    lent, call = tuple(map(messages.memory_to_data, pools)), device.connection.new_call()
    message = messages.GetSupportedOperations(call, device.name, data, lent, _consumers(model, consumers))
    answer = device.connection.ask(message, messages.SupportedOperations, lent_fds(pools))
    return _status(answer.status, level), list(answer.supported)


_PREPARE: dict[FeatureLevel, tuple[str, ...]] = {  # what comes after the model
    V1_0: ("callback",),
    V1_1: ("preference", "callback"),
    V1_2: ("preference", "modelCache", "dataCache", "token", "callback"),
    V1_3: ("preference", "priority", "deadline", "modelCache", "dataCache", "token", "callback"),
}
PreparedCallback = Callable[[ErrorStatus, "IPreparedModel | None"], None]


def _prepare_model(
    device: IDevice, level: FeatureLevel, model: Model, *arguments: Any, consumers: Consumers | None = None
) -> ErrorStatus:
    given = dict(zip(_PREPARE[level], arguments, strict=True))
    callback: PreparedCallback = given["callback"]
    # No device here has cache files, so any handle is one too many.
    if _fault(device, level, model) is not None or given.get("modelCache") or given.get("dataCache"):
        callback(ErrorStatus.INVALID_ARGUMENT, None)
        return ErrorStatus.INVALID_ARGUMENT
    data, pools = encode_model(model)
    deadline_ns = given.get("deadline")
    message = messages.PrepareModel(
        device.connection.new_call(),
        device.name,
        given.get("preference", ExecutionPreference.FAST_SINGLE_ANSWER),
        given.get("priority", Priority.MEDIUM),
        NO_TIME if deadline_ns is None else deadline_ns,
        data,
        tuple(map(messages.memory_to_data, pools)),
        _consumers(model, consumers),
    )

    def notify(answer: messages.PreparedModelReady | None) -> None:
        if answer is None or answer.status is not NONE:
            callback(ErrorStatus.GENERAL_FAILURE if answer is None else _status(answer.status, level), None)
        else:
            callback(NONE, IPreparedModel(device.connection, answer.model_id))

    waiting: OneShot[messages.PreparedModelReady] = OneShot()
    reply = device.connection.launch(message, messages.PreparedModelReady, waiting, lent_fds(pools))
    _after(reply, waiting, notify)
    return _status(reply.status, level)


DEVICE: dict[str, Form] = {
    "getStatus": Form(V1_0, _get_status),
    "getCapabilities": Form(V1_0, _get_capabilities),
    "getCapabilities_1_1": Form(V1_1, _get_capabilities),
    "getCapabilities_1_2": Form(V1_2, _get_capabilities),
    "getCapabilities_1_3": Form(V1_3, _get_capabilities),
    "getVersionString": Form(V1_2, lambda device, _level: (NONE, device.info().version)),
    "getType": Form(V1_2, lambda device, _level: (NONE, device.info().type)),
    "getSupportedExtensions": Form(V1_2, lambda device, _level: (NONE, list(device.info().extensions))),
    "getNumberOfCacheFilesNeeded": Form(V1_2, lambda _device, _level: (NONE, 0, 0)),
    "getSupportedOperations": Form(V1_0, _get_supported_operations),
    "getSupportedOperations_1_1": Form(V1_1, _get_supported_operations),
    "getSupportedOperations_1_2": Form(V1_2, _get_supported_operations),
    "getSupportedOperations_1_3": Form(V1_3, _get_supported_operations),
    "prepareModel": Form(V1_0, _prepare_model),
    "prepareModel_1_1": Form(V1_1, _prepare_model),
    "prepareModel_1_2": Form(V1_2, _prepare_model),
    "prepareModel_1_3": Form(V1_3, _prepare_model),
}


# -- IPreparedModel ---------------------------------------------------------------------------------------------------


class IPreparedModel:
    """A prepared model as the connection's HIDL interface has it; its methods are in PREPARED_MODEL. Close it."""

    def __init__(self, connection: Connection, model_id: int) -> None:
        self.connection = connection
        self.model_id = model_id

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _form(PREPARED_MODEL, self, FeatureLevel(self.connection.level), name)

    def __dir__(self) -> list[str]:
        level = self.connection.level
        return [*super().__dir__(), *(name for name, form in PREPARED_MODEL.items() if form.level <= level)]

    def close(self) -> None:
        """Drop the reference: the driver releases the model."""
        if self.connection.is_open:
            self.connection.ask(messages.ReleaseModel(self.connection.new_call(), self.model_id), messages.Reply)


def _execution(
    model: IPreparedModel, request: Request, measure: MeasureTiming, deadline: int | None, loop_timeout: int | None
) -> tuple[dict[str, Any], list[int]]:
    """Return the fields that all calls with a request have, and the descriptors."""
    timeout_ns = LoopTimeoutDurationNs.DEFAULT if loop_timeout is None else loop_timeout
    fields = {
        "call": model.connection.new_call(),
        "model_id": model.model_id,
        "request": messages.request_to_data(request),
        "config": messages.ConfigData(measure, timeout_ns),
        "deadline_ns": NO_TIME if deadline is None else deadline,
    }
    return fields, lent_fds(request.pools)


def _execute_synchronously(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    measure: MeasureTiming,
    deadline: int | None = None,
    loop_timeout: int | None = None,
) -> tuple[ErrorStatus, list[OutputShape], Timing]:
    fields, fds = _execution(model, request, measure, deadline, loop_timeout)
    answer = model.connection.ask(messages.Execute(**fields), messages.Executed, fds)
    return _status(answer.status, level), list(messages.shapes_from_data(answer.shapes)), _timing(answer)


def _timing(answer: messages.Executed | messages.ExecutionFinished) -> Timing:
    return Timing(microseconds(answer.time_on_device_ns), microseconds(answer.time_in_driver_ns))


_EXECUTE: dict[FeatureLevel, tuple[str, ...]] = {  # what comes after the request
    V1_0: ("callback",),
    V1_2: ("measure", "callback"),
    V1_3: ("measure", "deadline", "loopTimeoutDuration", "callback"),
}


def _execute(model: IPreparedModel, level: FeatureLevel, request: Request, *arguments: Any) -> ErrorStatus:
    given = dict(zip(_EXECUTE[level], arguments, strict=True))
    measure, callback = given.get("measure", MeasureTiming.NO), given["callback"]
    fields, fds = _execution(model, request, measure, given.get("deadline"), given.get("loopTimeoutDuration"))

    def notify(answer: messages.ExecutionFinished | None) -> None:
        status = ErrorStatus.GENERAL_FAILURE if answer is None else _status(answer.status, level)
        if level < V1_2:
            callback(status)
        elif answer is None:
            callback(status, [], NO_TIMING)
        else:
            callback(status, list(messages.shapes_from_data(answer.shapes)), _timing(answer))

    waiting: OneShot[messages.ExecutionFinished] = OneShot()
    message = messages.ExecuteAsynchronously(**fields)
    reply = model.connection.launch(message, messages.ExecutionFinished, waiting, fds)
    _after(reply, waiting, notify)
    return _status(reply.status, level)


class FencedCallback:
    """IFencedExecutionCallback, and the owner of the fence that came with it. Close it."""

    def __init__(self, execution: FencedExecution[FencedTiming]) -> None:
        self._execution = execution

    def getExecutionInfo(self) -> tuple[ErrorStatus, Timing, Timing]:
        """Return the status and the times from the launch and from the last fence on."""
        try:
            times = self._execution.info()
        except DeadObject:
            raise
        except NnfmqError as error:
            return error.status, NO_TIMING, NO_TIMING
        launched, fenced = (
            Timing(microseconds(timing.time_on_device_ns), microseconds(timing.time_in_driver_ns)) for timing in times
        )
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
    """A handle without a descriptor is None, which is INVALID_ARGUMENT (N-REQ-3)."""
    fences = [fence for fence in wait_for if fence is not None]
    if len(fences) < len(wait_for):
        return ErrorStatus.INVALID_ARGUMENT, None, None
    fields, fds = _execution(model, request, measure, deadline, loop_timeout)
    duration_ns = NO_TIME if duration is None else duration
    message = messages.ExecuteFenced(**fields, duration_ns=duration_ns, fence_count=len(fences))
    try:
        launched = FencedExecution.launch(
            model.connection, message, [*fds, *fence_fds(fences)], None, lambda times: times
        )
    except DeadObject:
        raise
    except NnfmqError as error:
        return _status(error.status, level), None, None
    return NONE, launched.fence, FencedCallback(launched)


# -- bursts -----------------------------------------------------------------------------------------------------------


class BurstContext:
    """IBurstContext: a burst over the caller's two queues, which stay his. Close it before them."""

    def __init__(self, connection: Connection, callback: Any, queues: tuple[MessageQueue, MessageQueue]) -> None:
        self._connection = connection
        self._callback = callback
        self._queues = queues
        self._burst_id = 0
        self.peer = watcher.Peer(flag := DeadFlag())
        for queue in queues:
            queue.dead = flag  # no wait outlives the driver
        self.peer.add(*queues)

    def open(self, answer: messages.BurstConfigured) -> None:
        """The driver has made it: it may ask for memories from now on."""
        self._burst_id = answer.burst_id
        if answer.status is NONE:
            self._connection.add_burst(answer.burst_id, self)

    def memories_of(self, slots: Sequence[int]) -> list[Pool]:
        """Ask the callback, as the driver wants."""
        status, memories = self._callback.getMemories(list(slots))
        if status is not NONE:
            raise error_for(status, "the callback answers so")
        return list(memories)

    def freeMemory(self, slot: int) -> None:
        """Let the driver forget a slot; an unknown one is no error."""
        self._connection.send(messages.FreeMemory(self._burst_id, slot))

    def close(self) -> None:
        """Drop the reference: the burst ends in the driver."""
        if self._burst_id and self._connection.is_open:
            self._connection.ask(messages.CloseBurst(self._connection.new_call(), self._burst_id), messages.Reply)
        self._connection.discard_burst(self._burst_id, self.peer)
        self.peer.discard(*self._queues)
        self._burst_id = 0


def _configure_burst(
    model: IPreparedModel,
    level: FeatureLevel,
    callback: Any,
    requests: MessageQueue,
    results: MessageQueue,
) -> tuple[ErrorStatus, BurstContext | None]:
    """`callback.getMemories(slots)` answers a status and a memory for each slot; it runs on the connection's thread."""
    connection = model.connection
    context = BurstContext(connection, callback, (requests, results))
    connection.add_peer(context.peer)
    message = messages.ConfigureBurst(
        connection.new_call(), model.model_id, descriptor_data(requests), descriptor_data(results)
    )
    fds = [requests.memory.fileno(), results.memory.fileno()]
    answer = connection.ask(message, messages.BurstConfigured, fds, on_answer=context.open)
    if answer.status is not NONE:
        context.close()
        return _status(answer.status, level), None
    return NONE, context


PREPARED_MODEL: dict[str, Form] = {
    "execute": Form(V1_0, _execute),
    "execute_1_2": Form(V1_2, _execute),
    "execute_1_3": Form(V1_3, _execute),
    "executeFenced": Form(V1_3, _execute_fenced),
    "executeSynchronously": Form(V1_2, _execute_synchronously),
    "executeSynchronously_1_3": Form(V1_3, _execute_synchronously),
    "configureExecutionBurst": Form(V1_2, _configure_burst),
}
