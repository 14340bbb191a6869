"""The reader of verified FlatBuffers, compared with the `tflite` package's generated code, and its names."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tflite
from support import tflite_files

from nnfmq.importers.tflite import flatbuffers
from nnfmq.importers.tflite.file import BUILTIN_OPERATORS, TENSOR_TYPES
from nnfmq.importers.tflite.flatbuffers import Field, Scalar, String, Table, TableReader, Union, Vector, verify

MODELS = ["mobilenet_v1_0.25_128", "mobilenet_v2_1.0_224_quant", "tts_float"]


def assert_equal_tables(found: TableReader, generated: Any, table: Table) -> int:
    """Assert that two objects have equal fields, tables within them included; return how many fields were compared."""
    return sum(_assert_equal_fields(found, generated, field) for field in table.fields)


def _assert_equal_fields(found: TableReader, generated: Any, field: Field) -> int:
    name, compared = field.name, 1
    match field.kind:
        case Vector(element=element):
            count = getattr(generated, f"{name}Length")()
            assert getattr(found, f"{name}Length")() == count
            for index in range(min(count, 1000)):
                ours, theirs = getattr(found, name)(index), getattr(generated, name)(index)
                if isinstance(element, Table):
                    compared += assert_equal_tables(ours, theirs, element)
                else:
                    assert ours == theirs
            if count and isinstance(element, Scalar):
                assert np.array_equal(getattr(found, f"{name}AsNumpy")(), getattr(generated, f"{name}AsNumpy")())
        case Union(members=members):
            member = members.get(getattr(generated, f"{name}Type")())
            ours, union = getattr(found, name)(), getattr(generated, name)()
            assert (ours is None) == (member is None or union is None)
            if ours is not None and member is not None:
                theirs = getattr(tflite, member.name)()
                theirs.Init(union.Bytes, union.Pos)
                compared += assert_equal_tables(ours, theirs, member)
        case Table() as table:
            ours, theirs = getattr(found, name)(), getattr(generated, name)()
            assert (ours is None) == (theirs is None)
            if ours is not None:
                compared += assert_equal_tables(ours, theirs, table)
        case Scalar() if name == "BuiltinCode":  # the generated function may return the deprecated code instead
            assert getattr(found, name)() in (0, getattr(generated, name)())
        case Scalar() if name == "ExternalBuffer":  # a newer field than the package has
            assert getattr(found, name)() == 0
        case _:
            assert getattr(found, name)() == getattr(generated, name)()
    return compared


@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_the_fields_that_the_schema_package_reads(name: str, data_dir: Path) -> None:
    data = (data_dir / "models" / f"{name}.tflite").read_bytes()
    found = TableReader.root(data, flatbuffers.MODEL)
    assert assert_equal_tables(found, tflite.Model.GetRootAs(data, 0), flatbuffers.MODEL) > 500


def test_a_model_with_every_kind_of_option_has_the_fields_that_the_schema_package_reads() -> None:
    data = tflite_files.everything()
    found = TableReader.root(data, flatbuffers.MODEL)
    assert assert_equal_tables(found, tflite.Model.GetRootAs(data, 0), flatbuffers.MODEL) > 250


@pytest.mark.parametrize(
    ("names", "constants"), [(TENSOR_TYPES, tflite.TensorType), (BUILTIN_OPERATORS, tflite.BuiltinOperator)]
)
def test_the_enumerations_are_those_of_the_schema_package(names: dict[int, str], constants: type) -> None:
    members = vars(constants).items()  # since Python 3.13 with __firstlineno__
    known = {number: name for name, number in members if isinstance(number, int) and not name.startswith("_")}
    assert names == known


ENDS = ("", "Length", "AsNumpy", "IsNone")
THE_TENSORS_SAY_IT = "the type of a tensor, or the number of tensors"
NOT_READ = {
    "ArgMaxOptions.OutputType": THE_TENSORS_SAY_IT,
    "ArgMinOptions.OutputType": THE_TENSORS_SAY_IT,
    "CastOptions.InDataType": THE_TENSORS_SAY_IT,
    "CastOptions.OutDataType": THE_TENSORS_SAY_IT,
    "Conv2DOptions.QuantizedBiasType": "the bias has a type",
    "FullyConnectedOptions.QuantizedBiasType": "the bias has a type",
    "PackOptions.ValuesCount": THE_TENSORS_SAY_IT,
    "ShapeOptions.OutType": THE_TENSORS_SAY_IT,
    "SparseToDenseOptions.ValidateIndices": "no kernel of TFLite reads it",
    "SplitOptions.NumSplits": THE_TENSORS_SAY_IT,
    "SplitVOptions.NumSplits": THE_TENSORS_SAY_IT,
    "TransposeConvOptions.QuantizedBiasType": "the bias has a type",
    "UniqueOptions.IdxOutType": THE_TENSORS_SAY_IT,
    "UnpackOptions.Num": THE_TENSORS_SAY_IT,
}
NOT_SUPPORTED = {"ConcatEmbeddingsOptions", "HashtableOptions", "SkipGramOptions"}  # their operators


def test_each_field_of_options_is_read_or_has_a_reason_not_to_be() -> None:
    tables = {table.name: table for table in flatbuffers.OPTIONS.values()}
    unread = set()
    for name in (
        name for name in vars(tflite.BuiltinOptions) if name.endswith("Options") and name not in NOT_SUPPORTED
    ):
        known = {f"{field.name}{end}" for field in tables[name].fields for end in ENDS} if name in tables else set()
        generated = {field for field in vars(getattr(tflite, name)) if field[0].isupper() and name not in field}
        unread.update(f"{name}.{field}" for field in generated - known - {"Init", "GetRootAs"})
    assert unread == set(NOT_READ)


LEAF = Table("Leaf", (Field(4, "number", Scalar(4, "i"), -7), Field(6, "text", String())))
ROOT = Table("Root", (
    Field(4, "flag", Scalar(1, "?"), True), Field(6, "numbers", Vector(Scalar(2, "h"))), Field(8, "leaf", LEAF),
    Field(10, "kind", Scalar(1, "B")), Field(12, "choice", Union(10, {1: LEAF})), Field(14, "leaves", Vector(LEAF)),
    Field(16, "part", Scalar(4, "f")),
))  # fmt: skip


def file_of(vtable: bytes, table: bytes) -> bytes:
    """Return a file with a root table, of 12 bytes or more, and behind it a LEAF without fields."""
    body = struct.pack("<I4s", 8 + len(vtable), b"TEST") + vtable + struct.pack("<i", len(vtable)) + table
    return body + struct.pack("<HHi", 4, 4, 4)


def test_missing_fields_have_their_defaults() -> None:
    data = file_of(struct.pack("<HH", 4, 12), bytes(8))
    verify(data, ROOT, b"TEST")
    root = TableReader.root(data, ROOT)
    assert (root.flag(), root.kind(), root.leaf(), root.choice()) == (True, 0, None, None)
    assert (root.numbersLength(), root.leavesLength(), root.numbers(0)) == (0, 0, None)
    assert root.numbersAsNumpy().tolist() == []
    assert repr([root.flag(), root.kind(), root.part()]) == "[True, 0, 0.0]"  # of the field's type


@pytest.mark.parametrize(("kind", "has_member"), [(0, False), (1, True), (2, False)])
def test_a_union_has_the_table_of_its_type(kind: int, has_member: bool) -> None:
    vtable = struct.pack("<8H", 14, 12, 0, 0, 0, 8, 4, 0)
    data = file_of(vtable, struct.pack("<IB3x", 12, kind))
    verify(data, ROOT, b"TEST")
    choice = TableReader.root(data, ROOT).choice()
    assert (choice is not None) == has_member
    assert choice is None or (choice.number(), choice.text()) == (-7, None)


def test_only_the_described_fields_have_names() -> None:
    root = TableReader.root(file_of(struct.pack("<HH", 4, 12), bytes(8)), ROOT)
    for name in ("other", "otherLength", "AsNumpy"):
        with pytest.raises(AttributeError, match=f"Root has no field for {name}"):
            getattr(root, name)
    with pytest.raises(TypeError, match=r"Root\.leaves is no vector of numbers"):
        root.leavesAsNumpy()
