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
_NO_ARGUMENTS = OperationGenerator()
_PAIR = OperationGenerator(arrays.pair_with("second"))
_ONE_AXIS = OperationGenerator(arrays.one_axis)
_REDUCTION = OperationGenerator(arrays.reduction)
_POOL = OperationGenerator(images.pool, _IMAGE)
_RESIZE = OperationGenerator(images.resize, _IMAGE)

_BY_NAME: dict[str, OperationGenerator] = {
    **dict.fromkeys(("FLOOR", "RELU", "RELU1", "RELU6", "HARD_SWISH", "ABS", "EXP", "NEG", "SIN"), _NO_ARGUMENTS),
    **dict.fromkeys(("LOGICAL_NOT", "QUANTIZE", "DEQUANTIZE", "CAST", "RANK"), _NO_ARGUMENTS),
    "LOGISTIC": OperationGenerator(fixed_output=(1 / 256, 0)),
    "TANH": OperationGenerator(fixed_output=(1 / 128, 128)),
    "ELU": OperationGenerator(arrays.elu),
    "LOG": OperationGenerator(sign=Sign.POSITIVE),
    "RSQRT": OperationGenerator(sign=Sign.POSITIVE),
    "SQRT": OperationGenerator(sign=Sign.NOT_NEGATIVE),
    **dict.fromkeys(("ADD", "SUB", "MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR"), _PAIR),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), _PAIR),
    "MUL": OperationGenerator(arrays.pair_with("second"), fits_output_scale=True),
    "DIV": OperationGenerator(arrays.pair_with("second", Sign.NOT_ZERO)),
    "POW": OperationGenerator(arrays.pair_with("exponent"), sign=Sign.NOT_NEGATIVE),
    "PRELU": OperationGenerator(arrays.pair_with("alpha")),
    "SELECT": OperationGenerator(arrays.select),
    "CONCATENATION": OperationGenerator(arrays.concatenation),
    "PACK": OperationGenerator(arrays.pack, (1, 2, 3)),
    "BATCH_MATMUL": OperationGenerator(arrays.matrices, _MATRICES, fits_output_scale=True),
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
    "MIRROR_PAD": OperationGenerator(arrays.mirror_pad),
    "SLICE": OperationGenerator(arrays.slice_of),
    "STRIDED_SLICE": OperationGenerator(arrays.strided_slice),
    "SPLIT": OperationGenerator(arrays.split),
    "GATHER": OperationGenerator(arrays.gather),
    "EMBEDDING_LOOKUP": OperationGenerator(arrays.lookups, _MATRICES),
    "HASHTABLE_LOOKUP": OperationGenerator(arrays.lookups, _MATRICES, same_quantization=(0,)),
    "TOPK_V2": OperationGenerator(arrays.top_k, same_quantization=(0,)),
    "FILL": OperationGenerator(arrays.fill),
    **dict.fromkeys(("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D"), _POOL),
    "CONV_2D": OperationGenerator(images.convolution, _IMAGE, fits_output_scale=True),
    "DEPTHWISE_CONV_2D": OperationGenerator(images.depthwise, _IMAGE, fits_output_scale=True),
    "GROUPED_CONV_2D": OperationGenerator(images.grouped, _IMAGE, fits_output_scale=True),
    "TRANSPOSE_CONV_2D": OperationGenerator(images.transposed, _IMAGE, fits_output_scale=True),
    "FULLY_CONNECTED": OperationGenerator(images.fully_connected, _MATRICES, fits_output_scale=True),
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
    "ROI_POOLING": OperationGenerator(images.regions, _IMAGE, same_quantization=(0,)),
    "HEATMAP_MAX_KEYPOINT": OperationGenerator(
        images.keypoints, _IMAGE, shape=images.square_image, accepts=images.is_square, same_quantization=(0,)
    ),
}

GENERATORS: dict[OperationType, OperationGenerator] = {
    OperationType[name]: generator for name, generator in _BY_NAME.items()
}
"""The generator of each operation that random graphs contain."""
