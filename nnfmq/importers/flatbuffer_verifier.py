"""A bounded walk over a flatbuffer that nobody vouches for, before any of its tables is read.

Python's flatbuffers reader follows whatever offset it finds and has no verifier. This one is given the tables that
will be read, as data, and touches nothing else: every offset, vtable, vector length, string and union member must
lie inside the buffer, or InvalidArgument says which field is wrong and at which byte. Afterwards the generated
accessors of exactly those tables cannot leave the buffer.

The work is bounded by the buffer's size: a table is checked once however often it is referred to, and no more offsets
are followed than the buffer has room for. Alignment is not checked, because Python and numpy read unaligned
values. Format: "FlatBuffer internals" of the flatbuffers documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from nnfmq.hal.errors import InvalidArgument

__all__ = ["Field", "Scalar", "String", "Table", "Union", "Vector", "check"]

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_OFFSET_BYTES = 4


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number stored in place."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class String:
    """An offset to length, bytes, NUL."""


@dataclass(frozen=True, slots=True)
class Vector:
    """An offset to a count and that many elements."""

    element: Scalar | Table


@dataclass(frozen=True, slots=True)
class Union:
    """An offset to the table that the byte in `type_slot` selects; members not listed are not read, so not checked."""

    type_slot: int
    members: Mapping[int, Table]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a table; `slot` is its place in the vtable in bytes: 4, 6, 8 ..."""

    slot: int
    name: str
    kind: Scalar | String | Vector | Union | Table


@dataclass(frozen=True, slots=True)
class Table:
    """A table's name and those of its fields that will be read."""

    name: str
    fields: tuple[Field, ...]


def check(buffer: bytes, root: Table, identifier: bytes) -> None:
    """Check `buffer` as a file with the given four-byte identifier and root table. Raises InvalidArgument."""
    walk = _Walk(buffer)
    walk.need(0, 8, "file header")
    if buffer[4:8] != identifier:
        walk.fail("file header", f"the identifier is {buffer[4:8]!r}, not {identifier!r}", 4)
    walk.table(walk.follow(0, root.name), root, root.name)


class _Walk:
    """One pass over one buffer. `path` says in the schema's words which value is looked at."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer = buffer
        self._offsets_left = len(buffer) // _OFFSET_BYTES
        self._checked: set[tuple[int, str]] = set()

    def fail(self, path: str, what: str, at: int) -> NoReturn:
        raise InvalidArgument(f"corrupt file: {path}: {what} (at byte {at} of {len(self._buffer)})")

    def need(self, at: int, size_bytes: int, path: str) -> None:
        """Demand that `size_bytes` bytes at `at` lie inside the buffer."""
        if at < 0 or at + size_bytes > len(self._buffer):
            self.fail(path, f"{size_bytes} bytes at byte {at} lie outside the file", at)

    def unpack(self, form: struct.Struct, at: int, path: str) -> int:
        self.need(at, form.size, path)
        value: int = form.unpack_from(self._buffer, at)[0]
        return value

    def follow(self, at: int, path: str) -> int:
        """Return where the offset stored at `at` points. Offsets only point forward, so a walk cannot circle."""
        self._offsets_left -= 1
        if self._offsets_left < 0:
            self.fail(path, "more offsets than the file has room for: its parts overlap", at)
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
            offset = self._field_offset(vtable, vtable_bytes, field.slot)
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

    def _field_offset(self, vtable: int, vtable_bytes: int, slot: int) -> int:
        if slot + 2 > vtable_bytes:
            return 0
        offset: int = _U16.unpack_from(self._buffer, vtable + slot)[0]
        return offset

    def _field(self, field: Field, table_at: int, table_bytes: int, slots: dict[int, int], path: str) -> None:
        at = slots[field.slot]
        size_bytes = field.kind.size_bytes if isinstance(field.kind, Scalar) else _OFFSET_BYTES
        if at - table_at < _OFFSET_BYTES or at - table_at + size_bytes > table_bytes:
            self.fail(path, f"lies outside its table of {table_bytes} bytes", at)
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
            self.fail(path, f"a string of {length} bytes without a NUL behind it", at)

    def _union(self, at: int, union: Union, slots: dict[int, int], path: str) -> None:
        # The type's field stands before the union in the table's field list, so it has been checked already.
        type_at = slots.get(union.type_slot)
        member = union.members.get(self._buffer[type_at]) if type_at is not None else None
        if member is not None:
            self.table(self.follow(at, path), member, f"{path}({member.name})")
