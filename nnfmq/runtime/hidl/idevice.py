"""IDevice: queries, and preparation of models, from the model itself or from cache files (DEV-13, CACHE)."""

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
    DEFAULT_PREFERENCE,
    DeviceStatus,
    DeviceType,
    Model,
    OperandType,
    Priority,
)
from nnfmq.runtime.client import Client
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
    Method,
    VersionedObject,
    notify_when_done,
    reject,
    status_at,
)
from nnfmq.runtime.wire_values import memory_fds
from nnfmq.serialize import messages
from nnfmq.serialize.model_codec import encode_model
from nnfmq.validation.interface_conversion import convert_to

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
