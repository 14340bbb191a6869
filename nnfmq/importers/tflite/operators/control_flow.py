"""IF and WHILE, and the resource variables that they may share."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import ELEMENTS
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tensor_info import StateInfo, operand_info
from nnfmq.hal.types import LifeTime, Operand
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import ConversionContext, OpConverter, State, is_constant

__all__ = ["CONVERTERS", "finish_variables"]


def _if(context: ConversionContext, operator: TfliteOperator) -> None:
    options, builder = operator.options, context.builder
    condition, *values = _known(context, operator.inputs)
    then = context.call(options.ThenSubgraphIndex(), values, keeps_constants=True)  # kernels pack weights
    otherwise = context.call(options.ElseSubgraphIndex(), values, keeps_constants=True)
    _require_same("branches", then.outputs, otherwise.outputs)
    callees = [builder.callee(callee.index) for callee in (then, otherwise)]
    values = [value for value in values if not is_constant(builder[value])]
    _emit(context, operator, OperationType.IF, [condition, *callees, *values], then.outputs)


def _while(context: ConversionContext, operator: TfliteOperator) -> None:
    options, builder = operator.options, context.builder
    values = _known(context, operator.inputs)
    condition = context.call(options.CondSubgraphIndex(), values)
    body = context.call(options.BodySubgraphIndex(), values)
    if len(condition.outputs) != 1:
        raise InvalidArgument(f"its condition has {len(condition.outputs)} outputs: one is required")
    _require_same("values before and after the loop", tuple(builder[value] for value in values), body.outputs)
    callees = [builder.callee(callee.index) for callee in (condition, body)]
    _emit(context, operator, OperationType.WHILE, [*callees, *values], body.outputs)


def _known(context: ConversionContext, indexes: Sequence[int]) -> list[int]:
    """Return the operands of tensors; those of rank 0 have one dimension from here on."""
    values = [context.value(index) for index in indexes]
    for index, value in zip(indexes, values, strict=True):
        if not context.builder[value].dimensions and context.file.tensor(index).rank == 0:
            context.builder.set_dimensions(value, (1,))
    return values


def _require_same(what: str, first: Sequence[Operand], second: Sequence[Operand]) -> None:
    kinds = [[(o.type, o.dimensions, o.scale, o.zero_point) for o in operands] for operands in (first, second)]
    if kinds[0] != kinds[1]:
        raise InvalidArgument(f"its {what} differ in number, type, shape or quantization: that is not supported")


def _emit(
    context: ConversionContext,
    operator: TfliteOperator,
    operation_type: OperationType,
    arguments: Sequence[int],
    results: Sequence[Operand],
) -> None:
    if len(operator.outputs) != len(results):
        raise InvalidArgument(f"{len(operator.outputs)} outputs for {len(results)} results of its subgraphs")
    outputs = [context.result(index, o.dimensions) for index, o in zip(operator.outputs, results, strict=True)]
    for output, result in zip(outputs, results, strict=True):
        context.builder.set_dimensions(output, result.dimensions)
    context.builder.operation(operation_type, arguments, *outputs)


_MANY = range(1, 1 << 16)

_CONTROL_FLOW_CONVERTERS: dict[str, OpConverter] = {
    "IF": OpConverter(range(2, 1 << 16), _if, "IfOptions", True, _MANY),
    "WHILE": OpConverter(_MANY, _while, "WhileOptions", True, _MANY),
}


# ----------------------------------------------------------------------------------------------------------------------
# Resource variables: VAR_HANDLE, READ_VARIABLE, ASSIGN_VARIABLE, and CALL_ONCE, which initializes them.
#
# A variable becomes a state of the model. Reading it gives the operand that was assigned last, at first the state's
# input; what was assigned last is the state's output. The tensors of handles have no operands.


class _Variable(Struct):
    """A variable. `before` and `current` are None until it is read or assigned, `initial` if there is none."""

    name: str
    initial: TfliteTensor | None = None
    before: int | None = None
    current: int | None = None


def _var_handle(context: ConversionContext, operator: TfliteOperator) -> None:
    name = context.file.shared_name(operator)
    context.variables.setdefault(name, _Variable(name))
    context.handles[operator.outputs[0]] = name


def _variable(context: ConversionContext, operator: TfliteOperator) -> _Variable:
    """Return the variable of the operator's first input."""
    name = context.handles.get(operator.inputs[0])
    if name is None:
        raise InvalidArgument("its variable is not the result of a VAR_HANDLE of the same subgraph")
    variable: _Variable = context.variables[name]
    return variable


def _read(context: ConversionContext, operator: TfliteOperator) -> None:
    variable, index = _variable(context, operator), operator.outputs[0]
    if variable.current is None:
        if variable.initial is None:
            raise InvalidArgument(f"the variable {variable.name!r} is read before a value is assigned to it")
        _begin(context, variable, variable.initial)
    assert variable.current is not None
    if not context.is_model_output(index):
        context.name(index, variable.current)
        return
    _copy(context, variable.current, context.result(index, context.builder[variable.current].dimensions))


def _copy(context: ConversionContext, source: int, target: int) -> None:
    shape = context.builder.int32_vector(context.builder[source].dimensions or (1,))
    context.builder.operation(OperationType.RESHAPE, (source, shape), target)


def _assign(context: ConversionContext, operator: TfliteOperator) -> None:
    variable, value = _variable(context, operator), context.file.tensor(operator.inputs[1])
    operand = context.value(value.index)
    if variable.before is None:
        _begin(context, variable, value if variable.initial is None else variable.initial)
    assert variable.before is not None
    if not _equal(context.builder[variable.before], context.builder[operand]):
        raise InvalidArgument(f"the variable {variable.name!r} gets a value of another type or shape than it had")
    variable.current = operand


def _begin(context: ConversionContext, variable: _Variable, like: TfliteTensor) -> None:
    """Make the variable's value at the begin of an execution an input of the model."""
    lifetime = LifeTime.SUBGRAPH_INPUT
    operand = Operand(like.type, like.shape, like.scale, like.zero_point, lifetime)
    variable.before = variable.current = context.builder.operand(operand)


def _equal(one: Operand, other: Operand) -> bool:
    fields = [(o.type, o.scale, o.zero_point) for o in (one, other)]
    shapes = [o.dimensions or (1,) for o in (one, other)]
    return fields[0] == fields[1] and shapes[0] == shapes[1]


def finish_variables(context: ConversionContext) -> list[State]:
    """Make each variable's last value an output of the model, and return the states."""
    return [_finish(context, variable) for variable in context.variables.values() if variable.before is not None]


def _finish(context: ConversionContext, variable: _Variable) -> State:
    builder, before, after = context.builder, variable.before, variable.current
    assert before is not None
    assert after is not None
    if builder[after].lifetime == LifeTime.TEMPORARY_VARIABLE:
        builder.as_output(after)
    else:  # an input, a constant, or an output already
        operand = builder[before]
        copy = Operand(operand.type, operand.dimensions, operand.scale, operand.zero_point, LifeTime.SUBGRAPH_OUTPUT)
        source, after = after, builder.operand(copy)
        _copy(context, source, after)
    initial = b"" if variable.initial is None else context.stored_bytes(variable.initial)
    return State(before, after, StateInfo(operand_info(builder[before], variable.name, ELEMENTS), initial))


def _call_once(context: ConversionContext, operator: TfliteOperator) -> None:
    """Take the values that the initialization subgraph assigns, which must be constants, as initial values."""
    from nnfmq.importers.tflite.folding import Folding

    file = context.file.subgraph(operator.options.InitSubgraphIndex())
    inner = ConversionContext(file, context.builder)
    folding = Folding(inner)
    for step in file.operators():
        if step.name == "VAR_HANDLE":
            inner.handles[step.outputs[0]] = file.shared_name(step)
        elif step.name == "ASSIGN_VARIABLE":
            _initialize(context, inner, step)
        else:
            folding.or_convert(_reject)(step)


def _initialize(context: ConversionContext, inner: ConversionContext, step: TfliteOperator) -> None:
    name, value = inner.handles.get(step.inputs[0]), inner.file.tensor(step.inputs[1])
    if name is None or value.data is None:
        raise InvalidArgument(f"its subgraph assigns {value}, which is not a constant")
    variable = context.variables.setdefault(name, _Variable(name))
    if variable.before is not None:
        raise InvalidArgument(f"it initializes the variable {name!r} after it was used")
    variable.initial = value


def _reject(step: TfliteOperator) -> None:
    raise InvalidArgument(f"its subgraph has {step}, which is not computed when a model is loaded")


_VARIABLE_CONVERTERS: dict[str, OpConverter] = {
    "ASSIGN_VARIABLE": OpConverter(range(2, 3), _assign, "AssignVariableOptions", output_counts=range(1)),
    "CALL_ONCE": OpConverter(range(1), _call_once, "CallOnceOptions", needs_options=True, output_counts=range(1)),
    "READ_VARIABLE": OpConverter(range(1, 2), _read, "ReadVariableOptions"),
    "VAR_HANDLE": OpConverter(range(1), _var_handle, "VarHandleOptions", needs_options=True),
}

CONVERTERS: dict[str, OpConverter] = {**_CONTROL_FLOW_CONVERTERS, **_VARIABLE_CONVERTERS}
