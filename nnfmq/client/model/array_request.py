"""ArrayRequest: a request over shared memory for an execution with the application's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable, Uncopyable
from nnfmq.client.model.array_copies import ArrayCopies
from nnfmq.client.model.arrays import (
    Array,
    InputValue,
    Outputs,
    callers_shape,
    check_count,
    check_fits,
    check_out,
    check_reported_shapes,
    checked_array,
    checked_arrays,
    copy_out,
    in_order,
    layout,
    names_of,
    outputs_type,
    require_fixed_shapes,
    view,
)
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.handle import CompiledHandle, MappedState, ModelHandle, mapped_state
from nnfmq.hal.errors import InvalidArgument, OutputInsufficientSize
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, OutputShape, Pool, Request, RequestArgument

__all__ = [
    "IN_PLACE",
    "ArrayRequest",
    "CallArguments",
    "MappedArrays",
    "check_targets",
    "checked_arguments",
    "has_unknown_shapes",
    "with_prepared",
]

Shapes = Sequence[tuple[int, ...]]
IN_PLACE = Outputs()
"""Stands for the `outputs` of a burst or an execution object as `out`: an execution of other shapes replaces those."""


def checked_arguments(infos: Sequence[TensorInfo], values: Sequence[InputValue | Buffer]) -> list[Array | Buffer]:
    """As `checked_arrays`, but accept Buffers unchecked: the driver checks those."""
    values = in_order(infos, values)
    check_count("input", infos, len(values))
    pairs = zip(infos, values, strict=True)
    return [value if isinstance(value, Buffer) else checked_array(info, value) for info, value in pairs]


def check_targets(infos: Sequence[TensorInfo], out: Sequence[Array | Buffer]) -> None:
    """Raise InvalidArgument unless `out` has an array that can take it, or a Buffer, for each output."""
    unchecked: Any = out  # from the application: any type
    if not isinstance(unchecked, Sequence) or not any(isinstance(target, Buffer) for target in unchecked):
        check_out(infos, unchecked)
        return
    if len(unchecked) != len(infos):
        outputs = counted(len(infos), "output")
        raise InvalidArgument(f"the model has {outputs}, `out` has {len(unchecked)} arrays and buffers")
    arrays = [pair for pair in zip(infos, unchecked, strict=True) if not isinstance(pair[1], Buffer)]
    check_out([info for info, _ in arrays], [target for _, target in arrays])


def fill_targets(targets: Sequence[Array | Buffer], results: Sequence[Array | Buffer]) -> tuple[Array | Buffer, ...]:
    """Copy the results that are arrays into the caller's, and return the caller's arrays and buffers."""
    pairs = zip(targets, results, strict=True)
    arrays = [(t, r) for t, r in pairs if isinstance(t, np.ndarray) and isinstance(r, np.ndarray)]
    copy_out([target for target, _ in arrays], [result for _, result in arrays])
    return tuple(targets)


class CallArguments:
    """The checked arguments of one synchronous execution: arrays and managed buffers.

    `targets` has one object for each output: an array or a Buffer of `out`, or None for a new array.

    Raises:
        InvalidArgument: If an argument's shape, dtype or number is wrong, or a Buffer has another role.
    """

    def __init__(
        self, model: CompiledHandle, inputs: Sequence[InputValue | Buffer], out: Sequence[Array | Buffer] | None
    ) -> None:
        self.inputs = checked_arguments(model.inputs, inputs)
        if out is not None:
            check_targets(model.outputs, out)
        self._out = out
        self.targets: Sequence[object] = out if out is not None else [None] * len(model.outputs)
        for values, is_output in ((self.inputs, False), (self.targets, True)):
            for index, value in enumerate(values):
                if isinstance(value, Buffer):
                    value.check_role((model, index, is_output), self)

    def finish(self, outputs: tuple[Array | Buffer, ...]) -> tuple[Array | Buffer, ...]:
        """Note that the execution has succeeded, and return what its caller gets: `outputs`, or the filled `out`."""
        for target in self.targets:
            if isinstance(target, Buffer):
                target.mark_written(self)
        return outputs if self._out is None else fill_targets(self._out, outputs)


class ArrayRequest(Closable):
    """A request with the inputs copied into one memory, and space for the outputs in another.

    The driver cannot write the inputs' memory. Close it, or use `with`.
    """

    def __init__(
        self,
        model: ModelHandle,
        input_memory: Memory,
        input_args: tuple[RequestArgument, ...],
        inputs: Sequence[Array | Buffer],
        targets: Sequence[object],
    ) -> None:
        self._model = model
        self._input_memory = input_memory
        self._input_args = input_args
        self._inputs = [value if isinstance(value, Buffer) else None for value in inputs]  # a burst keeps no arrays
        self._targets = targets
        self._output_memory: Memory | None = None
        self._output_args: tuple[RequestArgument, ...] = ()
        self._shapes: Shapes = ()

    @classmethod
    def create(
        cls, model: ModelHandle, inputs: Sequence[Array | Buffer], targets: Sequence[object] | None = None
    ) -> Self:
        """Copy `inputs`, which `checked_arguments` returned, and make space for outputs of the model's shapes.

        Buffers among `inputs` and `targets` (one for each output) become pools of the request.
        """
        shapes = [value.shape if isinstance(value, np.ndarray) else () for value in inputs]
        input_args, size_bytes = layout(model.inputs, shapes, 0)
        input_memory = Memory.create(size_bytes, "nnfmq-inputs", one_writer=True)
        request = cls(model, input_memory, input_args, inputs, targets or [None] * len(model.outputs))
        try:
            request.write(inputs)
            request._allocate_outputs([info.shape for info in model.outputs])
        except BaseException:
            request.close()
            raise
        return request

    def write(self, inputs: Sequence[Array | Buffer]) -> None:
        """Copy inputs, which `checked_arguments` returned, into the memory. They have the shapes of those before."""
        for info, argument, value in zip(self._model.inputs, self._input_args, inputs, strict=True):
            if isinstance(value, np.ndarray):
                np.copyto(view(self._input_memory, argument, info, value.shape), value, casting="same_kind")

    def _allocate_outputs(self, shapes: Shapes) -> None:
        self._output_args, size_bytes = layout(self._model.outputs, shapes, 1)
        if self._output_memory is not None:
            self._output_memory.close()
        self._output_memory = Memory.create(size_bytes, "nnfmq-outputs")
        self._shapes = shapes

    @property
    def request(self) -> Request:
        """The request, which `grow` replaces."""
        assert self._output_memory is not None  # `create` has allocated it
        pools: list[Memory | BufferToken] = [self._input_memory, self._output_memory]
        inputs = self._arguments(self._input_args, self._inputs, pools)
        return Request(inputs, self._arguments(self._output_args, self._targets, pools), tuple(pools))

    def _arguments(
        self, arguments: Sequence[RequestArgument], values: Sequence[object], pools: list[Memory | BufferToken]
    ) -> tuple[RequestArgument, ...]:
        """Return `arguments` with those of Buffers replaced; adds the Buffers' pools to `pools`."""
        found = []
        for argument, value in zip(arguments, values, strict=True):
            if isinstance(value, Buffer):
                pool = value.pool_for(self._model.connection)
                index = next((i for i, other in enumerate(pools) if other is pool), len(pools))
                if index == len(pools):  # a memory listed twice would hide overlapping arguments (N-RQX-13)
                    pools.append(pool)
                found.append(value.argument_in(index))
            else:
                found.append(argument)
        return tuple(found)

    def grow(self, error: OutputInsufficientSize) -> None:
        """Allocate the outputs again, in the shapes that the driver reported.

        Raises:
            OutputInsufficientSize: `error` itself, if that cannot help.
            ProtocolError: If the reported shapes are invalid.
        """
        reported = [shape.dimensions for shape in error.output_shapes]
        check_reported_shapes(self._model.outputs, reported)
        are_known = all(shape.is_sufficient or 0 not in shape.dimensions for shape in error.output_shapes)
        if reported == self._shapes or not are_known:
            try:
                raise error
            finally:
                del error  # this frame, to which it refers, would keep it
        self._allocate_outputs(list(map(callers_shape, self._model.outputs, reported)))

    def arrays(self, reported: Sequence[OutputShape]) -> Outputs:
        """As `results`, for a request without Buffers."""
        arrays = [result for result in self.results(reported) if isinstance(result, np.ndarray)]
        return outputs_type(names_of(self._model.outputs))(arrays)

    def results(self, reported: Sequence[OutputShape]) -> tuple[Array | Buffer, ...]:
        """Return copies of the outputs, in the reported shapes if there are any, and the Buffers among the targets.

        Raises:
            ProtocolError: If the reported shapes are invalid.
        """
        assert self._output_memory is not None
        infos = self._model.outputs
        shapes = [shape.dimensions for shape in reported]
        if shapes:
            check_reported_shapes(infos, shapes)
        results: list[Array | Buffer] = []
        for info, argument, shape, target in zip(
            infos, self._output_args, shapes or self._shapes, self._targets, strict=True
        ):
            if isinstance(target, Buffer):
                results.append(target)
                continue
            check_fits([info], [argument], [shape])
            results.append(view(self._output_memory, argument, info, callers_shape(info, shape)).copy())
        return tuple(results)

    def close(self) -> None:
        """Close the memories. A driver that still uses them has its own mappings. Idempotent."""
        self._input_memory.close()
        if self._output_memory is not None:
            self._output_memory.close()


# ----------------------------------------------------------------------------------------------------------------------
# MappedArrays: a model's input and output arrays in shared memory, laid out once for many executions.


class MappedArrays(Uncopyable, Struct, frozen=True, eq=False):
    """Input arrays over one memory, output arrays over another, and the request over both.

    The driver cannot write the inputs' memory. `inputs` and `outputs` are the caller's; `all_inputs` and `all_outputs`
    have the model's states, too. `copies` copies an execution's arrays. `prepared` is what the arrays' user
    has made of the request: a burst its packets, an execution object what sends it.
    """

    input_infos: tuple[TensorInfo, ...]
    output_infos: tuple[TensorInfo, ...]
    inputs: tuple[Array, ...]
    outputs: Outputs
    copies: ArrayCopies
    all_inputs: tuple[Array, ...]
    all_outputs: tuple[Array, ...]
    state: MappedState | None
    request: Request
    memories: tuple[Pool, ...]
    prepared: Any = None

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
            places = (source, input_args[input_count:]), (sink, output_args[output_count:])
            state = mapped_state(model.states, inputs[input_count:], *places)
        own_outputs = outputs_type(names_of(model.caller_outputs))(outputs[:output_count])
        return cls(
            model.caller_inputs,
            model.caller_outputs,
            inputs[:input_count],
            own_outputs,
            ArrayCopies(inputs[:input_count], own_outputs),
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
        copies = ArrayCopies(inputs, outputs)
        return cls(
            model.inputs, model.outputs, inputs, own_outputs, copies, inputs, outputs, None, request, tuple(pools)
        )  # fmt: skip

    def require_laid_out(self) -> None:
        """Raise InvalidArgument if there are no input arrays yet."""

    def check_out(self, out: Sequence[Array] | None) -> None:
        """Raise InvalidArgument unless `out` is None, IN_PLACE, `outputs`, or arrays that can take the outputs."""
        if out is not None and out is not self.outputs and out is not IN_PLACE:
            check_out(self.output_infos, out)

    def copy_in(self, values: Sequence[InputValue]) -> MappedArrays:
        """Copy an execution's inputs, in order or by name, into the memory; no values at all leave it as it is.

        Returns the arrays that have them now: these, unless their shapes depend on the values.

        Raises:
            InvalidArgument: If their number, a name, a shape or a dtype is wrong.
        """
        if not values:
            return self
        if self.copies.copy_in(values):
            return self
        if len(values) != len(self.inputs):
            values = in_order(self.input_infos, values)
            check_count("input", self.input_infos, len(values))
        return self.take(checked_arrays(self.input_infos, values))

    def take(self, values: Sequence[Array]) -> MappedArrays:
        """Copy inputs that were checked; otherwise as `copy_in`."""
        for target, value in zip(self.inputs, values, strict=True):
            np.copyto(target, value, casting="same_kind")
        return self

    def copy_out(self, out: Sequence[Array] | None) -> Outputs:
        """Return the outputs: new arrays if `out` is None, `outputs` or in place, else the filled arrays of `out`."""
        outputs = self.outputs
        if out is None:
            return outputs.__class__(self.copies.copy_out())
        if out is outputs or out is IN_PLACE:
            return outputs
        copy_out(out, outputs)
        return outputs.__class__(out)


def has_unknown_shapes(model: CompiledHandle) -> bool:
    """Return whether a shape is not fully known, so that the arrays are laid out for each execution."""
    return any(info.has_unknown_shape for info in (*model.inputs, *model.outputs))


def with_prepared(arrays: MappedArrays, prepared: object) -> MappedArrays:
    """Return the same arrays with what their user has made of the request."""
    return replace(arrays, prepared=prepared)


def _views(memory: Memory, args: Sequence[RequestArgument], infos: Sequence[TensorInfo]) -> tuple[Array, ...]:
    return tuple(view(memory, argument, info, info.shape) for argument, info in zip(args, infos, strict=True))
