"""Import of TensorFlow Lite files: a HAL model, and descriptions of its inputs and outputs.

    bytes ── flatbuffer_verifier ── tflite_file: records ── tflite_operators: conversion ── graph_builder ── Model

The file is not trusted: time and memory are bounded by its size. A corrupt file raises InvalidArgument with the field
and the byte offset. Unsupported operators and tensors raise UnsupportedModel, which lists all of them. The first
subgraph or that of a signature is imported, with those that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.hal.summaries import nearest
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import LifeTime
from nnfmq.importers.device_support import require_computable
from nnfmq.importers.file_format import ModelSource, Shapes
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel, Problems
from nnfmq.importers.tflite.file import TfliteFile, TfliteOperator, read
from nnfmq.importers.tflite.folding import EmptyTensors, Folding
from nnfmq.importers.tflite.interface import FileSignature, read_metadata, read_signatures
from nnfmq.importers.tflite.operators import ConversionContext, convert_operator, live_operators
from nnfmq.importers.tflite.operators.control_flow import finish_variables
from nnfmq.importers.tflite.operators.conversion import CalledSubgraph, has_unknown_sizes, is_constant
from nnfmq.importers.tflite.resizing import Resizing, input_index

__all__ = ["Subgraphs", "TracedModel", "import_model", "import_traced"]


# ----------------------------------------------------------------------------------------------------------------------
# Import of the subgraphs of a TFLite file that IF and WHILE call.
#
# Each call imports its subgraph with the operands that it is given, so that their shapes are known inside. The number
# of calls and their depth are limited, because the tables of a hostile file can overlap.


_CALLS_MAX = 64
_DEPTH_MAX = 8


class Subgraphs:
    """The calls of one import so far. It refers to no context: a cycle would keep the content of the file."""

    def __init__(self) -> None:
        self._calls = 0
        self._depth = 0

    def call(
        self, caller: ConversionContext, index: int, inputs: Sequence[int], keeps_constants: bool
    ) -> CalledSubgraph:
        """Import a subgraph to be called with these operands of the caller.

        If it `keeps_constants`, it has those among the operands itself, and is called with the others.

        Raises:
            InvalidArgument: If there are too many calls, or the subgraph is not supported; the message has all reasons.
        """
        self._calls += 1
        if self._calls > _CALLS_MAX or self._depth >= _DEPTH_MAX:
            raise InvalidArgument(f"more than {_CALLS_MAX} subgraphs are called, or deeper than {_DEPTH_MAX}")
        self._depth += 1
        try:
            return self._import(caller, index, inputs, keeps_constants)
        finally:
            self._depth -= 1

    def _import(
        self, caller: ConversionContext, index: int, inputs: Sequence[int], keeps_constants: bool
    ) -> CalledSubgraph:
        context = ConversionContext(caller.file.subgraph(index), caller.builder.child())
        context.subgraphs = self
        given = self._give(caller, context, inputs, keeps_constants)
        problems, folding = Problems(), Folding(context)
        convert = folding.or_convert(partial(convert_operator, context))
        for operator in live_operators(context.file):
            _convert(context, operator, problems, convert)
        try:
            problems.raise_if_any()
            outputs = _outputs(context)
        except InvalidArgument as error:
            raise InvalidArgument(f"subgraph {index}: {error}") from None
        if context.states() or context.variables:
            raise InvalidArgument(f"subgraph {index} has states or variables: that is not supported")
        number = context.builder.refer(given, outputs)
        return CalledSubgraph(number, tuple(context.builder[output] for output in outputs))

    def _give(
        self, caller: ConversionContext, context: ConversionContext, inputs: Sequence[int], keeps_constants: bool
    ) -> list[int]:
        """Return operands of the subgraph's inputs, of the types and shapes of the caller's; not of kept constants."""
        if len(inputs) != len(context.file.inputs):
            raise InvalidArgument(f"{len(inputs)} values for a subgraph of {len(context.file.inputs)} inputs")
        given = []
        for tensor_index, outer in zip(context.file.inputs, inputs, strict=True):
            operand, tensor = caller.builder[outer], context.file.tensor(tensor_index)
            if operand.type != tensor.type or not operand.dimensions or 0 in operand.dimensions:
                raise InvalidArgument(f"{tensor} of a subgraph gets a value of another type or of unknown shape")
            is_kept = keeps_constants and is_constant(operand)
            inner = replace(operand, lifetime=LifeTime.SUBGRAPH_INPUT, location=type(operand.location)())
            number = context.builder.operand(operand if is_kept else inner)
            context.given(tensor_index, number)
            given += [] if is_kept else [number]
        return given


def _outputs(context: ConversionContext) -> list[int]:
    """Return the operands of the outputs: copies of inputs, constants and other outputs, which the HAL requires."""
    found: list[int] = []
    for index in context.file.outputs:
        operand = context.value(index)
        if not context.builder[operand].dimensions:
            context.builder.set_dimensions(operand, context.file.tensor(index).shape or (1,))
        if 0 in context.builder[operand].dimensions:
            raise InvalidArgument(f"{context.file.tensor(index)} is a result of unknown shape")
        is_output = context.builder[operand].lifetime == LifeTime.SUBGRAPH_OUTPUT
        found.append(operand if is_output and operand not in found else context.copied(operand))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Import of TensorFlow Lite files: a HAL model, and descriptions of its inputs and outputs.


class TracedModel(Struct, frozen=True):
    """A model, and where the file's tensors are in it.

    `shapes` has the shape of each tensor that an operator writes, and `results` the outputs that are intermediate
    results, by tensor; they follow the model's own outputs. `states` has the variable tensors, whose states come first.
    """

    loaded: LoadedModel
    shapes: Mapping[int, tuple[int, ...]]
    results: Mapping[int, int]
    states: tuple[int, ...]


_Imported = tuple[LoadedModel, ConversionContext, list[int]]
"""The last are the tensors of the intermediate results that are outputs."""


def import_model(source: ModelSource) -> LoadedModel:
    """Return the model of a .tflite file.

    Raises:
        InvalidArgument: If the file is corrupt or uses an unsupported feature.
    """
    if source.signature is not None:
        return _import_signature(source, source.signature)
    file, (loaded, _, _) = _import_file(source)
    signatures = tuple(read_signatures(source.data))
    return replace(loaded, metadata=read_metadata(file, source.data), signatures=signatures)


def _import_signature(source: ModelSource, key: str) -> LoadedModel:
    """Return a signature of a .tflite file as a model, whose inputs and outputs have the signature's names."""
    read(source.data)  # verifies it
    signatures = read_signatures(source.data)
    if key not in signatures:
        known = ", ".join(map(repr, signatures)) or "none"
        raise InvalidArgument(f"there is no signature {key!r}; those of the file: {known}{nearest(key, signatures)}")
    places: dict[str | int, int] = {name: place for place, name in enumerate(signatures[key].inputs)}
    shapes = {places.get(name, name): shape for name, shape in source.shapes.items()}
    _, (loaded, _, _) = _import_file(
        replace(source, shapes=shapes), subgraph=signatures[key].subgraph, signature=signatures[key]
    )
    return replace(
        loaded,
        inputs=_named(loaded.inputs, signatures[key].inputs),
        outputs=_named(loaded.outputs, signatures[key].outputs),
        signatures=tuple(signatures),
    )


def _named(infos: Iterable[TensorInfo], names: Iterable[str]) -> tuple[TensorInfo, ...]:
    return tuple(replace(info, name=name) for info, name in zip(infos, names, strict=True))


def import_traced(source: ModelSource, *, keep_results: bool = False, subgraph: int = 0) -> TracedModel:
    """Return a subgraph of a .tflite file as a model, with the places of its tensors. Raises as `import_model`.

    With `keep_results` all results of operators on which the model's outputs depend are outputs, too.
    """
    file, (loaded, context, results) = _import_file(source, keep_results=keep_results, subgraph=subgraph)
    if source.path:
        loaded = replace(loaded, file_name=source.path.name)
    places = {tensor: len(file.outputs) + place for place, tensor in enumerate(results)}
    shapes = {**context.known_shapes(), **file.empty_shapes()}
    return TracedModel(loaded, shapes, places, tuple(context.states()))


def _import_file(
    source: ModelSource, *, keep_results: bool = False, subgraph: int = 0, signature: FileSignature | None = None
) -> tuple[TfliteFile, _Imported]:
    """Import a file with the shapes that it states, or with those that follow from the inputs; in turn if one fails.

    Those that follow from inputs without elements follow from inputs that have some.

    The converter of TFLite states 1 for a dimension that it does not know, even if it follows from the inputs' shapes.
    Then the operators that compute sizes are needed; otherwise they are left out, because they may not be supported.
    """
    if any(0 in shape for shape in source.shapes.values()):
        file = _with_empty_inputs(source, subgraph, signature)
        return file, _import(file, {}, keep_results=keep_results)
    file = _open(source, subgraph, signature)
    with_sizes = has_unknown_sizes(file) and not any(file.tensor(index).is_empty for index in file.inputs)
    try:
        return file, _import_once(file, source.shapes, keep_results, with_sizes)
    except UnsupportedModel:
        file = _open(source, subgraph, signature)
        with suppress(InvalidArgument):
            stated = [file.tensor(index).shape for index in file.outputs]
            imported = _import_once(file, source.shapes, keep_results, not with_sizes)
            if with_sizes or source.shapes or _have_shapes(imported[0].outputs, stated):
                return file, imported
        raise


def _have_shapes(outputs: Sequence[TensorInfo], stated: Sequence[tuple[int, ...]]) -> bool:
    """Return True if a model's outputs have the shapes that the file states, if it states any."""
    return all(output.shape == shape for output, shape in zip(outputs, stated, strict=False) if shape)


def _with_empty_inputs(source: ModelSource, subgraph: int, signature: FileSignature | None) -> TfliteFile:
    """Return a file that states the shapes of its tensors for inputs without elements.

    The rules of operations are for tensors that have some, so the shapes are those for sizes of 1 to 3 in place of 0,
    continued; each extent must be a linear function of the size.
    """
    file, found = _open(source, subgraph, signature), []
    for size in (1, 2, 3):
        shapes = {key: tuple(extent or size for extent in shape) for key, shape in source.shapes.items()}
        _, (_, context, _) = _import_file(replace(source, shapes=shapes), subgraph=subgraph, signature=signature)
        found.append(context.known_shapes())
    for index, first in found[0].items():
        if index not in file.inputs and (first != (1,) or file.tensor(index).rank):
            file.set_shape(index, _continued(str(file.tensor(index)), [shapes.get(index, ()) for shapes in found]))
    for key, shape in source.shapes.items():
        file.set_shape(input_index(file, key), tuple(shape))
    return file


def _continued(tensor: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape for a size of 0, given those for 1, 2 and 3. Raises InvalidArgument if it does not follow."""
    first, second, third = shapes
    is_linear = len(first) == len(second) == len(third) and all(
        third[axis] - second[axis] == second[axis] - first[axis] for axis in range(len(first))
    )
    shape = tuple(2 * one - two for one, two in zip(first, second, strict=False))
    if not is_linear or min(shape, default=0) < 0 or 0 in first:
        raise InvalidArgument(f"the shape of {tensor} does not follow from inputs without elements")
    return shape


def _open(source: ModelSource, subgraph: int, signature: FileSignature | None) -> TfliteFile:
    file = read(source.data, source.follows_tflite).subgraph(subgraph)
    if signature is not None:
        file.inputs, file.outputs = tuple(signature.inputs.values()), tuple(signature.outputs.values())
    return file


def _import_once(file: TfliteFile, shapes: Shapes, keep_results: bool, with_sizes: bool) -> _Imported:
    if with_sizes and not shapes:
        shapes = {place: file.tensor(index).shape for place, index in enumerate(file.inputs)}
    return _import(file, shapes, keep_results=keep_results, with_sizes=with_sizes)


def _import(file: TfliteFile, shapes: Shapes, *, keep_results: bool = False, with_sizes: bool = False) -> _Imported:
    builder, problems = GraphBuilder(max_constant_bytes=file.constant_bytes_max), Problems()
    context = ConversionContext(file, builder)
    convert = Resizing(context, shapes).convert if shapes else partial(convert_operator, context)
    inputs = _all(problems, context.model_input, file.inputs)
    convert_known = EmptyTensors(context).or_convert(Folding(context).or_convert(convert))
    context.subgraphs = Subgraphs()
    for operator in live_operators(file, with_sizes=with_sizes):
        _convert(context, operator, problems, convert_known)
    outputs = _all(problems, context.model_output, file.outputs)
    problems.raise_if_any()
    if not outputs:
        raise InvalidArgument("the model has no outputs")
    context.find_ranks(outputs)
    described = context.infos(file.inputs, inputs), context.infos(file.outputs, outputs)
    states = [*context.states().values(), *finish_variables(context)]
    results = context.keep_results() if keep_results else {}
    inputs += [state.before for state in states]
    outputs += [*results.values(), *(state.after for state in states)]
    model = builder.build(inputs, outputs)
    infos = tuple(state.info for state in states)
    kept = context.infos(tuple(results), tuple(results.values()))
    loaded = LoadedModel(model, described[0], (*described[1], *kept), states=infos)
    return loaded, context, list(results)


def _convert(
    context: ConversionContext,
    operator: TfliteOperator,
    problems: Problems,
    convert: Callable[[TfliteOperator], None],
) -> None:
    """Add the operations of an operator; or a problem, and operands for its results, which later operators read."""
    begin = context.builder.operation_count
    try:
        convert(operator)
        require_computable(context.builder, begin)
    except InvalidArgument as error:
        problems.add(str(error), operator.index, operator.name, context.file.types(operator))
        context.assume_written(operator)


def _all(problems: Problems, convert: Callable[[int], int], indexes: Iterable[int]) -> list[int]:
    """Return the operands of a model's inputs or outputs, and collect the problems of those that have none."""
    operands = []
    for index in indexes:
        with problems.collect():
            operands.append(convert(index))
    return operands
