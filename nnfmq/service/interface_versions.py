"""The eight interfaces that a client may speak, HIDL 1.0 to 1.3 and AIDL v1 to v4, where they meet the driver's form.

Inside there is one form, AIDL's (ns, -1 = none). Here, at the edge, a call that the client's interface has not is
refused, and so is an argument that it could not have said; an answer loses what the interface cannot say. Everything is
in CALLS and VALUES, and in `validation.interface_conversion`. docs/reference/hal-versions.md shows the same.
(REQUIREMENTS 0: two dialects of one contract; DEV-9, DEV-13, EXE-15)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.feature_levels import FeatureLevel, interface_name, is_aidl
from nnfmq.hal.timing import NO_TIME, Timing
from nnfmq.hal.types import ExecutionPreference, LoopTimeoutDurationNs, MeasureTiming, Model, Priority
from nnfmq.serialize.messages import (
    Allocate,
    ConfigData,
    ConfigureAidlBurst,
    ConfigureBurst,
    CopyFrom,
    CopyTo,
    CreateExecution,
    DeviceCapabilities,
    DeviceList,
    ExecuteAidlBurst,
    ExecuteFenced,
    Message,
    PrepareModelFromCache,
    ReleaseMemoryResource,
    RequestData,
    capabilities_from_data,
    capabilities_to_data,
    config_from_data,
)
from nnfmq.validation.interface_conversion import convert_to
from nnfmq.validation.values import validate_consumers, validate_hints

V1_1, V1_2, V1_3 = FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3
AIDL_V1, AIDL_V4 = FeatureLevel.AIDL_V1, FeatureLevel.AIDL_V4
MessageT = TypeVar("MessageT", bound=Message)


class CallVersions(NamedTuple):
    """Which interfaces have a call, and what the HAL names it."""

    name: str
    first: FeatureLevel
    last: FeatureLevel = AIDL_V4


# Calls that not every interface has. FMQ bursts are HIDL's; here AIDL has them too, as its own are slower. So has it
# ExecuteAsynchronously, which came with HIDL 1.0 and went with it.
CALLS: dict[type[Message], CallVersions] = {
    ExecuteFenced: CallVersions("executeFenced", V1_3),
    CreateExecution: CallVersions("createReusableExecution", AIDL_V4),
    Allocate: CallVersions("allocate", V1_3),
    CopyFrom: CallVersions("IBuffer.copyFrom", V1_3),
    CopyTo: CallVersions("IBuffer.copyTo", V1_3),
    PrepareModelFromCache: CallVersions("prepareModelFromCache", V1_2),
    ConfigureBurst: CallVersions("configureExecutionBurst", V1_2),
    ConfigureAidlBurst: CallVersions("configureExecutionBurst without queues", AIDL_V1),
    ExecuteAidlBurst: CallVersions("IBurst.executeSynchronously", AIDL_V1),
    ReleaseMemoryResource: CallVersions("IBurst.releaseMemoryResource", AIDL_V1),
}


def _config(message: Any) -> ConfigData | None:
    return getattr(message, "config", None)


def _has_loop_timeout(message: Any) -> bool:
    config = _config(message)
    return config is not None and config.loop_timeout_ns not in (NO_TIME, LoopTimeoutDurationNs.DEFAULT)


def _has_hints(message: Any) -> bool:
    said = _config(message) or message  # of an execution, or of a preparation
    return bool(getattr(said, "hints", ()) or (_config(message) is not None and said.extensions))


def _is_measured(message: Any) -> bool:
    config = _config(message)
    return config is not None and config.measure is MeasureTiming.YES


def _has_padding(message: Any) -> bool:
    request: RequestData | None = getattr(message, "request", None)
    if not isinstance(request, RequestData):  # a burst's `request` is a queue
        return False
    return any(argument.location.padding for argument in (*request.inputs, *request.outputs))


class ArgumentVersion(NamedTuple):
    """Something that an argument can say, since which interface, and whether a message says it."""

    what: str
    first: FeatureLevel
    is_said: Callable[[Any], bool]


_USUAL = ExecutionPreference.FAST_SINGLE_ANSWER
VALUES: tuple[ArgumentVersion, ...] = (
    ArgumentVersion("a preference", V1_1, lambda message: getattr(message, "preference", _USUAL) != _USUAL),
    ArgumentVersion("measured times", V1_2, _is_measured),
    ArgumentVersion(
        "a priority", V1_3, lambda message: getattr(message, "priority", Priority.MEDIUM) != Priority.MEDIUM
    ),
    ArgumentVersion("a deadline", V1_3, lambda message: getattr(message, "deadline_ns", NO_TIME) != NO_TIME),
    ArgumentVersion("a loop timeout", V1_3, _has_loop_timeout),
    ArgumentVersion("padding of an argument", AIDL_V1, _has_padding),
    ArgumentVersion("hints", AIDL_V4, _has_hints),
)


class InterfaceVersion:
    """The interface of one connection; `level` is its feature level."""

    def __init__(self, level: FeatureLevel) -> None:
        self.level = level
        self.name = interface_name(level)
        self.takes_unspecified = level >= V1_2  # outputs that neither the model nor the request specifies (VAL-3)
        self._values = tuple(value for value in VALUES if value.first > level)

    def refusal(self, message: Message) -> NnfmqError | None:
        """Return why this interface does not have `message`, or None: GENERAL_FAILURE for a call, else the argument."""
        span = CALLS.get(type(message))
        if span is not None and not span.first <= self.level <= span.last:
            return GeneralFailure(f"{self.name} has no {span.name}: {_where(span)}")
        for value in self._values:
            if value.is_said(message):
                return InvalidArgument(
                    f"{self.name} has not {value.what}, which is since {interface_name(value.first)}"
                )
        config = _config(message)
        if config is not None and (config.hints or config.extensions):
            try:
                validate_hints(*_hints(config))
            except InvalidArgument as error:
                return error
        return None

    def check_consumers(self, model: Model, consumers: Sequence[Sequence[int]]) -> None:
        """Judge the numberOfConsumers of a valid model: exact in HIDL, absent in AIDL (N-MOD-8)."""
        graphs = () if is_aidl(self.level) else (model.main, *model.referenced)
        if len(consumers) != len(graphs):
            text = f"numberOfConsumers of {len(consumers)} subgraphs; with {self.name} they come for {len(graphs)}"
            raise InvalidArgument(f"N-MOD-8: {text}")
        for graph, counts in zip(graphs, consumers, strict=True):
            validate_consumers(graph, counts)

    def spoken(self, message: MessageT) -> MessageT:
        """Return what the interface can say of a message of the driver's."""
        if self.level is AIDL_V4:
            return message
        changes: dict[str, Any] = {}
        if isinstance(message, DeviceList):
            changes["devices"] = tuple(
                msgspec.structs.replace(device, feature_level=min(device.feature_level, self.level))
                for device in message.devices
            )
        elif isinstance(message, DeviceCapabilities) and message.capabilities is not None:
            capabilities = convert_to(capabilities_from_data(message.capabilities), self.level).value
            changes["capabilities"] = capabilities_to_data(capabilities)
        if hasattr(message, "status"):
            changes["status"] = convert_to(message.status, self.level).value
        if not self.takes_unspecified and hasattr(message, "shapes"):
            changes["shapes"] = ()
        for device, driver in _times(type(message)):
            timing = Timing(getattr(message, device), getattr(message, driver))
            timing = convert_to(timing, self.level).value
            changes |= {device: timing.time_on_device_ns, driver: timing.time_in_driver_ns}
        return msgspec.structs.replace(message, **changes) if changes else message


def _where(span: CallVersions) -> str:
    return f"it is in {interface_name(span.first)} to {interface_name(span.last)}"


def _hints(config: ConfigData) -> tuple[Any, Any]:
    converted = config_from_data(config)
    return converted.hints, converted.extensions


@cache
def _times(kind: type[Message]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of fields of a message that are a Timing."""
    names = [name for name in kind.__struct_fields__ if name.endswith("_on_device_ns")]
    return tuple((name, name.replace("_on_device_ns", "_in_driver_ns")) for name in names)
