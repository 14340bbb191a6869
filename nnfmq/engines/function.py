"""A program that is one Python function over whole models: the shortest way to a device of a plug-in.

The function takes the model's inputs as arrays (None: omitted) and returns the outputs as arrays, in order. The
deadline and cancellation are checked once, before the function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnfmq.engines import memory
from nnfmq.engines.execution import (
    DEFAULT_RUN_OPTIONS,
    InputSpec,
    RunOptions,
    check_inputs,
    copy_outputs,
    is_compatible_shape,
    value_bytes,
)
from nnfmq.engines.memory import Charge
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model, OutputShape, is_scalar
from nnfmq.operations.declaration import NUMPY_TYPES, Array

Function = Callable[[Sequence[Array | None]], Sequence[Array]]

__all__ = ["FunctionProgram"]


class FunctionProgram:
    """A prepared model that `function` computes. Several threads may call the function concurrently.

    Inputs may be in memory that another process can write to: a function that uses an input as an index or a size
    copies it first. Outputs must have the operands' element types, and shapes that agree with the declared dimensions.
    """

    def __init__(self, model: Model, function: Function) -> None:
        main = model.main
        self._function = function
        self._inputs = [InputSpec.of(main, index, is_optional=True) for index in main.input_indexes]
        self._outputs = [main.operands[index] for index in main.output_indexes]
        # What the function allocates beside its results is not known.
        self._result_bytes = sum(map(value_bytes, self._outputs))

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> _FunctionExecution:
        """Check `inputs` and bind the program to the buffers; see `PreparedProgram.bind`.

        Raises:
            InvalidArgument: If an input does not fit the model.
            ResourceExhausted: If the results exceed the budget of this process.
        """
        check_inputs(self._inputs, inputs)
        return _FunctionExecution(self, inputs, outputs, memory.charge(self._result_bytes))

    def run(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> tuple[OutputShape, ...]:
        """Call the function, copy its results to `outputs` and return their shapes.

        Raises:
            GeneralFailure: If the number, types or shapes of the results are not the model's.
        """
        results = [np.asarray(result) for result in self._function(inputs)]
        if len(results) != len(self._outputs):
            raise GeneralFailure(f"the device computed {len(results)} outputs, the model has {len(self._outputs)}")
        for operand, result in zip(self._outputs, results, strict=True):
            shape = result.shape
            fits = not shape if is_scalar(operand.type) else is_compatible_shape(operand.dimensions, shape)
            if result.dtype != NUMPY_TYPES[operand.type] or not fits:
                computed = f"{result.dtype} {list(result.shape)}"
                declared = f"{operand.type.name} {list(operand.dimensions)}"
                raise GeneralFailure(f"the device computed {computed}, the model declares {declared}")
        return copy_outputs(results, outputs)


class _FunctionExecution:
    """A bound program: the buffers of one request."""

    def __init__(
        self, program: FunctionProgram, inputs: Sequence[Array | None], outputs: Sequence[Any], charge: Charge | None
    ) -> None:
        self._program = program
        self._charge = charge  # as long as this object exists
        self._inputs = inputs
        self._outputs = outputs

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once, unless the deadline has passed or the execution was cancelled."""
        options.check()
        return self._program.run(self._inputs, self._outputs)
