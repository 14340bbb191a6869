"""Vendor extensions: codes and names, and those of the built-in `nnfmq.tflite`.

The code of an extension's operand type or operation is prefix << 16 | type, which is above BASE_MAX. AIDL's codes are
signed, so a prefix has 15 bits; HIDL's has 16. Each model chooses the prefixes of its extensions (`Model.extensions`);
prefix 0 is never used. `ExtensionCodes` assigns them.

Source: HAL 1.2 types.hal, `Extension` and `ExtensionNameAndPrefix`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from functools import cache
from typing import TypeVar

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.types import (
    BASE_MAX,
    CLAMPS,
    ExtensionNameAndPrefix,
    ExtensionOperandTypeInformation,
    Operand,
    OperandType,
)

__all__ = [
    "AIDL_PREFIX_BITS",
    "DTYPES",
    "ELEMENTS",
    "HAL_RANK",
    "HIDL_PREFIX_BITS",
    "MAX_DYNAMIC_PRODUCTS",
    "NAME",
    "PREFIX",
    "TENSOR_COMPLEX64",
    "TENSOR_FLOAT64",
    "TENSOR_INT64",
    "TENSOR_UINT32",
    "TENSOR_UINT64",
    "TYPE_BITS",
    "WIDE_TYPES",
    "Extension",
    "ExtensionCodes",
    "ExtensionOperandTypeInformation",
    "Scheme",
    "TfliteOperation",
    "extended_code",
    "extended_operations",
    "extension_code",
    "extension_prefix",
    "extension_type",
    "flat_shape",
    "is_extension",
    "is_extension_name",
    "named_code",
    "operation_code",
]

TYPE_BITS = 16
AIDL_PREFIX_BITS = 15
HIDL_PREFIX_BITS = 16

Code = TypeVar("Code", OperandType, OperationType)

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


class Extension(Struct, frozen=True):
    """An extension that a device supports, with its operand types."""

    name: str
    operand_types: tuple[ExtensionOperandTypeInformation, ...] = ()


def is_extension(code: int) -> bool:
    """Return True if an operand type or operation code belongs to an extension."""
    return code > BASE_MAX


def extension_prefix(code: int) -> int:
    """Return the prefix of a code; 0 if it does not belong to an extension."""
    return code >> TYPE_BITS


def extension_type(code: int) -> int:
    """Return the type of a code, which identifies the operand type or operation within its extension."""
    return code & BASE_MAX


def extension_code(prefix: int, type: int, *, prefix_bits: int = AIDL_PREFIX_BITS) -> int:
    """Return the code of operand type or operation `type` of the extension with `prefix`.

    Raises:
        InvalidArgument: If `prefix` is not in 1 to 2^prefix_bits - 1, or `type` not in 0 to 2^16 - 1.
    """
    if not 0 < prefix < 1 << prefix_bits:
        raise InvalidArgument(f"extension prefix {prefix}, allowed are 1 to {(1 << prefix_bits) - 1}")
    if not 0 <= type <= BASE_MAX:
        raise InvalidArgument(f"type {type} within an extension, allowed are 0 to {BASE_MAX}")
    return prefix << TYPE_BITS | type


def is_extension_name(name: str) -> bool:
    """Return whether `name` has two or more parts of lowercase letters, digits and underscores, joined by periods."""
    return _NAME.fullmatch(name) is not None


def named_code(kind: type[Code], code: int, name: str) -> Code:
    """Return an extension's code as a member of the enum `kind` that has this name, for messages and displays."""
    member = kind(code)  # the enums create a new object for each extension code
    member._name_ = name
    return member


class ExtensionCodes:
    """Assigns the codes of extensions' operand types and operations in one model; prefixes are 1, 2, ... in call order.

    codes = ExtensionCodes()
    int64 = codes.operand_type("com.example.fibonacci", 0)
    model = Model(..., extensions=codes.extensions)
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}

    @property
    def extensions(self) -> tuple[ExtensionNameAndPrefix, ...]:
        """Names and prefixes of all extensions used so far, for `Model.extensions`."""
        return tuple(ExtensionNameAndPrefix(name, prefix) for name, prefix in self._prefixes.items())

    def prefix(self, name: str) -> int:
        """Return the prefix of an extension.

        Raises:
            InvalidArgument: If the name is malformed.
        """
        if not is_extension_name(name):
            raise InvalidArgument(f"extension name {name!r}, e.g. 'com.example.name' is one")
        return self._prefixes.setdefault(name, len(self._prefixes) + 1)

    def operand_type(self, name: str, type: int) -> OperandType:
        """Return the code of operand type `type` of an extension.

        Raises:
            InvalidArgument: If the name is malformed, or the type out of range.
        """
        return OperandType(extension_code(self.prefix(name), type))

    def operation_type(self, name: str, type: int) -> OperationType:
        """Return the code of operation `type` of an extension.

        Raises:
            InvalidArgument: If the name is malformed, or the type out of range.
        """
        return OperationType(extension_code(self.prefix(name), type))


# ----------------------------------------------------------------------------------------------------------------------
# Codes of the built-in extension `nnfmq.tflite`: what TFLite and ONNX models need beyond the HAL.
#
# `operations` declares the operations, and importers emit them. The numbers are the extension's interface: models
# contain them, so they never change. The extension has prefix 1 in every process (`operations` installs it before all
# others) and in every model of an importer.


NAME = "nnfmq.tflite"
PREFIX = 1


class TfliteOperation(IntEnum):
    """The operations of the extension, by their number within it."""

    # 0 to 63: builtin and custom operators of TFLite that the HAL has no operation for
    GELU = 0
    COS = 1
    ROUND = 2
    SIGN = 3
    FLOOR_MOD = 4
    ATAN2 = 5
    TRUNCATED_DIV = 6
    BITWISE_XOR = 7
    RIGHT_SHIFT = 8
    RANGE = 9
    SHAPE = 10
    WHERE = 11
    UNIQUE = 12
    CUMSUM = 13
    RFFT2D = 14
    REAL = 15
    IMAG = 16
    COMPLEX_ABS = 17
    ONE_HOT = 18
    BATCH_GATHER = 19
    GATHER_ND = 20
    SCATTER_ND = 21
    SPARSE_TO_DENSE = 22
    SEGMENT_SUM = 23
    UNSORTED_SEGMENT = 24
    MATRIX_DIAG = 25
    MATRIX_SET_DIAG = 26
    REVERSE_SEQUENCE = 27
    DYNAMIC_UPDATE_SLICE = 28
    BITCAST = 29
    BUCKETIZE = 30
    CONV_3D = 31
    CONV_3D_TRANSPOSE = 32
    NON_MAX_SUPPRESSION = 33
    EMBEDDING_LOOKUP_SPARSE = 34
    FAKE_QUANT = 35
    MAX_POOL_WITH_ARGMAX = 37
    MAX_UNPOOL = 38
    TRANSFORM_LANDMARKS = 39
    TRANSFORM_TENSOR = 40
    LANDMARKS_TO_TRANSFORM_MATRIX = 41

    # 64 to 127: quantization schemes of TFLite that the HAL does not have
    # Q16_X is the HAL's X on TENSOR_QUANT16_SYMM
    Q16_CONV_2D = 64
    Q16_DEPTHWISE_CONV_2D = 65
    Q16_TRANSPOSE_CONV_2D = 66
    Q16_GROUPED_CONV_2D = 67
    Q16_FULLY_CONNECTED = 68
    Q16_BATCH_MATMUL = 69
    Q16_ADD = 70
    Q16_SUB = 71
    Q16_MUL = 72
    Q16_MAXIMUM = 73
    Q16_MINIMUM = 74
    Q16_PRELU = 75
    Q16_LEAKY_RELU = 76
    Q16_RELU = 77
    Q16_RELU6 = 78
    Q16_ABS = 79
    Q16_NEG = 80
    Q16_EXP = 81
    Q16_LOG = 82
    Q16_LOGISTIC = 83
    Q16_TANH = 84
    Q16_SOFTMAX = 85
    Q16_MEAN = 86
    Q16_REDUCE_MAX = 87
    Q16_REDUCE_MIN = 88
    Q16_AVERAGE_POOL_2D = 89
    Q16_MAX_POOL_2D = 90
    Q16_RESIZE_BILINEAR = 91
    Q16_RESIZE_NEAREST_NEIGHBOR = 92
    Q16_QUANTIZE = 93
    Q16_DEQUANTIZE = 94
    Q16_CAST = 95
    Q16_RESHAPE = 96
    Q16_SQUEEZE = 97
    Q16_EXPAND_DIMS = 98
    Q16_CONCATENATION = 99
    Q16_PACK = 100
    Q16_SLICE = 101
    Q16_STRIDED_SLICE = 102
    Q16_SPLIT = 103
    Q16_GATHER = 104
    Q16_EMBEDDING_LOOKUP = 105
    Q16_TILE = 106
    Q16_TRANSPOSE = 107
    Q16_PAD = 108
    Q16_PAD_V2 = 109
    Q16_MIRROR_PAD = 110
    Q16_REVERSE = 111
    Q16_SPACE_TO_BATCH_ND = 112
    Q16_BATCH_TO_SPACE_ND = 113
    Q16_SELECT = 114
    Q16_TOPK_V2 = 115
    Q16_EQUAL = 116
    Q16_NOT_EQUAL = 117
    Q16_LESS = 118
    Q16_LESS_EQUAL = 119
    Q16_GREATER = 120
    Q16_GREATER_EQUAL = 121
    REQUANTIZE = 122
    Q16_RSQRT = 123
    Q16_SQRT = 124
    INTEGER_LSTM = 125
    INTEGER_SVDF = 126
    SOFTMAX_TO_Q16 = 127

    # 128 to 159: more of them
    Q16_DIV = 128
    Q16_REDUCE_PROD = 129

    # 160 to 199: operators of ONNX
    GATHER_ELEMENTS = 160
    SCATTER_ELEMENTS = 161
    SCATTER_ND_UPDATE = 162
    BITWISE_AND = 163
    LEFT_SHIFT = 164
    ROUND_TO_FORMAT = 165
    ERF = 166
    QUANTIZE_LINEAR = 190
    QLINEAR_ADD = 191
    QLINEAR_MUL = 192

    # 200 to 226: operations of the HAL for more types and ranks
    ADD = 200
    SUB = 201
    MUL = 202
    DIV = 203
    POW = 204
    RESHAPE = 205
    SQUEEZE = 206
    EXPAND_DIMS = 207
    CONCATENATION = 208
    PACK = 209
    SLICE = 210
    STRIDED_SLICE = 211
    SPLIT = 212
    PAD = 213
    PAD_V2 = 214
    MIRROR_PAD = 215
    TRANSPOSE = 216
    REVERSE = 217
    TILE = 218
    GATHER = 219
    SELECT = 220
    MEAN = 221
    REDUCE_MAX = 222
    REDUCE_MIN = 223
    REDUCE_SUM = 224
    REDUCE_PROD = 225
    CAST = 226

    # 227 to 240: Q8_X is TFLite's X on 8-bit tensors, where the HAL has none, or another one
    Q8_CLAMP = 227
    Q8_ABS = 228
    Q8_NEG = 229
    Q8_SQRT = 230
    Q8_RSQRT = 231
    Q8_LOG = 232
    Q8_EXP = 233
    Q8_ELU = 234
    Q8_SQUARED_DIFFERENCE = 235
    Q8_DIV = 236
    Q8_MEAN = 237
    Q8_REDUCE_SUM = 238
    Q8_REDUCE_PROD = 239
    Q8_LOG_SOFTMAX = 240

    # 241 to 255: TFLite's definition of operations that the HAL has too
    Q8_MAXIMUM = 241
    Q8_MINIMUM = 242
    Q8_SELECT = 243
    TOPK_V2 = 244
    Q8_EQUAL = 245
    Q8_NOT_EQUAL = 246
    Q8_LESS = 247
    Q8_LESS_EQUAL = 248
    Q8_GREATER = 249
    Q8_GREATER_EQUAL = 250
    Q8_L2_NORMALIZATION = 251
    Q8_AVERAGE_POOL_2D = 252
    Q8_RESIZE_BILINEAR = 253
    Q8_FULLY_CONNECTED = 254
    Q8_LEAKY_RELU = 255

    # 256 to 287: operations for weights of 8 bits and inputs of floats, or results of INT32. HYBRID_X is the HAL's X
    DYNAMIC_QUANTIZE = 256
    HYBRID_LSTM = 257
    HYBRID_UNIDIRECTIONAL_SEQUENCE_LSTM = 258
    HYBRID_BIDIRECTIONAL_SEQUENCE_LSTM = 259
    HYBRID_RNN = 260
    HYBRID_UNIDIRECTIONAL_SEQUENCE_RNN = 261
    HYBRID_BIDIRECTIONAL_SEQUENCE_RNN = 262
    DYNAMIC_UNIDIRECTIONAL_SEQUENCE_LSTM = 263
    DYNAMIC_FULLY_CONNECTED = 264
    DYNAMIC_CONV_2D = 265
    BLOCKWISE_MATMUL = 266
    HYBRID_FULLY_CONNECTED = 267
    HYBRID_CONV_2D = 268
    HYBRID_SVDF = 269
    DYNAMIC_QUANTIZE_LINEAR = 270
    EXACT_FULLY_CONNECTED = 271
    EXACT_CONV_2D = 272
    HYBRID_DEPTHWISE_CONV_2D = 273

    # 288 to 299: functions of real numbers that ONNX has
    TAN = 288
    ASIN = 289
    ACOS = 290
    ATAN = 291
    SINH = 292
    COSH = 293
    ASINH = 294
    ACOSH = 295
    ATANH = 296
    SOFTPLUS = 297
    MISH = 298

    # 300 to 319: more operators of ONNX
    DETERMINANT = 300

    # 320 to 351: more operations of the HAL, for elements of 64 bits and UINT32
    MAXIMUM = 320
    MINIMUM = 321
    EQUAL = 322
    NOT_EQUAL = 323
    LESS = 324
    LESS_EQUAL = 325
    GREATER = 326
    GREATER_EQUAL = 327
    ABS = 328
    NEG = 329
    EXP = 330
    LOG = 331
    SQRT = 332
    RSQRT = 333
    SIN = 334
    FLOOR = 335
    LOGISTIC = 336
    TANH = 337
    ARGMAX = 338
    ARGMIN = 339
    BATCH_MATMUL = 340
    PRELU = 341

    # 352: conversions for other operations of the extension
    SATURATE = 352


def operation_code(operation: TfliteOperation) -> OperationType:
    """Return the code of an operation in this process and in the models of importers."""
    return named_code(OperationType, extension_code(PREFIX, operation), f"{NAME}.{operation.name}")


class Scheme(Enum):
    """Why the extension has an operation of the HAL again; the value is the name of that, `{}` being the HAL's name."""

    WIDER = "{}"  # more operand types, or ranks above 4
    TFLITE = "Q8_{}"  # TFLite's arithmetic on 8-bit tensors, where the HAL has none or another one
    SIXTEEN_BITS = "Q16_{}"  # TENSOR_QUANT16_SYMM
    TO_SIXTEEN_BITS = "{}_TO_Q16"  # from 8-bit tensors to TENSOR_QUANT16_SYMM
    HYBRID = "HYBRID_{}"  # floats with weights of 8 bits, as TFLite computes them
    DYNAMIC = "DYNAMIC_{}"  # the same as ONNX Runtime computes it
    EXACT = "EXACT_{}"  # sums of products of 8-bit values, as INT32


MAX_DYNAMIC_PRODUCTS = (1 << 30) // 255**2
"""The most products of a sum of 8-bit values that is not requantized: its magnitude is at most 2³⁰."""


@cache
def extended_operations() -> Mapping[tuple[OperationType, Scheme], TfliteOperation]:
    """Return the operations of the HAL that the extension has again; `operations` declares them as variants."""
    ours = TfliteOperation.__members__
    found = {
        (base, scheme): ours[name]
        for scheme in Scheme
        for base_name, base in OperationType.__members__.items()
        if (name := scheme.value.format(base_name)) in ours
    }
    del found[OperationType.QUANTIZE, Scheme.DYNAMIC]  # DYNAMIC_QUANTIZE is no QUANTIZE: its result are floats
    topk = found.pop((OperationType.TOPK_V2, Scheme.WIDER))  # it is TFLite's definition, of more types than 8 bits
    return found | {(OperationType.TOPK_V2, Scheme.TFLITE): topk}


def extended_code(base: OperationType, scheme: Scheme) -> OperationType:
    """Return the code of an operation of the HAL in a scheme of the extension; `base` if the extension has none."""
    operation = extended_operations().get((base, scheme))
    return base if operation is None else operation_code(operation)


TENSOR_COMPLEX64 = named_code(OperandType, extension_code(PREFIX, 0), "TENSOR_COMPLEX64")

TENSOR_INT64 = named_code(OperandType, extension_code(PREFIX, 1), "TENSOR_INT64")
TENSOR_FLOAT64 = named_code(OperandType, extension_code(PREFIX, 2), "TENSOR_FLOAT64")
TENSOR_UINT32 = named_code(OperandType, extension_code(PREFIX, 3), "TENSOR_UINT32")
TENSOR_UINT64 = named_code(OperandType, extension_code(PREFIX, 4), "TENSOR_UINT64")

WIDE_TYPES = (TENSOR_INT64, TENSOR_FLOAT64, TENSOR_UINT32, TENSOR_UINT64)
"""The types of numbers that no type of the HAL has all of."""

DTYPES: dict[OperandType, str] = {
    TENSOR_COMPLEX64: "complex64",
    TENSOR_INT64: "int64",
    TENSOR_FLOAT64: "float64",
    TENSOR_UINT32: "uint32",
    TENSOR_UINT64: "uint64",
}
"""NumPy's name of the element type of each operand type."""

ELEMENTS = {operand_type: ElementInfo(dtype, is_scalar=False) for operand_type, dtype in DTYPES.items()}
"""The same as the client needs it for arrays."""


# ----------------------------------------------------------------------------------------------------------------------
# Functions of elements and of rows, which take tensors of ranks above 4 in another shape.


HAL_RANK = 4
"""The highest rank that most operations of the HAL accept."""


def flat_shape(operation_type: OperationType, inputs: Sequence[Operand]) -> tuple[int, ...]:
    """Return the shape of rank 1 or 2 in which the HAL takes the first input, whose rank is above 4; else ().

    It has an operation on elements or on the rows of the last dimension, whose result has the input's shape.
    """
    shape = inputs[0].dimensions if inputs else ()
    if len(shape) <= HAL_RANK or 0 in shape:
        return ()
    if operation_type in _OF_ELEMENTS:
        return (math.prod(shape),)
    return (math.prod(shape[:-1]), shape[-1]) if len(inputs) == _OF_ROWS.get(operation_type) else ()


_OF_ELEMENTS = frozenset(
    (OperationType.DEQUANTIZE, OperationType.FLOOR, OperationType.LOGISTIC, OperationType.TANH, *CLAMPS)
)
_OF_ROWS = {
    OperationType.L2_NORMALIZATION: 1,
    operation_code(TfliteOperation.Q8_L2_NORMALIZATION): 1,
    OperationType.SOFTMAX: 2,
}
"""The number of inputs without an axis."""
