"""Access to the tables of a FlatBuffer that `flatbuffer_verifier` has checked, by the same description of its tables.

The functions of a table are named as in the code that FlatBuffers' compiler generates for Python. Such code is a module
for each table of a schema: the `tflite` package has 180 of them, which take 22 ms to import.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nnfmq.importers.file_format import FileContent
from nnfmq.importers.flatbuffer_verifier import Field, Scalar, String, Table, Union, Vector

__all__ = ["TableReader"]

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_OFFSET_BYTES = 4
_TYPES = {"?": bool, "f": float}


class TableReader:
    """A table at `position` of a verified buffer; only the fields of its description can be read.

    `reader.Name()` returns the value of the field Name: a number, the bytes of a string, or the reader of a table. A
    missing number is its default, any other missing field None. Elements of a vector are `reader.Name(index)`, their
    number is `reader.NameLength()`, and `reader.NameAsNumpy()` is an array of numbers, in the buffer.
    """

    __slots__ = ("_buffer", "_position", "_table", "_vtable", "_vtable_bytes")

    def __init__(self, buffer: FileContent, position: int, table: Table) -> None:
        self._buffer, self._position, self._table = buffer, position, table
        self._vtable = position - _I32.unpack_from(buffer, position)[0]
        self._vtable_bytes: int = _U16.unpack_from(buffer, self._vtable)[0]

    @classmethod
    def root(cls, buffer: FileContent, table: Table) -> TableReader:
        """Return the root table of a verified buffer."""
        return cls(buffer, _U32.unpack_from(buffer)[0], table)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for suffix, read in _FUNCTIONS.items():
            field = self._table.by_name.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if field is not None:
                return partial(read, self, field)
        raise AttributeError(f"{self._table.name} has no field for {name}")

    def _at(self, slot: int) -> int:
        """Return where the field of a slot is in the buffer; 0 if it is missing."""
        if slot + _U16.size > self._vtable_bytes:
            return 0
        offset: int = _U16.unpack_from(self._buffer, self._vtable + slot)[0]
        return self._position + offset if offset else 0

    def _follow(self, at: int) -> int:
        return at + int(_U32.unpack_from(self._buffer, at)[0])

    def _table_at(self, at: int, table: Table) -> TableReader:
        return TableReader(self._buffer, self._follow(at), table)

    def _value(self, field: Field, index: int = 0) -> Any:
        at = self._at(field.slot)
        match field.kind:
            case Scalar(form=form):
                if not at:
                    return _TYPES.get(form, int)(field.default)
                return struct.unpack_from(f"<{form}", self._buffer, at)[0]
            case _ if not at:
                return None
            case String():
                begin, length = self._elements(at)
                return bytes(self._buffer[begin : begin + length])
            case Vector(element=element):
                return self._element(at, element, index)
            case Union(type_slot=slot, members=members):
                member = members.get(self._buffer[self._at(slot)]) if self._at(slot) else None
                return None if member is None else self._table_at(at, member)
            case Table() as table:
                return self._table_at(at, table)

    def _elements(self, at: int) -> tuple[int, int]:
        """Return where the elements of the vector or string at an offset begin, and their number."""
        begin = self._follow(at)
        return begin + _OFFSET_BYTES, _U32.unpack_from(self._buffer, begin)[0]

    def _element(self, at: int, element: Scalar | Table, index: int) -> Any:
        begin, _ = self._elements(at)
        if isinstance(element, Table):
            return self._table_at(begin + _OFFSET_BYTES * index, element)
        return struct.unpack_from(f"<{element.form}", self._buffer, begin + element.size_bytes * index)[0]

    def _length(self, field: Field) -> int:
        at = self._at(field.slot)
        return self._elements(at)[1] if at else 0

    def _as_numpy(self, field: Field) -> np.ndarray[Any, Any]:
        at, vector = self._at(field.slot), field.kind
        if not (isinstance(vector, Vector) and isinstance(vector.element, Scalar)):
            raise TypeError(f"{self._table.name}.{field.name} is no vector of numbers")
        begin, count = self._elements(at) if at else (0, 0)
        return np.frombuffer(self._buffer, f"<{vector.element.form}", count, begin)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "": TableReader._value,
    "Length": TableReader._length,
    "AsNumpy": TableReader._as_numpy,
}
"""By the end of the name; a field's whole name comes first."""
