"""The tensors, operators and signatures of a TFLite file, of all its subgraphs and before any conversion.

`file` has what the conversion needs; this is what a program that inspects a file sees. A tensor may have a type
that is not supported. The file is verified first, and reading it is bounded by its size.
"""

from __future__ import annotations

import io
import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import tensor_text
from nnfmq.importers.file_format import TFLITE_IMPORTER, FileContent, importer_of
from nnfmq.importers.loaded_model import ModelMetadata, TensorMetadata
from nnfmq.importers.tflite import flatbuffers
from nnfmq.importers.tflite.file import BUILTIN_OPERATORS, TENSOR_TYPES, TfliteFile, buffer_content
from nnfmq.importers.tflite.flatbuffers import Field, Scalar, String, Table, TableReader, Union, Vector

__all__ = [
    "FileOperator",
    "FileSignature",
    "FileSubgraph",
    "FileTensor",
    "TfliteInterface",
    "read_interface",
    "read_metadata",
    "read_signatures",
]


class FileTensor(Struct, frozen=True):
    """A tensor as the file has it: `type` is the schema's name, `shape_signature` may be empty.

    `data` is a view of the file, None without a value.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    shape_signature: tuple[int, ...]
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    quantized_dimension: int = 0
    is_variable: bool = False
    data: memoryview | None = None

    def __repr__(self) -> str:
        return f"<FileTensor: {tensor_text(self.type, self.shape)} {self.name!r}>"


class FileOperator(Struct, frozen=True):
    """An operator: the name of the builtin or custom operator, and tensor indexes (-1: omitted)."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FileSubgraph(Struct, frozen=True):
    """The tensors of a subgraph, the indexes of its inputs and outputs, and its operators in the file's order."""

    tensors: tuple[FileTensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[FileOperator, ...]


class FileSignature(Struct, frozen=True):
    """The tensors of a signature by the names that it gives them."""

    subgraph: int
    inputs: dict[str, int]
    outputs: dict[str, int]


class TfliteInterface(Struct, frozen=True):
    """The subgraphs of a file, and its signatures by key."""

    subgraphs: tuple[FileSubgraph, ...]
    signatures: dict[str, FileSignature]


def read_interface(data: FileContent) -> TfliteInterface:
    """Return the interface of a .tflite file.

    Raises:
        InvalidArgument: If it is no .tflite file, or corrupt.
    """
    if importer_of(data) != TFLITE_IMPORTER:
        raise InvalidArgument(
            "this is no TensorFlow Lite file; nnfmq.load and nnfmq.compat.onnxruntime read .onnx files"
        )
    flatbuffers.verify(data, flatbuffers.MODEL, flatbuffers.IDENTIFIER)
    return _InterfaceReader(data).read()


def read_signatures(data: FileContent) -> dict[str, FileSignature]:
    """Return the signatures of a verified .tflite file by key. Raises InvalidArgument if one is invalid."""
    return _InterfaceReader(data).signatures()


class _InterfaceReader:
    """Reads a verified file within a budget of elements, so that parts that overlap cannot multiply the work."""

    def __init__(self, data: FileContent) -> None:
        self._model = TableReader.root(data, flatbuffers.MODEL)
        self._elements_left = len(data)

    def read(self) -> TfliteInterface:
        model = self._model
        subgraphs = tuple(self._subgraph(model.Subgraphs(index)) for index in range(model.SubgraphsLength()))
        if not subgraphs:
            raise InvalidArgument("0 subgraphs: a model has at least one")
        return TfliteInterface(subgraphs, self.signatures())

    def signatures(self) -> dict[str, FileSignature]:
        signatures = (self._model.SignatureDefs(index) for index in range(self._model.SignatureDefsLength()))
        return {self._text(raw.SignatureKey()): self._signature(raw) for raw in signatures}

    def _subgraph(self, raw: Any) -> FileSubgraph:
        tensors = tuple(self._tensor(raw.Tensors(index)) for index in range(raw.TensorsLength()))
        inputs = self._ints(raw.InputsLength(), raw.InputsAsNumpy)
        outputs = self._ints(raw.OutputsLength(), raw.OutputsAsNumpy)
        operators = tuple(self._operator(raw.Operators(index)) for index in range(raw.OperatorsLength()))
        used = [inputs, outputs, *(indexes for found in operators for indexes in (found.inputs, found.outputs))]
        _require_indexes(used, len(tensors))
        return FileSubgraph(tensors, inputs, outputs, operators)

    def _tensor(self, raw: Any) -> FileTensor:
        self._spend(1)
        shape = self._ints(raw.ShapeLength(), raw.ShapeAsNumpy)
        signature = self._ints(raw.ShapeSignatureLength(), raw.ShapeSignatureAsNumpy)
        scales: tuple[float, ...] = ()
        zero_points: tuple[int, ...] = ()
        quantization, dimension = raw.Quantization(), 0
        if quantization is not None:
            scales = self._floats(quantization.ScaleLength(), quantization.ScaleAsNumpy)
            zero_points = self._ints(quantization.ZeroPointLength(), quantization.ZeroPointAsNumpy)
            dimension = quantization.QuantizedDimension()
        type_name, is_variable = TENSOR_TYPES.get(raw.Type(), f"number {raw.Type()}"), bool(raw.IsVariable())
        return FileTensor(
            self._text(raw.Name()), type_name, shape, signature,
            scales, zero_points, dimension, is_variable, buffer_content(self._model, raw.Buffer()),
        )  # fmt: skip

    def _operator(self, raw: Any) -> FileOperator:
        self._spend(1)
        if raw.OpcodeIndex() >= self._model.OperatorCodesLength():
            raise InvalidArgument(f"operator code index {raw.OpcodeIndex()} is out of range")
        code = self._model.OperatorCodes(raw.OpcodeIndex())
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        name = BUILTIN_OPERATORS.get(number, f"code {number}")
        return FileOperator(
            self._text(code.CustomCode()) if name == "CUSTOM" else name,
            self._ints(raw.InputsLength(), raw.InputsAsNumpy),
            self._ints(raw.OutputsLength(), raw.OutputsAsNumpy),
        )

    def _signature(self, raw: Any) -> FileSignature:
        self._spend(1)
        subgraph = raw.SubgraphIndex()
        if subgraph >= self._model.SubgraphsLength():
            raise InvalidArgument(f"a signature has subgraph {subgraph}, which does not exist")
        inputs = self._tensor_map(raw.InputsLength(), raw.Inputs)
        outputs = self._tensor_map(raw.OutputsLength(), raw.Outputs)
        _require_indexes([inputs.values(), outputs.values()], self._model.Subgraphs(subgraph).TensorsLength())
        return FileSignature(subgraph, inputs, outputs)

    def _tensor_map(self, count: int, entry: Callable[[int], Any]) -> dict[str, int]:
        self._spend(count)
        entries = [entry(index) for index in range(count)]
        return dict(sorted((self._text(found.Name()), int(found.TensorIndex())) for found in entries))

    def _spend(self, count: int) -> None:
        self._elements_left -= count
        if self._elements_left < 0:
            raise InvalidArgument("corrupt file: its vectors overlap (more elements than the file has bytes)")

    def _ints(self, count: int, as_numpy: Callable[[], Any]) -> tuple[int, ...]:
        self._spend(count)
        return tuple(as_numpy().tolist()) if count else ()

    def _floats(self, count: int, as_numpy: Callable[[], Any]) -> tuple[float, ...]:
        self._spend(count)
        return tuple(as_numpy().tolist()) if count else ()

    def _text(self, raw: bytes | None) -> str:
        self._spend(len(raw or b""))
        return (raw or b"").decode("utf-8", "replace")


def _require_indexes(groups: Iterable[Iterable[int]], count: int) -> None:
    for group in groups:
        for index in group:
            if not -1 <= index < count:
                raise InvalidArgument(f"tensor index {index} is not in 0..{count - 1}")


# ----------------------------------------------------------------------------------------------------------------------
# Metadata of a TFLite file: what its author says of inputs and outputs, with labels and normalization.
#
# The file has a FlatBuffer of its own in a buffer that the model names, and the label files in a zip archive appended
# to it. Metadata do not decide what the model computes: if they are corrupt, the model loads without, and a warning is
# logged. Nothing is read beyond the limits that the file's size sets. Source: metadata_schema.fbs of TensorFlow Lite
# Support, version 1.1.0.


_IDENTIFIER = b"M001"
_FLOAT = Scalar(4)
_FILE = Table(
    "AssociatedFile", (Field(4, "name", String()), Field(8, "type", Scalar(1)), Field(10, "locale", String()))
)
_NORMALIZATION = Table("NormalizationOptions", (Field(4, "mean", Vector(_FLOAT)), Field(6, "std", Vector(_FLOAT))))
_UNIT = Table("ProcessUnit", (Field(4, "type", Scalar(1)), Field(6, "options", Union(4, {1: _NORMALIZATION}))))
_TENSOR = Table("TensorMetadata", (
    Field(4, "name", String()), Field(6, "description", String()),
    Field(12, "process_units", Vector(_UNIT)), Field(16, "associated_files", Vector(_FILE)),
))  # fmt: skip
_SUBGRAPH = Table("SubGraphMetadata", (
    Field(8, "inputs", Vector(_TENSOR)), Field(10, "outputs", Vector(_TENSOR)),
))  # fmt: skip
_MODEL = Table("ModelMetadata", (
    Field(4, "name", String()), Field(6, "description", String()), Field(8, "version", String()),
    Field(10, "subgraph_metadata", Vector(_SUBGRAPH)), Field(12, "author", String()), Field(14, "license", String()),
))  # fmt: skip
_LABEL_TYPES = (2, 3)  # TENSOR_AXIS_LABELS, TENSOR_VALUE_LABELS
_ZIP_ERRORS = (zlib.error, EOFError, OSError, ValueError, RuntimeError, struct.error, KeyError)
_log = logging.getLogger("nnfmq.importers")

_Record = Mapping[str, Any]


def read_metadata(file: TfliteFile, data: FileContent) -> ModelMetadata | None:
    """Return the metadata of a file with this content; None if it has none, or, with a warning, if they are corrupt."""
    try:
        packed = file.metadata()
        if packed is None:
            return None
        flatbuffers.verify(packed, _MODEL, _IDENTIFIER)
        model = _Decoder(packed).root(_MODEL)
        main: _Record = next(iter(model.get("subgraph_metadata", ())), {})
        files = _associated_files(data)
        return ModelMetadata(
            model.get("name", ""),
            model.get("description", ""),
            model.get("version", ""),
            model.get("author", ""),
            model.get("license", ""),
            tuple(_tensor(record, files) for record in main.get("inputs", ())),
            tuple(_tensor(record, files) for record in main.get("outputs", ())),
            files,
        )
    except InvalidArgument as error:
        _log.warning("the model's metadata are not used: %s", error)
        return None


def _tensor(record: _Record, files: Mapping[str, bytes]) -> TensorMetadata:
    mean, std = _normalization(record)
    return TensorMetadata(record.get("name", ""), record.get("description", ""), mean, std, _labels(record, files))


def _normalization(record: _Record) -> tuple[tuple[float, ...], tuple[float, ...]]:
    for unit in record.get("process_units", ()):
        options = unit.get("options")
        if options is not None:
            mean, std = tuple(options.get("mean", ())), tuple(options.get("std", ()))
            if not mean or len(mean) != len(std) or 0.0 in std or not all(map(math.isfinite, mean + std)):
                raise InvalidArgument(f"a normalization with mean {mean[:8]} and std {std[:8]}")
            return mean, std
    return (), ()


def _labels(record: _Record, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the lines of the first label file; one without a locale, if there is any."""
    found = [file for file in record.get("associated_files", ()) if file.get("type", 0) in _LABEL_TYPES]
    for file in sorted(found, key=lambda file: bool(file.get("locale"))):
        content = files.get(file.get("name", ""))
        if content is not None:
            return tuple(content.decode("utf-8", "replace").splitlines())
    return ()


def _associated_files(data: FileContent) -> dict[str, bytes]:
    """Return the files in the zip archive at the end of `data`, by name; none if there is no archive.

    Raises:
        InvalidArgument: If it is corrupt, or its files are larger than a file of this size may contain.
    """
    import zipfile  # large, and only for files with metadata

    if not zipfile.is_zipfile(io.BytesIO(data)):
        return {}
    files, left = {}, 4 * len(data) + 65536
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                with archive.open(member) as source:
                    files[member.filename] = source.read(left + 1)
                left -= len(files[member.filename])
                if left < 0:
                    raise InvalidArgument("its associated files are too large")
    except (zipfile.BadZipFile, *_ZIP_ERRORS) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"its associated files cannot be read: {error}") from None
    return files


class _Decoder:
    """Records of a verified buffer, as dicts by field name. Parts that overlap cannot multiply the work."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer = buffer
        self._left = 4 * len(buffer)

    def root(self, table: Table) -> _Record:
        return self._table(self._follow(0), table)

    def _spend(self, size_bytes: int) -> None:
        self._left -= size_bytes
        if self._left < 0:
            raise InvalidArgument("its parts overlap")

    def _read(self, form: str, at: int) -> Any:
        return struct.unpack_from(form, self._buffer, at)[0]

    def _follow(self, at: int) -> int:
        return at + int(self._read("<I", at))

    def _table(self, at: int, table: Table) -> _Record:
        self._spend(4)
        vtable = at - self._read("<i", at)
        size_bytes, record = self._read("<H", vtable), dict[str, Any]()
        for field in table.fields:
            offset = self._read("<H", vtable + field.slot) if field.slot + 2 <= size_bytes else 0
            if offset:
                record[field.name] = self._value(at + offset, field, record)
        return record

    def _value(self, at: int, field: Field, record: _Record) -> Any:
        match field.kind:
            case Scalar():
                return self._buffer[at]
            case String():
                begin = self._follow(at) + 4
                length = self._read("<I", begin - 4)
                self._spend(length)
                return self._buffer[begin : begin + length].decode("utf-8", "replace")
            case Vector(element=element):
                return self._vector(self._follow(at), element)
            case Union(members=members):
                member = members.get(record.get("type", 0))
                return None if member is None else self._table(self._follow(at), member)
            case Table():
                return self._table(self._follow(at), field.kind)

    def _vector(self, at: int, element: Scalar | Table) -> list[Any]:
        count = self._read("<I", at)
        self._spend(4 * count)
        places = range(at + 4, at + 4 + 4 * count, 4)
        if isinstance(element, Scalar):
            return [self._read("<f", place) for place in places]
        return [self._table(self._follow(place), element) for place in places]
