"""An execution plan for people and programs: as text, one block of lines per step, and as a dict for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nnfmq.hal.summaries import code_name, counted, listed, tensor_text
from nnfmq.hal.types import operand_bytes
from nnfmq.planning.plan import (
    MAIN,
    ExecutionPlan,
    ExecutionStep,
    GotoStep,
    IfStep,
    LogicalStep,
    OperandKey,
    WhileStep,
    subgraph_of,
)
from nnfmq.planning.sub_models import has_unknown_size

__all__ = ["plan_dict", "plan_text"]

_SHOWN_OPERATIONS = 4
_SHOWN_VALUES = 3


def plan_text(plan: ExecutionPlan) -> str:
    """Return the plan as lines of at most some 80 columns: each step, its device, its operations, and its values.

    A step reads what stands before its arrow and writes what stands after it. An operand is named by its index, that of
    a referenced subgraph by subgraph and index.
    """
    kind = "simple" if plan.is_simple else "compound"
    width = len(str(len(plan.steps)))
    lines = [f"{kind} plan: {counted(len(plan.steps), 'step')}, {_temporaries_text(plan)}"]
    for index, step in enumerate(plan.steps):
        first, *more = _step_lines(plan, step)
        lines += [f"{index:>{width}}  {first}", *(f"{'':{width}}    {line}" for line in more)]
    return "\n".join(lines)


def plan_dict(plan: ExecutionPlan) -> dict[str, Any]:
    """Return the plan as a dict of lists, dicts, strings, numbers and None only.

    An operand is {"subgraph", "operand", "type", "dimensions", "bytes"}: subgraph 0 is the main one, 0 in dimensions is
    an unknown extent, and bytes are None if the size is unknown. Other steps are named by their indexes.
    """
    return {
        "kind": "simple" if plan.is_simple else "compound",
        "devices": list(plan.devices),
        "steps": [{"index": index} | _step_dict(plan, step) for index, step in enumerate(plan.steps)],
        "temporaries": _values(plan, plan.temporaries),
        "constants": _values(plan, plan.constants),
    }


# ------------------------------------------------------------------------------------------------ as text


def _temporaries_text(plan: ExecutionPlan) -> str:
    operands = [plan.operand(key) for key in plan.temporaries]
    unknown = sum(map(has_unknown_size, operands))
    text = f"{counted(len(operands), 'temporary value')} of {sum(map(operand_bytes, operands))} bytes"
    return f"{text} and {unknown} unknown size{'s' * (unknown > 1)}" if unknown else text


def _step_lines(plan: ExecutionPlan, step: LogicalStep) -> Iterator[str]:
    match step:
        case ExecutionStep():
            yield f"{plan.devices[step.device]}: {_operations_text(plan, step)}"
            yield from _flow_lines(plan, step.inputs, step.outputs)
        case IfStep():
            yield f"IF {_name(step.condition)}: step {step.then_step}, otherwise step {step.else_step}"
            yield from _flow_lines(plan, step.inputs, step.outputs)
        case WhileStep():
            targets = f"step {step.body_step} while {_name(step.condition)}, then step {step.exit_step}"
            yield f"WHILE: condition from step {step.condition_step}, {targets}"
            yield from _flow_lines(plan, step.inputs, step.outputs)
        case GotoStep():
            yield f"go to step {step.target}"


def _operations_text(plan: ExecutionPlan, step: ExecutionStep) -> str:
    names = _operation_names(plan, step)
    where = "" if step.subgraph == MAIN else f" of referenced subgraph {step.subgraph - 1}"
    return f"{counted(len(names), 'operation')}{where}: {listed(names[:_SHOWN_OPERATIONS], len(names))}"


def _flow_lines(plan: ExecutionPlan, inputs: Sequence[OperandKey], outputs: Sequence[OperandKey]) -> Iterator[str]:
    for arrow, keys in (("reads ", inputs), ("writes", outputs)):
        shown = [f"{_name(key)} {_operand_text(plan, key)}" for key in keys[:_SHOWN_VALUES]]
        yield f"{arrow} {listed(shown, len(keys))}"


def _operand_text(plan: ExecutionPlan, key: OperandKey) -> str:
    operand = plan.operand(key)
    size = operand_bytes(operand)
    text = tensor_text(code_name(operand.type), operand.dimensions)
    return f"({text}{f', {size} B' if size else ', size unknown' if has_unknown_size(operand) else ''})"


def _name(key: OperandKey) -> str:
    return f"%{key.operand}" if key.subgraph == MAIN else f"%{key.subgraph - 1}.{key.operand}"


# ------------------------------------------------------------------------------------------------ as a dict


def _step_dict(plan: ExecutionPlan, step: LogicalStep) -> dict[str, Any]:
    match step:
        case ExecutionStep():
            return {
                "kind": "execution",
                "device": plan.devices[step.device],
                "subgraph": step.subgraph,
                "operations": [
                    {"index": index, "type": name}
                    for index, name in zip(step.operations, _operation_names(plan, step), strict=True)
                ],
                "inputs": _values(plan, step.inputs),
                "outputs": _values(plan, step.outputs),
            }
        case IfStep():
            return {
                "kind": "if",
                "subgraph": step.subgraph,
                "operation": step.operation,
                "condition": _value(plan, step.condition),
                "then_step": step.then_step,
                "else_step": step.else_step,
                "inputs": _values(plan, step.inputs),
                "outputs": _values(plan, step.outputs),
            }
        case WhileStep():
            return {
                "kind": "while",
                "subgraph": step.subgraph,
                "operation": step.operation,
                "condition": _value(plan, step.condition),
                "condition_step": step.condition_step,
                "body_step": step.body_step,
                "exit_step": step.exit_step,
                "inputs": _values(plan, step.inputs),
                "outputs": _values(plan, step.outputs),
            }
        case GotoStep():
            return {"kind": "goto", "target": step.target}


def _operation_names(plan: ExecutionPlan, step: ExecutionStep) -> list[str]:
    operations = subgraph_of(plan.model, step.subgraph).operations
    return [code_name(operations[index].type) for index in step.operations]


def _values(plan: ExecutionPlan, keys: Sequence[OperandKey]) -> list[dict[str, Any]]:
    return [_value(plan, key) for key in keys]


def _value(plan: ExecutionPlan, key: OperandKey) -> dict[str, Any]:
    operand = plan.operand(key)
    return {
        "subgraph": key.subgraph,
        "operand": key.operand,
        "type": code_name(operand.type),
        "dimensions": list(operand.dimensions),
        "bytes": None if has_unknown_size(operand) else operand_bytes(operand),
    }
