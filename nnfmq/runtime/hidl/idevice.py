"""IDevice: queries, and preparing models, from the model itself or from cache files (REQUIREMENTS DEV-13, CACHE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from nnfmq.hal.capabilities import (
    BYTE_SIZE_OF_CACHE_TOKEN,
    MAX_NUMBER_OF_CACHE_FILES,
    Capabilities,
    PerformanceInfo,
    performance_of,
)
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel, number_of_consumers
from nnfmq.hal.timing import to_limit_field
from nnfmq.hal.types import (
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    Model,
    OperandType,
    Priority,
)
from nnfmq.runtime.client import Client
from nnfmq.runtime.execution_result import memory_fds
from nnfmq.runtime.future import Future
from nnfmq.runtime.hidl.ibuffer import allocate
from nnfmq.runtime.hidl.iprepared_model import IPreparedModel
from nnfmq.runtime.hidl.methods import (
    INVALID,
    NONE,
    V1_0,
    V1_1,
    V1_2,
    V1_3,
    Form,
    HasForms,
    call_back,
    refused,
    status_of,
)
from nnfmq.serialize import messages
from nnfmq.serialize.model_codec import encode_model
from nnfmq.validation.interface_conversion import convert_to

Consumers = Sequence[Sequence[int]]
Handle = Sequence[int]
PreparedCallback = Callable[[ErrorStatus, IPreparedModel | None], None]


# -- queries ----------------------------------------------------------------------------------------------------------


def _get_status(device: IDevice, _level: FeatureLevel) -> DeviceStatus:
    return device.info().status


_NOTHING = messages.DeviceInfo("", DeviceType.OTHER, "", 0, DeviceStatus.UNKNOWN, ())


def _query(read: Callable[[messages.DeviceInfo], Sequence[Any]]) -> Callable[..., tuple[Any, ...]]:
    """Return a form that answers what `read` finds, and nothing while the device is busy or offline (N-BAS-5)."""

    def run(device: IDevice, _level: FeatureLevel) -> tuple[Any, ...]:
        info = device.info()
        if info.status is not DeviceStatus.AVAILABLE:
            return ErrorStatus.DEVICE_UNAVAILABLE, *read(_NOTHING)
        return NONE, *read(info)

    return run


def _get_capabilities(device: IDevice, level: FeatureLevel) -> tuple[ErrorStatus, SimpleNamespace | None]:
    message = messages.GetCapabilities(device.connection.new_call(), device.name)
    answer = device.connection.ask(message, messages.DeviceCapabilities)
    if answer.capabilities is None:
        return status_of(answer.status, level), None
    found = convert_to(messages.capabilities_from_data(answer.capabilities), level).value
    fields = {name: read(found) for name, read in _CAPABILITIES[level].items()}
    return status_of(answer.status, level), SimpleNamespace(**fields)


def _figure(type: OperandType) -> Callable[[Capabilities], PerformanceInfo]:
    return lambda found: performance_of(found, type)


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


# -- models -----------------------------------------------------------------------------------------------------------


def _consumers(model: Model, given: Consumers | None) -> tuple[tuple[int, ...], ...]:
    graphs = (model.main, *model.referenced)
    return tuple(map(tuple, given if given is not None else map(number_of_consumers, graphs)))


def _can_say(device: IDevice, level: FeatureLevel, model: Model) -> bool:
    """Return False for a model that a form older than the connection's interface cannot carry as it is."""
    if level == device.connection.level:
        return True  # the driver judges it
    try:
        return not convert_to(model, level).lost
    except InvalidArgument:
        return False


def _get_supported_operations(
    device: IDevice, level: FeatureLevel, model: Model, *, consumers: Consumers | None = None
) -> tuple[ErrorStatus, list[bool]]:
    """`consumers` is numberOfConsumers of each subgraph's operands, by default the true one."""
    if not _can_say(device, level, model):
        return INVALID, []
    data, pools = encode_model(model)
    lent, call = tuple(map(messages.memory_to_data, pools)), device.connection.new_call()
    message = messages.GetSupportedOperations(call, device.name, data, lent, _consumers(model, consumers))
    answer = device.connection.ask(message, messages.SupportedOperations, memory_fds(pools))
    return status_of(answer.status, level), list(answer.supported)


_CACHE = ("modelCache", "dataCache", "token")
_PREPARE: dict[FeatureLevel, tuple[str, ...]] = {  # what comes after the model
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
    given = dict(zip(_PREPARE[level], arguments, strict=True))
    callback: PreparedCallback | None = given["callback"]
    if callback is None or not _can_say(device, level, model):
        return refused(callback, None)
    data, pools = encode_model(model)
    caches, cache_fds = _caches(given) or _NO_CACHES  # what cannot be saved to changes nothing else (CACHE-4)
    message = messages.PrepareModel(
        device.connection.new_call(),
        device.name,
        given.get("preference", ExecutionPreference.FAST_SINGLE_ANSWER),
        given.get("priority", Priority.MEDIUM),
        to_limit_field(given.get("deadline")),
        data,
        tuple(map(messages.memory_to_data, pools)),
        _consumers(model, consumers),
        caches,
    )
    return _launch(device, level, message, [*memory_fds(pools), *cache_fds], callback)


def _prepare_model_from_cache(device: IDevice, level: FeatureLevel, *arguments: Any) -> ErrorStatus:
    given = dict(zip(_PREPARE_FROM_CACHE[level], arguments, strict=True))
    callback: PreparedCallback | None = given["callback"]
    found = _caches(given)
    if callback is None or found is None:
        return refused(callback, None)
    caches, fds = found
    call, deadline_ns = device.connection.new_call(), to_limit_field(given.get("deadline"))
    message = messages.PrepareModelFromCache(call, device.name, deadline_ns, caches)
    return _launch(device, level, message, fds, callback)


def _caches(given: Mapping[str, Any]) -> _Caches | None:
    """Return the cache files given, and their descriptors; None for what no driver can take, and no message carry.

    That is a handle that has not one descriptor, more handles than any device needs, and a token of another length.
    """
    kinds: list[Sequence[Handle]] = [given.get(name, ()) for name in ("modelCache", "dataCache")]
    handles = [handle for kind in kinds for handle in kind]
    if not handles:
        return _NO_CACHES  # and no token either (CACHE-7)
    if any(len(handle) != 1 for handle in handles) or max(map(len, kinds)) > MAX_NUMBER_OF_CACHE_FILES:
        return None
    if len(given["token"]) != BYTE_SIZE_OF_CACHE_TOKEN:
        return None
    return messages.CachesData(given["token"], *map(len, kinds)), [fd for (fd,) in handles]


def _launch(
    device: IDevice,
    level: FeatureLevel,
    message: messages.PrepareModel | messages.PrepareModelFromCache,
    fds: Sequence[int],
    callback: PreparedCallback,
) -> ErrorStatus:
    """Send either call; `callback` is called with what the driver made, or why it did not."""

    def notify(answer: messages.PreparedModelReady | None) -> None:
        if answer is None or answer.status is not NONE:
            callback(ErrorStatus.GENERAL_FAILURE if answer is None else status_of(answer.status, level), None)
        else:
            callback(NONE, IPreparedModel(device.connection, answer.model_id))

    waiting: Future[messages.PreparedModelReady] = Future()
    try:
        reply = device.connection.launch(message, messages.PreparedModelReady, waiting, fds)
    except InvalidArgument:  # what no message carries: numbers of other types, too many pools
        return refused(callback, None)
    call_back(reply, waiting, notify)
    return status_of(reply.status, level)


DEVICE: dict[str, Form] = {
    "getStatus": Form(V1_0, _get_status),
    "getCapabilities": Form(V1_0, _get_capabilities),
    "getCapabilities_1_1": Form(V1_1, _get_capabilities),
    "getCapabilities_1_2": Form(V1_2, _get_capabilities),
    "getCapabilities_1_3": Form(V1_3, _get_capabilities),
    "getVersionString": Form(V1_2, _query(lambda info: [info.version])),
    "getType": Form(V1_2, _query(lambda info: [info.type])),
    "getSupportedExtensions": Form(V1_2, _query(lambda info: [list(info.extensions)])),
    "getNumberOfCacheFilesNeeded": Form(V1_2, _query(lambda info: [info.model_cache_files, info.data_cache_files])),
    "getSupportedOperations": Form(V1_0, _get_supported_operations),
    "getSupportedOperations_1_1": Form(V1_1, _get_supported_operations),
    "getSupportedOperations_1_2": Form(V1_2, _get_supported_operations),
    "getSupportedOperations_1_3": Form(V1_3, _get_supported_operations),
    "prepareModel": Form(V1_0, _prepare_model),
    "prepareModel_1_1": Form(V1_1, _prepare_model),
    "prepareModel_1_2": Form(V1_2, _prepare_model),
    "prepareModel_1_3": Form(V1_3, _prepare_model),
    "prepareModelFromCache": Form(V1_2, _prepare_model_from_cache),
    "prepareModelFromCache_1_3": Form(V1_3, _prepare_model_from_cache),
    "allocate": Form(V1_3, allocate),
}


class IDevice(HasForms):
    """A device as the connection's HIDL interface has it; its methods are in DEVICE.

    Raises InvalidArgument for a client that speaks AIDL, and for an unknown device.
    """

    forms = DEVICE

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = client.device(name).info.name
        self.connection = client.connection
        if self.connection.is_aidl:
            raise InvalidArgument(
                f"this client speaks {client.interface}; connect with interface='HIDL 1.3' or an older one"
            )

    def info(self) -> messages.DeviceInfo:
        """Return what the device says of itself now."""
        return self._client.device(self.name).info
