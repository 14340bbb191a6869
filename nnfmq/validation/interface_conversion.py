"""compliant_with and convert_to: whether a value can go to an interface of some feature level, and what arrives there.

Values stay in their canonical form: convert_to answers what is left of one after the passage, and says what was lost.
What a peer could misunderstand is refused (InvalidArgument); what is only a wish or a figure is dropped and told:
statuses above 4 become GENERAL_FAILURE, priorities and preferences the default, times whole microseconds. How bytes
look at a level (field order, names) is not known here. A Request converts alone; against its model it is
`validation.request` that judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from nnfmq.hal.capabilities import UNKNOWN_PERFORMANCE, Capabilities
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.feature_levels import (
    FeatureLevel,
    interface_name,
    introduced_in,
    is_aidl,
    microseconds,
    nanoseconds,
    prefix_bits,
)
from nnfmq.hal.types import (
    BufferToken,
    ExecutionPreference,
    Model,
    OperandType,
    Priority,
    Request,
    RequestArgument,
    Timing,
)
from nnfmq.validation.model import validate_model

__all__ = ["Converted", "compliant_with", "convert_to", "require_level", "require_prefixes"]

T = TypeVar("T")
_FIRST_FIGURES = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM)  # what 1.0 and 1.1 have figures for


@dataclass(frozen=True, slots=True)
class Converted(Generic[T]):
    """A value as an interface of an older level can carry it, and what it lost on the way: one sentence for each."""

    value: T
    lost: tuple[str, ...] = ()


def compliant_with(value: Any, level: FeatureLevel) -> bool:
    """Return True if `value` goes to an interface of `level` and loses nothing.

    Raises InvalidArgument if no level allows the model, TypeError for a type that has no conversion.
    """
    if isinstance(value, Model):
        validate_model(value)
    try:
        return not convert_to(value, level).lost
    except InvalidArgument:
        return False


def convert_to(value: T, level: FeatureLevel) -> Converted[T]:
    """Return what arrives of `value` at an interface of `level`, with what was lost.

    Takes Model, Request, RequestArgument, Capabilities, ErrorStatus, Timing, Priority and ExecutionPreference.
    Raises InvalidArgument if the interface cannot express the value, TypeError for another type.
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
    """Raise InvalidArgument for a prefix of an extension that is too large for the interface."""
    for extension in model.extensions:
        if extension.prefix >= 1 << prefix_bits(level):
            raise InvalidArgument(f"N-VAL-12: extension {extension.name}: prefix {extension.prefix} is HIDL's only")


def require_level(needed: int, level: FeatureLevel) -> None:
    """Raise InvalidArgument where a model, valid at level `needed`, is too new for an interface."""
    if needed > level:
        names = interface_name(FeatureLevel(needed)), interface_name(level)
        raise InvalidArgument(f"N-VAL-21: the model needs {names[0]}, the interface is {names[1]}")


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
        needed, given = interface_name(FeatureLevel.V1_3), interface_name(level)
        raise InvalidArgument(f"BUR-18: buffers of the driver's need {needed}, the interface is {given}")
    inputs, outputs = ([_argument(a, level) for a in list] for list in (request.inputs, request.outputs))
    lost = [sentence for _, sentences in (*inputs, *outputs) for sentence in sentences]
    return replace(request, inputs=tuple(a for a, _ in inputs), outputs=tuple(a for a, _ in outputs)), lost


def _status(status: ErrorStatus, level: FeatureLevel) -> tuple[ErrorStatus, list[str]]:
    if status != ErrorStatus.DEAD_OBJECT and introduced_in(status) <= level:
        return status, []
    return ErrorStatus.GENERAL_FAILURE, [f"that the failure was {status.name}"]


def _timing(timing: Timing, level: FeatureLevel) -> tuple[Timing, list[str]]:
    if is_aidl(level):
        return timing, []
    if level < FeatureLevel.V1_2:
        return Timing(), [] if timing == Timing() else ["both times"]
    times = (timing.time_on_device_ns, timing.time_in_driver_ns)
    whole = Timing(*(nanoseconds(microseconds(time)) for time in times))
    return whole, [] if whole == timing else ["fractions of microseconds"]


def _priority(priority: Priority, level: FeatureLevel) -> tuple[Priority, list[str]]:
    if level >= introduced_in(priority) or priority == Priority.MEDIUM:
        return priority, []
    return Priority.MEDIUM, [f"priority {priority.name}"]


def _preference(preference: ExecutionPreference, level: FeatureLevel) -> tuple[ExecutionPreference, list[str]]:
    default = ExecutionPreference.FAST_SINGLE_ANSWER
    if level >= introduced_in(preference) or preference == default:
        return preference, []
    return default, [f"preference {preference.name}"]


def _capabilities(capabilities: Capabilities, level: FeatureLevel) -> tuple[Capabilities, list[str]]:
    kept = tuple(e for e in capabilities.operand_performance if _has_figure(e.type, level))
    changes: dict[str, Any] = dict.fromkeys(_missing_figures(level), UNKNOWN_PERFORMANCE)
    lost = [name for name in changes if getattr(capabilities, name) != UNKNOWN_PERFORMANCE]
    lost += [f"the figures of {e.type.name}" for e in capabilities.operand_performance if e not in kept]
    return replace(capabilities, operand_performance=kept, **changes), lost


def _has_figure(type: OperandType, level: FeatureLevel) -> bool:
    return type in _FIRST_FIGURES if level < FeatureLevel.V1_2 else introduced_in(type) <= level


def _missing_figures(level: FeatureLevel) -> Iterator[str]:
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
