"""Example of a device for nnfmq's driver: `mine` supports ADD and RELU of float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnfmq.driver.devices.device import DeviceBase
from nnfmq.engines.function import FunctionProgram
from nnfmq.engines.interpreter import load_constant
from nnfmq.hal.types import Model, OperandType, Operation, OperationType, Subgraph


class Mine(DeviceBase):
    """A device that computes with NumPy. Everything that is not overridden has a default."""

    name = "mine"

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return True for RELU and for ADD without an activation, of float32."""
        operands = [subgraph.operands[index] for index in operation.inputs]
        if operands[0].type != OperandType.TENSOR_FLOAT32:
            return False
        if operation.type == OperationType.ADD:
            activation = load_constant(model, operands[2])
            return activation is not None and activation == 0
        return operation.type == OperationType.RELU

    def compile(self, model: Model) -> FunctionProgram:
        """Prepare the model: a device with memory of its own uploads the constants here. `run` is one execution."""
        main = model.main
        constants = [load_constant(model, operand) for operand in main.operands]

        def run(inputs: Sequence[Any]) -> list[Any]:
            values = dict(enumerate(constants)) | dict(zip(main.input_indexes, inputs, strict=True))
            for operation in main.operations:
                a, *others = [values[index] for index in operation.inputs]
                values[operation.outputs[0]] = np.maximum(a, 0) if len(others) == 0 else a + others[0]
            return [values[index] for index in main.output_indexes]

        return FunctionProgram(model, run)
