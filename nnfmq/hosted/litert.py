"""The device `litert`: .tflite files on LiteRT, with XNNPACK as LiteRT chooses it.

LiteRT takes the file as `bytes`: one private copy. It computes in memory of its own: an execution copies each input to
it and each output from it. It cannot be told to stop: a late execution ends with its worker.

States are inputs and outputs of the HAL's model, as with nnfmq's own importer, so that executions of several bursts on
one interpreter do not mix: variable tensors are set before and read after each one; resource variables, to which
LiteRT's interface has no access, are assigned and read by two subgraphs that the file gets (`resource_variables`).

Options: `threads`, and those arguments of LiteRT's `Interpreter` in `_FLAGS`, true or false, as well as
`experimental_op_resolver_type`, by the name of its value. With `experimental_preserve_all_tensors` all tensors that
operators write, and whose elements cross, follow the outputs. Delegates and operators from libraries are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.hosted import OPERAND_TYPES, HostedDescription, HostedTensor, Shape, is_known
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.hosted.litert_tensors import Place, Sizes, Tensors
from nnfmq.hosted.options import require_one_of
from nnfmq.hosted.resource_variables import initialize, with_access
from nnfmq.operations.declaration import Array

__all__ = ["LiteRtDevice"]

_FLAGS = (
    "experimental_disable_delegate_clustering",
    "experimental_default_delegate_latest_features",
    "experimental_compress_quantization_zero_points",
    "experimental_disable_delegate_node_fusion",
)
_PRESERVE = "experimental_preserve_all_tensors"
_RESOLVER = "experimental_op_resolver_type"


class LiteRtDevice(HostedDevice):
    """A device that runs .tflite files on LiteRT."""

    name = "litert"
    has_signatures = True

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """See `HostedDevice.open`."""
        from ai_edge_litert import schema_py_generated as schema
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        content, arguments = bytes(file.model), _arguments(options, OpResolverType)
        interpreter = Interpreter(model_content=content, **arguments)  # verifies the file
        parsed = schema.Model.GetRootAs(content)
        access, names = with_access(content, parsed, schema)
        if names:
            interpreter = Interpreter(model_content=access, **arguments)
        return _Model(interpreter, parsed, schema, options, names)


def _arguments(options: OpenOptions, resolvers: Any) -> dict[str, Any]:
    """Return arguments of the interpreter. Raises InvalidArgument if an option is none of them."""
    options.require_known(_RESOLVER, _PRESERVE, *_FLAGS)
    arguments: dict[str, Any] = {"num_threads": options.threads, **options.options}
    for name, value in options.options.items():
        require_one_of(name, value, resolvers.__members__ if name == _RESOLVER else (True, False))
    if _RESOLVER in arguments:
        arguments[_RESOLVER] = resolvers[arguments[_RESOLVER]]
    return arguments


class _Model(HostedModel):
    """An interpreter with one subgraph of a file.

    Attributes:
        calls: The interpreter's functions, which take a subgraph and do not look for views that are still held.
        inputs: The places of the inputs, states last.
        outputs: The places of the outputs, states last.
        subgraphs: The subgraphs that an execution invokes, in order.
        count: The number of inputs without states.
        open_inputs: The positions of the inputs whose shapes the file leaves open.
        shapes: The shapes of the inputs without states for which memory is allocated; None: for none.
        variables: The memory of the variable tensors, which are the first states.
    """

    def __init__(self, interpreter: Any, file: Any, schema: Any, options: OpenOptions, names: Sequence[str]) -> None:
        self._interpreter = interpreter  # owns the file's content
        self.calls = interpreter._interpreter
        self._tensors = tensors = Tensors(self.calls, file, schema)
        self._graph, inputs, outputs = tensors.interface(options.signature)
        variables = [named for named in tensors.used(self._graph, "Inputs") if tensors.is_variable(named[1])]
        if options.options.get(_PRESERVE):
            known = {place for _, place in (*outputs, *variables)}
            written = (named for named in tensors.used(self._graph, "Outputs") if named[1] not in known)
            outputs += [named for named in written if tensors.dtype(named[1]) in OPERAND_TYPES]
        reader = file.SubgraphsLength()  # the first subgraph of `with_access`; the other one follows
        values = range(1, 2 * len(names), 2)
        self.inputs = [*(place for _, place in (*inputs, *variables)), *((value, reader + 1) for value in values)]
        self.outputs = [*(place for _, place in (*outputs, *variables)), *((value, reader) for value in values)]
        self.subgraphs = (reader + 1, self._graph, reader) if names else (self._graph,)
        self.count = len(inputs)
        self.open_inputs = [i for i, (_, place) in enumerate(inputs) if None in tensors.sizes(place)]
        self.shapes: tuple[tuple[int, ...], ...] | None = None
        self.variables = _Variables(self.calls, [place for _, place in variables if 0 not in tensors.size(place)])
        # Memory for the shapes that the file states, which may be impossible if it leaves some open.
        with suppress(*((RuntimeError, ValueError) if self.open_inputs else ())):
            self._allocate()
        if names:
            initialize(self.calls, reader, len(names))
        state_names = (*(name for name, _ in variables), *names)
        states = list(map(tensors.state, state_names, self.outputs[len(outputs) :]))
        self.description = HostedDescription(
            (*(self._declared(name, place) for name, place in inputs), *(s for s, _ in states)),
            (*(self._declared(name, place, is_result=True) for name, place in outputs), *(s for s, _ in states)),
            signatures=tuple(self.calls.GetSignatureDefs()),
            states=len(states),
            initial=tuple(value for _, value in states),
        )

    def _allocate(self) -> None:
        self.variables.forget()
        self.calls.AllocateTensors(self._graph)
        self.shapes = tuple(map(self._tensors.size, self.inputs[: self.count]))

    def _has_memory(self, place: Place) -> bool:
        """Return whether an output has its shape before an execution; otherwise that decides it.

        One of no elements, which needs no memory, has it if that is not the file's: then an operator has set it.
        """
        with suppress(RuntimeError, ValueError):
            found = self.calls.tensor(self.calls, *place)
            if not self.open_inputs and None in self._tensors.sizes(place):
                return False  # XNNPACK has memory, but not yet that of the shape
            return found.size > 0 or list(found.shape) != self._tensors.stated_shape(place)
        return False

    def _result_sizes(self, place: Place) -> Sizes | None:
        size = self._tensors.size(place)
        return size if self._has_memory(place) else (None,) * len(size) or None

    def _declared(self, name: str, place: Place, *, is_result: bool = False) -> HostedTensor:
        dtype = self._tensors.dtype(place)
        if dtype not in OPERAND_TYPES:  # LiteRT's interface may not even view it
            raise InvalidArgument(f"tensor {name!r} has elements of type {dtype}, which do not cross from LiteRT")
        is_sized = not is_result or (self.open_inputs and self._has_memory(place))
        shape = self._tensors.sizes(place) if is_sized else self._result_sizes(place)
        return HostedTensor(name, dtype, shape, *self._tensors.quantization(place))

    def resolve(self, shapes: Sequence[Shape | None]) -> Sequence[Shape | None]:
        """See `HostedModel.resolve`. LiteRT also takes other sizes than those that the file states."""
        self.resize({position: shape for position, shape in enumerate(shapes[: self.count]) if is_known(shape)})
        return super().resolve(shapes) if self.shapes is None else list(map(self._result_sizes, self.outputs))

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        """See `HostedModel.bind`."""
        return _Run(self, inputs, outputs)

    def resize(self, shapes: Mapping[int, tuple[int, ...]]) -> None:
        """Set the shapes of inputs, and allocate memory unless other shapes are open. Raises InvalidArgument."""
        self.shapes = None
        try:
            for position, shape in shapes.items():
                index, graph = self.inputs[position]
                self.calls.ResizeInputTensor(index, np.array(shape, np.int32), False, graph)
            if all(position in shapes for position in self.open_inputs):
                self._allocate()
        except (RuntimeError, ValueError) as error:
            raise InvalidArgument(f"litert: inputs of {', '.join(map(str, shapes.values()))}: {error}") from error


class _Variables:
    """The memory of the variable tensors that have elements; LiteRT allocates them as one block.

    LiteRT's function for a view of a tensor takes as long as several copies of a small one. The views are kept,
    therefore, but an execution may move the block, because LiteRT allocates again after an operator whose inputs decide
    the size of its output. So after each one, the address of the first tensor says whether the views still hold.
    """

    def __init__(self, calls: Any, places: Sequence[Place]) -> None:
        self.numbers = {place: number for number, place in enumerate(places)}
        self._views = [partial(calls.tensor, calls, index, *_unless_first(graph)) for index, graph in places]
        self._address: int | None = None
        self._memory: list[memoryview] = []
        self._is_checked = False

    def forget(self) -> None:
        """Look for the memory again: LiteRT allocates all tensors."""
        self._is_checked, self._address = False, None

    def note_execution(self) -> None:
        """Check the address again: LiteRT executes."""
        self._is_checked = False

    def memory(self) -> Sequence[memoryview]:
        """Return the bytes of each tensor. They hold until LiteRT allocates or executes."""
        if not self._is_checked and self._views:
            address = int(self._views[0]().ctypes.data)
            if address != self._address:
                self._memory, self._address = [view().data.cast("B") for view in self._views], address
            self._is_checked = True
        return self._memory


class _Run(HostedRun):
    """Copies inputs, invokes, copies outputs."""

    def __init__(self, model: _Model, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        calls, self._model, variables = model.calls, model, model.variables.numbers
        takes = list(zip(model.inputs, inputs, strict=True))
        gives = [(place, y) for place, y in zip(model.outputs, outputs, strict=True) if y is not None]
        self._before = [(variables[place], x.data.cast("B")) for place, x in takes if place in variables]
        self._after = [(variables[place], y.data.cast("B")) for place, y in gives if place in variables]
        copied = [(place, x) for place, x in takes if x.size and place not in variables]
        self._steps = [partial(calls.SetTensor, i, x, *_unless_first(graph)) for (i, graph), x in copied]
        self._steps += [partial(calls.Invoke, graph) for graph in model.subgraphs]
        view, read = partial(calls.tensor, calls), [each for each in gives if each[0] not in variables]
        self._outputs = [(partial(view, i, *_unless_first(graph)), y) for (i, graph), y in read]
        self._found = [(position, *place) for position, place in enumerate(model.outputs) if outputs[position] is None]
        self._shapes = tuple(array.shape for array in inputs[: model.count])

    def __call__(self) -> Sequence[Array | None]:
        """See `HostedRun.__call__`."""
        variables = self._model.variables
        if self._model.shapes != self._shapes:
            self._model.resize(dict(enumerate(self._shapes)))
        memory = variables.memory()
        for number, value in self._before:
            memory[number][:] = value
        variables.note_execution()
        for step in self._steps:
            step()
        for view, out in self._outputs:
            result = view()
            if result.shape != out.shape:
                raise GeneralFailure(f"litert: output tensor {view.args[1]} is {result.shape}, not {out.shape}")
            out[...] = result
        memory = variables.memory()
        for number, value in self._after:
            value[:] = memory[number]
        if not self._found:
            return ()
        calls, tensors = self._model.calls, self._model.description.outputs
        results: list[Array | None] = [None] * len(tensors)
        for position, *place in self._found:
            shape, dtype = calls.TensorSize(*place), tensors[position].dtype  # of no elements: GetTensor raises
            results[position] = np.asarray(calls.GetTensor(*place)) if shape.all() else np.empty(shape, dtype)
        return results


def _unless_first(graph: int) -> tuple[int, ...]:
    """Return a subgraph as the last argument of LiteRT's functions, which take the first one faster without it."""
    return (graph,) if graph else ()
