"""Conversion of values to older interface versions.

`convert_to` returns what an interface of a given feature level can express of a value, and describes what was lost. It
rejects a value that the peer could misunderstand. It replaces values that are only hints or metrics: statuses above 4
become GENERAL_FAILURE, priorities and preferences the default, times whole microseconds. The byte layout at a level
(field order, names) is the codec's. A Request is converted without its model; `validation.requests` validates it
against the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.capabilities import UNKNOWN_PERFORMANCE, Capabilities
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extensions import is_extension
from nnfmq.hal.feature_levels import FeatureLevel, interface_name, introduced_in, is_aidl, prefix_bits
from nnfmq.hal.timing import Timing, truncate_to_microseconds
from nnfmq.hal.types import (
    DEFAULT_PREFERENCE,
    BufferToken,
    ExecutionPreference,
    Model,
    OperandType,
    Priority,
    Request,
    RequestArgument,
)
from nnfmq.validation.models import validate_model

__all__ = ["Converted", "compliant_with", "convert_to", "require_level", "require_prefixes"]

T = TypeVar("T")
_V1_0_PERFORMANCE_TYPES = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_QUANT8_ASYMM,
)  # HAL 1.0 and 1.1 have performance info for these only


class Converted(Struct, Generic[T], frozen=True):
    """A value as an older interface can express it, and a description of each thing that was lost."""

    value: T
    lost: tuple[str, ...] = ()


def compliant_with(value: Any, level: FeatureLevel) -> bool:
    """Return True if an interface of `level` can express `value` without loss.

    Raises:
        InvalidArgument: If `value` is a model that no level allows.
        TypeError: If values of this type have no conversion.
    """
    if isinstance(value, Model):
        validate_model(value)
    try:
        return not convert_to(value, level).lost
    except InvalidArgument:
        return False


def convert_to(value: T, level: FeatureLevel) -> Converted[T]:
    """Return `value` as an interface of `level` can express it, with descriptions of what was lost.

    Accepts Model, Request, RequestArgument, Capabilities, ErrorStatus, Timing, Priority and ExecutionPreference.

    Raises:
        InvalidArgument: If the interface cannot express the value.
        TypeError: If values of this type have no conversion.
    """
    convert = _CONVERTERS.get(type(value))
    if convert is None:
        raise TypeError(f"{type(value).__name__} has no conversion, allowed are {[t.__name__ for t in _CONVERTERS]}")
    converted, lost = convert(value, level)
    return Converted(converted, tuple(lost))


def _model(model: Model, level: FeatureLevel) -> tuple[Model, list[str]]:
    lost = []
    if level < FeatureLevel.V1_1 and model.relax_computation_float32_to_float16:
        model = replace(model, relax_computation_float32_to_float16=False)
        lost.append("the permission to compute float32 in float16 range")
    if level < FeatureLevel.V1_2 and model.extensions and not _uses_extensions(model):
        model = replace(model, extensions=())
        lost.append("the names of extensions that no operand or operation uses")
    require_level(validate_model(model), level)
    require_prefixes(model, level)
    return model, lost


def require_prefixes(model: Model, level: FeatureLevel) -> None:
    """Raise InvalidArgument if an extension prefix is too large for an interface of `level`."""
    for extension in model.extensions:
        if extension.prefix >= 1 << prefix_bits(level):
            message = f"extension {extension.name}: prefix {extension.prefix} has 16 bits, which only HIDL allows"
            raise InvalidArgument(f"{message} (N-VAL-12)")


def require_level(needed: int, level: FeatureLevel) -> None:
    """Raise InvalidArgument if a model that needs level `needed` is too new for an interface of `level`."""
    if needed > level:
        names = interface_name(FeatureLevel(needed)), interface_name(level)
        raise InvalidArgument(f"the model needs {names[0]}, the interface is {names[1]} (N-VAL-21)")


def _uses_extensions(model: Model) -> bool:
    graphs = (model.main, *model.referenced)
    operands = (is_extension(operand.type) for graph in graphs for operand in graph.operands)
    return any(operands) or any(is_extension(operation.type) for graph in graphs for operation in graph.operations)


def _argument(argument: RequestArgument, level: FeatureLevel) -> tuple[RequestArgument, list[str]]:
    padding = argument.location.padding
    if is_aidl(level) or not padding:
        return argument, []
    return replace(argument, location=replace(argument.location, padding=0)), [f"{padding} bytes of padding"]


def _request(request: Request, level: FeatureLevel) -> tuple[Request, list[str]]:
    if level < FeatureLevel.V1_3 and any(isinstance(pool, BufferToken) for pool in request.pools):
        needed, offered = interface_name(FeatureLevel.V1_3), interface_name(level)
        raise InvalidArgument(f"managed buffers need {needed}, the interface is {offered} (BUR-18)")
    inputs, outputs = ([_argument(a, level) for a in list] for list in (request.inputs, request.outputs))
    lost = [description for _, descriptions in (*inputs, *outputs) for description in descriptions]
    return replace(request, inputs=tuple(a for a, _ in inputs), outputs=tuple(a for a, _ in outputs)), lost


def _status(status: ErrorStatus, level: FeatureLevel) -> tuple[ErrorStatus, list[str]]:
    if status != ErrorStatus.DEAD_OBJECT and introduced_in(status) <= level:
        return status, []
    return ErrorStatus.GENERAL_FAILURE, [f"the status {status.name}"]


def _timing(timing: Timing, level: FeatureLevel) -> tuple[Timing, list[str]]:
    if is_aidl(level):
        return timing, []
    if level < FeatureLevel.V1_2:
        return Timing(), [] if timing == Timing() else ["both times"]
    whole = truncate_to_microseconds(timing)
    return whole, [] if whole == timing else ["fractions of microseconds"]


def _priority(priority: Priority, level: FeatureLevel) -> tuple[Priority, list[str]]:
    if level >= introduced_in(priority) or priority == Priority.MEDIUM:
        return priority, []
    return Priority.MEDIUM, [f"priority {priority.name}"]


def _preference(preference: ExecutionPreference, level: FeatureLevel) -> tuple[ExecutionPreference, list[str]]:
    if level >= introduced_in(preference) or preference == DEFAULT_PREFERENCE:
        return preference, []
    return DEFAULT_PREFERENCE, [f"preference {preference.name}"]


def _capabilities(capabilities: Capabilities, level: FeatureLevel) -> tuple[Capabilities, list[str]]:
    kept = tuple(e for e in capabilities.operand_performance if _has_performance_info(e.type, level))
    changes: dict[str, Any] = dict.fromkeys(_missing_performance_fields(level), UNKNOWN_PERFORMANCE)
    lost = [name for name in changes if getattr(capabilities, name) != UNKNOWN_PERFORMANCE]
    lost += [f"the performance info of {e.type.name}" for e in capabilities.operand_performance if e not in kept]
    return replace(capabilities, operand_performance=kept, **changes), lost


def _has_performance_info(type: OperandType, level: FeatureLevel) -> bool:
    return type in _V1_0_PERFORMANCE_TYPES if level < FeatureLevel.V1_2 else introduced_in(type) <= level


def _missing_performance_fields(level: FeatureLevel) -> Iterator[str]:
    if level < FeatureLevel.V1_3:
        yield from ("if_performance", "while_performance")
    if level < FeatureLevel.V1_2:
        yield "relaxed_float32_to_float16_scalar"
    if level < FeatureLevel.V1_1:
        yield "relaxed_float32_to_float16_tensor"


_CONVERTERS: Mapping[type, Callable[[Any, FeatureLevel], tuple[Any, list[str]]]] = {
    Model: _model,
    Request: _request,
    RequestArgument: _argument,
    Capabilities: _capabilities,
    ErrorStatus: _status,
    Timing: _timing,
    Priority: _priority,
    ExecutionPreference: _preference,
}
