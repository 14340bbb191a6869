"""The layout of recordings: a header, then records that are only ever appended (docs/reference/recording-format.md).

    file:    8 bytes magic, u32 version, u32 0; then records
    record:  u32 kind, u64 length, u32 CRC-32 of the payload, u32 CRC-32 of the 16 bytes before; then the payload

All integers are little-endian, and the CRC-32 is zlib's. A payload of DATA is bytes as they are; those of the other
kinds are MessagePack arrays of the fields of a struct below, in their order. A file whose writer was killed ends with
part of a record, which does not count.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.types import HalExecutionMode

__all__ = [
    "FILE_HEADER_BYTES",
    "MAX_STRUCT_BYTES",
    "NO_DATA",
    "RECORD_HEADER_BYTES",
    "EndRow",
    "ExecutionRow",
    "ModelRow",
    "RecordHeader",
    "RecordKind",
    "SessionRow",
    "TensorContent",
    "TensorFormat",
    "check_file_header",
    "decode_record_header",
    "decode_row",
    "encode_row",
    "file_header",
    "is_recording",
    "record_header",
]

VERSION: Final = 1
NO_DATA: Final = -1
"""In place of the number of a DATA record: there is none."""
MAX_STRUCT_BYTES: Final = 16 << 20
"""Of a payload that is not DATA."""

_MAGIC = b"NNFMQREC"
_FILE_HEADER = struct.Struct("<8sII")
_RECORD_FIELDS = struct.Struct("<IQI")
_HEADER_CHECKSUM = struct.Struct("<I")
FILE_HEADER_BYTES: Final = _FILE_HEADER.size
RECORD_HEADER_BYTES: Final = _RECORD_FIELDS.size + _HEADER_CHECKSUM.size

U63: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
FromMinusOne: TypeAlias = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Extent: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Shape: TypeAlias = Annotated[tuple[Extent, ...], Meta(max_length=64)]
Text: TypeAlias = Annotated[str, Meta(max_length=1024)]


class RecordKind(IntEnum):
    """The kinds of records. DATA records are numbered from 0 in the order of the file, and so are MODEL records."""

    SESSION = 1
    DATA = 2
    MODEL = 3
    EXECUTION = 4
    END = 5


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class: an array of the fields, in their order."""


class SessionRow(_Row, frozen=True):
    """The first record: the process that was recorded, and its two clocks at the same moment."""

    version: Text
    """Of nnfmq."""
    pid: U63
    command: Annotated[tuple[Annotated[str, Meta(max_length=1 << 16)], ...], Meta(max_length=4096)]
    monotonic_ns: U63
    realtime_ns: U63
    has_tensors: bool
    """Whether inputs and outputs are recorded."""


class TensorFormat(_Row, frozen=True):
    """An input or output of a model, as `TensorInfo`."""

    name: str
    shape: Shape
    dtype: Text
    scale: float
    zero_point: int
    is_scalar: bool
    is_empty: bool = False


class ModelRow(_Row, frozen=True):
    """A prepared model; `digest` is the SHA-256 of the encoded model and its pools.

    `data` is the number of the DATA record with the encoded model (`serialize.models`), NO_DATA if the application
    gave none; `pools` are those of its pools. Inputs and outputs include the states, which are the last ones.
    """

    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    device: Text
    device_version: Text
    preference: int
    priority: int
    inputs: tuple[TensorFormat, ...]
    outputs: tuple[TensorFormat, ...]
    state_count: U63
    data: FromMinusOne
    pools: tuple[U63, ...]


class TensorContent(_Row, frozen=True):
    """The shape of an input or output, and the number of the DATA record with its elements."""

    shape: Shape
    data: U63


class ExecutionRow(_Row, frozen=True):
    """One execution. Times are CLOCK_MONOTONIC in ns; -1 = no deadline, or a duration that was not measured.

    `inputs` and `outputs` are None if they were not recorded, or the execution failed.
    """

    model: U63
    mode: HalExecutionMode
    status: ErrorStatus
    intended_ns: U63
    begin_ns: U63
    end_ns: U63
    deadline_ns: FromMinusOne
    time_on_device_ns: FromMinusOne
    time_in_driver_ns: FromMinusOne
    inputs: tuple[TensorContent, ...] | None
    outputs: tuple[TensorContent, ...] | None


class EndRow(_Row, frozen=True):
    """The last record, if the application ended orderly: what is not in the file.

    `dropped` executions came faster than they could be written; `beyond_limit` ones came when the file was full.
    """

    executions: U63
    dropped: U63
    beyond_limit: U63


_RowT = TypeVar("_RowT", SessionRow, ModelRow, ExecutionRow, EndRow)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (SessionRow, ModelRow, ExecutionRow, EndRow)
}


def encode_row(row: _Row) -> bytes:
    """Return the payload of a record."""
    return _encoder.encode(row)


def decode_row(kind: type[_RowT], payload: bytes) -> _RowT:
    """Return the row in a payload.

    Raises:
        InvalidArgument: If the payload is not exactly one row of this kind.
    """
    try:
        return _decoders[kind].decode(payload)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"it is no {kind.__name__}: {error}") from error


def is_recording(path: Path) -> bool:
    """Return whether a file is empty, or begins as a recording of any version. Raises OSError."""
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
    return begin in (b"", _MAGIC)


def file_header() -> bytes:
    """Return the header of a file."""
    return _FILE_HEADER.pack(_MAGIC, VERSION, 0)


def check_file_header(data: bytes) -> None:
    """Check the header of a file.

    Raises:
        InvalidArgument: If it is not that of a recording of this version.
    """
    if len(data) < FILE_HEADER_BYTES or not data.startswith(_MAGIC):
        raise InvalidArgument("it is no recording: those of `nnfmq record` begin with NNFMQREC")
    _, version, reserved = _FILE_HEADER.unpack_from(data)
    if version != VERSION or reserved:
        raise InvalidArgument(f"it is a recording of format {version}; this nnfmq reads format {VERSION}")


def record_header(kind: RecordKind, payload: bytes | memoryview) -> bytes:
    """Return the header of a record."""
    fields = _RECORD_FIELDS.pack(kind, len(payload), zlib.crc32(payload))
    return fields + _HEADER_CHECKSUM.pack(zlib.crc32(fields))


class RecordHeader(NamedTuple):
    """A record's header: its kind, the length of its payload, and the CRC-32 of its payload."""

    kind: RecordKind
    length: int
    checksum: int


def decode_record_header(header: bytes) -> RecordHeader:
    """Return the fields of a header.

    Raises:
        InvalidArgument: If its checksum is wrong, or its kind or length is not allowed.
    """
    fields = header[: _RECORD_FIELDS.size]
    if _HEADER_CHECKSUM.unpack_from(header, len(fields))[0] != zlib.crc32(fields):
        raise InvalidArgument("the checksum of its header is wrong: the file was changed or damaged")
    number, length, checksum = _RECORD_FIELDS.unpack(fields)
    if number not in RecordKind.__members__.values():
        raise InvalidArgument(f"kind {number} is unknown; 1 to {len(RecordKind)} are allowed")
    kind = RecordKind(number)
    if kind is not RecordKind.DATA and length > MAX_STRUCT_BYTES:
        raise InvalidArgument(f"{length} bytes; a {kind.name} has at most {MAX_STRUCT_BYTES}")
    return RecordHeader(kind, length, checksum)
