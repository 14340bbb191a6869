"""A program that is one Python function over whole models: the short way for a device of one's own.

The function takes the model's inputs as arrays (None: omitted) and returns the outputs as arrays, in order. What an
interpreter does between operations, deadlines and cancellation, is looked at once, before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, RunOptions
from nnfmq.engines.interpreter import InputSpec
from nnfmq.engines.storing import store
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import Model, Operand, OutputShape, is_scalar
from nnfmq.operations.signature import NUMPY_TYPES, Array

Function = Callable[[Sequence[Array | None]], Sequence[Array]]

__all__ = ["FunctionProgram"]


class FunctionProgram:
    """A prepared model that `function` computes. It may be called by several threads at once.

    Inputs may lie in memory that another process can write to: a function that uses one as an index or a size copies
    it first. Outputs must have the operands' element types, and shapes that agree with what the model says.
    """

    def __init__(self, model: Model, function: Function) -> None:
        main = model.main
        self._function = function
        self._inputs = [InputSpec.of(main, index, True) for index in main.input_indexes]
        self._outputs = [main.operands[index] for index in main.output_indexes]

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> _Call:
        """Check `inputs` and return what computes `outputs` from them. Raises InvalidArgument."""
        if len(inputs) != len(self._inputs):
            raise InvalidArgument(f"{len(inputs)} inputs given, the model has {len(self._inputs)}")
        for expected, array in zip(self._inputs, inputs, strict=True):
            expected.check(array)
        return _Call(self, inputs, outputs)

    def run(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> tuple[OutputShape, ...]:
        """Call the function and copy its results. Raises GeneralFailure for results that are not the model's."""
        results = [np.asarray(result) for result in self._function(inputs)]
        if len(results) != len(self._outputs):
            raise GeneralFailure(f"the device computed {len(results)} outputs, the model has {len(self._outputs)}")
        for operand, result in zip(self._outputs, results, strict=True):
            if result.dtype != NUMPY_TYPES[operand.type] or not _agree(operand, result.shape):
                computed = f"{result.dtype} {list(result.shape)}"
                known = f"{operand.type.name} {list(operand.dimensions)}"
                raise GeneralFailure(f"the device computed {computed}, the model says {known}")
        return store(results, outputs)


def _agree(operand: Operand, shape: tuple[int, ...]) -> bool:
    known = operand.dimensions
    if not known:
        return not (is_scalar(operand.type) and shape)  # a tensor of unknown rank takes any
    return len(known) == len(shape) and all(extent in (0, given) for extent, given in zip(known, shape, strict=True))


class _Call:
    """One request."""

    def __init__(self, program: FunctionProgram, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> None:
        self._program = program
        self._inputs = inputs
        self._outputs = outputs

    def run(self, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once, if the deadline has not passed."""
        limits.check()
        return self._program.run(self._inputs, self._outputs)
