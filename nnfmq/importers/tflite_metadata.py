"""Metadata of a TFLite file: what its author says of inputs and outputs, with labels and normalization.

The file has a FlatBuffer of its own in a buffer that the model names, and the label files in a zip archive appended to
it. Metadata do not decide what the model computes: if they are corrupt, the model loads without, and a warning is
logged. Nothing is read beyond the limits that the file's size sets. Source: metadata_schema.fbs of TensorFlow Lite
Support, version 1.1.0.
"""

from __future__ import annotations

import io
import logging
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import flatbuffer_verifier
from nnfmq.importers.file_format import FileContent
from nnfmq.importers.flatbuffer_verifier import Field, Scalar, String, Table, Union, Vector
from nnfmq.importers.loaded_model import ModelMetadata, TensorMetadata
from nnfmq.importers.tflite_file import TfliteFile

__all__ = ["read_metadata"]

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
        flatbuffer_verifier.verify(packed, _MODEL, _IDENTIFIER)
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
