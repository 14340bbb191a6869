"""Import of TensorFlow Lite files: a HAL model, and descriptions of its inputs and outputs.

    bytes ── flatbuffer_verifier ── tflite_file: records ── tflite_operators: conversion ── graph_builder ── Model

The file is not trusted: time and memory are bounded by its size. A corrupt file raises InvalidArgument with the field
and the byte offset. Unsupported operators and tensors raise UnsupportedModel, which lists all of them. The first
subgraph or that of a signature is imported, with those that it calls. External buffers are not supported.
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
from nnfmq.importers.file_format import ModelSource, Shapes
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel
from nnfmq.importers.operation_check import require_computable
from nnfmq.importers.problems import Problems
from nnfmq.importers.tflite_empty import EmptyTensors
from nnfmq.importers.tflite_file import TfliteFile, TfliteOperator, read
from nnfmq.importers.tflite_folding import Folding
from nnfmq.importers.tflite_interface import FileSignature, read_signatures
from nnfmq.importers.tflite_metadata import read_metadata
from nnfmq.importers.tflite_operators import ConversionContext, convert_operator, live_operators
from nnfmq.importers.tflite_operators.pruning import has_unknown_sizes
from nnfmq.importers.tflite_operators.variable_ops import finish_variables
from nnfmq.importers.tflite_resizing import Resizing, input_index
from nnfmq.importers.tflite_subgraphs import Subgraphs

__all__ = ["TracedModel", "import_model", "import_traced"]


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
