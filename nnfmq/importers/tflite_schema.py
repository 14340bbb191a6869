"""The tables of a TFLite file that the importer reads, for `flatbuffer_verifier`: fields, vtable slots and sizes.

A table must list every field that `tflite_file` and `tflite_operators` read through the `tflite` package; the verifier
does not check other fields. A test compares each slot with the package's generated accessors. Source: schema.fbs of
TensorFlow Lite (version 3), as in the `tflite` package 2.18.
"""

from __future__ import annotations

from typing import Any

from nnfmq.importers.flatbuffer_verifier import Field, Scalar, String, Table, Union, Vector

__all__ = ["IDENTIFIER", "MODEL", "OPTIONS", "VERSION", "enum_names"]

IDENTIFIER = b"TFL3"
VERSION = 3

_BYTE = Scalar(1)
_SHORT = Scalar(2)
_INT = Scalar(4)
_LONG = Scalar(8)

_CONV_2D = Table("Conv2DOptions", (
    Field(4, "Padding", _BYTE), Field(6, "StrideW", _INT), Field(8, "StrideH", _INT),
    Field(10, "FusedActivationFunction", _BYTE),
    Field(12, "DilationWFactor", _INT), Field(14, "DilationHFactor", _INT),
))  # fmt: skip
_DEPTHWISE_CONV_2D = Table("DepthwiseConv2DOptions", (
    Field(4, "Padding", _BYTE), Field(6, "StrideW", _INT), Field(8, "StrideH", _INT),
    Field(10, "DepthMultiplier", _INT), Field(12, "FusedActivationFunction", _BYTE),
    Field(14, "DilationWFactor", _INT), Field(16, "DilationHFactor", _INT),
))  # fmt: skip
_POOL_2D = Table("Pool2DOptions", (
    Field(4, "Padding", _BYTE), Field(6, "StrideW", _INT), Field(8, "StrideH", _INT),
    Field(10, "FilterWidth", _INT), Field(12, "FilterHeight", _INT), Field(14, "FusedActivationFunction", _BYTE),
))  # fmt: skip
_FULLY_CONNECTED = Table("FullyConnectedOptions", (
    Field(4, "FusedActivationFunction", _BYTE), Field(6, "WeightsFormat", _BYTE), Field(8, "KeepNumDims", _BYTE),
    Field(10, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_TRANSPOSE_CONV = Table("TransposeConvOptions", (
    Field(4, "Padding", _BYTE), Field(6, "StrideW", _INT), Field(8, "StrideH", _INT),
    Field(10, "FusedActivationFunction", _BYTE),
))  # fmt: skip
_LOCAL_RESPONSE_NORMALIZATION = Table("LocalResponseNormalizationOptions", (
    Field(4, "Radius", _INT), Field(6, "Bias", _INT), Field(8, "Alpha", _INT), Field(10, "Beta", _INT),
))  # fmt: skip
_STRIDED_SLICE = Table("StridedSliceOptions", (
    Field(4, "BeginMask", _INT), Field(6, "EndMask", _INT), Field(8, "EllipsisMask", _INT),
    Field(10, "NewAxisMask", _INT), Field(12, "ShrinkAxisMask", _INT), Field(14, "Offset", _BYTE),
))  # fmt: skip
_LSTM = Table("LSTMOptions", (
    Field(4, "FusedActivationFunction", _BYTE), Field(6, "CellClip", _INT), Field(8, "ProjClip", _INT),
    Field(10, "KernelType", _BYTE),
    Field(12, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_UNIDIRECTIONAL_SEQUENCE_LSTM = Table("UnidirectionalSequenceLSTMOptions", (
    Field(4, "FusedActivationFunction", _BYTE), Field(6, "CellClip", _INT), Field(8, "ProjClip", _INT),
    Field(10, "TimeMajor", _BYTE), Field(14, "DiagonalRecurrentTensors", _BYTE),
    Field(12, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_BIDIRECTIONAL_SEQUENCE_LSTM = Table("BidirectionalSequenceLSTMOptions", (
    Field(4, "FusedActivationFunction", _BYTE), Field(6, "CellClip", _INT), Field(8, "ProjClip", _INT),
    Field(10, "MergeOutputs", _BYTE), Field(12, "TimeMajor", _BYTE),
    Field(14, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_SEQUENCE_RNN = Table("SequenceRNNOptions", (
    Field(4, "TimeMajor", _BYTE), Field(6, "FusedActivationFunction", _BYTE),
    Field(8, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_BIDIRECTIONAL_SEQUENCE_RNN = Table("BidirectionalSequenceRNNOptions", (
    Field(4, "TimeMajor", _BYTE), Field(6, "FusedActivationFunction", _BYTE), Field(8, "MergeOutputs", _BYTE),
    Field(10, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_SVDF = Table("SVDFOptions", (
    Field(4, "Rank", _INT), Field(6, "FusedActivationFunction", _BYTE),
    Field(8, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip
_SOFTMAX = Table("SoftmaxOptions", (Field(4, "Beta", _INT),))
_CONCATENATION = Table("ConcatenationOptions", (Field(4, "Axis", _INT), Field(6, "FusedActivationFunction", _BYTE)))
_RESHAPE = Table("ReshapeOptions", (Field(4, "NewShape", Vector(_INT)),))
_REDUCER = Table("ReducerOptions", (Field(4, "KeepDims", _BYTE),))
_SQUEEZE = Table("SqueezeOptions", (Field(4, "SqueezeDims", Vector(_INT)),))
_GATHER = Table("GatherOptions", (Field(4, "Axis", _INT), Field(6, "BatchDims", _INT)))
_RESIZE_BILINEAR = Table(
    "ResizeBilinearOptions", (Field(8, "AlignCorners", _BYTE), Field(10, "HalfPixelCenters", _BYTE))
)
_RESIZE_NEAREST = Table("ResizeNearestNeighborOptions", (
    Field(4, "AlignCorners", _BYTE), Field(6, "HalfPixelCenters", _BYTE),
))  # fmt: skip
_CONV_3D = Table("Conv3DOptions", (
    Field(4, "Padding", _BYTE), Field(6, "StrideD", _INT), Field(8, "StrideW", _INT), Field(10, "StrideH", _INT),
    Field(12, "FusedActivationFunction", _BYTE), Field(14, "DilationDFactor", _INT),
    Field(16, "DilationWFactor", _INT), Field(18, "DilationHFactor", _INT),
))  # fmt: skip
_FAKE_QUANT = Table("FakeQuantOptions", (
    Field(4, "Min", _INT), Field(6, "Max", _INT), Field(8, "NumBits", _INT), Field(10, "NarrowRange", _BYTE),
))  # fmt: skip
_REVERSE_SEQUENCE = Table("ReverseSequenceOptions", (Field(4, "SeqDim", _INT), Field(6, "BatchDim", _INT)))
_IF = Table("IfOptions", (Field(4, "ThenSubgraphIndex", _INT), Field(6, "ElseSubgraphIndex", _INT)))
_WHILE = Table("WhileOptions", (Field(4, "CondSubgraphIndex", _INT), Field(6, "BodySubgraphIndex", _INT)))
_CUMSUM = Table("CumsumOptions", (Field(4, "Exclusive", _BYTE), Field(6, "Reverse", _BYTE)))
_RANDOM = Table("RandomOptions", (Field(4, "Seed", _LONG), Field(6, "Seed2", _LONG)))
_BATCH_MATMUL = Table("BatchMatMulOptions", (
    Field(4, "AdjX", _BYTE), Field(6, "AdjY", _BYTE),
    Field(8, "AsymmetricQuantizeInputs", _BYTE),
))  # fmt: skip


def _activated(name: str) -> Table:
    return Table(name, (Field(4, "FusedActivationFunction", _BYTE),))


def _sum(name: str) -> Table:
    return Table(name, (Field(4, "FusedActivationFunction", _BYTE), Field(6, "PotScaleInt16", _BYTE)))


# By the code of the member in the union BuiltinOptions.
OPTIONS: dict[int, Table] = {
    1: _CONV_2D,
    2: _DEPTHWISE_CONV_2D,
    4: Table("LSHProjectionOptions", (Field(4, "Type", _BYTE),)),
    5: _POOL_2D,
    6: _SVDF,
    7: Table("RNNOptions", (Field(4, "FusedActivationFunction", _BYTE), Field(6, "AsymmetricQuantizeInputs", _BYTE))),
    8: _FULLY_CONNECTED,
    9: _SOFTMAX,
    10: _CONCATENATION,
    11: _sum("AddOptions"),
    12: _activated("L2NormOptions"),
    13: _LOCAL_RESPONSE_NORMALIZATION,
    14: _LSTM,
    15: _RESIZE_BILINEAR,
    16: Table("CallOptions", (Field(4, "Subgraph", _INT),)),
    17: _RESHAPE,
    19: Table("SpaceToDepthOptions", (Field(4, "BlockSize", _INT),)),
    20: Table("EmbeddingLookupSparseOptions", (Field(4, "Combiner", _BYTE),)),
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
    59: Table("PackOptions", (Field(6, "Axis", _INT),)),
    61: Table("OneHotOptions", (Field(4, "Axis", _INT),)),
    64: Table("UnpackOptions", (Field(6, "Axis", _INT),)),
    69: _BIDIRECTIONAL_SEQUENCE_LSTM,
    70: _BIDIRECTIONAL_SEQUENCE_RNN,
    71: _UNIDIRECTIONAL_SEQUENCE_LSTM,
    74: _RESIZE_NEAREST,
    75: Table("LeakyReluOptions", (Field(4, "Alpha", _INT),)),
    77: Table("MirrorPadOptions", (Field(4, "Mode", _BYTE),)),
    87: _REVERSE_SEQUENCE,
    92: _IF,
    93: _WHILE,
    94: Table("DepthToSpaceOptions", (Field(4, "BlockSize", _INT),)),
    101: _BATCH_MATMUL,
    102: _CUMSUM,
    103: Table("CallOnceOptions", (Field(4, "InitSubgraphIndex", _INT),)),
    106: _CONV_3D,
    111: Table("VarHandleOptions", (Field(4, "Container", String()), Field(6, "SharedName", String()))),
    112: Table("ReadVariableOptions", ()),
    113: Table("AssignVariableOptions", ()),
    114: _RANDOM,
    115: Table("BucketizeOptions", (Field(4, "Boundaries", Vector(_INT)),)),
    116: Table("GeluOptions", (Field(4, "Approximate", _BYTE),)),
}

_OPERATOR = Table("Operator", (
    Field(4, "OpcodeIndex", _INT), Field(6, "Inputs", Vector(_INT)), Field(8, "Outputs", Vector(_INT)),
    Field(10, "BuiltinOptionsType", _BYTE), Field(12, "BuiltinOptions", Union(10, OPTIONS)),
    Field(14, "CustomOptions", Vector(_BYTE)),
    Field(20, "Intermediates", Vector(_INT)),
))  # fmt: skip
_QUANTIZATION = Table("QuantizationParameters", (
    Field(8, "Scale", Vector(_INT)), Field(10, "ZeroPoint", Vector(_LONG)),
    Field(12, "DetailsType", _BYTE), Field(16, "QuantizedDimension", _INT),
))  # fmt: skip
_INDEX_VECTORS = {
    1: Table("Int32Vector", (Field(4, "Values", Vector(_INT)),)),
    2: Table("Uint16Vector", (Field(4, "Values", Vector(_SHORT)),)),
    3: Table("Uint8Vector", (Field(4, "Values", Vector(_BYTE)),)),
}
_DIMENSION_METADATA = Table("DimensionMetadata", (
    Field(4, "Format", _BYTE), Field(6, "DenseSize", _INT),
    Field(8, "ArraySegmentsType", _BYTE), Field(10, "ArraySegments", Union(8, _INDEX_VECTORS)),
    Field(12, "ArrayIndicesType", _BYTE), Field(14, "ArrayIndices", Union(12, _INDEX_VECTORS)),
))  # fmt: skip
_SPARSITY = Table("SparsityParameters", (
    Field(4, "TraversalOrder", Vector(_INT)), Field(6, "BlockMap", Vector(_INT)),
    Field(8, "DimMetadata", Vector(_DIMENSION_METADATA)),
))  # fmt: skip
_TENSOR = Table("Tensor", (
    Field(4, "Shape", Vector(_INT)), Field(6, "Type", _BYTE), Field(8, "Buffer", _INT), Field(10, "Name", String()),
    Field(12, "Quantization", _QUANTIZATION), Field(14, "IsVariable", _BYTE), Field(16, "Sparsity", _SPARSITY),
    Field(18, "ShapeSignature", Vector(_INT)),
))  # fmt: skip
_SUBGRAPH = Table("SubGraph", (
    Field(4, "Tensors", Vector(_TENSOR)), Field(6, "Inputs", Vector(_INT)), Field(8, "Outputs", Vector(_INT)),
    Field(10, "Operators", Vector(_OPERATOR)),
))  # fmt: skip
_OPERATOR_CODE = Table("OperatorCode", (
    Field(4, "DeprecatedBuiltinCode", _BYTE), Field(6, "CustomCode", String()), Field(10, "BuiltinCode", _INT),
))  # fmt: skip
_BUFFER = Table("Buffer", (Field(4, "Data", Vector(_BYTE)), Field(6, "Offset", _LONG), Field(8, "Size", _LONG)))

_METADATA = Table("Metadata", (Field(4, "Name", String()), Field(6, "Buffer", _INT)))

_TENSOR_MAP = Table("TensorMap", (Field(4, "Name", String()), Field(6, "TensorIndex", _INT)))
_SIGNATURE = Table("SignatureDef", (
    Field(4, "Inputs", Vector(_TENSOR_MAP)), Field(6, "Outputs", Vector(_TENSOR_MAP)),
    Field(8, "SignatureKey", String()), Field(12, "SubgraphIndex", _INT),
))  # fmt: skip

MODEL = Table("Model", (
    Field(4, "Version", _INT), Field(6, "OperatorCodes", Vector(_OPERATOR_CODE)),
    Field(8, "Subgraphs", Vector(_SUBGRAPH)), Field(12, "Buffers", Vector(_BUFFER)),
    Field(16, "Metadata", Vector(_METADATA)), Field(18, "SignatureDefs", Vector(_SIGNATURE)),
))  # fmt: skip


def enum_names(constants: Any) -> dict[int, str]:
    """Return the name of each number of one of the `tflite` package's classes of constants."""
    members = vars(constants).items()  # since Python 3.13 with __firstlineno__
    return {number: name for name, number in members if isinstance(number, int) and not name.startswith("_")}
