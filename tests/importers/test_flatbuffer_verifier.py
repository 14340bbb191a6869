"""The verifier's errors with path and offset, its bounded work, and the schema tables against the schema package."""

from __future__ import annotations

import ast
import inspect
import re
import struct
from collections.abc import Iterator

import pytest
import tflite
from support import tflite_files

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.tflite import flatbuffers
from nnfmq.importers.tflite.flatbuffers import Field, Scalar, String, Table, Union, Vector, verify

LEAF = Table("Leaf", (Field(4, "number", Scalar(4)),))
ROOT = Table("Root", (
    Field(4, "text", String()), Field(6, "numbers", Vector(Scalar(4))), Field(8, "leaves", Vector(LEAF)),
    Field(10, "kind", Scalar(1)), Field(12, "choice", Union(10, {1: LEAF})),
))  # fmt: skip


def root_file(field: int, body: bytes, *, kind: int = 1, table_bytes: int = 12) -> bytes:
    """Return a file whose root table has the byte `kind` and one offset, in slot `field`, to `body` behind it.

    header 0..8, vtable 8..22 (7 entries), table 24..36: soffset, offset at 28, kind at 32; body at 36.
    """
    slots = [0, 0, 0, 8, 0]
    slots[(field - 4) // 2] = 4
    vtable = struct.pack("<7H", 14, table_bytes, *slots)
    table = struct.pack("<iIB3x", 16, 8, kind)
    return struct.pack("<I4s", 24, b"TEST") + vtable + b"\0\0" + table + body


LEAF_BODY = struct.pack("<HHHH", 6, 8, 4, 0) + struct.pack("<ii", 8, 7)  # vtable, padding, table at +8


def leaves(count: int) -> bytes:
    """Return a vector of `count` offsets that all point to the same leaf, behind the vector."""
    offsets = [4 * (count - index) + 8 for index in range(count)]
    return struct.pack(f"<I{count}I", count, *offsets) + LEAF_BODY


@pytest.mark.parametrize(
    ("field", "body"),
    [
        (4, struct.pack("<I", 3) + b"abc\0"),
        (4, struct.pack("<I", 0) + b"\0"),
        (6, struct.pack("<Iii", 2, 5, 6)),
        (6, struct.pack("<I", 0)),
        (8, leaves(3)),
    ],
)
def test_what_fits_is_accepted(field: int, body: bytes) -> None:
    verify(root_file(field, body), ROOT, b"TEST")


@pytest.mark.parametrize(
    ("field", "body"),
    [(4, struct.pack("<I", 3) + b"abc\0"), (6, struct.pack("<Iii", 2, 5, 6)), (8, leaves(2))],
)
def test_a_file_cut_at_any_byte_is_rejected(field: int, body: bytes) -> None:
    whole = root_file(field, body)
    accepted = [length for length in range(len(whole)) if _is_accepted(whole[:length])]
    assert accepted == []


def _is_accepted(data: bytes) -> bool:
    try:
        verify(data, ROOT, b"TEST")
    except InvalidArgument:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"file header: 8 bytes at byte 0 are outside"),
        (struct.pack("<I4s", 8, b"ELSE") + bytes(20), r"identifier is b'ELSE', not b'TEST' \(at byte 4"),
        (struct.pack("<I4s", 1 << 30, b"TEST"), r"Root: 4 bytes at byte 1073741824 are outside"),
        (struct.pack("<I4s", 0, b"TEST"), r"Root: offset 0 points into itself \(at byte 0"),
        (struct.pack("<I4si", 8, b"TEST", 100), r"Root: vtable: 2 bytes at byte -92 are outside"),
        (struct.pack("<I4siHH", 8, b"TEST", -4, 3, 4), r"Root: a vtable of 3 bytes \(at byte 12"),
        (struct.pack("<I4siHH", 8, b"TEST", -4, 60, 4), r"Root: vtable: 60 bytes at byte 12 are outside"),
        (struct.pack("<I4siHH", 8, b"TEST", -4, 4, 90), r"Root: 90 bytes at byte 8 are outside"),
        (root_file(4, b"", table_bytes=6), r"Root.text: is outside its table of 6 bytes \(at byte 28"),
        (root_file(4, struct.pack("<I", 3) + b"abcd"), r"Root.text: a string of 3 bytes without a terminating NUL"),
        (root_file(4, struct.pack("<I", 2**32 - 1)), r"Root.text: 4294967296 bytes at byte 40 are outside"),
        (root_file(6, struct.pack("<I", 2**32 - 1)), r"Root.numbers: a vector of 4294967295 elements of 4 bytes"),
        (root_file(8, struct.pack("<II", 1, 0) + LEAF_BODY), r"Root.leaves\[0\]: offset 0 points into itself"),
        (root_file(12, struct.pack("<i", 1)), r"Root.choice\(Leaf\): vtable"),
    ],
)
def test_a_fault_is_named_with_its_field_and_byte(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        verify(data, ROOT, b"TEST")


def test_a_union_member_that_is_not_read_is_not_checked() -> None:
    verify(root_file(12, struct.pack("<i", 1), kind=2), ROOT, b"TEST")


def test_overlapping_tables_cannot_multiply_the_work() -> None:
    # 100 entries refer to one table with a vector of 1,000 entries, in a file that has space for one of each.
    inner = Table("Inner", (Field(4, "leaves", Vector(LEAF)),))
    outer = Table("Outer", tuple(Field(4, f"inner{n}", Vector(Table(f"Inner{n}", inner.fields))) for n in range(100)))
    offsets = struct.pack("<100I", *(4 * (100 - n) + 8 for n in range(100)))
    table = struct.pack("<HHHHiI", 6, 8, 4, 0, 8, 4)
    data = struct.pack("<I4sHHHHiI", 16, b"TEST", 6, 8, 4, 0, 8, 4) + struct.pack("<I", 100) + offsets + table
    with pytest.raises(InvalidArgument, match="more offsets than fit the file"):
        verify(data + leaves(1000), outer, b"TEST")


def _tables(table: Table) -> Iterator[Table]:
    yield table
    for field in table.fields:
        match field.kind:
            case Table() as inner:
                yield from _tables(inner)
            case Vector(Table() as inner):
                yield from _tables(inner)
            case Union(_, members):
                yield from members.values()


FIELDS = [(table.name, field) for table in _tables(flatbuffers.MODEL) for field in table.fields]
FORMS = {
    "Int8": (1, "b"),
    "Uint8": (1, "B"),
    "Bool": (1, "?"),
    "Uint16": (2, "H"),
    "Int32": (4, "i"),
    "Uint32": (4, "I"),
    "Float32": (4, "f"),
    "Int64": (8, "q"),
    "Uint64": (8, "Q"),
}


@pytest.mark.parametrize(("table", "field"), FIELDS, ids=[f"{table}.{field.name}" for table, field in FIELDS])
def test_each_field_has_the_slot_that_the_schema_package_reads(table: str, field: Field) -> None:
    schema = tflite
    if not hasattr(getattr(tflite, table), field.name):  # a field that is newer than the package
        schema = pytest.importorskip("ai_edge_litert.schema_py_generated", reason="ai-edge-litert is not installed")
    source = inspect.getsource(getattr(getattr(schema, table), field.name))
    assert f"_tab.Offset({field.slot})" in source
    element = field.kind.element if isinstance(field.kind, Vector) else field.kind
    flags = re.search(r"_tab\.Get\(flatbuffers\.number_types\.(\w+)Flags, (?:o|a) \+", source)
    assert (flags is not None) == isinstance(element, Scalar)
    if isinstance(element, Scalar) and flags:
        assert FORMS[flags.group(1)] == (element.size_bytes, element.form)
    if isinstance(field.kind, Scalar) and field.name != "BuiltinCode":  # it may return another field's value
        assert ast.literal_eval(re.findall(r"return (\S+)\n", source)[-1]) == field.default


def test_the_union_members_have_the_numbers_of_the_schema_package() -> None:
    numbers = {getattr(tflite.BuiltinOptions, table.name): table.name for table in flatbuffers.OPTIONS.values()}
    assert numbers == {number: table.name for number, table in flatbuffers.OPTIONS.items()}


def test_a_written_model_passes_the_walk() -> None:
    verify(tflite_files.everything(), flatbuffers.MODEL, flatbuffers.IDENTIFIER)
