"""FlatBuffers: a verifier of untrusted files, access to their tables, and the description of TFLite's tables.

The functions of a table are named as in the code that FlatBuffers' compiler generates for Python. Such code is a module
for each table of a schema: the `tflite` package has 180 of them, which take 22 ms to import.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NoReturn

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.file_format import FileContent

__all__ = [
    "IDENTIFIER",
    "MODEL",
    "OPTIONS",
    "VERSION",
    "Field",
    "Scalar",
    "String",
    "Table",
    "TableReader",
    "Union",
    "Vector",
    "verify",
]


# ----------------------------------------------------------------------------------------------------------------------
# Verifier of untrusted FlatBuffers, for the tables that a reader will access.
#
# Python's flatbuffers package follows every offset unchecked and has no verifier (C++ has flatbuffers::Verifier). This
# one takes the tables and fields that will be read, and checks that every offset, vtable, vector length, string and
# union member of these is inside the buffer. Afterwards the generated accessors of these tables cannot leave the
# buffer; other fields have not been checked.
#
# Time is bounded by the buffer's size: a table is checked once even if it is referenced often, and no more offsets are
# followed than fit the buffer. Alignment is not checked, because Python and NumPy read unaligned values. Format:
# "FlatBuffer internals" in the FlatBuffers documentation.


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


# ----------------------------------------------------------------------------------------------------------------------
# Access to the tables of a FlatBuffer that the verifier has checked, by the same description of its tables.


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

    def content(self, offset: int, size_bytes: int) -> memoryview:
        """Return bytes of the file. Raises InvalidArgument if it does not have them."""
        end = offset + size_bytes
        if end > len(self._buffer):
            raise InvalidArgument(f"corrupt or truncated file: bytes {offset} to {end} of {len(self._buffer)}")
        return memoryview(self._buffer)[offset:end].cast("B")

    def _at(self, slot: int) -> int:
        """Return the position of a slot's field in the buffer; 0 if it is missing."""
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
        """Return the position of the first element of the vector or string at an offset, and the number of elements."""
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


# ----------------------------------------------------------------------------------------------------------------------
# The tables of a TFLite file that the importer reads: fields, vtable slots and sizes.
#
# A table lists the fields that `file` and `operators` read; the verifier does not check other fields.
# Tests compare slots, types and defaults with the generated accessors of the `tflite` package. Source: schema.fbs of
# TensorFlow Lite (version 3), as in that package's version 2.18.


IDENTIFIER = b"TFL3"
VERSION = 3

_INT8, _UINT8, _BOOL = Scalar(1, "b"), Scalar(1, "B"), Scalar(1, "?")
_UINT16 = Scalar(2, "H")
_INT32, _UINT32, _FLOAT32 = Scalar(4, "i"), Scalar(4, "I"), Scalar(4, "f")
_INT64, _UINT64 = Scalar(8, "q"), Scalar(8, "Q")

_CONV_2D = Table("Conv2DOptions", (
    Field(4, "Padding", _INT8), Field(6, "StrideW", _INT32), Field(8, "StrideH", _INT32),
    Field(10, "FusedActivationFunction", _INT8),
    Field(12, "DilationWFactor", _INT32, 1), Field(14, "DilationHFactor", _INT32, 1),
))  # fmt: skip
_DEPTHWISE_CONV_2D = Table("DepthwiseConv2DOptions", (
    Field(4, "Padding", _INT8), Field(6, "StrideW", _INT32), Field(8, "StrideH", _INT32),
    Field(10, "DepthMultiplier", _INT32), Field(12, "FusedActivationFunction", _INT8),
    Field(14, "DilationWFactor", _INT32, 1), Field(16, "DilationHFactor", _INT32, 1),
))  # fmt: skip
_POOL_2D = Table("Pool2DOptions", (
    Field(4, "Padding", _INT8), Field(6, "StrideW", _INT32), Field(8, "StrideH", _INT32),
    Field(10, "FilterWidth", _INT32), Field(12, "FilterHeight", _INT32), Field(14, "FusedActivationFunction", _INT8),
))  # fmt: skip
_FULLY_CONNECTED = Table("FullyConnectedOptions", (
    Field(4, "FusedActivationFunction", _INT8), Field(6, "WeightsFormat", _INT8), Field(8, "KeepNumDims", _BOOL),
    Field(10, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_TRANSPOSE_CONV = Table("TransposeConvOptions", (
    Field(4, "Padding", _INT8), Field(6, "StrideW", _INT32), Field(8, "StrideH", _INT32),
    Field(10, "FusedActivationFunction", _INT8),
))  # fmt: skip
_LOCAL_RESPONSE_NORMALIZATION = Table("LocalResponseNormalizationOptions", (
    Field(4, "Radius", _INT32), Field(6, "Bias", _FLOAT32), Field(8, "Alpha", _FLOAT32), Field(10, "Beta", _FLOAT32),
))  # fmt: skip
_STRIDED_SLICE = Table("StridedSliceOptions", (
    Field(4, "BeginMask", _INT32), Field(6, "EndMask", _INT32), Field(8, "EllipsisMask", _INT32),
    Field(10, "NewAxisMask", _INT32), Field(12, "ShrinkAxisMask", _INT32), Field(14, "Offset", _BOOL),
))  # fmt: skip
_LSTM = Table("LSTMOptions", (
    Field(4, "FusedActivationFunction", _INT8), Field(6, "CellClip", _FLOAT32), Field(8, "ProjClip", _FLOAT32),
    Field(10, "KernelType", _INT8),
    Field(12, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_UNIDIRECTIONAL_SEQUENCE_LSTM = Table("UnidirectionalSequenceLSTMOptions", (
    Field(4, "FusedActivationFunction", _INT8), Field(6, "CellClip", _FLOAT32), Field(8, "ProjClip", _FLOAT32),
    Field(10, "TimeMajor", _BOOL), Field(14, "DiagonalRecurrentTensors", _BOOL),
    Field(12, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_BIDIRECTIONAL_SEQUENCE_LSTM = Table("BidirectionalSequenceLSTMOptions", (
    Field(4, "FusedActivationFunction", _INT8), Field(6, "CellClip", _FLOAT32), Field(8, "ProjClip", _FLOAT32),
    Field(10, "MergeOutputs", _BOOL), Field(12, "TimeMajor", _BOOL, True),
    Field(14, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_SEQUENCE_RNN = Table("SequenceRNNOptions", (
    Field(4, "TimeMajor", _BOOL), Field(6, "FusedActivationFunction", _INT8),
    Field(8, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_BIDIRECTIONAL_SEQUENCE_RNN = Table("BidirectionalSequenceRNNOptions", (
    Field(4, "TimeMajor", _BOOL), Field(6, "FusedActivationFunction", _INT8), Field(8, "MergeOutputs", _BOOL),
    Field(10, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_SVDF = Table("SVDFOptions", (
    Field(4, "Rank", _INT32), Field(6, "FusedActivationFunction", _INT8),
    Field(8, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip
_SOFTMAX = Table("SoftmaxOptions", (Field(4, "Beta", _FLOAT32),))
_CONCATENATION = Table("ConcatenationOptions", (Field(4, "Axis", _INT32), Field(6, "FusedActivationFunction", _INT8)))
_RESHAPE = Table("ReshapeOptions", (Field(4, "NewShape", Vector(_INT32)),))
_REDUCER = Table("ReducerOptions", (Field(4, "KeepDims", _BOOL),))
_SQUEEZE = Table("SqueezeOptions", (Field(4, "SqueezeDims", Vector(_INT32)),))
_GATHER = Table("GatherOptions", (Field(4, "Axis", _INT32), Field(6, "BatchDims", _INT32)))
_RESIZE_BILINEAR = Table(
    "ResizeBilinearOptions", (Field(8, "AlignCorners", _BOOL), Field(10, "HalfPixelCenters", _BOOL))
)
_RESIZE_NEAREST = Table("ResizeNearestNeighborOptions", (
    Field(4, "AlignCorners", _BOOL), Field(6, "HalfPixelCenters", _BOOL),
))  # fmt: skip
_CONV_3D = Table("Conv3DOptions", (
    Field(4, "Padding", _INT8), Field(6, "StrideD", _INT32), Field(8, "StrideW", _INT32), Field(10, "StrideH", _INT32),
    Field(12, "FusedActivationFunction", _INT8), Field(14, "DilationDFactor", _INT32, 1),
    Field(16, "DilationWFactor", _INT32, 1), Field(18, "DilationHFactor", _INT32, 1),
))  # fmt: skip
_FAKE_QUANT = Table("FakeQuantOptions", (
    Field(4, "Min", _FLOAT32), Field(6, "Max", _FLOAT32), Field(8, "NumBits", _INT32), Field(10, "NarrowRange", _BOOL),
))  # fmt: skip
_REVERSE_SEQUENCE = Table("ReverseSequenceOptions", (Field(4, "SeqDim", _INT32), Field(6, "BatchDim", _INT32)))
_IF = Table("IfOptions", (Field(4, "ThenSubgraphIndex", _INT32), Field(6, "ElseSubgraphIndex", _INT32)))
_WHILE = Table("WhileOptions", (Field(4, "CondSubgraphIndex", _INT32), Field(6, "BodySubgraphIndex", _INT32)))
_CUMSUM = Table("CumsumOptions", (Field(4, "Exclusive", _BOOL), Field(6, "Reverse", _BOOL)))
_RANDOM = Table("RandomOptions", (Field(4, "Seed", _INT64), Field(6, "Seed2", _INT64)))
_BATCH_MATMUL = Table("BatchMatMulOptions", (
    Field(4, "AdjX", _BOOL), Field(6, "AdjY", _BOOL),
    Field(8, "AsymmetricQuantizeInputs", _BOOL),
))  # fmt: skip


def _activated(name: str) -> Table:
    return Table(name, (Field(4, "FusedActivationFunction", _INT8),))


def _sum(name: str) -> Table:
    return Table(name, (Field(4, "FusedActivationFunction", _INT8), Field(6, "PotScaleInt16", _BOOL, True)))


# By the code of the member in the union BuiltinOptions.
OPTIONS: dict[int, Table] = {
    1: _CONV_2D,
    2: _DEPTHWISE_CONV_2D,
    4: Table("LSHProjectionOptions", (Field(4, "Type", _INT8),)),
    5: _POOL_2D,
    6: _SVDF,
    7: Table("RNNOptions", (Field(4, "FusedActivationFunction", _INT8), Field(6, "AsymmetricQuantizeInputs", _BOOL))),
    8: _FULLY_CONNECTED,
    9: _SOFTMAX,
    10: _CONCATENATION,
    11: _sum("AddOptions"),
    12: _activated("L2NormOptions"),
    13: _LOCAL_RESPONSE_NORMALIZATION,
    14: _LSTM,
    15: _RESIZE_BILINEAR,
    16: Table("CallOptions", (Field(4, "Subgraph", _UINT32),)),
    17: _RESHAPE,
    19: Table("SpaceToDepthOptions", (Field(4, "BlockSize", _INT32),)),
    20: Table("EmbeddingLookupSparseOptions", (Field(4, "Combiner", _INT8),)),
    21: _activated("MulOptions"),
    23: _GATHER,
    27: _REDUCER,
    28: _sum("SubOptions"),
    29: _activated("DivOptions"),
    30: _SQUEEZE,
    31: _SEQUENCE_RNN,
    32: _STRIDED_SLICE,
    49: _TRANSPOSE_CONV,
    55: Table("ShapeOptions", ()),
    58: _FAKE_QUANT,
    59: Table("PackOptions", (Field(6, "Axis", _INT32),)),
    61: Table("OneHotOptions", (Field(4, "Axis", _INT32),)),
    64: Table("UnpackOptions", (Field(6, "Axis", _INT32),)),
    69: _BIDIRECTIONAL_SEQUENCE_LSTM,
    70: _BIDIRECTIONAL_SEQUENCE_RNN,
    71: _UNIDIRECTIONAL_SEQUENCE_LSTM,
    74: _RESIZE_NEAREST,
    75: Table("LeakyReluOptions", (Field(4, "Alpha", _FLOAT32),)),
    77: Table("MirrorPadOptions", (Field(4, "Mode", _INT8),)),
    87: _REVERSE_SEQUENCE,
    92: _IF,
    93: _WHILE,
    94: Table("DepthToSpaceOptions", (Field(4, "BlockSize", _INT32),)),
    101: _BATCH_MATMUL,
    102: _CUMSUM,
    103: Table("CallOnceOptions", (Field(4, "InitSubgraphIndex", _INT32),)),
    106: _CONV_3D,
    111: Table("VarHandleOptions", (Field(4, "Container", String()), Field(6, "SharedName", String()))),
    112: Table("ReadVariableOptions", ()),
    113: Table("AssignVariableOptions", ()),
    114: _RANDOM,
    115: Table("BucketizeOptions", (Field(4, "Boundaries", Vector(_FLOAT32)),)),
    116: Table("GeluOptions", (Field(4, "Approximate", _BOOL),)),
}

_OPERATOR = Table("Operator", (
    Field(4, "OpcodeIndex", _UINT32), Field(6, "Inputs", Vector(_INT32)), Field(8, "Outputs", Vector(_INT32)),
    Field(10, "BuiltinOptionsType", _UINT8), Field(12, "BuiltinOptions", Union(10, OPTIONS)),
    Field(14, "CustomOptions", Vector(_UINT8)),
    Field(20, "Intermediates", Vector(_INT32)),
))  # fmt: skip
_QUANTIZATION = Table("QuantizationParameters", (
    Field(8, "Scale", Vector(_FLOAT32)), Field(10, "ZeroPoint", Vector(_INT64)),
    Field(12, "DetailsType", _UINT8), Field(16, "QuantizedDimension", _INT32),
))  # fmt: skip
_INDEX_VECTORS = {
    1: Table("Int32Vector", (Field(4, "Values", Vector(_INT32)),)),
    2: Table("Uint16Vector", (Field(4, "Values", Vector(_UINT16)),)),
    3: Table("Uint8Vector", (Field(4, "Values", Vector(_UINT8)),)),
}
_DIMENSION_METADATA = Table("DimensionMetadata", (
    Field(4, "Format", _INT8), Field(6, "DenseSize", _INT32),
    Field(8, "ArraySegmentsType", _UINT8), Field(10, "ArraySegments", Union(8, _INDEX_VECTORS)),
    Field(12, "ArrayIndicesType", _UINT8), Field(14, "ArrayIndices", Union(12, _INDEX_VECTORS)),
))  # fmt: skip
_SPARSITY = Table("SparsityParameters", (
    Field(4, "TraversalOrder", Vector(_INT32)), Field(6, "BlockMap", Vector(_INT32)),
    Field(8, "DimMetadata", Vector(_DIMENSION_METADATA)),
))  # fmt: skip
_TENSOR = Table("Tensor", (
    Field(4, "Shape", Vector(_INT32)), Field(6, "Type", _INT8), Field(8, "Buffer", _UINT32),
    Field(10, "Name", String()),
    Field(12, "Quantization", _QUANTIZATION), Field(14, "IsVariable", _BOOL), Field(16, "Sparsity", _SPARSITY),
    Field(18, "ShapeSignature", Vector(_INT32)), Field(24, "ExternalBuffer", _UINT32),
))  # fmt: skip
_SUBGRAPH = Table("SubGraph", (
    Field(4, "Tensors", Vector(_TENSOR)), Field(6, "Inputs", Vector(_INT32)), Field(8, "Outputs", Vector(_INT32)),
    Field(10, "Operators", Vector(_OPERATOR)),
))  # fmt: skip
_OPERATOR_CODE = Table("OperatorCode", (
    Field(4, "DeprecatedBuiltinCode", _INT8), Field(6, "CustomCode", String()), Field(10, "BuiltinCode", _INT32),
))  # fmt: skip
_BUFFER = Table("Buffer", (Field(4, "Data", Vector(_UINT8)), Field(6, "Offset", _UINT64), Field(8, "Size", _UINT64)))

_METADATA = Table("Metadata", (Field(4, "Name", String()), Field(6, "Buffer", _UINT32)))

_TENSOR_MAP = Table("TensorMap", (Field(4, "Name", String()), Field(6, "TensorIndex", _UINT32)))
_SIGNATURE = Table("SignatureDef", (
    Field(4, "Inputs", Vector(_TENSOR_MAP)), Field(6, "Outputs", Vector(_TENSOR_MAP)),
    Field(8, "SignatureKey", String()), Field(12, "SubgraphIndex", _UINT32),
))  # fmt: skip

MODEL = Table("Model", (
    Field(4, "Version", _UINT32), Field(6, "OperatorCodes", Vector(_OPERATOR_CODE)),
    Field(8, "Subgraphs", Vector(_SUBGRAPH)), Field(12, "Buffers", Vector(_BUFFER)),
    Field(16, "Metadata", Vector(_METADATA)), Field(18, "SignatureDefs", Vector(_SIGNATURE)),
))  # fmt: skip
