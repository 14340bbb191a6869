"""A TFLite file as records: tensors with HAL types, and operators that are not converted yet.

`read` verifies the FlatBuffer, then versions, indexes and sizes. Constants are not copied: `TfliteTensor.data` is a
view of the file. A tensor is validated when an operator uses it, so that an unused tensor of an unsupported type does
no harm. All errors are InvalidArgument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.hal.extensions import TENSOR_COMPLEX64, TENSOR_INT64
from nnfmq.hal.types import ChannelQuant, OperandType, element_bytes
from nnfmq.importers.file_format import FileContent
from nnfmq.importers.tflite import flatbuffers
from nnfmq.importers.tflite.flatbuffers import TableReader

__all__ = ["BUILTIN_OPERATORS", "TENSOR_TYPES", "TfliteFile", "TfliteOperator", "TfliteTensor", "densified", "read"]


# ----------------------------------------------------------------------------------------------------------------------
# Sparse constants of TFLite files as dense ones.
#
# A sparse tensor is stored as a tree: each level is a dimension, or a dimension of the blocks into which others are
# divided. A DENSE level has all indexes, a SPARSE_CSR level those that it lists for each node of the level above. The
# values are the leaves, in order. Source: schema.fbs of TensorFlow Lite, SparsityParameters.


_DENSE, _SPARSE_CSR = 0, 1
_Indexes = npt.NDArray[np.int64]


def densified(sparsity: Any, data: memoryview, shape: tuple[int, ...], element_bytes: int) -> memoryview:
    """Return the bytes of the dense tensor. Its size must have been limited by the caller.

    Raises:
        InvalidArgument: If the indexes do not fit the shape, or their number the values.
    """
    order, blocks = (
        _ints(sparsity.TraversalOrderLength, sparsity.TraversalOrderAsNumpy),
        _ints(sparsity.BlockMapLength, sparsity.BlockMapAsNumpy),
    )
    sizes = _level_sizes(sparsity, order, blocks, shape)
    paths = _paths(sparsity, order, sizes, math.prod(shape))
    if len(data) != element_bytes * len(next(iter(paths.values()), ())):
        raise InvalidArgument(f"a sparse tensor has {len(data)} bytes of values, its indexes are for another number")
    positions = np.zeros(len(data) // element_bytes, np.int64)
    for axis, extent in enumerate(shape):
        along = paths[axis]
        for level, blocked in enumerate(blocks, len(shape)):
            if blocked == axis:
                along = along * sizes[level] + paths[level]
        if along.size and int(along.max()) >= extent:
            raise InvalidArgument(f"a sparse tensor has an index outside dimension {axis} of {extent}")
        positions = positions * extent + along
    dense = np.zeros((math.prod(shape), element_bytes), np.uint8)
    dense[positions] = np.frombuffer(data, np.uint8).reshape(-1, element_bytes)
    return memoryview(dense.tobytes())


def _ints(length: Any, values: Any) -> list[int]:
    return [int(value) for value in values()] if length() else []


def _level_sizes(sparsity: Any, order: list[int], blocks: list[int], shape: tuple[int, ...]) -> dict[int, int]:
    """Return the extent of each dimension and block dimension; that of a blocked dimension counts blocks."""
    levels = len(shape) + len(blocks)
    if sorted(order) != list(range(levels)) or not all(0 <= axis < len(shape) for axis in blocks):
        raise InvalidArgument(f"a sparse tensor has traversal order {order[:16]} and block map {blocks[:16]}")
    if sparsity.DimMetadataLength() != levels:
        raise InvalidArgument(f"a sparse tensor has {sparsity.DimMetadataLength()} levels, it needs {levels}")
    sizes = dict(enumerate(shape))
    for level, axis in enumerate(blocks, len(shape)):
        metadata = sparsity.DimMetadata(order.index(level))
        size = metadata.DenseSize()
        if metadata.Format() != _DENSE or size < 1 or sizes[axis] % size:
            raise InvalidArgument(f"a sparse tensor has blocks of {size} in a dimension of {sizes[axis]}")
        sizes[level], sizes[axis] = size, sizes[axis] // size
    return sizes


def _paths(sparsity: Any, order: list[int], sizes: dict[int, int], count: int) -> dict[int, _Indexes]:
    """Return, for each level, the index there of each value; never more than `count` values."""
    paths: dict[int, _Indexes] = {}
    nodes = 1
    for number, level in enumerate(order):
        metadata = sparsity.DimMetadata(number)
        if metadata.Format() == _DENSE:
            size = sizes[level]
            if size * nodes > count or metadata.DenseSize() != size:
                raise InvalidArgument(f"a sparse tensor has a level of {metadata.DenseSize()}, it must have {size}")
            repeats: Any = size
            indexes = np.tile(np.arange(size), nodes)
        elif metadata.Format() == _SPARSE_CSR:
            repeats, indexes = _compressed(metadata, nodes, sizes[level])
        else:
            raise InvalidArgument(f"a sparse tensor has a level of format {metadata.Format()}")
        paths = {other: np.repeat(along, repeats) for other, along in paths.items()}
        paths[level] = indexes
        nodes = len(indexes)
        if nodes > count:
            raise InvalidArgument(f"a sparse tensor has more than its {count} elements")
    return paths


def _compressed(metadata: Any, nodes: int, size: int) -> tuple[_Indexes, _Indexes]:
    """Return how many indexes each node has, and the indexes."""
    segments = _vector(metadata.ArraySegments())
    indexes = _vector(metadata.ArrayIndices())
    counts = np.diff(segments)
    fits = len(segments) == nodes + 1 and segments[0] == 0 and segments[-1] == len(indexes) and not (counts < 0).any()
    if not fits or (indexes.size and not 0 <= int(indexes.min()) <= int(indexes.max()) < size):
        raise InvalidArgument("a sparse tensor has segments or indexes that do not fit")
    return counts, indexes


def _vector(vector: TableReader | None) -> _Indexes:
    if vector is None or not vector.ValuesLength():
        return np.zeros(0, np.int64)
    return np.asarray(vector.ValuesAsNumpy(), np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# TFLite's names of element types and operators, by their numbers in a file.
#
# Source: the enumerations TensorType and BuiltinOperator in schema.fbs of TensorFlow Lite. Tests compare them with the
# `tflite` package.


TENSOR_TYPES = dict(
    enumerate(
        [
            "FLOAT32",
            "FLOAT16",
            "INT32",
            "UINT8",
            "INT64",
            "STRING",
            "BOOL",
            "INT16",
            "COMPLEX64",
            "INT8",
            "FLOAT64",
            "COMPLEX128",
            "UINT64",
            "RESOURCE",
            "VARIANT",
            "UINT32",
            "UINT16",
            "INT4",
            "BFLOAT16",
        ]
    )
)

BUILTIN_OPERATORS = dict(
    enumerate(
        [
            "ADD",
            "AVERAGE_POOL_2D",
            "CONCATENATION",
            "CONV_2D",
            "DEPTHWISE_CONV_2D",
            "DEPTH_TO_SPACE",
            "DEQUANTIZE",
            "EMBEDDING_LOOKUP",
            "FLOOR",
            "FULLY_CONNECTED",
            "HASHTABLE_LOOKUP",
            "L2_NORMALIZATION",
            "L2_POOL_2D",
            "LOCAL_RESPONSE_NORMALIZATION",
            "LOGISTIC",
            "LSH_PROJECTION",
            "LSTM",
            "MAX_POOL_2D",
            "MUL",
            "RELU",
            "RELU_N1_TO_1",
            "RELU6",
            "RESHAPE",
            "RESIZE_BILINEAR",
            "RNN",
            "SOFTMAX",
            "SPACE_TO_DEPTH",
            "SVDF",
            "TANH",
            "CONCAT_EMBEDDINGS",
            "SKIP_GRAM",
            "CALL",
            "CUSTOM",
            "EMBEDDING_LOOKUP_SPARSE",
            "PAD",
            "UNIDIRECTIONAL_SEQUENCE_RNN",
            "GATHER",
            "BATCH_TO_SPACE_ND",
            "SPACE_TO_BATCH_ND",
            "TRANSPOSE",
            "MEAN",
            "SUB",
            "DIV",
            "SQUEEZE",
            "UNIDIRECTIONAL_SEQUENCE_LSTM",
            "STRIDED_SLICE",
            "BIDIRECTIONAL_SEQUENCE_RNN",
            "EXP",
            "TOPK_V2",
            "SPLIT",
            "LOG_SOFTMAX",
            "DELEGATE",
            "BIDIRECTIONAL_SEQUENCE_LSTM",
            "CAST",
            "PRELU",
            "MAXIMUM",
            "ARG_MAX",
            "MINIMUM",
            "LESS",
            "NEG",
            "PADV2",
            "GREATER",
            "GREATER_EQUAL",
            "LESS_EQUAL",
            "SELECT",
            "SLICE",
            "SIN",
            "TRANSPOSE_CONV",
            "SPARSE_TO_DENSE",
            "TILE",
            "EXPAND_DIMS",
            "EQUAL",
            "NOT_EQUAL",
            "LOG",
            "SUM",
            "SQRT",
            "RSQRT",
            "SHAPE",
            "POW",
            "ARG_MIN",
            "FAKE_QUANT",
            "REDUCE_PROD",
            "REDUCE_MAX",
            "PACK",
            "LOGICAL_OR",
            "ONE_HOT",
            "LOGICAL_AND",
            "LOGICAL_NOT",
            "UNPACK",
            "REDUCE_MIN",
            "FLOOR_DIV",
            "REDUCE_ANY",
            "SQUARE",
            "ZEROS_LIKE",
            "FILL",
            "FLOOR_MOD",
            "RANGE",
            "RESIZE_NEAREST_NEIGHBOR",
            "LEAKY_RELU",
            "SQUARED_DIFFERENCE",
            "MIRROR_PAD",
            "ABS",
            "SPLIT_V",
            "UNIQUE",
            "CEIL",
            "REVERSE_V2",
            "ADD_N",
            "GATHER_ND",
            "COS",
            "WHERE",
            "RANK",
            "ELU",
            "REVERSE_SEQUENCE",
            "MATRIX_DIAG",
            "QUANTIZE",
            "MATRIX_SET_DIAG",
            "ROUND",
            "HARD_SWISH",
            "IF",
            "WHILE",
            "NON_MAX_SUPPRESSION_V4",
            "NON_MAX_SUPPRESSION_V5",
            "SCATTER_ND",
            "SELECT_V2",
            "DENSIFY",
            "SEGMENT_SUM",
            "BATCH_MATMUL",
            "PLACEHOLDER_FOR_GREATER_OP_CODES",
            "CUMSUM",
            "CALL_ONCE",
            "BROADCAST_TO",
            "RFFT2D",
            "CONV_3D",
            "IMAG",
            "REAL",
            "COMPLEX_ABS",
            "HASHTABLE",
            "HASHTABLE_FIND",
            "HASHTABLE_IMPORT",
            "HASHTABLE_SIZE",
            "REDUCE_ALL",
            "CONV_3D_TRANSPOSE",
            "VAR_HANDLE",
            "READ_VARIABLE",
            "ASSIGN_VARIABLE",
            "BROADCAST_ARGS",
            "RANDOM_STANDARD_NORMAL",
            "BUCKETIZE",
            "RANDOM_UNIFORM",
            "MULTINOMIAL",
            "GELU",
            "DYNAMIC_UPDATE_SLICE",
            "RELU_0_TO_1",
            "UNSORTED_SEGMENT_PROD",
            "UNSORTED_SEGMENT_MAX",
            "UNSORTED_SEGMENT_SUM",
            "ATAN2",
            "UNSORTED_SEGMENT_MIN",
            "SIGN",
            "BITCAST",
            "BITWISE_XOR",
            "RIGHT_SHIFT",
            "STABLEHLO_LOGISTIC",
            "STABLEHLO_ADD",
            "STABLEHLO_DIVIDE",
            "STABLEHLO_MULTIPLY",
            "STABLEHLO_MAXIMUM",
            "STABLEHLO_RESHAPE",
            "STABLEHLO_CLAMP",
            "STABLEHLO_CONCATENATE",
            "STABLEHLO_BROADCAST_IN_DIM",
            "STABLEHLO_CONVOLUTION",
            "STABLEHLO_SLICE",
            "STABLEHLO_CUSTOM_CALL",
            "STABLEHLO_REDUCE",
            "STABLEHLO_ABS",
            "STABLEHLO_AND",
            "STABLEHLO_COSINE",
            "STABLEHLO_EXPONENTIAL",
            "STABLEHLO_FLOOR",
            "STABLEHLO_LOG",
            "STABLEHLO_MINIMUM",
            "STABLEHLO_NEGATE",
            "STABLEHLO_OR",
            "STABLEHLO_POWER",
            "STABLEHLO_REMAINDER",
            "STABLEHLO_RSQRT",
            "STABLEHLO_SELECT",
            "STABLEHLO_SUBTRACT",
            "STABLEHLO_TANH",
            "STABLEHLO_SCATTER",
            "STABLEHLO_COMPARE",
            "STABLEHLO_CONVERT",
            "STABLEHLO_DYNAMIC_SLICE",
            "STABLEHLO_DYNAMIC_UPDATE_SLICE",
            "STABLEHLO_PAD",
            "STABLEHLO_IOTA",
            "STABLEHLO_DOT_GENERAL",
            "STABLEHLO_REDUCE_WINDOW",
            "STABLEHLO_SORT",
            "STABLEHLO_WHILE",
            "STABLEHLO_GATHER",
            "STABLEHLO_TRANSPOSE",
            "DILATE",
            "STABLEHLO_RNG_BIT_GENERATOR",
            "REDUCE_WINDOW",
            "STABLEHLO_COMPOSITE",
            "STABLEHLO_SHIFT_LEFT",
            "STABLEHLO_CBRT",
        ]
    )
)


# ----------------------------------------------------------------------------------------------------------------------
# A TFLite file as records: tensors with HAL types, and operators that are not converted yet.


# The limits bound the work on a hostile file; TFLite's own kernels stop at rank 8.
_MAX_RANK = 8
_MAX_NAME_BYTES = 4096
_TYPES_SHOWN = 8  # of an operator, in messages
_MAX_TENSOR_BYTES = 2**32 - 1  # the HAL's limit on an operand
_SPARE_BYTES = 1 << 16
_DENSE_FACTOR = 32  # how much larger than the file its sparse constants may become
_MAX_FILE_BYTES = 2**31 - 1  # flatbuffers' own

_STORED_BYTES = {"INT64": 8, "COMPLEX64": 8}  # of an element, where the operand type's size is unknown here

_PLAIN_TYPES = {
    "FLOAT32": OperandType.TENSOR_FLOAT32,
    "FLOAT16": OperandType.TENSOR_FLOAT16,
    "INT32": OperandType.TENSOR_INT32,
    "INT64": TENSOR_INT64,
    "BOOL": OperandType.TENSOR_BOOL8,
    "COMPLEX64": TENSOR_COMPLEX64,
}
_QUANTIZED_TYPES = {
    "UINT8": OperandType.TENSOR_QUANT8_ASYMM,
    "INT4": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,  # constants, which are unpacked
    "INT8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "INT16": OperandType.TENSOR_QUANT16_SYMM,
}
_PLAIN_INTEGERS = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT16_SYMM)
_ZERO_POINTS = {"INT4": (-8, 7), "UINT8": (0, 255), "INT8": (-128, 127), "INT16": (-32768, 32767)}


class TfliteTensor(Struct, frozen=True):
    """A tensor; `data` is its constant value in the file, or None.

    `file_scale` is the file's scale, even if an operand of that type has none (the INT32 bias of a quantized
    operation). `rank` is that in the file: a constant and an input of rank 0 have shape (1,); a result may have
    shape () because its rank is unknown.
    """

    index: int
    name: str
    type: OperandType
    shape: tuple[int, ...]
    scale: float
    zero_point: int
    channel_quant: ChannelQuant | None
    file_scale: float
    buffer_index: int
    data: memoryview | None
    rank: int
    is_variable: bool

    @property
    def is_empty(self) -> bool:
        """True if it is known to have no elements: an input, a constant, or a result of which that was found."""
        return self.data is not None and 0 in self.shape

    @property
    def is_plain(self) -> bool:
        """True if the elements are integers of UINT8 or INT16, for which the file has no scale."""
        return self.type in _PLAIN_INTEGERS and self.channel_quant is None and self.file_scale == 0.0

    def __str__(self) -> str:
        return f"tensor {self.index} ({self.name[:80]!r})"


class TfliteOperator(Struct, frozen=True):
    """An operator: TFLite's name, tensor indexes (-1: omitted), and the reader of its options or None.

    `intermediates` are tensors without values, whose quantization some operators need.
    A custom operator has its code and options in `custom_code` and `custom`; its name is `CUSTOM 'code'`.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options_name: str
    options: Any
    intermediates: tuple[int, ...] = ()
    custom_code: str = ""
    custom: bytes = b""

    def __str__(self) -> str:
        return f"operator {self.index} ({self.name})"


def read(data: FileContent, follows_tflite: bool = False) -> TfliteFile:
    """Verify a TFLite file and return its first subgraph. Raises InvalidArgument if it is invalid.

    `follows_tflite`: operations have TFLite's definition where the HAL's is another one.
    """
    if len(data) > _MAX_FILE_BYTES:
        raise UnsupportedModel(f"a file of {len(data)} bytes: flatbuffers end at {_MAX_FILE_BYTES}")
    flatbuffers.verify(data, flatbuffers.MODEL, flatbuffers.IDENTIFIER)
    model = TableReader.root(data, flatbuffers.MODEL)
    if model.Version() != flatbuffers.VERSION:
        raise InvalidArgument(f"TFLite schema version {model.Version()}: only {flatbuffers.VERSION} is known")
    if model.SubgraphsLength() == 0:
        raise InvalidArgument("0 subgraphs: a model has at least one")
    return TfliteFile(model, len(data), follows_tflite)


class TfliteFile:
    """A subgraph of a checked file, by default the first one.

    Its vectors are read within one budget, so that overlaps cannot multiply the work.
    """

    def __init__(self, model: TableReader, size_bytes: int, follows_tflite: bool, index: int = 0) -> None:
        self._model = model
        self.follows_tflite = follows_tflite
        self._subgraph = model.Subgraphs(index)
        self._elements_left = size_bytes
        self._tensors: dict[int, TfliteTensor | str] = {}  # or why it is invalid, so that it is read once
        self.size_bytes = size_bytes
        self._dense_bytes = 0
        self._operators: tuple[TfliteOperator, ...] | None = None  # these when they are needed
        self._written: frozenset[int] | None = None
        self.from_data: tuple[set[int], set[int]] | None = None
        """The tensors whose elements follow from data, and those whose shape does; see `conversion`."""
        self.subgraph_count = model.SubgraphsLength()
        self.inputs = self._ints(self._subgraph.InputsLength(), self._subgraph.InputsAsNumpy)
        self.outputs = self._ints(self._subgraph.OutputsLength(), self._subgraph.OutputsAsNumpy)

    def subgraph(self, index: int) -> TfliteFile:
        """Return another subgraph of the file. Raises InvalidArgument if there is none of this index."""
        if not 0 <= index < self.subgraph_count:
            raise InvalidArgument(f"subgraph {index} is not in 0..{self.subgraph_count - 1}")
        return TfliteFile(self._model, self.size_bytes, self.follows_tflite, index)

    def shared_name(self, operator: TfliteOperator) -> str:
        """Return the name of the variable of a VAR_HANDLE."""
        names = (self._text(text) for text in (operator.options.Container(), operator.options.SharedName()))
        return "/".join(filter(None, names))

    def operators(self) -> Sequence[TfliteOperator]:
        """Return the operators in the file's order, which is the order of execution."""
        if self._operators is None:
            self._operators = tuple(self._read_operators())
        return self._operators

    def _read_operators(self) -> Iterator[TfliteOperator]:
        for index in range(self._subgraph.OperatorsLength()):
            operator = self._subgraph.Operators(index)
            name, custom_code = self._operator_name(index, operator.OpcodeIndex())
            inputs = self._ints(operator.InputsLength(), operator.InputsAsNumpy)
            outputs = self._ints(operator.OutputsLength(), operator.OutputsAsNumpy)
            options_name, options = _options(operator)
            custom = self._bytes(operator) if custom_code else b""
            inner = self._ints(operator.IntermediatesLength(), operator.IntermediatesAsNumpy)
            yield TfliteOperator(index, name, inputs, outputs, options_name, options, inner, custom_code, custom)

    def tensor(self, index: int) -> TfliteTensor:
        """Return one tensor. Raises InvalidArgument for an index out of range and for what a tensor may not be."""
        if index not in self._tensors:
            count = self._subgraph.TensorsLength()
            if not 0 <= index < count:
                raise InvalidArgument(f"tensor index {index} is not in 0..{count - 1}")
            raw = self._subgraph.Tensors(index)
            name = self._text(raw.Name())
            try:
                self._tensors[index] = self._tensor(index, name, raw)
            except InvalidArgument as error:
                self._tensors[index] = f"tensor {index} ({name[:80]!r}): {error}"
        tensor = self._tensors[index]
        if isinstance(tensor, str):
            raise InvalidArgument(tensor)
        return tensor

    def _is_written(self, index: int) -> bool:
        """Return whether an operator writes a tensor."""
        if self._written is None:
            self._written = frozenset(index for operator in self.operators() for index in operator.outputs)
        return index in self._written

    def set_shape(self, index: int, shape: tuple[int, ...]) -> None:
        """Replace the shape of a tensor that is no constant. Raises InvalidArgument if it cannot be one's shape."""
        tensor = self.tensor(index)
        if tensor.data is not None and not (tensor.is_empty and index in self.inputs):
            raise InvalidArgument(f"{tensor} is a constant: it cannot be resized")
        if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
            raise InvalidArgument(f"{tensor} cannot have the shape {list(shape)}: dimensions are integers from 0 on")
        _check_size(tensor.type, _checked_shape(shape), None, element_bytes(tensor.type) or 8)
        is_input = index in self.inputs
        rank = 0 if tensor.rank == 0 and shape == (1,) and not is_input else len(shape)  # of a scalar's operand
        data = memoryview(b"") if is_input and 0 in shape else None
        self._tensors[index] = replace(tensor, shape=shape or (1,) if is_input else shape, rank=rank, data=data)

    def empty_shapes(self) -> dict[int, tuple[int, ...]]:
        """Return the shapes of the tensors that are known to have no elements, by index."""
        tensors = [tensor for tensor in self._tensors.values() if isinstance(tensor, TfliteTensor)]
        return {tensor.index: tensor.shape for tensor in tensors if tensor.is_empty}

    @property
    def constant_bytes_max(self) -> int:
        """The limit on the constants of the imported model.

        They may be larger than the file: missing biases become zeros, dequantized weights four times their size, and
        sparse tensors dense.
        """
        tensors = (self._subgraph.Tensors(index) for index in range(self._subgraph.TensorsLength()))
        is_sparse = any(tensor.Sparsity() is not None for tensor in tensors)
        return 4 * self.size_bytes * (_DENSE_FACTOR if is_sparse else 1) + _SPARE_BYTES

    def set_value(self, index: int, data: bytes | memoryview, shape: tuple[int, ...]) -> None:
        """Make a tensor, which no operator will write, a constant whose elements are those of its operand type."""
        tensor = self.tensor(index)
        number = -1 - index  # of no buffer in the file
        self._tensors[index] = replace(tensor, data=memoryview(data), shape=shape or (1,), buffer_index=number)

    def signature(self, index: int) -> tuple[int, ...]:
        """Return the shape of a tensor with -1 for each dimension that may change; () if the file does not state it."""
        if not 0 <= index < self._subgraph.TensorsLength():
            return ()
        raw = self._subgraph.Tensors(index)
        return self._ints(raw.ShapeSignatureLength(), raw.ShapeSignatureAsNumpy)

    def metadata(self) -> bytes | None:
        """Return the FlatBuffer of the model's metadata; None if there is none. Raises InvalidArgument."""
        for index in range(self._model.MetadataLength()):
            entry = self._model.Metadata(index)
            if self._text(entry.Name()) == "TFLITE_METADATA":
                content = self._constant(entry.Buffer())
                return None if content is None else bytes(content)
        return None

    def types(self, operator: TfliteOperator) -> str:
        """Return the element types of an operator's tensors as the file names them: `FLOAT32, INT8 → FLOAT32`."""
        return " → ".join(self._type_names(indexes) for indexes in (operator.inputs, operator.outputs))

    def _type_names(self, indexes: tuple[int, ...]) -> str:
        count = self._subgraph.TensorsLength()
        names = [
            _type_name(self._subgraph.Tensors(index).Type()) if 0 <= index < count else "none"
            for index in indexes[:_TYPES_SHOWN]
        ]
        return ", ".join(names) + (", …" if len(indexes) > len(names) else "") or "none"

    def _spend(self, count: int) -> None:
        self._elements_left -= count
        if self._elements_left < 0:
            raise InvalidArgument("corrupt file: its vectors overlap (more elements than the file has bytes)")

    def _spend_dense(self, size_bytes: int) -> None:
        self._dense_bytes += size_bytes
        if self._dense_bytes > _DENSE_FACTOR * self.size_bytes:
            raise InvalidArgument(
                f"sparse tensors of {self._dense_bytes} bytes or more: a file of {self.size_bytes} may have "
                f"{_DENSE_FACTOR} times as many"
            )

    def _ints(self, count: int, as_numpy: Callable[[], Any]) -> tuple[int, ...]:
        self._spend(count)
        return tuple(as_numpy().tolist()) if count else ()

    def _text(self, raw: bytes | None) -> str:
        raw = raw or b""
        self._spend(len(raw))
        return raw[:_MAX_NAME_BYTES].decode("utf-8", "replace")

    def _bytes(self, operator: Any) -> bytes:
        """Return the options of a custom operator."""
        count = operator.CustomOptionsLength()
        self._spend(count)
        return bytes(operator.CustomOptionsAsNumpy()) if count else b""

    def _operator_name(self, index: int, opcode_index: int) -> tuple[str, str]:
        """Return the operator's name, and its custom code if it has one."""
        if opcode_index >= self._model.OperatorCodesLength():
            raise InvalidArgument(f"operator {index}: operator code index {opcode_index} is out of range")
        code = self._model.OperatorCodes(opcode_index)
        # Newer codes do not fit the deprecated byte: a file has the code in either field, and 0 or 127 in the other.
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        name = BUILTIN_OPERATORS.get(number, f"code {number}")
        custom_code = self._text(code.CustomCode()) if name == "CUSTOM" else ""
        return (f"CUSTOM {custom_code!r}" if name == "CUSTOM" else name), custom_code

    def _tensor(self, index: int, name: str, raw: Any) -> TfliteTensor:
        shape = _checked_shape(self._ints(raw.ShapeLength(), raw.ShapeAsNumpy))
        type_name = _type_name(raw.Type())
        if raw.ExternalBuffer():
            raise InvalidArgument("its elements are in another file (external_buffer), which is not supported")
        scales, zero_points, dimension = self._quantization(raw.Quantization())
        data = self._constant(raw.Buffer())
        number = raw.Buffer()
        if data is None and 0 in shape and not raw.IsVariable() and not self._is_written(index):
            data = memoryview(b"")
        if type_name == "INT4" and 0 not in shape:
            data, number = self._unpacked(data, math.prod(shape)), -1 - index  # bytes that no other tensor has
        if data is not None and raw.IsVariable():
            raise InvalidArgument("a variable tensor with an initial value is not supported: it must start from zeros")
        rank = len(shape)
        kind, scale, zero_point, channels = _operand_type(type_name, shape, scales, zero_points, dimension)
        if data is not None or index in self.inputs:
            shape = shape or (1,)  # rank 0: shape () of an operand means unknown rank
        stored_bytes = _STORED_BYTES.get(type_name) or element_bytes(kind)
        is_variable = bool(raw.IsVariable())
        if raw.Sparsity() is not None and data is not None:
            self._spend_dense(math.prod(shape) * stored_bytes)
            data, number = densified(raw.Sparsity(), data, shape, stored_bytes), -1 - index
        _check_size(kind, shape, data, stored_bytes)
        file_scale = scales[0] if len(scales) == 1 else 0.0
        return TfliteTensor(
            index, name, kind, shape, scale, zero_point, channels, file_scale, number, data, rank, is_variable
        )

    def _unpacked(self, data: memoryview | None, count: int) -> memoryview:
        """Return a constant of INT4 as INT8; the first of two elements is in the lower half of a byte."""
        if data is None or len(data) != (count + 1) // 2:
            raise InvalidArgument(f"{count} elements of INT4 need a constant of {(count + 1) // 2} bytes")
        self._spend_dense(count)
        pairs = np.frombuffer(data, np.int8)
        return memoryview(np.stack([pairs << 4 >> 4, pairs >> 4], axis=1).reshape(-1)[:count].tobytes())

    def _quantization(self, raw: Any) -> tuple[tuple[float, ...], tuple[int, ...], int]:
        if raw is None:
            return (), (), 0
        if raw.DetailsType():
            raise InvalidArgument(f"custom quantization (details type {raw.DetailsType()}) is not supported")
        scales = self._ints(raw.ScaleLength(), raw.ScaleAsNumpy)
        zero_points = self._ints(raw.ZeroPointLength(), raw.ZeroPointAsNumpy)
        return tuple(float(scale) for scale in scales), zero_points, raw.QuantizedDimension()

    def _constant(self, index: int) -> memoryview | None:
        return buffer_content(self._model, index)


def buffer_content(model: TableReader, index: int) -> memoryview | None:
    """Return the bytes of a buffer: in the FlatBuffer, or after it; None if it has none. Raises InvalidArgument."""
    if index >= model.BuffersLength():
        raise InvalidArgument(f"buffer index {index} is not in 0..{model.BuffersLength() - 1}")
    buffer = model.Buffers(index)
    if buffer.Offset() > 1 and buffer.Size() > 0:  # writers use 1 as a placeholder
        return model.content(buffer.Offset(), buffer.Size())
    return memoryview(buffer.DataAsNumpy()).cast("B") if buffer.DataLength() else None


def _type_name(number: int) -> str:
    return TENSOR_TYPES.get(number, f"number {number}")


def _options(operator: Any) -> tuple[str, Any]:
    """Return the name and the reader of the operator's options; ("", None) if there are none that are read."""
    options = operator.BuiltinOptions()
    if options is None:
        return "", None
    return flatbuffers.OPTIONS[operator.BuiltinOptionsType()].name, options


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > _MAX_RANK:
        raise InvalidArgument(f"rank {len(shape)}: at most {_MAX_RANK} is supported")
    if any(dimension < 0 for dimension in shape):
        raise InvalidArgument(f"shape {list(shape)} has a negative extent")
    return shape


def _check_size(kind: OperandType, shape: tuple[int, ...], data: memoryview | None, stored_bytes: int) -> None:
    # An extent of 0 does not excuse the others: each is a number of 32 bits further on, and so are their products.
    if math.prod(max(dimension, 1) for dimension in shape) * stored_bytes > _MAX_TENSOR_BYTES:
        raise InvalidArgument(f"shape {list(shape)} takes more than {_MAX_TENSOR_BYTES} bytes")
    size_bytes = math.prod(shape) * stored_bytes
    if data is not None and len(data) != size_bytes:
        raise InvalidArgument(f"shape {list(shape)} of {kind.name} is {size_bytes} bytes, its buffer has {len(data)}")


_Quantized = tuple[OperandType, float, int, ChannelQuant | None]


def _operand_type(
    type_name: str, shape: tuple[int, ...], scales: tuple[float, ...], zero_points: tuple[int, ...], dimension: int
) -> _Quantized:
    """Return operand type, scale, zero point and per-channel scales for a TFLite type and its quantization."""
    plain = _PLAIN_TYPES.get(type_name)
    if plain is not None:
        return plain, 0.0, 0, None
    if type_name not in _QUANTIZED_TYPES:
        raise InvalidArgument(f"tensor type {type_name} is not supported")
    if not scales and type_name in ("UINT8", "INT16"):
        return _QUANTIZED_TYPES[type_name], 1.0, 0, None  # plain integers: each stands for itself
    if not scales:
        raise InvalidArgument(f"tensor type {type_name} without a quantization scale is not supported")
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise InvalidArgument("a quantization scale is not a positive number")
    if len(scales) > 1:
        return _per_channel(type_name, shape, scales, zero_points, dimension)
    return _per_tensor(type_name, scales[0], zero_points)


def _per_tensor(type_name: str, scale: float, zero_points: tuple[int, ...]) -> _Quantized:
    lowest, highest = _ZERO_POINTS[type_name]
    zero_point = zero_points[0] if zero_points else 0
    if len(zero_points) > 1 or not lowest <= zero_point <= highest:
        raise InvalidArgument(
            f"zero points {list(zero_points[:8])}: one in {lowest}..{highest} goes with one {type_name} scale"
        )
    return _QUANTIZED_TYPES[type_name], scale, zero_point, None


def _per_channel(
    type_name: str, shape: tuple[int, ...], scales: tuple[float, ...], zero_points: tuple[int, ...], dimension: int
) -> _Quantized:
    if type_name not in ("INT8", "INT4"):
        raise InvalidArgument(f"scales per channel are supported for INT8 and INT4 only, not for {type_name}")
    if not 0 <= dimension < len(shape) or shape[dimension] != len(scales):
        raise InvalidArgument(f"{len(scales)} scales for dimension {dimension} of shape {list(shape)}")
    if any(zero_points):
        raise InvalidArgument("zero points per channel must be 0")
    return OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, 0.0, 0, ChannelQuant(scales, dimension)
