"""Hosted models: the vendor extension `nnfmq.hosted`, whose one operation runs a model file on another runtime.

Such a model is an ordinary model of the HAL with one operation. Its first input operand is a constant, the JSON of a
`HostedCall`: the format, the files, the options of the runtime, and the tensors as the file declares them. The next
ones are constants with the bytes of the files, in the order of `HostedCall.files`: TENSOR_QUANT8_ASYMM, each of at most
MAX_PART_BYTES, so that a larger file has several. The others are the inputs and outputs of the model, in the order of
the tensors. A tensor of rank 0, or one without elements, has an operand of the shape (1,); an unknown size is 0; a
tensor of unknown rank has no dimensions.

The operation's code is of this extension, and the types that the HAL does not have are those of `nnfmq.tflite`.
bfloat16, which NumPy lacks, crosses as 16-bit words (TENSOR_QUANT16_ASYMM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct, field

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import DTYPES, HIDL_PREFIX_BITS, extension_code
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType

__all__ = [
    "LIBRARIES",
    "MAX_PART_BYTES",
    "NAME",
    "OPERAND_TYPES",
    "RUN",
    "RUNTIMES",
    "FileParts",
    "HostedCall",
    "HostedDescription",
    "HostedRuntime",
    "HostedTensor",
    "Shape",
    "call_of",
    "constant_bytes",
    "decode_call",
    "fits_declaration",
    "is_file_name",
    "is_hosted",
    "is_known",
    "is_runtime_name",
    "library_names",
    "require_number_types",
    "runtime_named",
    "runtimes_of",
]

NAME = "nnfmq.hosted"
RUN = 0
"""The number of the operation within the extension."""
MAX_PART_BYTES = 2**32 - 1
"""The largest operand: a location's length has 32 bits."""
LIBRARIES = "custom_op_libraries"
"""The option that lists libraries of custom operators: a client's paths; in a call, names of its files."""
_FILES_MAX, _TENSORS_MAX, _NAME_MAX = 64, 65536, 255

Dimension = int | str | None
"""A size, the name of a symbol, or None if it has neither."""
Shape = tuple[Dimension, ...]


# ----------------------------------------------------------------------------------------------------------------------
# The runtimes that this build can host.


class HostedRuntime(Struct, frozen=True):
    """A runtime: the name of its device, the module that the adapter imports, and how to install it.

    `formats` are the formats of files that it runs, as `importers.file_format` names them. The adapter is the class
    `device_class` of the module of this name in `nnfmq.hosted`.
    """

    name: str
    package: str
    formats: tuple[str, ...]
    device_class: str

    @property
    def extra(self) -> str:
        """The extra of nnfmq that installs it."""
        return f"nnfmq[{self.name}]"


RUNTIMES = (
    HostedRuntime("litert", "ai_edge_litert", ("tflite",), "LiteRtDevice"),
    HostedRuntime("onnxruntime", "onnxruntime", ("onnx",), "OnnxRuntimeDevice"),
    HostedRuntime("openvino", "openvino", ("openvino", "onnx", "tflite"), "OpenVinoDevice"),
    HostedRuntime("torch", "torch", ("pt2",), "TorchDevice"),
    HostedRuntime("jax", "jax", ("jax",), "JaxDevice"),
)
"""The runtimes of this build, in the order in which they are tried for a file that names no device."""


def runtime_named(name: str) -> HostedRuntime | None:
    """Return the runtime of this build that a device of this name hosts; None if there is none."""
    return next((runtime for runtime in RUNTIMES if runtime.name == name), None)


def is_runtime_name(name: str) -> bool:
    """Return whether a device of this name hosts a runtime of this build."""
    return runtime_named(name) is not None


def runtimes_of(format: str) -> tuple[HostedRuntime, ...]:
    """Return the runtimes of this build that run files of a format, in the order in which they are tried."""
    return tuple(runtime for runtime in RUNTIMES if format in runtime.formats)


# ----------------------------------------------------------------------------------------------------------------------
# What a hosted model's operation has, and what a device tells of a file.


def is_known(shape: Shape | None) -> TypeGuard[tuple[int, ...]]:
    """Return whether the rank and all sizes are known."""
    return shape is not None and all(isinstance(size, int) for size in shape)


def fits_declaration(shape: Shape | None, declared: Shape | None) -> bool:
    """Return whether a shape is the one that a file declares, or has any sizes where the file leaves them open."""
    if shape is None or declared is None:
        return declared is None
    if len(shape) != len(declared):
        return False
    return all(size == known or not isinstance(known, int) for size, known in zip(shape, declared, strict=True))


class HostedTensor(Struct, frozen=True):
    """An input or output as the file declares it.

    `dtype` is NumPy's name of the element type, or "bfloat16"; other names ("string", "sequence") are of what does not
    cross. `shape` is None if the rank is not known. `scale` is 0 if the tensor is not quantized. `stated` is the shape
    in the file, if that says more than the runtime vouches for: results may have another one.
    """

    name: str
    dtype: str
    shape: Shape | None
    scale: float = 0.0
    zero_point: int = 0
    stated: Shape | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the tensor has no elements, and its shape is known."""
        return is_known(self.shape) and 0 in self.shape

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the operand."""
        if self.shape is None:
            return ()
        if self.shape == () or self.is_empty:
            return (1,)
        return tuple(size if isinstance(size, int) else 0 for size in self.shape)


class HostedDescription(Struct, frozen=True):
    """A runtime's description of a file, with the options given: inputs, outputs, states, names of signatures.

    `states` are the last inputs and the last outputs, in the same order; `initial` has the first values of each, as
    stored bytes (empty: zeros). `providers` are the execution providers that the runtime has, whatever the file.
    """

    inputs: tuple[HostedTensor, ...]
    outputs: tuple[HostedTensor, ...]
    signatures: tuple[str, ...] = ()
    states: int = 0
    initial: tuple[bytes, ...] = ()
    providers: tuple[str, ...] = ()


class FileParts(Struct, frozen=True, array_like=True):
    """A file of a hosted model: its name, without folders, and how many operands its bytes are in (0: it is empty)."""

    name: str
    parts: int


class HostedCall(Struct, frozen=True):
    """The first operand of a hosted model's operation.

    Attributes:
        format: The format of the first file, as `importers.file_format` names it.
        files: The files; the first is the model, others belong to it (external data, OpenVINO's .bin).
        signature: One of the file's signatures; None: its default.
        options: Options of the runtime. Each adapter documents its own.
        inputs: The model's inputs, in order, states last.
        outputs: The model's outputs, in order, states last.
    """

    format: str
    files: tuple[FileParts, ...]
    signature: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[HostedTensor, ...] = ()
    outputs: tuple[HostedTensor, ...] = ()

    def encode(self) -> bytes:
        """Return the JSON. Raises InvalidArgument if an option is not a value of JSON."""
        try:
            return msgspec.json.encode(self)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"runtime options are values of JSON: {error}") from error


_call_decoder = msgspec.json.Decoder(HostedCall)


def decode_call(data: bytes | memoryview) -> HostedCall:
    """Return the call that `HostedCall.encode` encoded.

    Raises:
        InvalidArgument: If it is none, has no file or too many, or a name that is not one of a file in one folder.
    """
    try:
        call = _call_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the first operand of a hosted model is not valid: {error}") from error
    if not 0 < len(call.files) <= _FILES_MAX:
        raise InvalidArgument(f"a hosted model has 1 to {_FILES_MAX} files, this one has {len(call.files)}")
    if max(len(call.inputs), len(call.outputs)) > _TENSORS_MAX:
        raise InvalidArgument(f"a hosted model has at most {_TENSORS_MAX} inputs and outputs each")
    for file in call.files:
        if not is_file_name(file.name):
            raise InvalidArgument(f"{file.name!r:.80} is no name of a file: it may have no '/' and not be '..'")
        if file.parts < 0:
            raise InvalidArgument(f"file {file.name!r:.80} has {file.parts} parts")
    names = [file.name for file in call.files]
    if len(set(names)) < len(names):
        raise InvalidArgument("two files of a hosted model have the same name")
    return call


def is_hosted(model: Model) -> bool:
    """Return whether a model runs a file on a hosted runtime."""
    return any(entry.name == NAME for entry in model.extensions)


def call_of(model: Model) -> HostedCall:
    """Return the call of a hosted model. Raises InvalidArgument if it has another operation, or no such operand."""
    codes = [extension_code(e.prefix, RUN, prefix_bits=HIDL_PREFIX_BITS) for e in model.extensions if e.name == NAME]
    operations = model.main.operations
    if not codes or [each.type for each in operations] != codes or not operations[0].inputs or model.referenced:
        raise InvalidArgument(f"a hosted model has one operation, {NAME}.{RUN}, with the call as its first operand")
    return decode_call(constant_bytes(model, model.main.operands[operations[0].inputs[0]]))


def constant_bytes(model: Model, operand: Operand) -> memoryview:
    """Return the bytes of a constant operand, without a copy. Raises InvalidArgument if it is none."""
    location = operand.location
    if operand.lifetime is LifeTime.CONSTANT_COPY:
        data = memoryview(model.operand_values)
    elif operand.lifetime is LifeTime.CONSTANT_REFERENCE:
        data = model.pools[location.pool_index].view
    else:
        raise InvalidArgument("the call and the files of a hosted model are constants")
    return data[location.offset : location.offset + location.length]


def library_names(option: object) -> list[str]:
    """Return the option LIBRARIES. Raises InvalidArgument if it is no list of different names."""
    if not isinstance(option, list) or not all(isinstance(name, str) for name in option):
        raise InvalidArgument(f"{LIBRARIES} is a list of files, not {option!r:.80}")
    return list(dict.fromkeys(option))


def is_file_name(name: str) -> bool:
    """Return whether a name is one of a file in one folder: no separator, no NUL, not "." or ".."."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(name) <= _NAME_MAX


# ----------------------------------------------------------------------------------------------------------------------
# The operand type of each element type.


OPERAND_TYPES: Mapping[str, OperandType] = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "bfloat16": OperandType.TENSOR_QUANT16_ASYMM,
    "bool": OperandType.TENSOR_BOOL8,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int16": OperandType.TENSOR_QUANT16_SYMM,
    "uint16": OperandType.TENSOR_QUANT16_ASYMM,
    "int32": OperandType.TENSOR_INT32,
    **{dtype: operand_type for operand_type, dtype in DTYPES.items()},
}
"""The operand type of each element type that crosses. Types of 8 and 16 bits that are not quantized have scale 1."""


def require_number_types(interface: HostedCall | HostedDescription) -> None:
    """Check that the elements of all inputs and outputs cross.

    Raises:
        InvalidArgument: If one has other elements: strings, sequences. The message names it.
    """
    for kind, tensors in (("input", interface.inputs), ("output", interface.outputs)):
        for tensor in tensors:
            if tensor.dtype not in OPERAND_TYPES:
                found, allowed = f"{kind} {tensor.name!r} has elements of type {tensor.dtype}", ", ".join(OPERAND_TYPES)
                raise InvalidArgument(f"{found}; tensors of these types cross: {allowed}")
