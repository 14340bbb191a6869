"""Model files for another runtime: their bytes in sealed memories, and the HAL's model that runs them there.

Nothing of a file is read here but its format: a device of the driver, which hosts a runtime, tells what the inputs and
outputs are (`hal.hosted`). The memories are sealed against writing, so the driver maps them instead of copying. Where
another client has sent the same bytes, the model refers to that client's memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.shared_constants import SharedConstants
from nnfmq.hal.extensions import NAME as TYPES_NAME
from nnfmq.hal.extensions import ExtensionCodes, named_code
from nnfmq.hal.hosted import (
    LIBRARIES,
    MAX_PART_BYTES,
    NAME,
    OPERAND_TYPES,
    RUN,
    FileParts,
    HostedCall,
    HostedDescription,
    HostedTensor,
    is_known,
    library_names,
    require_number_types,
)
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import QUANTIZED_TYPES, DataLocation, LifeTime, Model, Operand, Operation, OperationType, Subgraph
from nnfmq.importers.companion_files import companion_files
from nnfmq.importers.file_format import ModelSource, Shapes, SourceArgument, hosted_format, indexed_shapes, read_source
from nnfmq.importers.loaded_model import LoadedModel

__all__ = ["Describe", "HostedSource", "describe_hosted", "hosted_model", "load_hosted", "read_hosted"]

Describe: TypeAlias = Callable[
    [HostedCall, Sequence[SharedConstants]], tuple[HostedDescription, Sequence[SharedConstants]]
]
"""Returns what a device finds in a file, given a call and the parts of the files, and these parts in the memory that
the model shall refer to. The call has no outputs, and inputs only if the application chose their sizes, which may
decide those of the outputs."""


class HostedSource(Struct, frozen=True):
    """A model file and those that belong to it, in sealed memories: the parts of each file, in order.

    `file_name` is the model file's, "" if it was given as bytes.
    """

    format: str
    files: tuple[tuple[str, tuple[SharedConstants, ...]], ...]
    file_name: str = ""

    @property
    def parts(self) -> tuple[SharedConstants, ...]:
        """The memories of all files."""
        return tuple(part for _, parts in self.files for part in parts)


def load_hosted(
    source: SourceArgument | HostedSource,
    describe: Describe,
    *,
    shapes: Shapes | None = None,
    signature: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Return the model that runs a file on the runtime that `describe` asks.

    Args:
        source: The path of the file, or its content; or what `read_hosted` has returned.
        describe: Asks the device.
        shapes: Sizes of inputs that the file leaves open, by name or index. Without them they are given with each
            execution.
        signature: One of the file's signatures.
        options: Options of the runtime: values of JSON. Those libraries of custom operators that it names by their
            paths are read, and cross with the file.

    Raises:
        InvalidArgument: If no runtime reads the file, the device rejects it, or an argument is not valid.
        OSError: If a file cannot be read.
    """
    given = source if isinstance(source, HostedSource) else read_hosted(read_source(source, is_sealed=True))
    files, values = _with_libraries(given, dict(options or {}))
    call = _call_of(files, signature, values)
    description, parts = describe(call, files.parts)
    inputs = _with_shapes(description.inputs, {} if shapes is None else shapes)
    if inputs != description.inputs:
        description, parts = describe(replace(call, inputs=inputs), parts)
    loaded = hosted_model(replace(call, inputs=inputs, outputs=description.outputs), parts, description)
    return replace(loaded, file_name=given.file_name, data_files=tuple(name for name, _ in given.files[1:]))


def describe_hosted(source: SourceArgument, describe: Describe) -> HostedDescription:
    """Return the description of a file by the runtime that `describe` asks. Raises as `load_hosted`."""
    given = read_hosted(read_source(source, is_sealed=True))
    return describe(_call_of(given), given.parts)[0]


def _call_of(files: HostedSource, signature: str | None = None, options: Mapping[str, Any] | None = None) -> HostedCall:
    parts = tuple(FileParts(name, len(parts)) for name, parts in files.files)
    return HostedCall(files.format, parts, signature, options or {})


def read_hosted(file: ModelSource) -> HostedSource:
    """Return the parts of a file and of those beside it that belong to it. Raises as `load_hosted`."""
    format = hosted_format(file.data, file.path)
    name = file.path.name if file.path is not None else f"model.{format}"
    files = [(name, _parts(file))]
    files += [(other, _parts(source)) for other, source in companion_files(format, file).items()]
    return HostedSource(format, tuple(files), name if file.path is not None else "")


def _with_libraries(source: HostedSource, options: dict[str, Any]) -> tuple[HostedSource, dict[str, Any]]:
    """Return a file with the libraries that options name, and the options with their names instead of their paths."""
    paths = [Path(name) for name in library_names(options.get(LIBRARIES, []))]
    if not paths:
        return source, options
    read = tuple((path.name, _parts(read_source(path, is_sealed=True))) for path in paths)
    return replace(source, files=source.files + read), {**options, LIBRARIES: [name for name, _ in read]}


def _parts(source: ModelSource) -> tuple[SharedConstants, ...]:
    if source.memory is not None and source.memory.size_bytes <= MAX_PART_BYTES:
        return (source.memory,)
    data = memoryview(source.data).cast("B")
    slices = [data[begin : begin + MAX_PART_BYTES] for begin in range(0, len(data), MAX_PART_BYTES)]
    return tuple(SharedConstants.of_values([part])[0] for part in slices)


def _with_shapes(inputs: Sequence[HostedTensor], shapes: Shapes) -> tuple[HostedTensor, ...]:
    """Return the inputs with the sizes that the caller gives."""
    given = indexed_shapes([tensor.name for tensor in inputs], shapes)
    return tuple(replace(tensor, shape=given.get(index, tensor.shape)) for index, tensor in enumerate(inputs))


# ----------------------------------------------------------------------------------------------------------------------
# The HAL's model.


def hosted_model(call: HostedCall, parts: Sequence[SharedConstants], description: HostedDescription) -> LoadedModel:
    """Return the model with the operation that runs a file; the call has the inputs and outputs.

    Raises:
        InvalidArgument: If elements of a tensor do not cross.
    """
    require_number_types(call)
    data = call.encode()
    constants = [_constant(len(data), LifeTime.CONSTANT_COPY, 0)]
    constants += [_constant(part.size_bytes, LifeTime.CONSTANT_REFERENCE, i) for i, part in enumerate(parts)]
    operands = [
        *constants,
        *(_operand(tensor, LifeTime.SUBGRAPH_INPUT) for tensor in call.inputs),
        *(_operand(tensor, LifeTime.SUBGRAPH_OUTPUT) for tensor in call.outputs),
    ]
    first_input, first_output = len(constants), len(constants) + len(call.inputs)
    inputs, outputs = tuple(range(first_input, first_output)), tuple(range(first_output, len(operands)))
    codes = ExtensionCodes()
    codes.prefix(TYPES_NAME)  # the first of each model, as its types have it
    code = named_code(OperationType, codes.operation_type(NAME, RUN), f"{NAME}.RUN")
    operation = Operation(code, (*range(first_input), *inputs), outputs)
    model = Model(
        main=Subgraph(tuple(operands), (operation,), inputs, outputs),
        operand_values=data,
        pools=tuple(parts),
        extensions=codes.extensions,
    )
    count = description.states
    input_infos, output_infos = (tuple(map(_info, tensors)) for tensors in (call.inputs, call.outputs))
    split = len(input_infos) - count
    initial = description.initial or (b"",) * count
    states = tuple(StateInfo(info, value) for info, value in zip(input_infos[split:], initial, strict=True))
    return LoadedModel(
        model, input_infos[:split], output_infos[: len(output_infos) - count], states=states,
        signatures=description.signatures,
    )  # fmt: skip


def _constant(size: int, lifetime: LifeTime, pool_index: int) -> Operand:
    location = DataLocation(pool_index, 0, size)
    return Operand(OPERAND_TYPES["uint8"], (size,), scale=1.0, lifetime=lifetime, location=location)


def _operand(tensor: HostedTensor, lifetime: LifeTime) -> Operand:
    kind = OPERAND_TYPES[tensor.dtype]
    scale, zero_point = (tensor.scale or 1.0, tensor.zero_point) if kind in QUANTIZED_TYPES else (0.0, 0)
    return Operand(kind, tensor.dimensions, scale=scale, zero_point=zero_point, lifetime=lifetime)


def _info(tensor: HostedTensor) -> TensorInfo:
    is_bfloat16 = tensor.dtype == "bfloat16"
    dtype = "uint16" if is_bfloat16 else tensor.dtype
    shape = tensor.shape if is_known(tensor.shape) else tensor.dimensions
    return TensorInfo(
        tensor.name, shape, dtype, tensor.scale, tensor.zero_point,
        is_scalar=tensor.shape == (), is_empty=tensor.is_empty, is_bfloat16=is_bfloat16,
    )  # fmt: skip
