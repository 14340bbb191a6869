"""Table of the operations in random graphs, with their generators.

Types, overloads and output shapes come from the operation's declaration; `operation_generators` and `image_generators`
generate the rest. As in AOSP's generator there are no recurrent operations, detection, LSH_PROJECTION,
RANDOM_MULTINOMIAL, IF and WHILE.
"""

from __future__ import annotations

from nnfmq.conformance import image_generators as images
from nnfmq.conformance import operation_generators as arrays
from nnfmq.conformance.operation_generators import OperationGenerator
from nnfmq.conformance.random_source import Sign
from nnfmq.hal.types import OperationType

_IMAGE = (4,)
_MATRICES = (2, 3, 4)
_ONLY = OperationGenerator()
_PAIR = OperationGenerator(arrays.pair_with("second"))
_ONE_AXIS = OperationGenerator(arrays.one_axis)
_REDUCTION = OperationGenerator(arrays.reduction)
_POOL = OperationGenerator(images.pool, _IMAGE)
_RESIZE = OperationGenerator(images.resize, _IMAGE)

_BY_NAME: dict[str, OperationGenerator] = {
    **dict.fromkeys(("FLOOR", "RELU", "RELU1", "RELU6", "HARD_SWISH", "ABS", "EXP", "NEG", "SIN"), _ONLY),
    **dict.fromkeys(("LOGICAL_NOT", "QUANTIZE", "DEQUANTIZE", "CAST", "RANK"), _ONLY),
    "LOGISTIC": OperationGenerator(fixed_output=(1 / 256, 0)),
    "TANH": OperationGenerator(fixed_output=(1 / 128, 128)),
    "ELU": OperationGenerator(arrays.elu),
    "LOG": OperationGenerator(sign=Sign.POSITIVE),
    "RSQRT": OperationGenerator(sign=Sign.POSITIVE),
    "SQRT": OperationGenerator(sign=Sign.NOT_NEGATIVE),
    **dict.fromkeys(("ADD", "SUB", "MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR"), _PAIR),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), _PAIR),
    "MUL": OperationGenerator(arrays.pair_with("second"), fitted=True),
    "DIV": OperationGenerator(arrays.pair_with("second", Sign.NOT_ZERO)),
    "POW": OperationGenerator(arrays.pair_with("exponent"), sign=Sign.NOT_NEGATIVE),
    "PRELU": OperationGenerator(arrays.pair_with("alpha")),
    "SELECT": OperationGenerator(arrays.select),
    "CONCATENATION": OperationGenerator(arrays.joined),
    "PACK": OperationGenerator(arrays.packed, (1, 2, 3)),
    "BATCH_MATMUL": OperationGenerator(arrays.matrices, _MATRICES, fitted=True),
    "SOFTMAX": OperationGenerator(arrays.softmax, fixed_output=(1 / 256, 0)),
    "LOG_SOFTMAX": OperationGenerator(arrays.softmax),
    "L2_NORMALIZATION": OperationGenerator(arrays.one_axis, fixed_output=(1 / 128, 128)),
    "LOCAL_RESPONSE_NORMALIZATION": OperationGenerator(arrays.local_response),
    "INSTANCE_NORMALIZATION": OperationGenerator(arrays.instance, _IMAGE),
    **dict.fromkeys(
        ("MEAN", "REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_SUM"), _REDUCTION
    ),
    **dict.fromkeys(("ARGMAX", "ARGMIN"), _ONE_AXIS),
    "RESHAPE": OperationGenerator(arrays.reshape),
    "SQUEEZE": OperationGenerator(arrays.squeeze, shape=arrays.with_ones),
    "EXPAND_DIMS": OperationGenerator(arrays.expand),
    "TRANSPOSE": OperationGenerator(arrays.transpose),
    "REVERSE": OperationGenerator(arrays.reverse),
    "TILE": OperationGenerator(arrays.tile),
    "CHANNEL_SHUFFLE": OperationGenerator(arrays.shuffle),
    **dict.fromkeys(("PAD", "PAD_V2"), OperationGenerator(arrays.paddings)),
    "MIRROR_PAD": OperationGenerator(arrays.mirrored),
    "SLICE": OperationGenerator(arrays.part),
    "STRIDED_SLICE": OperationGenerator(arrays.strided_slice),
    "SPLIT": OperationGenerator(arrays.pieces),
    "GATHER": OperationGenerator(arrays.gather),
    "EMBEDDING_LOOKUP": OperationGenerator(arrays.lookups, _MATRICES),
    "HASHTABLE_LOOKUP": OperationGenerator(arrays.lookups, _MATRICES, keeps=(0,)),
    "TOPK_V2": OperationGenerator(arrays.largest, keeps=(0,)),
    "FILL": OperationGenerator(arrays.fill),
    **dict.fromkeys(("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D"), _POOL),
    "CONV_2D": OperationGenerator(images.convolution, _IMAGE, fitted=True),
    "DEPTHWISE_CONV_2D": OperationGenerator(images.depthwise, _IMAGE, fitted=True),
    "GROUPED_CONV_2D": OperationGenerator(images.grouped, _IMAGE, fitted=True),
    "TRANSPOSE_CONV_2D": OperationGenerator(images.transposed, _IMAGE, fitted=True),
    "FULLY_CONNECTED": OperationGenerator(images.fully_connected, _MATRICES, fitted=True),
    "DEPTH_TO_SPACE": OperationGenerator(
        images.depth_to_space, _IMAGE, shape=images.image_of(lambda b: (1, 1, 1, b * b))
    ),
    "SPACE_TO_DEPTH": OperationGenerator(images.space_to_depth, _IMAGE, shape=images.image_of(lambda b: (1, b, b, 1))),
    "BATCH_TO_SPACE_ND": OperationGenerator(
        images.batch_to_space, _IMAGE, shape=images.image_of(lambda b: (b * b, 1, 1, 1))
    ),
    "SPACE_TO_BATCH_ND": OperationGenerator(images.space_to_batch, _IMAGE),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), _RESIZE),
    "ROI_ALIGN": OperationGenerator(images.regions, _IMAGE),
    "ROI_POOLING": OperationGenerator(images.regions, _IMAGE, keeps=(0,)),
    "HEATMAP_MAX_KEYPOINT": OperationGenerator(
        images.keypoints, _IMAGE, shape=images.square_image, accepts=images.is_square, keeps=(0,)
    ),
}

GENERATORS: dict[OperationType, OperationGenerator] = {
    OperationType[name]: generator for name, generator in _BY_NAME.items()
}
"""The generator of each operation that random graphs contain."""
