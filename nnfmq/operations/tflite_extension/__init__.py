"""The built-in extension `nnfmq.tflite`: operations that TFLite and ONNX models need and the HAL does not have.

They are declared as those of a vendor's plug-in (`operations.extensions`), and devices report them in the same way. A
module holds one family, lists its operations in `DECLARATIONS`, and is imported when one of them is first used; their
numbers are in `hal.tflite_codes`. Where the HAL has an operation or an operand type, importers use that instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module

from nnfmq.hal.extensions import DTYPES, NAME, TfliteOperation
from nnfmq.operations import extensions
from nnfmq.operations.declaration import Declaration
from nnfmq.operations.extensions import ExtensionType, define_operation

__all__ = ["EXTENSION_FAMILIES", "family", "install_families"]

EXTENSION_FAMILIES: Mapping[str, str] = {
    "dynamic_sizes": "RANGE SHAPE WHERE UNIQUE",
    "eight_bits": (
        "Q8_SQUARED_DIFFERENCE Q8_DIV Q8_MEAN Q8_REDUCE_SUM Q8_REDUCE_PROD Q8_MAXIMUM Q8_MINIMUM Q8_SELECT "
        "TOPK_V2 Q8_EQUAL Q8_GREATER Q8_GREATER_EQUAL Q8_LESS Q8_LESS_EQUAL Q8_NOT_EQUAL Q8_CLAMP Q8_ABS "
        "Q8_NEG Q8_SQRT Q8_RSQRT Q8_LOG Q8_EXP Q8_ELU Q8_LEAKY_RELU Q8_L2_NORMALIZATION Q8_AVERAGE_POOL_2D "
        "Q8_RESIZE_BILINEAR Q8_LOG_SOFTMAX Q8_FULLY_CONNECTED"
    ),
    "functions": (
        "GELU COS BITCAST FAKE_QUANT ERF ROUND SIGN TAN ASIN ACOS ATAN SINH COSH ASINH ACOSH ATANH SOFTPLUS "
        "MISH ROUND_TO_FORMAT FLOOR_MOD TRUNCATED_DIV BITWISE_XOR BITWISE_AND LEFT_SHIFT RIGHT_SHIFT ATAN2 "
        "SATURATE"
    ),
    "indexing": (
        "BATCH_GATHER GATHER_ND SCATTER_ND SPARSE_TO_DENSE ONE_HOT DYNAMIC_UPDATE_SLICE REVERSE_SEQUENCE "
        "GATHER_ELEMENTS SCATTER_ELEMENTS SCATTER_ND_UPDATE"
    ),
    "matrices": "RFFT2D REAL IMAG COMPLEX_ABS DETERMINANT",
    "mediapipe": "TRANSFORM_LANDMARKS TRANSFORM_TENSOR LANDMARKS_TO_TRANSFORM_MATRIX MAX_POOL_WITH_ARGMAX MAX_UNPOOL",
    "quantization": "QUANTIZE_LINEAR QLINEAR_ADD QLINEAR_MUL DYNAMIC_QUANTIZE",
    "recurrent": (
        "INTEGER_LSTM INTEGER_SVDF HYBRID_LSTM HYBRID_UNIDIRECTIONAL_SEQUENCE_LSTM "
        "HYBRID_BIDIRECTIONAL_SEQUENCE_LSTM HYBRID_RNN HYBRID_UNIDIRECTIONAL_SEQUENCE_RNN "
        "HYBRID_BIDIRECTIONAL_SEQUENCE_RNN DYNAMIC_UNIDIRECTIONAL_SEQUENCE_LSTM"
    ),
    "segments": "CUMSUM SEGMENT_SUM UNSORTED_SEGMENT MATRIX_DIAG MATRIX_SET_DIAG BUCKETIZE",
    "sixteen_bit_arithmetic": (
        "Q16_ADD Q16_SUB Q16_MUL Q16_DIV Q16_REDUCE_PROD Q16_EQUAL Q16_GREATER Q16_GREATER_EQUAL Q16_LESS "
        "Q16_LESS_EQUAL Q16_NOT_EQUAL Q16_PRELU Q16_LEAKY_RELU Q16_RELU Q16_RELU6 Q16_ABS Q16_NEG REQUANTIZE"
    ),
    "sixteen_bits": (
        "Q16_LOGISTIC Q16_TANH Q16_SOFTMAX SOFTMAX_TO_Q16 Q16_EXP Q16_LOG Q16_RSQRT Q16_SQRT Q16_QUANTIZE "
        "Q16_DEQUANTIZE Q16_CAST Q16_AVERAGE_POOL_2D Q16_MAX_POOL_2D Q16_RESIZE_BILINEAR Q16_MEAN Q16_RESHAPE "
        "Q16_SQUEEZE Q16_EXPAND_DIMS Q16_CONCATENATION Q16_PACK Q16_SLICE Q16_STRIDED_SLICE Q16_SPLIT "
        "Q16_TRANSPOSE Q16_REVERSE Q16_TILE Q16_PAD Q16_MIRROR_PAD Q16_SPACE_TO_BATCH_ND "
        "Q16_BATCH_TO_SPACE_ND Q16_GATHER Q16_EMBEDDING_LOOKUP Q16_MAXIMUM Q16_MINIMUM Q16_SELECT "
        "Q16_REDUCE_MAX Q16_REDUCE_MIN Q16_PAD_V2 Q16_RESIZE_NEAREST_NEIGHBOR Q16_TOPK_V2 Q16_CONV_2D "
        "Q16_DEPTHWISE_CONV_2D Q16_GROUPED_CONV_2D Q16_TRANSPOSE_CONV_2D Q16_FULLY_CONNECTED Q16_BATCH_MATMUL"
    ),
    "suppression": "NON_MAX_SUPPRESSION",
    "volumes": "CONV_3D CONV_3D_TRANSPOSE",
    "wider_types": (
        "ADD SUB MUL DIV POW RESHAPE SQUEEZE EXPAND_DIMS CONCATENATION PACK SLICE STRIDED_SLICE SPLIT PAD "
        "PAD_V2 MIRROR_PAD TRANSPOSE REVERSE TILE GATHER SELECT MEAN REDUCE_MAX REDUCE_MIN REDUCE_SUM "
        "REDUCE_PROD CAST ABS NEG BATCH_MATMUL ARGMAX ARGMIN MAXIMUM MINIMUM EQUAL GREATER GREATER_EQUAL LESS "
        "LESS_EQUAL NOT_EQUAL EXP LOG SQRT RSQRT SIN FLOOR LOGISTIC TANH PRELU"
    ),
}
"""The names of each family's operations, by its module."""


def family(name: str) -> tuple[Declaration, ...]:
    """Return the declarations of a family, and import its module."""
    declarations: tuple[Declaration, ...] = import_module(f"{__name__}.{name}").DECLARATIONS
    return declarations


def install_families() -> None:
    """Install the extension in this process. Its families are imported when they are first used."""
    types = tuple(ExtensionType(operand_type, dtype) for operand_type, dtype in DTYPES.items())
    families = [
        (partial(family, module), [define_operation(TfliteOperation[name], name) for name in names.split()])
        for module, names in EXTENSION_FAMILIES.items()
    ]
    extensions.install_families(NAME, types, families)
