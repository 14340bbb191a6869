"""RecordingFile: read a recording. The file may come from anywhere, so every length, type and number is checked.

The whole file is read once: each record's checksum is verified, and of DATA records the position is kept. A part of a
record at the end is what a killed application leaves; it is reported and ignored. Anything else that is wrong is an
error that names the record.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nnfmq.base.ownership import Closable
from nnfmq.hal.errors import InvalidArgument
from nnfmq.recording.format import (
    FILE_HEADER_BYTES,
    NO_DATA,
    RECORD_HEADER_BYTES,
    EndRow,
    ExecutionRow,
    ModelRow,
    RecordKind,
    SessionRow,
    TensorContent,
    TensorFormat,
    check_file_header,
    decode_record_header,
    decode_row,
)

__all__ = ["RecordedExecution", "RecordingFile"]

_CHUNK_BYTES = 1 << 20
_DTYPES = frozenset(
    ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
     "complex64", "complex128")
)  # fmt: skip


class _Position(NamedTuple):
    """The position of the payload of a DATA record."""

    offset: int
    length: int


class RecordedExecution(NamedTuple):
    """An execution, and the number of its record in the file, counted from 0."""

    record: int
    row: ExecutionRow


class RecordingFile(Closable):
    """A recording, read and checked. Close it, or use `with`. Thread-safe: `read` changes nothing."""

    session: SessionRow
    models: tuple[ModelRow, ...]
    executions: tuple[RecordedExecution, ...]
    """In the order in which they ended."""
    end: EndRow | None
    """None if the application was killed."""
    unfinished_bytes: int
    """The length of the part of a record with which the file ends."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and read a recording; blocks.

        Raises:
            InvalidArgument: If the file is no recording, or a record is wrong; the message names the file and record.
            OSError: If the file cannot be read.
        """
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._data: list[_Position] = []
            self._read_all()
        except BaseException:
            self.close()
            raise

    def _read_all(self) -> None:
        size = os.fstat(self._fd).st_size
        try:
            check_file_header(os.pread(self._fd, FILE_HEADER_BYTES, 0))
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.path}: {error}") from None
        content = _Content()
        offset = FILE_HEADER_BYTES
        for record, (kind, position) in enumerate(self._records(size)):
            try:
                if kind is RecordKind.DATA:
                    self._data.append(position)
                else:
                    content.add(record, kind, self._payload(position), self._data)
            except InvalidArgument as error:
                raise self._error(record, position.offset - RECORD_HEADER_BYTES, str(error)) from None
            offset = position.offset + position.length
        if content.session is None:
            raise InvalidArgument(f"{self.path}: it has no whole record; the application was killed at its beginning")
        self.session, self.end = content.session, content.end
        self.models, self.executions = tuple(content.models), tuple(content.executions)
        self.unfinished_bytes = size - offset

    def _records(self, size: int) -> Iterator[tuple[RecordKind, _Position]]:
        """Yield kind and payload of each whole record, whose checksums are right."""
        offset, record = FILE_HEADER_BYTES, 0
        while offset + RECORD_HEADER_BYTES <= size:
            position = _Position(offset + RECORD_HEADER_BYTES, 0)
            try:
                header = decode_record_header(self._payload(_Position(offset, RECORD_HEADER_BYTES)))
                position = _Position(position.offset, header.length)
                if header.length > size - position.offset:
                    return  # the last one, of which a part was written
                if self._checksum(position) != header.checksum:
                    raise InvalidArgument("its checksum is wrong: the file was changed or damaged")
            except InvalidArgument as error:
                raise self._error(record, offset, str(error)) from None
            yield header.kind, position
            offset, record = position.offset + header.length, record + 1

    def _checksum(self, position: _Position) -> int:
        value = 0
        for begin in range(0, position.length, _CHUNK_BYTES):
            part = _Position(position.offset + begin, min(_CHUNK_BYTES, position.length - begin))
            value = zlib.crc32(self._payload(part), value)
        return value

    def _payload(self, position: _Position) -> bytes:
        data = os.pread(self._fd, position.length, position.offset)
        if len(data) != position.length:
            raise InvalidArgument("the file has become shorter while it was read")
        return data

    def _error(self, record: int, offset: int, text: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: record {record} at byte {offset}: {text}")

    def read(self, number: int) -> bytes:
        """Return the content of a DATA record; blocks.

        Raises:
            InvalidArgument: If the file has become shorter since it was opened.
        """
        return self._payload(self._data[number])

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Content:
    """The rows read so far; each is checked against those before it."""

    def __init__(self) -> None:
        self.session: SessionRow | None = None
        self.models: list[ModelRow] = []
        self.executions: list[RecordedExecution] = []
        self.end: EndRow | None = None

    def add(self, record: int, kind: RecordKind, payload: bytes, data: Sequence[_Position]) -> None:
        """Add the row of one record. Raises InvalidArgument if it is wrong."""
        if (kind is RecordKind.SESSION) != (record == 0):
            raise InvalidArgument(f"a {kind.name} as record {record}; the first record is a SESSION, no other one is")
        if self.end is not None:
            raise InvalidArgument(f"a {kind.name} after the END")
        if kind is RecordKind.SESSION:
            self.session = decode_row(SessionRow, payload)
        elif kind is RecordKind.MODEL:
            self.models.append(_checked_model(decode_row(ModelRow, payload), data))
        elif kind is RecordKind.EXECUTION:
            row = _checked_execution(decode_row(ExecutionRow, payload), self.models, data)
            self.executions.append(RecordedExecution(record, row))
        else:
            self.end = decode_row(EndRow, payload)


def _checked_model(row: ModelRow, data: Sequence[_Position]) -> ModelRow:
    numbers = [*row.pools, *([] if row.data == NO_DATA else [row.data])]
    for number in numbers:
        _require_data(number, data)
    if row.state_count > min(len(row.inputs), len(row.outputs)):
        raise InvalidArgument(f"{row.state_count} states, but {len(row.inputs)} inputs, {len(row.outputs)} outputs")
    for tensor in (*row.inputs, *row.outputs):
        if tensor.dtype not in _DTYPES:
            raise InvalidArgument(f"element type {tensor.dtype[:40]!r} of {tensor.name[:40]!r} is none of NumPy's")
        if not math.isfinite(tensor.scale) or abs(tensor.zero_point) > 2**31:
            raise InvalidArgument(f"scale or zero point of {tensor.name[:40]!r} is out of range")
    return row


def _checked_execution(row: ExecutionRow, models: Sequence[ModelRow], data: Sequence[_Position]) -> ExecutionRow:
    if row.model >= len(models):
        raise InvalidArgument(f"it is of model {row.model}; {len(models)} models precede it")
    if not row.intended_ns <= row.begin_ns <= row.end_ns:
        raise InvalidArgument(f"times {row.intended_ns}, {row.begin_ns}, {row.end_ns} are not in order")
    model = models[row.model]
    for kind, formats, contents in (("input", model.inputs, row.inputs), ("output", model.outputs, row.outputs)):
        if contents is None:
            continue
        if len(contents) != len(formats):
            raise InvalidArgument(f"{len(contents)} {kind}s; its model has {len(formats)}")
        for tensor, content in zip(formats, contents, strict=True):
            _check_content(kind, tensor, content, data)
    return row


def _check_content(kind: str, tensor: TensorFormat, content: TensorContent, data: Sequence[_Position]) -> None:
    _require_data(content.data, data)
    known = tensor.shape or tensor.is_scalar
    fits = len(content.shape) == len(tensor.shape) and all(
        wanted == extent or (wanted == 0 and not tensor.is_empty)
        for wanted, extent in zip(tensor.shape, content.shape, strict=True)
    )
    if known and not fits:
        raise InvalidArgument(f"{kind} {tensor.name[:40]!r} has shape {tensor.shape}, not {content.shape}")
    size, length = math.prod(content.shape) * np.dtype(tensor.dtype).itemsize, data[content.data].length
    if size != length:
        raise InvalidArgument(f"{kind} {tensor.name[:40]!r} has {size} bytes in this shape; its DATA has {length}")


def _require_data(number: int, data: Sequence[_Position]) -> None:
    if number >= len(data):
        raise InvalidArgument(f"it needs DATA {number}; {len(data)} precede it")
