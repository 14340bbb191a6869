"""Rules of the eight HAL versions that a client may use: HIDL 1.0 to 1.3 and AIDL v1 to v4.

The driver works with one set of types, AIDL v4's (times in ns, -1 for none). This module is the boundary: it rejects
calls and argument values that the client's version does not have, and removes from replies what it cannot express. All
rules are in CALLS, ARGUMENTS and `validation.interface_versions`; docs/reference/hal-versions.md has them as tables.
(DEV-9, DEV-13, EXE-15)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel, interface_name, is_aidl
from nnfmq.hal.timing import NO_TIME, Timing
from nnfmq.hal.types import DEFAULT_PREFERENCE, LoopTimeoutDurationNs, MeasureTiming, Model, Priority
from nnfmq.serialize import messages
from nnfmq.validation.interface_versions import convert_to
from nnfmq.validation.values import validate_consumers, validate_hints

V1_1, V1_2, V1_3 = FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3
AIDL_V1, AIDL_V4 = FeatureLevel.AIDL_V1, FeatureLevel.AIDL_V4
MessageT = TypeVar("MessageT", bound=messages.Message)


class CallVersions(NamedTuple):
    """A call's name in the HAL, and the first and last version that has it."""

    name: str
    first: FeatureLevel
    last: FeatureLevel = AIDL_V4


# The calls that not every version has. Bursts over FMQ are HIDL's; nnfmq offers them in AIDL as well, because IBurst's
# executions are slower. It also offers ExecuteAsynchronously in AIDL, although HIDL 1.3 was the last version with it.
CALLS: dict[type[messages.Message], CallVersions] = {
    messages.ExecuteFenced: CallVersions("executeFenced", V1_3),
    messages.CreateExecution: CallVersions("createReusableExecution", AIDL_V4),
    messages.Allocate: CallVersions("allocate", V1_3),
    messages.CopyFrom: CallVersions("IBuffer.copyFrom", V1_3),
    messages.CopyTo: CallVersions("IBuffer.copyTo", V1_3),
    messages.PrepareModelFromCache: CallVersions("prepareModelFromCache", V1_2),
    messages.ConfigureBurst: CallVersions("configureExecutionBurst", V1_2),
    messages.ConfigureAidlBurst: CallVersions("configureExecutionBurst without queues", AIDL_V1),
    messages.ExecuteAidlBurst: CallVersions("IBurst.executeSynchronously", AIDL_V1),
    messages.ReleaseMemoryResource: CallVersions("IBurst.releaseMemoryResource", AIDL_V1),
}


class ArgumentVersion(NamedTuple):
    """A kind of argument value, the first version that has it, and a function that finds it in a message."""

    description: str
    first: FeatureLevel
    is_used: Callable[[Any], bool]


def _config(message: Any) -> messages.ConfigData | None:
    return getattr(message, "config", None)


def _has_loop_timeout(message: Any) -> bool:
    config = _config(message)
    return config is not None and config.loop_timeout_ns not in (NO_TIME, LoopTimeoutDurationNs.DEFAULT)


def _has_hints(message: Any) -> bool:
    config = _config(message)
    owner = config or message  # hints of an execution, or of a preparation
    return bool(getattr(owner, "hints", ()) or (config is not None and config.extensions))


def _is_measured(message: Any) -> bool:
    config = _config(message)
    return config is not None and config.measure is MeasureTiming.YES


def _has_padding(message: Any) -> bool:
    request: messages.RequestData | None = getattr(message, "request", None)
    if not isinstance(request, messages.RequestData):  # in ConfigureBurst, `request` is a queue descriptor
        return False
    return any(argument.location.padding for argument in (*request.inputs, *request.outputs))


def _has_preference(message: Any) -> bool:
    return bool(getattr(message, "preference", DEFAULT_PREFERENCE) != DEFAULT_PREFERENCE)


def _has_priority(message: Any) -> bool:
    return getattr(message, "priority", Priority.MEDIUM) != Priority.MEDIUM


def _has_deadline(message: Any) -> bool:
    return getattr(message, "deadline_ns", NO_TIME) != NO_TIME


ARGUMENTS: tuple[ArgumentVersion, ...] = (
    ArgumentVersion("a preference", V1_1, _has_preference),
    ArgumentVersion("measured times", V1_2, _is_measured),
    ArgumentVersion("a priority", V1_3, _has_priority),
    ArgumentVersion("a deadline", V1_3, _has_deadline),
    ArgumentVersion("a loop timeout", V1_3, _has_loop_timeout),
    ArgumentVersion("padding of an argument", AIDL_V1, _has_padding),
    ArgumentVersion("hints", AIDL_V4, _has_hints),
)


class InterfaceVersion:
    """The HAL version that one client uses.

    Attributes:
        level: The version as a feature level.
        name: The version's name, such as "HIDL 1.2".
        takes_unspecified: Whether a request may have outputs that neither the model nor the request specifies (VAL-3).
    """

    def __init__(self, level: FeatureLevel) -> None:
        self.level = level
        self.name = interface_name(level)
        self.takes_unspecified = level >= V1_2
        self._later_arguments = tuple(argument for argument in ARGUMENTS if argument.first > level)

    def check_request(self, message: messages.Message) -> None:
        """Check that this version has a call and its arguments.

        Raises:
            GeneralFailure: If it does not have the call.
            InvalidArgument: If it does not have an argument's value, or the hints are invalid.
        """
        call = CALLS.get(type(message))
        if call is not None and not call.first <= self.level <= call.last:
            raise GeneralFailure(
                f"{self.name} does not have {call.name}, which {interface_name(call.first)} to "
                f"{interface_name(call.last)} have"
            )
        for argument in self._later_arguments:
            if argument.is_used(message):
                raise InvalidArgument(
                    f"{self.name} does not have {argument.description}, introduced in {interface_name(argument.first)}"
                )
        config = _config(message)
        if config is not None and (config.hints or config.extensions):
            converted = messages.config_from_data(config)
            validate_hints(converted.hints, converted.extensions)

    def check_consumers(self, model: Model, consumers: Sequence[Sequence[int]]) -> None:
        """Check the numberOfConsumers of a valid model, which HIDL requires to be exact and AIDL does not have.

        Raises:
            InvalidArgument: If they are wrong (N-MOD-8).
        """
        graphs = () if is_aidl(self.level) else (model.main, *model.referenced)
        if len(consumers) != len(graphs):
            raise InvalidArgument(
                f"numberOfConsumers of {len(consumers)} subgraphs; {self.name} has them for {len(graphs)} (N-MOD-8)"
            )
        for graph, counts in zip(graphs, consumers, strict=True):
            validate_consumers(graph, counts)

    def downgrade_reply(self, message: MessageT) -> MessageT:
        """Return a message of the driver without what this version cannot express: fields are dropped or rounded."""
        if self.level is AIDL_V4:
            return message
        changes: dict[str, Any] = {}
        if isinstance(message, messages.DeviceList):
            changes["devices"] = tuple(
                msgspec.structs.replace(device, feature_level=min(device.feature_level, self.level))
                for device in message.devices
            )
        elif isinstance(message, messages.DeviceCapabilities) and message.capabilities is not None:
            capabilities = convert_to(messages.capabilities_from_data(message.capabilities), self.level).value
            changes["capabilities"] = messages.capabilities_to_data(capabilities)
        if hasattr(message, "status"):
            changes["status"] = convert_to(message.status, self.level).value
        if not self.takes_unspecified and hasattr(message, "shapes"):
            changes["shapes"] = ()
        for device, driver in _timing_fields(type(message)):
            timing = Timing(getattr(message, device), getattr(message, driver))
            timing = convert_to(timing, self.level).value
            changes |= {device: timing.time_on_device_ns, driver: timing.time_in_driver_ns}
        return msgspec.structs.replace(message, **changes) if changes else message


@cache
def _timing_fields(kind: type[messages.Message]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of fields of a message that form a Timing."""
    names = [name for name in kind.__struct_fields__ if name.endswith("_on_device_ns")]
    return tuple((name, name.replace("_on_device_ns", "_in_driver_ns")) for name in names)
