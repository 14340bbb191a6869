"""ArrayLayouts: memory for a model's arrays whose shapes are not all known, laid out for the shapes of each execution.

An execution whose inputs have the shapes of an earlier one finds everything as that has left it: arrays, request, and
what its user has prepared. For other shapes the arrays are laid out again, in the same two memories if these are large
enough, otherwise in larger ones. Outputs of unknown size have locations of some bytes, which grow when the driver
reports OUTPUT_INSUFFICIENT_SIZE, and do not shrink.

`LaidOutArrays` do not change: a burst or an execution object replaces its arrays by others with one store, so a signal
handler that raises leaves it with the ones or the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.client.model.array_copies import ArrayCopies
from nnfmq.client.model.array_request import MappedArrays
from nnfmq.client.model.arrays import (
    LENGTH_MAX,
    Array,
    Outputs,
    callers_shape,
    format_tensor_shape,
    layout,
    names_of,
    outputs_type,
    size_bytes,
    space_bytes,
    view,
)
from nnfmq.client.model.handle import CompiledHandle, MappedState, mapped_state
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.types import OutputShape, Request

__all__ = ["ArrayLayouts", "LaidOutArrays"]

LAYOUTS_KEPT = 4
PAGE = 4096
FIRST_OUTPUT_BYTES = PAGE  # of the location of an output of unknown size, until an execution needs more

Shape = tuple[int, ...]
_NOWHERE = np.empty((), [("not laid out", np.uint8)])  # stands for an input before the first execution: fits no array


def _release_nothing(_prepared: object) -> None:
    """Release nothing."""


class ArrayUser(Protocol):
    """A burst or an execution object, whose arrays are laid out."""

    def lay_out(self, shapes: tuple[Shape, ...]) -> LaidOutArrays:
        """Replace the arrays by those for inputs of these shapes, and return them."""
        ...


class LaidOutArrays(MappedArrays, frozen=True, eq=False):
    """Arrays for inputs of one combination of shapes.

    The infos are the model's. `output_shapes` are those of the last execution's outputs, states included; if the model
    leaves one unknown, `outputs` is empty before the first. `user` replaces the arrays.
    """

    shapes: tuple[Shape, ...] = ()
    output_shapes: tuple[Shape, ...] = ()
    user: Callable[[], ArrayUser | None] = lambda: None

    def require_laid_out(self) -> None:
        """See `MappedArrays.require_laid_out`."""
        if self.inputs and not self.memories:
            info = next(info for info in self.input_infos if info.has_unknown_shape)
            raise InvalidArgument(
                f"`inputs` has no arrays yet: input {info.name!r} has the shape {format_tensor_shape(info)}, and the "
                "first execution with arrays says how large they are"
            )

    def take(self, values: Sequence[Array]) -> MappedArrays:
        """Copy inputs that were checked, and return the arrays that have them: others, if the shapes differ."""
        if any(value.shape != target.shape for value, target in zip(values, self.inputs, strict=True)):
            user = self.user()
            assert user is not None  # it is what calls this
            return user.lay_out(tuple(value.shape for value in values)).take(values)
        return super().take(values)


class _NoOutputs(Outputs):
    """The outputs before an execution has said their shapes. As `out` it stands for those that this will have."""

    def __getitem__(self, key: Any) -> Any:
        raise InvalidArgument(
            "`outputs` has no arrays yet: the model leaves a shape open, and the first execution says how large each is"
        )


class ArrayLayouts(Closable):
    """Lays out the arrays of one burst or execution object, in memories that it owns. Close it.

    Args:
        model: The model.
        user: The owner of the arrays, which refers to this.
        prepare: Makes of a request what the user needs of it: `MappedArrays.prepared`.
        release: Releases what `prepare` has made.
    """

    def __init__(
        self,
        model: CompiledHandle,
        user: ArrayUser,
        prepare: Callable[[Request], Any],
        release: Callable[[Any], object] = _release_nothing,
    ) -> None:
        self._model, self._prepare, self._release_prepared = model, prepare, release
        self._user = weakref.ref(user)
        self._memories: tuple[Memory, Memory] | None = None  # of the inputs, of the outputs
        self._replaced: list[Memory] = []
        self._dropped: list[Any] = []  # what was prepared for layouts that nothing finds any more
        self._layouts: dict[tuple[Shape, ...], LaidOutArrays] = {}  # the last one used is the last
        self._output_bytes = [
            FIRST_OUTPUT_BYTES if info.has_unknown_shape else max(space_bytes(info, info.shape), 1)
            for info in model.outputs
        ]
        self._is_closed = False

    def first(self) -> LaidOutArrays:
        """Return the arrays before the first execution."""
        model = self._model
        if any(info.has_unknown_shape for info in model.caller_inputs):
            nowhere = (_NOWHERE,) * len(model.caller_inputs)
            none = Request((), (), ())
            state = MappedState(model.states, (), _NOWHERE, _NOWHERE) if model.states else None
            return LaidOutArrays(
                model.caller_inputs, model.caller_outputs, nowhere, _NoOutputs(), ArrayCopies(nowhere, ()), nowhere, (),
                state, none, (), user=self._user,
            )  # fmt: skip
        return self.lay_out(tuple(info.shape for info in model.caller_inputs), None)

    def lay_out(self, shapes: tuple[Shape, ...], before: MappedArrays | None) -> LaidOutArrays:
        """Return the arrays for inputs of these shapes, with the states of the arrays `before`.

        Call `close_replaced` when nothing uses those any more.

        Raises:
            ResourceExhausted: If there is not enough memory.
            BadState: If this is closed.
            NnfmqError: If the user cannot prepare the request.
        """
        arrays = self._layouts.pop(shapes, None) or self._new(shapes)
        while len(self._layouts) >= LAYOUTS_KEPT:
            self._dropped.append(self._layouts.pop(next(iter(self._layouts))).prepared)
        self._layouts[shapes] = arrays
        if arrays.state is not None and before is not None and before.state is not None:
            arrays.state.set(before.state.get())
        return arrays

    def _new(self, shapes: tuple[Shape, ...]) -> LaidOutArrays:
        model = self._model
        input_shapes = (*shapes, *(state.tensor.shape for state in model.states))
        input_args, input_bytes = layout(model.inputs, input_shapes, 0)
        output_args, output_bytes = layout(model.outputs, [info.shape for info in model.outputs], 1, self._output_bytes)
        source, sink = self._memories_for(input_bytes, output_bytes)
        inputs = tuple(map(view, [source] * len(input_args), input_args, model.inputs, input_shapes))
        count, output_count, state = len(shapes), len(model.caller_outputs), None
        if model.states:
            state = mapped_state(
                model.states, inputs[count:], (source, input_args[count:]), (sink, output_args[output_count:])
            )
        request = Request(input_args, output_args, (source, sink))
        arrays = LaidOutArrays(
            model.caller_inputs, model.caller_outputs, inputs[:count], _NoOutputs(),
            ArrayCopies(inputs[:count], ()), inputs, (), state, request, (source, sink), self._prepare(request), shapes,
            user=self._user,
        )  # fmt: skip
        if any(info.has_unknown_shape for info in model.outputs):
            return arrays
        return self._with_outputs(arrays, tuple(info.shape for info in model.outputs))

    def _memories_for(self, input_bytes: int, output_bytes: int) -> tuple[Memory, Memory]:
        """Return the memories, after replacing those that are too small; what was laid out in them is dropped."""
        source, sink = self._memories or (None, None)
        with ExitStack() as undo:
            if source is None or source.size_bytes < input_bytes:
                size = _grown(source, input_bytes)
                source = undo.enter_context(Memory.create(size, "nnfmq-inputs", one_writer=True))
            if sink is None or sink.size_bytes < output_bytes:
                sink = undo.enter_context(Memory.create(_grown(sink, output_bytes), "nnfmq-outputs"))
            undo.pop_all()
        replaced = [memory for memory in self._memories or () if memory not in (source, sink)]
        if replaced:
            self._drop_layouts()
        self._replaced += replaced
        self._memories = source, sink
        if self._is_closed:  # by another thread
            self.close()
            raise BadState("closed while the arrays were laid out")
        return source, sink

    def show(self, arrays: MappedArrays, reported: Sequence[OutputShape], kept: Callable[[Any], Any]) -> LaidOutArrays:
        """Return the arrays with outputs of the shapes that an execution has reported and that were validated.

        `kept` returns what their user keeps of `arrays.prepared` if the shapes are others than those of the last one.
        """
        shapes = tuple(shape.dimensions for shape in reported) or tuple(info.shape for info in self._model.outputs)
        assert isinstance(arrays, LaidOutArrays)
        if shapes == arrays.output_shapes:
            return arrays
        shown = self._with_outputs(replace(arrays, prepared=kept(arrays.prepared)), shapes)
        if arrays.shapes in self._layouts:
            self._layouts[arrays.shapes] = shown
        return shown

    def _with_outputs(self, arrays: LaidOutArrays, shapes: tuple[Shape, ...]) -> LaidOutArrays:
        infos = self._model.outputs
        all_outputs = tuple(
            view(arrays.memories[1], argument, info, callers_shape(info, shape))
            for argument, info, shape in zip(arrays.request.outputs, infos, shapes, strict=True)
        )
        outputs = outputs_type(names_of(arrays.output_infos))(all_outputs[: len(arrays.output_infos)])
        return replace(
            arrays, outputs=outputs, all_outputs=all_outputs, copies=ArrayCopies(arrays.inputs, outputs),
            output_shapes=shapes,
        )  # fmt: skip

    def grow(self, arrays: MappedArrays, reported: Sequence[OutputShape]) -> LaidOutArrays | None:
        """Return arrays for the same inputs, with space for outputs of the shapes that an execution has reported.

        The inputs keep their values. Returns None if the driver does not know the sizes, or they fit. Raises as
        `lay_out`.
        """
        needed = [
            0 if shape.is_sufficient or 0 in shape.dimensions else size_bytes(info, shape.dimensions)
            for info, shape in zip(self._model.outputs, reported, strict=True)
        ]
        are_known = all(size or shape.is_sufficient for size, shape in zip(needed, reported, strict=True))
        if not are_known or not self._make_space(needed):
            return None
        return self._laid_out_again(arrays)

    def store(self, arrays: MappedArrays, results: Sequence[Array], kept: Callable[[Any], Any]) -> LaidOutArrays:
        """Return the arrays with the outputs `results`, copied; otherwise as `show`. Raises as `lay_out`."""
        if self._make_space([space_bytes(info, r.shape) for info, r in zip(self._model.outputs, results, strict=True)]):
            arrays = self._laid_out_again(arrays)
            if arrays.state is not None:
                arrays.state.begin()  # as before an execution: these are those with which it began
        arrays = self.show(arrays, [OutputShape(result.shape) for result in results], kept)
        for target, result in zip(arrays.all_outputs, results, strict=True):
            np.copyto(target, result)
        return arrays

    def _laid_out_again(self, arrays: MappedArrays) -> LaidOutArrays:
        assert isinstance(arrays, LaidOutArrays)
        return self.lay_out(arrays.shapes, arrays)

    def _make_space(self, needed: Sequence[int]) -> bool:
        """Make space for outputs of `needed` bytes; return whether one had too little."""
        pairs = list(zip(self._output_bytes, needed, strict=True))
        if all(size <= length for length, size in pairs):
            return False
        self._output_bytes = [_enlarged(*pair) for pair in pairs]
        self._drop_layouts()
        return True

    def _drop_layouts(self) -> None:
        layouts, self._layouts = self._layouts, {}
        self._dropped += [arrays.prepared for arrays in layouts.values()]

    def close_replaced(self) -> Sequence[Memory]:
        """Release what no layout uses any more, and return the memories that were closed: larger ones are there."""
        replaced, self._replaced = self._replaced, []
        dropped, self._dropped = self._dropped, []
        for prepared in dropped:
            self._release_prepared(prepared)
        for memory in replaced:
            memory.close()
        return replaced

    def close(self) -> None:
        """Release what was prepared, and close the memories. Idempotent."""
        self._is_closed = True
        self._drop_layouts()
        self.close_replaced()
        for memory in self._memories or ():
            memory.close()


def _grown(memory: Memory | None, needed: int) -> int:
    """Return the size of what replaces `memory`: enough that slowly growing shapes do not replace it each time."""
    size = needed if memory is None else max(needed, memory.size_bytes * 3 // 2)
    return -(-size // PAGE) * PAGE  # what it takes anyway


def _enlarged(length: int, needed: int) -> int:
    """Return the length of an output's location that needs `needed` bytes: as `_grown`."""
    return length if needed <= length else min(max(needed, length * 3 // 2), LENGTH_MAX)
