"""The library in the application as a fuzz target: bytes become calls of ModelBuilder, whose model is then planned.

The calls are those that build a test model, with some changed, repeated, left out or in another order. A finished model
is divided among two devices, which get the operations in turn, and each step's model is prepared by the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, uniform_capabilities
from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument, ResourceExhaustedTransient
from nnfmq.hal.types import LifeTime, Model
from nnfmq.lab.conformance.runtime_targets import in_turn
from nnfmq.planning.device_assignment import PlanOptions
from nnfmq.planning.partitioning import make_plan
from nnfmq.planning.plan import ExecutionPlan
from nnfmq.validation import validate_model
from support.choices import ByteChoices, Choices
from support.rebuilt import content, rebuilt
from support.vts_models import one_of_each

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_BYTES_MAX = 1 << 12  # of a constant: larger ones make a run slow
_INTEGERS = (0, 1, 2, 3, 4, 7, 31, 100, 9999, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, -1, -128)
_REALS = (0.0, 1.0, 0.5, -1.0, 1e-45, 3e38, float("inf"), float("nan"))
_OTHERS: tuple[Any, ...] = (None, "", "ADD", "TENSOR_FLOAT32", b"", b"\0" * 200, (), (0,), (0, 0), (1, None), 1.5, True)
_REFUSALS = (InvalidArgument, BadState)
_CALLED = "set_operand_value_from_model"


@dataclass(frozen=True)
class Call:
    """A call of a ModelBuilder. The argument of `set_operand_value_from_model` is a subgraph's number."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class CallSeries:
    """The calls that a run makes, and the model whose subgraphs they name."""

    name: str
    model: Model
    calls: tuple[Call, ...]

    def __repr__(self) -> str:
        lines = (f"    {call.function}{call.arguments}" for call in self.calls)
        return "\n".join([self.name, *lines])


def decode(data: bytes) -> CallSeries:
    """Return the calls that the bytes choose."""
    choices = ByteChoices(data)
    name, model, calls = choices.one_of(_series())
    changed = list(calls)
    for _ in range(choices.between(0, 6)):
        choices.one_of(_CHANGES)(choices, changed)
        if not choices.has_more:
            break
    return CallSeries(name, model, tuple(changed))


@cache
def _series() -> list[tuple[str, Model, tuple[Call, ...]]]:
    """Return the calls that build each small test model."""
    found = []
    for test in one_of_each():
        sizes = [operand.location.length for operand in test.model.main.operands]
        if max(sizes, default=0) <= _BYTES_MAX:
            found.append((test.name, test.model, tuple(_calls(test.model))))
    return found


def _calls(model: Model) -> Iterator[Call]:
    main = model.main
    for index, operand in enumerate(main.operands):
        yield Call("add_operand", (int(operand.type), operand.dimensions, operand.scale, operand.zero_point))
        if operand.channel_quant is not None:
            quant = operand.channel_quant
            yield Call("set_per_channel_quant_params", (index, quant.scales, quant.channel_dim))
        if operand.lifetime is LifeTime.SUBGRAPH:
            yield Call(_CALLED, (index, operand.location.offset))
        elif operand.lifetime is LifeTime.NO_VALUE:
            yield Call("set_operand_value", (index, None))
        elif operand.lifetime in _CONSTANTS:
            yield Call("set_operand_value", (index, content(model, operand)))
    for operation in main.operations:
        yield Call("add_operation", (int(operation.type), operation.inputs, operation.outputs))
    yield Call("identify_inputs_and_outputs", (main.input_indexes, main.output_indexes))
    yield Call("relax_computation", (model.relax_computation_float32_to_float16,))
    yield Call("finish", ())


# -- changes of the calls ---------------------------------------------------------------------------------------------

_Change: TypeAlias = Callable[[Choices, list[Call]], None]


def _leave_out(choices: Choices, calls: list[Call]) -> None:
    if calls:
        del calls[choices.between(0, len(calls) - 1)]


def _repeat(choices: Choices, calls: list[Call]) -> None:
    if calls:
        calls.insert(choices.between(0, len(calls)), choices.one_of(calls))


def _swap(choices: Choices, calls: list[Call]) -> None:
    if calls:
        first, second = (choices.between(0, len(calls) - 1) for _ in range(2))
        calls[first], calls[second] = calls[second], calls[first]


def _argument(choices: Choices, calls: list[Call]) -> None:
    """Change an argument of a call, or one element of it."""
    with_arguments = [index for index, call in enumerate(calls) if call.arguments]
    if not with_arguments:
        return
    index = choices.one_of(with_arguments)
    arguments = list(calls[index].arguments)
    place = choices.between(0, len(arguments) - 1)
    arguments[place] = _changed(choices, arguments[place])
    calls[index] = Call(calls[index].function, tuple(arguments))


def _changed(choices: Choices, value: Any) -> Any:
    if choices.between(0, 7) == 0:
        return choices.one_of(_OTHERS)
    if isinstance(value, tuple) and value:
        place = choices.between(0, len(value))
        kept = value[:place] + value[place + 1 :]
        return kept if choices.flag() else (*kept[:place], choices.one_of(_INTEGERS), *kept[place:])
    if isinstance(value, bytes):
        return choices.one_of((value[:-1], value + b"\0", value * 2, b"", bytes(len(value)), b"\xff" * len(value)))
    if isinstance(value, float):
        return choices.one_of(_REALS)
    return choices.one_of(_INTEGERS)


_CHANGES: tuple[_Change, ...] = (_leave_out, _repeat, _swap, _argument, _argument, _argument)


# -- a run ------------------------------------------------------------------------------------------------------------


def run_api(data: bytes) -> str:
    """Make the calls and divide the model; return how far it came: `not finished`, `undivided`, `simple`, `divided`.

    Raises:
        AssertionError: If a call that is refused changes the builder, or a finished model is not valid.
        Exception: If a call raises anything but InvalidArgument and BadState, or a step cannot be prepared.
    """
    series = decode(data)
    with ExitStack() as stack:
        builder = stack.enter_context(nnfmq.ModelBuilder())
        for call in series.calls:
            before = repr(builder)
            try:
                getattr(builder, call.function)(*_arguments(call, series.model, stack))
            except _REFUSALS:
                assert call.function == "finish" or repr(builder) == before, "a refused call has changed the builder"
        try:
            model = builder.model
        except BadState:
            return "not finished"
    validate_model(model, allow_unspecified_boundaries=True)
    try:
        plan = make_plan(model, _DEVICES, PlanOptions(choose=in_turn))
    except GeneralFailure:
        return "undivided"  # a step of it would have no input, or no output
    _prepare_steps(plan)
    return "simple" if plan.is_simple else "divided"


def _arguments(call: Call, model: Model, stack: ExitStack) -> Sequence[Any]:
    """Return the arguments, with the finished builder of a subgraph in place of its number."""
    if call.function != _CALLED or not call.arguments:
        return call.arguments
    *others, number = call.arguments
    is_subgraph = type(number) is int and 0 <= number < len(model.referenced)
    return (*others, stack.enter_context(_rebuilt_subgraph(model, number)) if is_subgraph else number)


def _rebuilt_subgraph(model: Model, number: int) -> nnfmq.ModelBuilder:
    from msgspec.structs import replace

    return rebuilt(replace(model, main=model.referenced[number]))


def _prepare_steps(plan: ExecutionPlan) -> None:
    for step in plan.execution_steps:
        validate_model(step.model, allow_unspecified_boundaries=True)
        try:
            interpreter.prepare(step.model)
        except (GeneralFailure, ResourceExhaustedTransient):
            continue  # the operation's own rules, which are checked when a device prepares it


class _Device:
    """A device that supports everything, for planning."""

    version_string = "1"
    feature_level = 8
    capabilities: Capabilities = uniform_capabilities(CPU_PERFORMANCE)

    def __init__(self, name: str, is_cpu: bool = False) -> None:
        self.name, self.is_cpu = name, is_cpu

    def supported_operations(self, model: Model) -> list[bool]:
        return [True] * len(model.main.operations)


_DEVICES = (_Device("first"), _Device("second"), _Device("cpu", is_cpu=True))
