"""ArrayRequest: a request over shared memory for an execution with the application's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from nnfmq.hal.errors import OutputInsufficientSize
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, OutputShape, Request, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime.array_checks import check_count, checked_array
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.runtime.outputs import Outputs, in_order, names_of, outputs_type
from nnfmq.runtime.result_validation import check_fits, check_reported_shapes
from nnfmq.runtime.tensor_layout import Array, InputValue, callers_shape, layout, view

Shapes = Sequence[tuple[int, ...]]


def checked_arguments(infos: Sequence[TensorInfo], values: Sequence[InputValue | Buffer]) -> list[Array | Buffer]:
    """As `array_checks.checked_arrays`, but accept Buffers unchecked: the driver checks those."""
    values = in_order(infos, values)
    check_count("input", infos, len(values))
    pairs = zip(infos, values, strict=True)
    return [value if isinstance(value, Buffer) else checked_array(info, value) for info, value in pairs]


class ArrayRequest:
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
        self._inputs = inputs
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
            for info, argument, value in zip(model.inputs, input_args, inputs, strict=True):
                if isinstance(value, np.ndarray):
                    np.copyto(view(input_memory, argument, info, value.shape), value, casting="same_kind")
            request._allocate_outputs([info.shape for info in model.outputs])
        except BaseException:
            request.close()
            raise
        return request

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
        if reported == self._shapes or any(0 in shape for shape in reported):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
