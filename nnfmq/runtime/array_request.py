"""The memory of an execution whose arrays are the application's: inputs copied in, room for outputs, results out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.hal.errors import OutputInsufficientSize
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, OutputShape, Request, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime import tensor_layout
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.tensor_layout import Array

Shapes = Sequence[tuple[int, ...]]


def checked_arguments(infos: Sequence[TensorInfo], values: Sequence[ArrayLike | Buffer]) -> list[Array | Buffer]:
    """As `tensor_layout.checked_arrays`, but let Buffers pass: what they hold, the driver knows."""
    tensor_layout.check_count("input", infos, len(values))
    pairs = zip(infos, values, strict=True)
    return [value if isinstance(value, Buffer) else tensor_layout.checked_array(info, value) for info, value in pairs]


class ArrayRequest:
    """Two memories and the request over them: the driver can only read the inputs'. Close it, or use `with`."""

    def __init__(
        self,
        outputs: Sequence[TensorInfo],
        source: Memory,
        inputs: tuple[RequestArgument, ...],
        given: Sequence[Array | Buffer],
        targets: Sequence[object],
        connection: Connection | None,
    ) -> None:
        self._infos = outputs
        self._source = source
        self._inputs = inputs
        self._given = given
        self._targets = targets
        self._connection = connection
        self._sink: Memory | None = None
        self._outputs: tuple[RequestArgument, ...] = ()
        self._shapes: Shapes = ()

    @classmethod
    def create(
        cls,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        given: Sequence[Array | Buffer],
        targets: Sequence[object] | None = None,
        connection: Connection | None = None,
    ) -> Self:
        """Copy `given` in, which were checked, and make room for outputs of the shapes that the model states.

        Buffers of the driver that `connection` leads to, among `given` and `targets`, take the place of such memory.
        """
        here = [value.shape if isinstance(value, np.ndarray) else () for value in given]
        places, size_bytes = tensor_layout.layout(inputs, here, 0)
        source = Memory.create(size_bytes, "nnfmq-inputs", one_writer=True)
        workspace = cls(outputs, source, places, given, targets or [None] * len(outputs), connection)
        try:
            for info, place, value in zip(inputs, places, given, strict=True):
                if isinstance(value, np.ndarray):
                    np.copyto(tensor_layout.view(source, place, info, value.shape), value, casting="same_kind")
            workspace._make_room([info.shape for info in outputs])
        except BaseException:
            workspace.close()
            raise
        return workspace

    def _make_room(self, shapes: Shapes) -> None:
        self._outputs, size_bytes = tensor_layout.layout(self._infos, shapes, 1)
        if self._sink is not None:
            self._sink.close()
        self._sink = Memory.create(size_bytes, "nnfmq-outputs")
        self._shapes = shapes

    @property
    def request(self) -> Request:
        """The request; it changes with `grow`."""
        assert self._sink is not None  # `create` returns none without
        pools: list[Memory | BufferToken] = [self._source, self._sink]
        inputs = self._in_buffers(self._inputs, self._given, pools)
        return Request(inputs, self._in_buffers(self._outputs, self._targets, pools), tuple(pools))

    def _in_buffers(
        self, places: Sequence[RequestArgument], values: Sequence[object], pools: list[Memory | BufferToken]
    ) -> tuple[RequestArgument, ...]:
        """Return `places` with those of Buffers, which are added to `pools`, in place of the others."""
        found = []
        for place, value in zip(places, values, strict=True):
            if isinstance(value, Buffer):
                assert self._connection is not None, "who gives buffers gives their connection"
                pool = value.pool_for(self._connection)
                index = next((number for number, listed in enumerate(pools) if listed is pool), len(pools))
                if index == len(pools):  # a memory listed twice would hide that arguments overlap (N-RQX-13)
                    pools.append(pool)
                found.append(value.argument_in(index))
            else:
                found.append(place)
        return tuple(found)

    def grow(self, error: OutputInsufficientSize) -> None:
        """Make room for what the driver says the outputs need; raises `error` where that cannot help.

        Raises ProtocolError where the driver states impossible shapes.
        """
        known = [shape.dimensions for shape in error.output_shapes]
        tensor_layout.check_reported_shapes(self._infos, known)
        if known == self._shapes or any(0 in shape for shape in known):
            raise error
        self._make_room(known)

    def arrays(self, reported: Sequence[OutputShape]) -> tuple[Array, ...]:
        """As `results`, of a workspace without Buffers."""
        return tuple(result for result in self.results(reported) if isinstance(result, np.ndarray))

    def results(self, reported: Sequence[OutputShape]) -> tuple[Array | Buffer, ...]:
        """Return copies of the outputs, which have the shapes that the driver reports, and Buffers as they were given.

        Raises ProtocolError where it states impossible shapes.
        """
        assert self._sink is not None
        final = [shape.dimensions for shape in reported] or self._shapes
        tensor_layout.check_reported_shapes(self._infos, final)
        results: list[Array | Buffer] = []
        for info, place, shape, target in zip(self._infos, self._outputs, final, self._targets, strict=True):
            if isinstance(target, Buffer):
                results.append(target)
                continue
            tensor_layout.check_fits([info], [place], [shape])
            results.append(tensor_layout.view(self._sink, place, info, shape).copy())
        return tuple(results)

    def close(self) -> None:
        """Give the memory back; a driver that still uses it has it mapped itself."""
        self._source.close()
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
