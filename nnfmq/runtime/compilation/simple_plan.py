"""The plan of a model that one device executes whole, and the models that the CPU device cannot execute."""

from __future__ import annotations

from nnfmq.execution_plan.plan import MAIN, ExecutionPlan, ExecutionStep, OperandKey
from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.types import Model, OperationType

__all__ = ["has_vendor_operations", "simple_plan"]


def simple_plan(model: Model, device: str) -> ExecutionPlan:
    """Return the plan of one step, all of `model` on the device of that name."""
    main = model.main
    inputs, outputs = (
        tuple(OperandKey(MAIN, index) for index in indexes) for indexes in (main.input_indexes, main.output_indexes)
    )
    step = ExecutionStep(0, MAIN, tuple(range(len(main.operations))), model, inputs, outputs)
    return ExecutionPlan(model, (device,), (step,))


def has_vendor_operations(model: Model) -> bool:
    """Return whether an operation is of an extension or OEM: the CPU device has none of those."""
    operations = (operation for graph in (model.main, *model.referenced) for operation in graph.operations)
    return any(is_extension(found.type) or found.type is OperationType.OEM_OPERATION for found in operations)
