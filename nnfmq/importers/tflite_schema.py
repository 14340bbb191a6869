"""The tables of a TFLite file that the importer reads, for `flatbuffer_verifier`: fields, vtable slots and sizes.

A table lists the fields that `tflite_file` and `tflite_operators` read; the verifier does not check other fields. Tests
compare slots, types and defaults with the generated accessors of the `tflite` package. Source: schema.fbs of TensorFlow
Lite (version 3), as in that package's version 2.18.
"""

from __future__ import annotations

from nnfmq.importers.flatbuffer_verifier import Field, Scalar, String, Table, Union, Vector

__all__ = ["IDENTIFIER", "MODEL", "OPTIONS", "VERSION"]

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
    Field(18, "ShapeSignature", Vector(_INT32)),
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
