"""The tables of a TFLite file that the importer reads, for the bounded walk: the fields, their slots and their sizes.

A table here must list every field that `tflite_file` and `tflite_operators` read through the `tflite` package;
what is not listed is never looked at. A test compares each slot with the package's generated accessors. Source:
schema.fbs of TensorFlow Lite (version 3), as the `tflite` package 2.18 has it.
"""

from __future__ import annotations

from nnfmq.importers.flatcheck import Field, Scalar, String, Table, Union, Vector

__all__ = ["IDENTIFIER", "MODEL", "OPTIONS", "VERSION"]

IDENTIFIER = b"TFL3"
VERSION = 3

_BYTE = Scalar(1)
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
))  # fmt: skip
_SOFTMAX = Table("SoftmaxOptions", (Field(4, "Beta", _INT),))
_CONCATENATION = Table("ConcatenationOptions", (Field(4, "Axis", _INT), Field(6, "FusedActivationFunction", _BYTE)))
_ADD = Table("AddOptions", (Field(4, "FusedActivationFunction", _BYTE),))
_MUL = Table("MulOptions", (Field(4, "FusedActivationFunction", _BYTE),))
_RESHAPE = Table("ReshapeOptions", (Field(4, "NewShape", Vector(_INT)),))
_REDUCER = Table("ReducerOptions", (Field(4, "KeepDims", _BYTE),))
_SQUEEZE = Table("SqueezeOptions", (Field(4, "SqueezeDims", Vector(_INT)),))

# By the number of the member in the union BuiltinOptions.
OPTIONS: dict[int, Table] = {
    1: _CONV_2D,
    2: _DEPTHWISE_CONV_2D,
    5: _POOL_2D,
    8: _FULLY_CONNECTED,
    9: _SOFTMAX,
    10: _CONCATENATION,
    11: _ADD,
    17: _RESHAPE,
    21: _MUL,
    27: _REDUCER,
    30: _SQUEEZE,
}

_OPERATOR = Table("Operator", (
    Field(4, "OpcodeIndex", _INT), Field(6, "Inputs", Vector(_INT)), Field(8, "Outputs", Vector(_INT)),
    Field(10, "BuiltinOptionsType", _BYTE), Field(12, "BuiltinOptions", Union(10, OPTIONS)),
))  # fmt: skip
_QUANTIZATION = Table("QuantizationParameters", (
    Field(8, "Scale", Vector(_INT)), Field(10, "ZeroPoint", Vector(_LONG)),
    Field(12, "DetailsType", _BYTE), Field(16, "QuantizedDimension", _INT),
))  # fmt: skip
_SPARSITY = Table("SparsityParameters", ())
_TENSOR = Table("Tensor", (
    Field(4, "Shape", Vector(_INT)), Field(6, "Type", _BYTE), Field(8, "Buffer", _INT), Field(10, "Name", String()),
    Field(12, "Quantization", _QUANTIZATION), Field(14, "IsVariable", _BYTE), Field(16, "Sparsity", _SPARSITY),
))  # fmt: skip
_SUBGRAPH = Table("SubGraph", (
    Field(4, "Tensors", Vector(_TENSOR)), Field(6, "Inputs", Vector(_INT)), Field(8, "Outputs", Vector(_INT)),
    Field(10, "Operators", Vector(_OPERATOR)),
))  # fmt: skip
_OPERATOR_CODE = Table("OperatorCode", (
    Field(4, "DeprecatedBuiltinCode", _BYTE), Field(6, "CustomCode", String()), Field(10, "BuiltinCode", _INT),
))  # fmt: skip
_BUFFER = Table("Buffer", (Field(4, "Data", Vector(_BYTE)), Field(6, "Offset", _LONG), Field(8, "Size", _LONG)))

MODEL = Table("Model", (
    Field(4, "Version", _INT), Field(6, "OperatorCodes", Vector(_OPERATOR_CODE)),
    Field(8, "Subgraphs", Vector(_SUBGRAPH)), Field(12, "Buffers", Vector(_BUFFER)),
))  # fmt: skip
