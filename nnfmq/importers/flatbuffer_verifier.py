"""Verifier of untrusted FlatBuffers, for the tables that a reader will access.

Python's flatbuffers package follows every offset unchecked and has no verifier (C++ has flatbuffers::Verifier). This
one takes the tables and fields that will be read, and checks that every offset, vtable, vector length, string and union
member of these is inside the buffer. Afterwards the generated accessors of these tables cannot leave the buffer; other
fields have not been checked.

Time is bounded by the buffer's size: a table is checked once even if it is referenced often, and no more offsets are
followed than fit the buffer. Alignment is not checked, because Python and NumPy read unaligned values. Format:
"FlatBuffer internals" in the FlatBuffers documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import NoReturn

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.file_format import FileContent

__all__ = ["Field", "Scalar", "String", "Table", "Union", "Vector", "verify"]

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_OFFSET_BYTES = 4


class Scalar(Struct, frozen=True):
    """A number stored in place; `form` is its letter in Python's module struct, where that is needed."""

    size_bytes: int
    form: str = ""


class String(Struct, frozen=True):
    """An offset to length, bytes, NUL."""


class Vector(Struct, frozen=True):
    """An offset to a count and that many elements."""

    element: Scalar | Table


class Union(Struct, frozen=True):
    """An offset to the table that the byte in `type_slot` selects; members not listed are not read, so not checked."""

    type_slot: int
    members: Mapping[int, Table]


class Field(Struct, frozen=True):
    """A field of a table; `slot` is its byte offset in the vtable: 4, 6, 8 ... `default`: of a missing number."""

    slot: int
    name: str
    kind: Scalar | String | Vector | Union | Table
    default: float = 0


class Table(Struct, frozen=True, dict=True):
    """A table's name, and the fields that will be read."""

    name: str
    fields: tuple[Field, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Field]:
        """The fields by name."""
        return {field.name: field for field in self.fields}


def verify(buffer: FileContent, root: Table, identifier: bytes) -> None:
    """Check `buffer` as a file with the given four-byte identifier and root table. Raises InvalidArgument."""
    verifier = _Verifier(buffer)
    verifier.need(0, 8, "file header")
    if buffer[4:8] != identifier:
        verifier.fail("file header", f"the identifier is {buffer[4:8]!r}, not {identifier!r}", 4)
    verifier.table(verifier.follow(0, root.name), root, root.name)


class _Verifier:
    """One pass over one buffer. `path` is the current value's name in the schema, for messages."""

    def __init__(self, buffer: FileContent) -> None:
        self._buffer = buffer
        self._offsets_left = len(buffer) // _OFFSET_BYTES
        self._checked: set[tuple[int, str]] = set()

    def fail(self, path: str, what: str, at: int) -> NoReturn:
        raise InvalidArgument(f"corrupt or truncated file: {path}: {what} (at byte {at} of {len(self._buffer)})")

    def need(self, at: int, size_bytes: int, path: str) -> None:
        """Require that `size_bytes` bytes at `at` are inside the buffer."""
        if at < 0 or at + size_bytes > len(self._buffer):
            self.fail(path, f"{size_bytes} bytes at byte {at} are outside the file", at)

    def unpack(self, form: struct.Struct, at: int, path: str) -> int:
        self.need(at, form.size, path)
        value: int = form.unpack_from(self._buffer, at)[0]
        return value

    def follow(self, at: int, path: str) -> int:
        """Return the target of the offset stored at `at`. Offsets are unsigned and relative, so there are no cycles."""
        self._offsets_left -= 1
        if self._offsets_left < 0:
            self.fail(path, "more offsets than fit the file: its parts overlap", at)
        target = self.unpack(_U32, at, path)
        if target < _OFFSET_BYTES:
            self.fail(path, f"offset {target} points into itself", at)
        self.need(at + target, _OFFSET_BYTES, path)
        return at + target

    def table(self, at: int, table: Table, path: str) -> None:
        if (at, table.name) in self._checked:
            return
        self._checked.add((at, table.name))
        vtable, vtable_bytes, table_bytes = self._vtable(at, path)
        slots: dict[int, int] = {}
        for field in table.fields:
            if field.slot + 2 > vtable_bytes:
                continue
            offset = _U16.unpack_from(self._buffer, vtable + field.slot)[0]
            if offset:
                slots[field.slot] = at + offset
                self._field(field, at, table_bytes, slots, f"{path}.{field.name}")

    def _vtable(self, at: int, path: str) -> tuple[int, int, int]:
        vtable = at - self.unpack(_I32, at, path)
        vtable_bytes = self.unpack(_U16, vtable, f"{path}: vtable")
        table_bytes = self.unpack(_U16, vtable + 2, f"{path}: vtable")
        if vtable_bytes < 4 or vtable_bytes % 2:
            self.fail(path, f"a vtable of {vtable_bytes} bytes", vtable)
        self.need(vtable, vtable_bytes, f"{path}: vtable")
        self.need(at, table_bytes, path)
        return vtable, vtable_bytes, table_bytes

    def _field(self, field: Field, table_at: int, table_bytes: int, slots: dict[int, int], path: str) -> None:
        at = slots[field.slot]
        size_bytes = field.kind.size_bytes if isinstance(field.kind, Scalar) else _OFFSET_BYTES
        if at - table_at < _OFFSET_BYTES or at - table_at + size_bytes > table_bytes:
            self.fail(path, f"is outside its table of {table_bytes} bytes", at)
        match field.kind:
            case Table():
                self.table(self.follow(at, path), field.kind, path)
            case Vector():
                self._vector(self.follow(at, path), field.kind.element, path)
            case String():
                self._string(self.follow(at, path), path)
            case Union():
                self._union(at, field.kind, slots, path)

    def _vector(self, at: int, element: Scalar | Table, path: str) -> None:
        count = self.unpack(_U32, at, path)
        first = at + _OFFSET_BYTES
        size_bytes = element.size_bytes if isinstance(element, Scalar) else _OFFSET_BYTES
        if first + count * size_bytes > len(self._buffer):
            self.fail(path, f"a vector of {count} elements of {size_bytes} bytes passes the end of the file", at)
        if isinstance(element, Table):
            for index in range(count):
                where = f"{path}[{index}]"
                self.table(self.follow(first + _OFFSET_BYTES * index, where), element, where)

    def _string(self, at: int, path: str) -> None:
        length = self.unpack(_U32, at, path)
        self.need(at + _OFFSET_BYTES, length + 1, path)
        if self._buffer[at + _OFFSET_BYTES + length]:
            self.fail(path, f"a string of {length} bytes without a terminating NUL", at)

    def _union(self, at: int, union: Union, slots: dict[int, int], path: str) -> None:
        # The type's field precedes the union in the table's field list, so it has been checked already.
        type_at = slots.get(union.type_slot)
        member = union.members.get(self._buffer[type_at]) if type_at is not None else None
        if member is not None:
            self.table(self.follow(at, path), member, f"{path}({member.name})")
