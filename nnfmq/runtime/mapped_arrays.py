"""MappedArrays: a model's input and output arrays in shared memory, laid out once for many executions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, Pool, Request, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime.array_checks import check_count, check_out, checked_arrays, copy_out, require_fixed_shapes
from nnfmq.runtime.model_handle import CompiledHandle, ModelHandle
from nnfmq.runtime.model_state import MappedState
from nnfmq.runtime.outputs import Outputs, in_order, names_of, outputs_type
from nnfmq.runtime.tensor_layout import Array, InputValue, layout, view
from nnfmq.uncopyable import Uncopyable


@dataclass(frozen=True, slots=True)
class MappedArrays(Uncopyable):
    """Input arrays over one memory, output arrays over another, and the request over both.

    The driver cannot write the inputs' memory. `inputs` and `outputs` are the caller's; `all_inputs` and `all_outputs`
    have the model's states, too. `copies` has for each of `outputs` what copies it.
    """

    input_infos: tuple[TensorInfo, ...]
    output_infos: tuple[TensorInfo, ...]
    inputs: tuple[Array, ...]
    outputs: Outputs
    copies: tuple[Callable[[], Array], ...]
    all_inputs: tuple[Array, ...]
    all_outputs: tuple[Array, ...]
    state: MappedState | None
    request: Request
    memories: tuple[Pool, ...]

    @classmethod
    def create(cls, model: CompiledHandle, resources: ExitStack, user: str) -> MappedArrays:
        """Allocate the memories, which `resources` closes; `user` names the caller in error messages.

        Raises:
            InvalidArgument: If a shape is not fully known.
        """
        require_fixed_shapes("input", model.inputs, user)
        require_fixed_shapes("output", model.outputs, user)
        input_args, input_bytes = layout(model.inputs, [info.shape for info in model.inputs], 0)
        output_args, output_bytes = layout(model.outputs, [info.shape for info in model.outputs], 1)
        source = resources.enter_context(Memory.create(input_bytes, "nnfmq-inputs", one_writer=True))
        sink = resources.enter_context(Memory.create(output_bytes, "nnfmq-outputs"))
        inputs, outputs = _views(source, input_args, model.inputs), _views(sink, output_args, model.outputs)
        input_count, output_count = len(model.caller_inputs), len(model.caller_outputs)
        state = None
        if model.states:
            before, after = _range(source, input_args[input_count:]), _range(sink, output_args[output_count:])
            state = MappedState(model.states, inputs[input_count:], before, after)
        own_outputs = outputs_type(names_of(model.caller_outputs))(outputs[:output_count])
        return cls(
            model.caller_inputs,
            model.caller_outputs,
            inputs[:input_count],
            own_outputs,
            tuple(output.copy for output in own_outputs),
            inputs,
            outputs,
            state,
            Request(input_args, output_args, (source, sink)),
            (source, sink),
        )

    @classmethod
    def over(cls, model: ModelHandle, request: Request) -> MappedArrays:
        """Return arrays over the memories of `request`, which the caller owns. The model has no states."""
        pools = [pool for pool in request.pools if not isinstance(pool, BufferToken)]
        inputs, outputs = (
            tuple(
                view(pools[arg.location.pool_index], arg, info, info.shape)
                for arg, info in zip(args, infos, strict=True)
            )
            for args, infos in ((request.inputs, model.inputs), (request.outputs, model.outputs))
        )
        own_outputs = outputs_type(names_of(model.outputs))(outputs)
        copies = tuple(output.copy for output in outputs)
        return cls(
            model.inputs, model.outputs, inputs, own_outputs, copies, inputs, outputs, None, request, tuple(pools)
        )  # fmt: skip

    def check_out(self, out: Sequence[Array] | None) -> None:
        """Raise InvalidArgument unless `out` is None, `outputs` itself, or arrays that can take the outputs."""
        if out is not None and out is not self.outputs:
            check_out(self.output_infos, out)

    def copy_in(self, values: Sequence[InputValue]) -> None:
        """Copy an execution's inputs, in order or by name, into the memory; no values at all leave it as it is.

        Raises:
            InvalidArgument: If their number, a name, a shape or a dtype is wrong.
        """
        if not values:
            return
        inputs = self.inputs
        if len(values) != len(inputs):
            values = in_order(self.input_infos, values)
            check_count("input", self.input_infos, len(values))
        for target, value in zip(inputs, values, strict=True):
            if type(value) is not np.ndarray or value.dtype != target.dtype or value.shape != target.shape:
                break
            target[...] = value
        else:
            return
        arrays = checked_arrays(self.input_infos, values)
        for target, array in zip(inputs, arrays, strict=True):
            np.copyto(target, array, casting="same_kind")

    def copy_out(self, out: Sequence[Array] | None) -> Outputs:
        """Return the outputs: new arrays if `out` is None, `outputs` itself, or the filled arrays of `out`."""
        outputs = self.outputs
        if out is None:
            copies = self.copies
            if len(copies) == 1:  # a list in between would cost as much as the copy of a small array
                return outputs.__class__((copies[0](),))
            if len(copies) == 2:
                return outputs.__class__((copies[0](), copies[1]()))
            return outputs.__class__([copy() for copy in copies])
        if out is outputs:
            return outputs
        copy_out(out, outputs)
        return outputs.__class__(out)


def _range(memory: Memory, args: Sequence[RequestArgument]) -> Array:
    """Return the bytes from the first argument's begin to the last one's end."""
    first, last = args[0].location, args[-1].location
    return np.frombuffer(memory.view[first.offset : last.offset + last.length], np.uint8)


def _views(memory: Memory, args: Sequence[RequestArgument], infos: Sequence[TensorInfo]) -> tuple[Array, ...]:
    return tuple(view(memory, argument, info, info.shape) for argument, info in zip(args, infos, strict=True))
