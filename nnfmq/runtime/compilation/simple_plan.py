"""simple_plan: the plan of a model that one device executes whole."""

from __future__ import annotations

from nnfmq.execution_plan.plan import MAIN, ExecutionPlan, ExecutionStep, OperandKey
from nnfmq.hal.types import Model

__all__ = ["simple_plan"]


def simple_plan(model: Model, device: str) -> ExecutionPlan:
    """Return the plan of one step, all of `model` on the device of that name."""
    main = model.main
    inputs, outputs = (
        tuple(OperandKey(MAIN, index) for index in indexes) for indexes in (main.input_indexes, main.output_indexes)
    )
    step = ExecutionStep(0, MAIN, tuple(range(len(main.operations))), model, inputs, outputs)
    return ExecutionPlan(model, (device,), (step,))
