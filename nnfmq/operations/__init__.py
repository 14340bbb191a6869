"""The operations: one declaration each, in `REGISTRY` by operation code.

A declaration (see `declaration`) is everything that nnfmq knows about an operation: parameter lists, types by feature
level, shape rule, kernels. Validation, the interpreter and the compiling engine all read it. A module holds one family
of the HAL's operations and is imported when one of them is first used; `tflite_extension` has the families of the
built-in extension that the HAL does not have, and `extensions` adds the operations of vendors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import REGISTRY, Declaration, Declarations
from nnfmq.operations.tflite_extension import install_families

__all__ = ["FAMILIES", "HAL_DECLARATIONS", "REGISTRY", "Declaration", "family", "load_all"]

FAMILIES: Mapping[str, str] = {
    "activation": "RELU RELU1 RELU6 LOGISTIC TANH ELU HARD_SWISH PRELU",
    "batch_matmul": "BATCH_MATMUL",
    "binary_arithmetic": "ADD SUB MUL DIV POW",
    "bounding_boxes": "AXIS_ALIGNED_BBOX_TRANSFORM GENERATE_PROPOSALS",
    "comparison": "EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL NOT_EQUAL LOGICAL_AND LOGICAL_OR LOGICAL_NOT",
    "control_flow": "IF WHILE",
    "convolution": "CONV_2D DEPTHWISE_CONV_2D GROUPED_CONV_2D",
    "detection": "BOX_WITH_NMS_LIMIT DETECTION_POSTPROCESSING",
    "fill_rank": "FILL RANK",
    "fully_connected": "FULLY_CONNECTED",
    "gather": "GATHER EMBEDDING_LOOKUP HASHTABLE_LOOKUP TOPK_V2",
    "keypoints": "HEATMAP_MAX_KEYPOINT",
    "lsh_projection": "LSH_PROJECTION",
    "lstm": "LSTM UNIDIRECTIONAL_SEQUENCE_LSTM BIDIRECTIONAL_SEQUENCE_LSTM",
    "min_max_select": "MAXIMUM MINIMUM SELECT",
    "multinomial": "RANDOM_MULTINOMIAL",
    "normalization": "L2_NORMALIZATION LOCAL_RESPONSE_NORMALIZATION INSTANCE_NORMALIZATION",
    "padding": "PAD PAD_V2 MIRROR_PAD",
    "permute": "TRANSPOSE REVERSE TILE CHANNEL_SHUFFLE",
    "pooling": "AVERAGE_POOL_2D L2_POOL_2D MAX_POOL_2D",
    "quantize_cast": "QUANTIZE DEQUANTIZE CAST",
    "quantized_lstm": "QUANTIZED_LSTM QUANTIZED_16BIT_LSTM",
    "reduction": "MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD REDUCE_SUM ARGMAX ARGMIN",
    "reshape_concat": "RESHAPE SQUEEZE EXPAND_DIMS CONCATENATION PACK",
    "resizing": "RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR",
    "rnn_svdf": "RNN UNIDIRECTIONAL_SEQUENCE_RNN BIDIRECTIONAL_SEQUENCE_RNN SVDF",
    "roi": "ROI_ALIGN ROI_POOLING",
    "slicing": "SLICE STRIDED_SLICE SPLIT",
    "softmax": "SOFTMAX LOG_SOFTMAX",
    "space_depth_batch": "DEPTH_TO_SPACE SPACE_TO_DEPTH BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND",
    "transpose_conv": "TRANSPOSE_CONV_2D",
    "unary": "ABS NEG EXP LOG SIN SQRT RSQRT FLOOR",
}
"""The names of each family's operations, by its module."""

HAL_DECLARATIONS = Declarations()
"""The declarations of the HAL's operations: `REGISTRY` without those of extensions."""


def family(name: str) -> tuple[Declaration, ...]:
    """Return the declarations of a family of the HAL, and import its module."""
    declarations: tuple[Declaration, ...] = import_module(f"{__name__}.{name}").DECLARATIONS
    return declarations


def load_all() -> None:
    """Import all families, for a process that forks others: they share what it has imported."""
    for code in REGISTRY:
        REGISTRY[code]


def _by_code(name: str) -> list[tuple[OperationType, Declaration]]:
    return [(declaration.code, declaration) for declaration in family(name)]


for _family, _names in FAMILIES.items():
    for _table in (REGISTRY, HAL_DECLARATIONS):
        _table.add_family([OperationType[name] for name in _names.split()], partial(_by_code, _family))
install_families({f"{__name__}.{family}": names for family, names in FAMILIES.items()})
