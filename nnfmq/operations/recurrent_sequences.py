"""Shared by the sequence operations of RNN and LSTM: time and batch order, bidirectional linking, merged outputs.

Cells only process time-major sequences (time, batch, size), forward in time. This module transposes batch-major
sequences, and reverses the backward direction's sequence and results. The backward cell reads an auxiliary input
without weights instead of the input (parallel linking); one with weights is added to both cells (cross linking).

    C1  the input has rank 3
    C11 auxiliary weights are given for both directions or none; the auxiliary input has the input's time and batch
    C12 there is one merged output, or two; all states may follow
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.extensions import Scheme
from nnfmq.hal.types import CLAMPS, FusedActivationFunc, OperandType
from nnfmq.operations import declaration as op
from nnfmq.operations.activation import clamp, logistic
from nnfmq.operations.declaration import Array, Plan, Run, Shape
from nnfmq.operations.quantization import linear_steps, row_steps
from nnfmq.operations.shapes import require

RunSequence: TypeAlias = Callable[..., tuple[Array, ...]]  # (steps, auxiliary steps, *states) -> results, then states


ACTIVATIONS: Mapping[int, Callable[[Array], Array]] = {
    FusedActivationFunc.NONE.value: lambda x: x,
    **{function.value: partial(clamp, low=function.low, high=function.high) for function in CLAMPS.values()},
    4: np.tanh,
    6: logistic,
}
"""Activations of the recurrent operations by code; LSTM does not allow 2 (RELU1)."""


def time_major_shape(shape: Shape, time_major: bool) -> Shape:
    """Return a sequence's shape with time and batch swapped if it is batch-major. Its own inverse."""
    require(len(shape) == 3, "C1", f"a sequence has shape {shape}, required are time, batch and size")
    return shape if time_major else (shape[1], shape[0], shape[2])


def swap_time_batch(array: Array, time_major: bool) -> Array:
    """Return a sequence with time and batch swapped if it is batch-major. Its own inverse."""
    return array if time_major else np.ascontiguousarray(array.swapaxes(0, 1))


class Linking(Struct, frozen=True):
    """Shapes of the backward cell's input, and of the auxiliary input if it has weights."""

    backward: Shape
    aux: Shape | None

    @classmethod
    def of(cls, input: Shape, aux: Shape | None, has_weights: tuple[bool, bool]) -> Linking:
        """Return the linking of a bidirectional operation: none, parallel or cross (C11)."""
        require(has_weights[0] == has_weights[1], "C11", "auxiliary weights are given for one direction only")
        if aux is None:
            require(not has_weights[0], "C11", "auxiliary weights are given without an auxiliary input")
            return cls(input, None)
        fits = len(aux) == 3 and aux[:2] == input[:2]
        require(fits, "C11", f"the auxiliary input has shape {aux}, the input {input}")
        return cls(input, aux) if has_weights[0] else cls(aux, None)


def bidirectional_shapes(
    steps: Shape, sizes: tuple[int, int], states: Sequence[Shape], time_major: bool, merged: bool, count: int
) -> tuple[Shape, ...]:
    """Return the output shapes of two directions over `steps`, and of the states if `count` includes them (C12)."""
    widths = (sum(sizes),) if merged else sizes
    allowed = (len(widths), len(widths) + len(states))
    require(count in allowed, "C12", f"{count} outputs given, allowed are {allowed} if merged is {bool(merged)}")
    outputs = (time_major_shape((*steps[:2], width), time_major) for width in widths)
    return (*outputs, *states)[:count]


def run_bidirectional(
    directions: tuple[RunSequence, RunSequence],
    inputs: tuple[Array, Array | None],
    states: Sequence[Array],
    *,
    linked: bool,
    time_major: bool,
    merged: bool,
) -> tuple[Array, ...]:
    """Run the forward and the backward cell, each with half of `states`. `linked`: auxiliary input without weights."""
    steps = swap_time_batch(inputs[0], time_major)
    aux = None if inputs[1] is None else swap_time_batch(inputs[1], time_major)
    backward_steps, cell_aux = (aux, None) if linked and aux is not None else (steps, aux)
    middle = len(states) // 2
    forward, *forward_states = directions[0](steps, cell_aux, *states[:middle])
    backward, *backward_states = directions[1](
        backward_steps[::-1], None if cell_aux is None else cell_aux[::-1], *states[middle:]
    )
    results = (forward, backward[::-1])
    outputs = (np.concatenate(results, axis=2),) if merged else results
    return (*(swap_time_batch(output, time_major) for output in outputs), *forward_states, *backward_states)


# ----------------------------------------------------------------------------------------------------------------------
# The operations of the extension on floats whose weights have 8 bits in the file. The weights are bytes, or given
# dequantized.
#
# TFLite quantizes the rows that are multiplied by such weights, inputs and hidden states, at each step; the parameter
# `asymmetric`, after all others, says how. ONNX Runtime's DynamicQuantizeLSTM does the same with one scale and zero
# point for all inputs, and one for the hidden states of each step.
#
# `plan` and `shape` are those of the HAL's operation on FLOAT32, `parameters` its longest list, in which the weights
# have the type W.


_WEIGHTS = (op.F32, op.Q8, op.Q8S, op.PC)


def hybrid(
    plan: Plan, shape: Callable[..., Any], parameters: Sequence[op.Parameter], **types: OperandType
) -> op.Extended:
    """Declare what TFLite computes; `types` are those of variables other than T and W."""

    def plan_hybrid(*tensors: Any, asymmetric: bool, **attributes: Any) -> Run:
        return plan(*tensors, quantize=partial(row_steps, asymmetric=bool(asymmetric)), **attributes)

    def shape_of_hybrid(*shapes: Any, asymmetric: bool, **attributes: Any) -> Any:
        return shape(*shapes, **attributes)

    overloads = (op.overload(*parameters, op.attribute("asymmetric", op.BOOL), level=op.V1_2),)
    variants = [op.of_types(plan_hybrid, op.F32, W=weights, **types) for weights in _WEIGHTS]
    changes = {"overloads": overloads, "shape": shape_of_hybrid}
    return op.Extended(Scheme.HYBRID, tuple(itertools.chain(*variants)), changes=changes)


def dynamic(plan: Plan, parameters: Sequence[op.Parameter], **types: OperandType) -> op.Extended:
    """Declare what ONNX Runtime computes."""
    planned = partial(plan, quantize=linear_steps)
    variants = [op.of_types(planned, op.F32, W=weights, **types) for weights in _WEIGHTS]
    overloads = (op.overload(*parameters, level=op.V1_2),)
    return op.Extended(Scheme.DYNAMIC, tuple(itertools.chain(*variants)), changes={"overloads": overloads})
