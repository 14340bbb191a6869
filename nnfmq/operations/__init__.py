"""The operations: one declaration each, in `REGISTRY` by operation code.

A declaration (see `signature`) is everything that nnfmq knows about an operation: parameter lists, types by feature
level, shape rule, kernels. Validation, the interpreter and the compiling engine all read it. A module holds one family
of the HAL's operations; `tflite_extension` has those of the built-in extension, and `extensions` adds those of vendors.
"""

from __future__ import annotations

from importlib import import_module

from nnfmq.hal.types import OperationType
from nnfmq.operations.extensions import install
from nnfmq.operations.registry import REGISTRY
from nnfmq.operations.signature import Declaration
from nnfmq.operations.tflite_extension import EXTENSION

__all__ = ["FAMILIES", "HAL_DECLARATIONS", "REGISTRY", "Declaration"]

_MODULES = (
    "activation",
    "batch_matmul",
    "binary_arithmetic",
    "bounding_boxes",
    "comparison",
    "convolution",
    "detection",
    "fill_rank",
    "fully_connected",
    "gather_topk",
    "grouped_conv",
    "if_while",
    "keypoints",
    "l2_lrn_instance_norm",
    "lstm",
    "min_max_select",
    "multinomial",
    "padding",
    "permute",
    "pool_2d",
    "projection",
    "quantize_cast",
    "quantized_16bit_lstm",
    "quantized_lstm",
    "reduce_argmax",
    "reshape_concat",
    "resizing",
    "rnn_svdf",
    "roi",
    "slicing",
    "softmax",
    "space_depth_batch",
    "transpose_conv",
    "unary",
)

FAMILIES: dict[str, tuple[Declaration, ...]] = {
    name: import_module(f"{__name__}.{name}").DECLARATIONS for name in _MODULES
}
HAL_DECLARATIONS: dict[OperationType, Declaration] = {
    declaration.code: declaration for declarations in FAMILIES.values() for declaration in declarations
}
REGISTRY.update(HAL_DECLARATIONS)
install(EXTENSION)
