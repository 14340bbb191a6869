"""Model files: their bytes, and the importer that their content selects. A file's name does not matter.

To add a format, add its importer to `_IMPORTERS` and its test to `_format_of`. An importer is a module with
`import_model(source: ModelSource) -> LoadedModel`.
"""

from __future__ import annotations

import io
import operator
import os
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct, field

from nnfmq.base.memory import Memory, PrivateBytes, copy_file
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.hal.summaries import nearest

if TYPE_CHECKING:
    from nnfmq.base.shared_constants import SharedConstants

__all__ = [
    "TFLITE_IMPORTER",
    "FileContent",
    "ModelSource",
    "Shapes",
    "SourceArgument",
    "UnknownFormat",
    "checked_shapes",
    "hosted_format",
    "importer_of",
    "indexed_shapes",
    "read_source",
]

FileContent: TypeAlias = bytes | PrivateBytes | memoryview
"""The bytes of a file. A slice is a copy, unless they are in sealed memory."""
SourceArgument: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview
"""The path of a file, or its content."""
Shapes: TypeAlias = Mapping[str | int, Sequence[int]]
"""New shapes of inputs, by name or by index."""

TFLITE_IMPORTER = "nnfmq.importers.tflite.model"
_IMPORTERS = {
    "a TensorFlow Lite file": TFLITE_IMPORTER,
    "an ONNX model": "nnfmq.importers.onnx.model",
}
"""The module that imports each supported format."""
_HOSTED_FORMATS = {
    "a TensorFlow Lite file": "tflite",
    "an ONNX model": "onnx",
    "an OpenVINO model": "openvino",
    "an archive of torch.export": "pt2",
    "a function of jax.export": "jax",
}
"""The formats that devices of `nnfmq.hosted` run, as these name them."""
_SUPPORTED = "models are read from TensorFlow Lite files (.tflite) and ONNX files (.onnx)"

_FIRST_BYTES = {
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"GIF8": "a GIF image",
    b"BM": "a BMP image",
    b"%PDF": "a PDF document",
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"\x89HDF": "an HDF5 file, such as a Keras model",
    b"GGUF": "a GGUF model",
    b"\x1f\x8b": "a gzip archive; extract it first",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; run `git lfs pull`",
    b"\x80\x02": "a Python pickle, such as a PyTorch checkpoint",
    b"\x80\x04": "a Python pickle, such as a PyTorch checkpoint",
    b"<!DOCTYPE": "an HTML page; the download has probably failed",
    b"<html": "an HTML page; the download has probably failed",
    b"ORTM": "an ONNX Runtime file (.ort)",
}
_ZIP, _TEXT = "a zip archive, such as a PyTorch, Keras or .npz file", "a text file"
_UNKNOWN_FORMAT = "a file of an unknown format"
_UNKNOWN = (_ZIP, _TEXT, _UNKNOWN_FORMAT)
"""What may be a model of a plug-in's runtime."""
_SHORTEST = 8
_TEXT_BYTES = 16  # a file that begins with as many printable characters is text
_LISTED_MEMBERS = 3
_XML_STARTS = (b"<?xml", b"<net", b"\xef\xbb\xbf<")
_XML_PROLOGUE_BYTES = 512  # declaration and comments before the root element


class UnknownFormat(InvalidArgument):
    """INVALID_ARGUMENT: a file may be a model, but none of a format that this build knows."""


class ModelSource(Struct, frozen=True):
    """The content of a model file, and how to import it.

    `path` is None if the caller gave bytes; it locates files that belong to this one. `shapes` replace those of inputs.
    `values` has NumPy arrays, by name, for inputs that become constants; only ONNX files can have them. `signature`
    names one of a TensorFlow Lite file. `follows_tflite`: the extension's operations are used where the HAL's are
    defined in another way than TensorFlow Lite's. `parsed` is what a reader of the same format has made of `data`, for
    the next one: an onnx.ModelProto. `memory` is sealed memory that has the content, if it was read to some.
    """

    data: FileContent
    path: Path | None = None
    shapes: Shapes = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    signature: str | None = None
    follows_tflite: bool = False
    parsed: Any = None
    memory: SharedConstants | None = None

    def __repr__(self) -> str:
        return f"<ModelSource: {self.path or 'bytes'}>"


def read_source(
    source: SourceArgument, shapes: Shapes | None = None, signature: str | None = None, *, is_sealed: bool = False
) -> ModelSource:
    """Return the content of a file, or the given bytes. If `is_sealed`, a file is read to sealed memory, for a driver.

    Raises:
        InvalidArgument: If the path is not that of a regular file.
        OSError: If the file cannot be read.
        ResourceExhaustedTransient: If there is not enough sealed memory, or no fd is left.
    """
    sizes = checked_shapes({} if shapes is None else shapes)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return ModelSource(bytes(source), None, sizes, signature=signature)
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidArgument(
            f"{type(source).__name__} is no model file: give its path, or its content as bytes (of an open file: "
            "file.read())"
        )
    path = Path(source)
    # Reading a device or a pipe might never end, and neither might opening a pipe that nobody writes to.
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument(f"{path}: not a regular file")
        memory = _sealed_content(file) if is_sealed else None
        data = _content(file) if memory is None else memory.view
        return ModelSource(data, path, sizes, signature=signature, memory=memory)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def checked_shapes(shapes: Any) -> dict[str | int, tuple[int, ...]]:
    """Return the shapes of inputs as an application gave them. Raises InvalidArgument if they are none."""
    if not isinstance(shapes, Mapping):
        raise InvalidArgument(f"shapes are given by input, as in {{'image': (1, 224, 224, 3)}}, not as {shapes!r}")
    checked = {}
    for key, shape in shapes.items():
        try:
            checked[key] = tuple(map(operator.index, shape))
        except TypeError:
            text = f"shapes: {shape!r} is no shape for input {key!r}; give a size for each dimension, as in (1, 128)"
            raise InvalidArgument(text) from None
    return checked


def indexed_shapes(names: Sequence[str], shapes: Any) -> dict[int, tuple[int, ...]]:
    """Return the shapes of inputs, which an application gave by name or by index, by the index among `names`.

    Raises:
        InvalidArgument: If they are no shapes, or there is no such input.
    """
    return {_position(names, key): shape for key, shape in checked_shapes(shapes).items()}


def _position(names: Sequence[str], key: str | int) -> int:
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    if key in names:
        return names.index(str(key))
    listed = ", ".join(map(repr, names))
    raise InvalidArgument(f"shapes: there is no input {key!r}; the inputs are {listed}{nearest(key, names)}")


def _content(file: io.BufferedReader) -> FileContent:
    """Return the rest of a file, in memory that returns to the kernel when it is freed.

    After free() of a large block from malloc, glibc would keep later ones of that size in its heap.
    """
    size = os.fstat(file.fileno()).st_size
    content = PrivateBytes.allocate(size)
    if file.readinto(content) == size > 0 and not file.read(1):
        return content
    file.seek(0)  # it is empty, or has changed meanwhile
    return file.read()


def _sealed_content(file: io.BufferedReader) -> SharedConstants | None:
    """Return a file's content in memory that nobody can write to; None if it is empty, or has changed meanwhile."""
    from nnfmq.base.shared_constants import SharedConstants  # most files are imported

    fd, size = file.fileno(), os.fstat(file.fileno()).st_size
    if not size:
        return None
    content = SharedConstants(Memory.create_constant(size, partial(copy_file, fd, 0, size), "nnfmq-constants"))
    return content if os.fstat(fd).st_size == size else None


def importer_of(data: FileContent) -> str:
    """Return the name of the module that imports a file with this content.

    Raises:
        UnsupportedModel: If there is none, and the file has a format of a runtime that can be hosted.
        UnknownFormat: If a plug-in's runtime may run the file.
        InvalidArgument: If it is no model; the message says what the file is.
    """
    kind = _format_of(data)
    if kind in _IMPORTERS:
        return _IMPORTERS[kind]
    problem = f"this is {kind}; {_SUPPORTED}"
    if kind in _HOSTED_FORMATS:
        raise UnsupportedModel(problem)
    raise UnknownFormat(problem) if kind in _UNKNOWN else InvalidArgument(problem)


def hosted_format(data: FileContent, path: Path | None) -> str:
    """Return the name of a file's format for devices that host a runtime: "onnx", "tflite" ...

    A format that this module does not know has the name that the file's name ends with: a device of a plug-in may run
    it.

    Raises:
        InvalidArgument: If there is no name; the message says what the file is.
    """
    kind = _format_of(data)
    if kind in _HOSTED_FORMATS:
        return _HOSTED_FORMATS[kind]
    if path is not None and len(path.suffix) > 1:
        return path.suffix[1:].lower()
    raise InvalidArgument(f"this is {kind}, which no runtime runs")


def _format_of(data: FileContent) -> str:
    if not data:
        return "an empty file"
    if data[4:8] == b"TFL3":
        return "a TensorFlow Lite file"
    for start, name in _FIRST_BYTES.items():
        if data[: len(start)] == start:
            return name
    start = bytes(data[:_XML_PROLOGUE_BYTES])
    if start.startswith(_XML_STARTS) and b"<net" in start:
        return "an OpenVINO model"
    if data[:4] == b"PK\x03\x04":
        return _zip_archive(data)
    if data[8:10] == b'{"' and int.from_bytes(data[:8], "little") < len(data):
        return "a safetensors file, which has weights but no model"
    if _is_onnx(data):
        return "an ONNX model"
    if _is_jax_export(data):
        return "a function of jax.export"
    if len(data) < _SHORTEST:
        return f"a file of {len(data)} bytes, too short for a model and probably truncated"
    words = b"".join(bytes(data[:_TEXT_BYTES]).split())
    return _TEXT if words.isascii() and words.decode().isprintable() else _UNKNOWN_FORMAT


def _zip_archive(data: FileContent) -> str:
    """Describe a zip archive by the models in it, if there are any."""
    import zipfile  # rarely needed, and large

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return "a truncated or corrupt zip archive"
    if any(name.partition("/")[2] == "models/model.json" for name in names):
        return "an archive of torch.export"
    models = [name for name in names if name.endswith((".tflite", ".onnx"))]
    if models:
        listed = ", ".join(repr(name[:80]) for name in models[:_LISTED_MEMBERS])
        return f"a zip archive with {listed}; extract it first"
    return _ZIP


_STABLEHLO_FIELD = 30  # of the table of jax.export, in bytes: mlir_module_serialized
_STABLEHLO_START = b"ML\xefR"  # of MLIR's bytecode


def _is_jax_export(data: FileContent) -> bool:
    """Return True if `data` is a FlatBuffer whose table has MLIR's bytecode where `jax.export` puts it."""

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(data[at : at + size], "little", signed=size == 4) if 0 <= at < len(data) else 0

    table = number(0)
    fields = table - number(table)
    vector = table + number(fields + _STABLEHLO_FIELD, 2)
    start = vector + number(vector) + 4
    return number(fields, 2) > _STABLEHLO_FIELD and start > 0 and data[start : start + 4] == _STABLEHLO_START


_ONNX_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
"""Number and wire type of each field of ONNX's ModelProto (onnx.proto)."""


def _is_onnx(data: FileContent) -> bool:
    """Return True if `data` is a protocol buffer with the fields of an ONNX model; it may be truncated."""
    at, seen = 0, set()
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if _ONNX_FIELDS.get(number) != wire_type:
            return False
        seen.add(number)
        value, at = _varint(data, at)
        if wire_type == 2:  # a length
            at += value
    return 1 in seen and len(seen) > 1


def _varint(data: FileContent, at: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            break
    return value, at
