"""The memory of an execution whose arrays are the application's: inputs copied in, room for outputs, results out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from nnfmq.hal.errors import OutputInsufficientSize
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import OutputShape, Request, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime import arguments
from nnfmq.runtime.arguments import Array

Shapes = Sequence[tuple[int, ...]]


class Workspace:
    """Two memories and the request over them: the driver can only read the inputs'. Close it, or use `with`."""

    def __init__(self, outputs: Sequence[TensorInfo], source: Memory, inputs: tuple[RequestArgument, ...]) -> None:
        self._infos = outputs
        self._source = source
        self._inputs = inputs
        self._sink: Memory | None = None
        self._outputs: tuple[RequestArgument, ...] = ()
        self._shapes: Shapes = ()

    @classmethod
    def create(cls, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], given: Sequence[Array]) -> Self:
        """Copy `given` in, which were checked, and make room for outputs of the shapes that the model states."""
        places, size_bytes = arguments.layout(inputs, [array.shape for array in given], 0)
        workspace = cls(outputs, Memory.create(size_bytes, "nnfmq-inputs", one_writer=True), places)
        try:
            for info, place, array in zip(inputs, places, given, strict=True):
                np.copyto(arguments.view(workspace._source, place, info, array.shape), array, casting="same_kind")
            workspace._make_room([info.shape for info in outputs])
        except BaseException:
            workspace.close()
            raise
        return workspace

    def _make_room(self, shapes: Shapes) -> None:
        self._outputs, size_bytes = arguments.layout(self._infos, shapes, 1)
        if self._sink is not None:
            self._sink.close()
        self._sink = Memory.create(size_bytes, "nnfmq-outputs")
        self._shapes = shapes

    @property
    def request(self) -> Request:
        """The request; it changes with `grow`."""
        assert self._sink is not None  # `create` returns none without
        return Request(self._inputs, self._outputs, (self._source, self._sink))

    def grow(self, error: OutputInsufficientSize) -> None:
        """Make room for what the driver says the outputs need; raises `error` where that cannot help.

        Raises ProtocolError where the driver states impossible shapes.
        """
        known = [shape.dimensions for shape in error.output_shapes]
        arguments.check_stated(self._infos, known)
        if known == self._shapes or any(0 in shape for shape in known):
            raise error
        self._make_room(known)

    def results(self, reported: Sequence[OutputShape]) -> tuple[Array, ...]:
        """Return copies of the outputs, which have the shapes that the driver reports.

        Raises ProtocolError where it states impossible shapes.
        """
        assert self._sink is not None
        final = [shape.dimensions for shape in reported] or self._shapes
        arguments.check_stated(self._infos, final)
        arguments.check_room(self._infos, self._outputs, final)
        triples = zip(self._infos, self._outputs, final, strict=True)
        return tuple(arguments.view(self._sink, place, info, shape).copy() for info, place, shape in triples)

    def close(self) -> None:
        """Give the memory back; a driver that still uses it has it mapped itself."""
        self._source.close()
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
