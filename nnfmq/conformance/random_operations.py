"""Every operation that random graphs draw, and how: a table, beside what the declarations say.

Types, forms and output shapes come from the operation's declaration; what that does not say is in `random_recipes` and
`random_images`. Not drawn, as in AOSP's generator: recurrent operations, detection, LSH_PROJECTION, RANDOM_MULTINOMIAL,
IF and WHILE.
"""

from __future__ import annotations

from nnfmq.conformance import random_images as images
from nnfmq.conformance import random_recipes as arrays
from nnfmq.conformance.drawing import Sign
from nnfmq.conformance.random_recipes import Recipe
from nnfmq.hal.types import OperationType

_IMAGE = (4,)
_MATRICES = (2, 3, 4)
_ONLY = Recipe()
_PAIR = Recipe(arrays.pair_with("second"))
_ONE_AXIS = Recipe(arrays.one_axis)
_REDUCTION = Recipe(arrays.reduction)
_POOL = Recipe(images.pool, _IMAGE)
_RESIZE = Recipe(images.resize, _IMAGE)

_BY_NAME: dict[str, Recipe] = {
    **dict.fromkeys(("FLOOR", "RELU", "RELU1", "RELU6", "HARD_SWISH", "ABS", "EXP", "NEG", "SIN"), _ONLY),
    **dict.fromkeys(("LOGICAL_NOT", "QUANTIZE", "DEQUANTIZE", "CAST", "RANK"), _ONLY),
    "LOGISTIC": Recipe(fixed_output=(1 / 256, 0)),
    "TANH": Recipe(fixed_output=(1 / 128, 128)),
    "ELU": Recipe(arrays.elu),
    "LOG": Recipe(sign=Sign.POSITIVE),
    "RSQRT": Recipe(sign=Sign.POSITIVE),
    "SQRT": Recipe(sign=Sign.NOT_NEGATIVE),
    **dict.fromkeys(("ADD", "SUB", "MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR"), _PAIR),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), _PAIR),
    "MUL": Recipe(arrays.pair_with("second"), fitted=True),
    "DIV": Recipe(arrays.pair_with("second", Sign.NOT_ZERO)),
    "POW": Recipe(arrays.pair_with("exponent"), sign=Sign.NOT_NEGATIVE),
    "PRELU": Recipe(arrays.pair_with("alpha")),
    "SELECT": Recipe(arrays.select),
    "CONCATENATION": Recipe(arrays.joined),
    "PACK": Recipe(arrays.packed, (1, 2, 3)),
    "BATCH_MATMUL": Recipe(arrays.matrices, _MATRICES, fitted=True),
    "SOFTMAX": Recipe(arrays.softmax, fixed_output=(1 / 256, 0)),
    "LOG_SOFTMAX": Recipe(arrays.softmax),
    "L2_NORMALIZATION": Recipe(arrays.one_axis, fixed_output=(1 / 128, 128)),
    "LOCAL_RESPONSE_NORMALIZATION": Recipe(arrays.local_response),
    "INSTANCE_NORMALIZATION": Recipe(arrays.instance, _IMAGE),
    **dict.fromkeys(
        ("MEAN", "REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_SUM"), _REDUCTION
    ),
    **dict.fromkeys(("ARGMAX", "ARGMIN"), _ONE_AXIS),
    "RESHAPE": Recipe(arrays.reshape),
    "SQUEEZE": Recipe(arrays.squeeze, shape=arrays.with_ones),
    "EXPAND_DIMS": Recipe(arrays.expand),
    "TRANSPOSE": Recipe(arrays.transpose),
    "REVERSE": Recipe(arrays.reverse),
    "TILE": Recipe(arrays.tile),
    "CHANNEL_SHUFFLE": Recipe(arrays.shuffle),
    **dict.fromkeys(("PAD", "PAD_V2"), Recipe(arrays.paddings)),
    "MIRROR_PAD": Recipe(arrays.mirrored),
    "SLICE": Recipe(arrays.part),
    "STRIDED_SLICE": Recipe(arrays.strided_slice),
    "SPLIT": Recipe(arrays.pieces),
    "GATHER": Recipe(arrays.gather),
    "EMBEDDING_LOOKUP": Recipe(arrays.lookups, _MATRICES),
    "HASHTABLE_LOOKUP": Recipe(arrays.lookups, _MATRICES, keeps=(0,)),
    "TOPK_V2": Recipe(arrays.largest, keeps=(0,)),
    "FILL": Recipe(arrays.fill),
    **dict.fromkeys(("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D"), _POOL),
    "CONV_2D": Recipe(images.convolution, _IMAGE, fitted=True),
    "DEPTHWISE_CONV_2D": Recipe(images.depthwise, _IMAGE, fitted=True),
    "GROUPED_CONV_2D": Recipe(images.grouped, _IMAGE, fitted=True),
    "TRANSPOSE_CONV_2D": Recipe(images.transposed, _IMAGE, fitted=True),
    "FULLY_CONNECTED": Recipe(images.fully_connected, _MATRICES, fitted=True),
    "DEPTH_TO_SPACE": Recipe(images.depth_to_space, _IMAGE, shape=images.image_of(lambda b: (1, 1, 1, b * b))),
    "SPACE_TO_DEPTH": Recipe(images.space_to_depth, _IMAGE, shape=images.image_of(lambda b: (1, b, b, 1))),
    "BATCH_TO_SPACE_ND": Recipe(images.batch_to_space, _IMAGE, shape=images.image_of(lambda b: (b * b, 1, 1, 1))),
    "SPACE_TO_BATCH_ND": Recipe(images.space_to_batch, _IMAGE),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), _RESIZE),
    "ROI_ALIGN": Recipe(images.regions, _IMAGE),
    "ROI_POOLING": Recipe(images.regions, _IMAGE, keeps=(0,)),
    "HEATMAP_MAX_KEYPOINT": Recipe(
        images.keypoints, _IMAGE, shape=images.square_image, accepts=images.is_square, keeps=(0,)
    ),
}

RECIPES: dict[OperationType, Recipe] = {OperationType[name]: recipe for name, recipe in _BY_NAME.items()}
"""Every operation that is drawn."""
