"""A TFLite file for each operator that becomes an operation of `nnfmq.tflite`, in every form and type."""

from __future__ import annotations

import numpy as np

from support.tflite_cases import Case, codes, integers, weight, x
from support.tflite_files import Tensor

_INT = x(3, 5, kind="INT32")


def boundaries(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def elementwise() -> list[Case]:
    cases = [Case(name, [x(3, 5)], [x(3, 5)]) for name in ("COS", "SIGN")]
    cases += [
        Case("GELU", [x(3, 65)], [x(3, 65)], "GeluOptions", {"Approximate": flag}, -7, 7, note=str(flag))
        for flag in (0, 1)
    ]
    cases += [
        Case("GELU", [codes(4, 64, kind=kind)], [codes(4, 64, kind=kind, scale=0.031, zero_point=9)], "GeluOptions",
            {"Approximate": flag}, note=f"{kind}{flag}")
        for kind in ("INT8", "UINT8") for flag in (0, 1)
    ]  # fmt: skip
    divisors = integers(2, -3, 5, 1, -1)
    return [
        *cases,
        Case("ROUND", [x(3, 5)], [x(3, 5)], optimized=True, low=-9, high=9),
        Case("SIGN", [_INT], [_INT], note="integers"),
        Case("ATAN2", [x(3, 5), x(3, 5, name="other")], [x(3, 5)]),
        Case("FLOOR_MOD", [_INT, divisors], [_INT], low=-9, high=9, note="integers"),
        Case("FLOOR_MOD", [x(3, 5), weight(5, scale=3)], [x(3, 5)], low=-9, high=9, note="floats"),
        Case("DIV", [_INT, divisors], [_INT], "DivOptions", low=-9, high=9, note="integers"),
        Case("BITWISE_XOR", [_INT, x(5, kind="INT32")], [_INT], low=-99, high=99),
        Case("RIGHT_SHIFT", [_INT, integers(0, 1, 31, 40, -3)], [_INT], low=-999, high=999),
        Case("RELU_0_TO_1", [x(3, 5)], [x(3, 5)]),
        Case("RELU_0_TO_1", [codes(3, 64, scale=0.01)], [codes(3, 64, scale=0.01)], note="codes"),
        Case("ZEROS_LIKE", [x(3, 5)], [x(3, 5)]),
        Case("ZEROS_LIKE", [_INT], [_INT], note="integers"),
        Case("BUCKETIZE", [x(3, 5)], [_INT], "BucketizeOptions", {"Boundaries": [-1.0, 0.0, 0.5]}),
    ]


def spectral() -> list[Case]:
    lengths = integers(8, 16)
    spectrum = x(2, 8, 9, kind="COMPLEX64")
    return [
        Case("RFFT2D", [x(2, 8, 16), lengths], [spectrum]),
        Case("RFFT2D", [x(2, 5, 20), lengths], [spectrum], note="cut and padded"),
        *(Case(name, [spectrum], [x(2, 8, 9)]) for name in ("REAL", "IMAG", "COMPLEX_ABS")),
    ]


def indexing() -> list[Case]:
    given, row = x(2, 3, 4), codes(2, 3, 4)
    pairs = integers(0, 2, 1, 0, shape=(2, 2))
    one = Tensor("one", (), data=boundaries(1.5))
    nothing = Tensor("nothing", (), data=boundaries(-0.5))
    return [
        *(Case("CUMSUM", [given, integers(axis, shape=())], [given], "CumsumOptions",
            {"Exclusive": exclusive, "Reverse": reverse}, note=f"{axis}{exclusive}{reverse}")
            for axis in (1, -1) for exclusive in (0, 1) for reverse in (0, 1)),
        Case("CUMSUM", [_INT, integers(0, shape=())], [_INT], "CumsumOptions", note="integers"),
        Case("GATHER", [given, x(2, 5, kind="INT32")], [x(2, 5, 4)], "GatherOptions", {"Axis": 1, "BatchDims": 1},
            low=0, high=2, note="batch"),
        Case("GATHER", [row, x(2, 5, kind="INT32")], [codes(2, 3, 5)], "GatherOptions", {"Axis": 2, "BatchDims": 1},
            low=0, high=3, note="batch of codes"),
        Case("GATHER_ND", [given, pairs], [x(2, 4)], "GatherNdOptions"),
        Case("GATHER_ND", [row, x(3, 1, kind="INT32")], [codes(3, 3, 4)], "GatherNdOptions", low=0, high=1,
            note="rows of codes"),
        Case("SCATTER_ND", [integers(3, 0, 3, shape=(3, 1)), x(3, 4), integers(5, 4)], [x(5, 4)], "ScatterNdOptions"),
        Case("SCATTER_ND", [pairs, x(2, kind="INT32"), integers(2, 3)], [x(2, 3, kind="INT32")], "ScatterNdOptions",
            note="integers"),
        Case("SPARSE_TO_DENSE", [pairs, integers(3, 4), x(2), nothing], [x(3, 4)], "SparseToDenseOptions"),
        Case("SPARSE_TO_DENSE", [integers(1, 3), integers(5), x(2), nothing], [x(5)], "SparseToDenseOptions",
            note="vector"),
        *(Case("ONE_HOT", [x(2, 3, kind="INT32"), integers(4, shape=()), one, nothing], [x(*shape)], "OneHotOptions",
            {"Axis": axis}, low=-1, high=4, note=str(axis)) for axis, shape in ((-1, (2, 3, 4)), (1, (2, 4, 3)))),
        Case("DYNAMIC_UPDATE_SLICE", [given, x(2, 1, 2, name="update"), x(3, kind="INT32", name="start")], [given],
            "DynamicUpdateSliceOptions", low=-3, high=5),
        Case("REVERSE_SEQUENCE", [given, x(2, kind="INT32")], [given], "ReverseSequenceOptions",
            {"SeqDim": 1, "BatchDim": 0}, low=0, high=3),
        Case("REVERSE_SEQUENCE", [given, x(4, kind="INT32")], [given], "ReverseSequenceOptions",
            {"SeqDim": 0, "BatchDim": 2}, low=0, high=2, note="batch last"),
        Case("MATRIX_DIAG", [x(2, 3)], [x(2, 3, 3)], "MatrixDiagOptions"),
        Case("MATRIX_SET_DIAG", [given, x(2, 3, name="diagonal")], [given], "MatrixSetDiagOptions"),
        *(Case(f"UNSORTED_SEGMENT_{name}", [x(4, 3), integers(2, 0, 2, -1), integers(4, shape=())], [x(4, 3)],
            f"UnsortedSegment{name.title()}Options") for name in ("SUM", "PROD", "MAX", "MIN")),
    ]  # fmt: skip


def wider() -> list[Case]:
    """Return operators of the HAL with types and ranks that only the extension takes."""
    deep = x(2, 3, 1, 2, 2)
    cases = []
    for kind in ("INT32", "BOOL", "INT64"):
        given = x(2, 3, 4, kind=kind)
        cases += [
            Case("TRANSPOSE", [given, integers(2, 0, 1)], [x(4, 2, 3, kind=kind)], note=kind),
            Case("STRIDED_SLICE", [given, integers(1), integers(2), integers(1)], [x(1, 3, 4, kind=kind)],
                "StridedSliceOptions", note=kind),
            Case("CONCATENATION", [given, x(2, 3, 4, kind=kind, name="other")], [x(2, 6, 4, kind=kind)],
                "ConcatenationOptions", {"Axis": 1}, note=kind),
            Case("SQUEEZE", [x(1, 3, kind=kind)], [x(3, kind=kind)], "SqueezeOptions", note=kind),
        ]  # fmt: skip
    number = x(2, 3, 4, kind="INT32")
    return [
        *cases,
        Case("PAD", [number, integers(1, 0, 0, 2, 1, 1, shape=(3, 2))], [x(3, 5, 6, kind="INT32")], note="integers"),
        *(Case(name, [number, integers(1)], [x(2, 4, kind="INT32")], "ReducerOptions", note="integers")
            for name in ("SUM", "REDUCE_PROD", "REDUCE_MAX", "REDUCE_MIN")),
        Case("RESHAPE", [x(2, 3, kind="BOOL"), integers(6)], [x(6, kind="BOOL")], note="truths"),
        Case("EXPAND_DIMS", [x(2, 3, kind="BOOL"), integers(1)], [x(2, 1, 3, kind="BOOL")], note="truths"),
        Case("TRANSPOSE", [deep, integers(4, 3, 0, 1, 2)], [x(2, 2, 2, 3, 1)], note="rank 5"),
        Case("RESHAPE", [deep, integers(4, 6)], [x(4, 6)], note="rank 5"),
        Case("ADD", [deep, x(2, 1, 1, 2, 2, name="other")], [deep], "AddOptions", note="rank 5"),
        Case("MEAN", [deep, integers(1, 3)], [x(2, 1, 2)], "ReducerOptions", note="rank 5"),
        Case("PAD", [deep, integers(*[0, 1] * 5, shape=(5, 2))], [x(3, 4, 2, 3, 3)], note="rank 5"),
        Case("CAST", [x(9, kind="BOOL")], [x(9)], low=0, high=1, note="truths"),
        Case("CAST", [x(9, kind="INT32")], [x(9, kind="BOOL")], note="to truths"),
        Case("CAST", [x(9, kind="INT32")], [x(9, kind="UINT8")], low=-999, high=999, note="wraps"),
        Case("POW", [number, x(4, kind="INT32")], [number], low=0, high=4, note="integers"),
    ]  # fmt: skip


def images() -> list[Case]:
    given = x(2, 3, 4)
    volume = x(2, 5, 6, 4, 3)
    strides = {"StrideD": 1, "StrideW": 2, "StrideH": 2}
    dilated = {"StrideD": 1, "StrideW": 1, "StrideH": 1, "DilationDFactor": 2, "DilationHFactor": 1,
        "DilationWFactor": 2}  # fmt: skip
    limit, overlap, least = (
        integers(4, shape=()),
        Tensor("iou", (), data=boundaries(0.3)),
        Tensor("s", (), data=boundaries(-1)),
    )
    sigma = Tensor("sigma", (), data=boundaries(0.6))
    boxes, scores = x(9, 4), x(9, name="scores")
    index, count = x(4, kind="INT32", name="index"), x(kind="INT32", name="count")
    slices = [
        ([1, 0], [2, 2], [1, 1], {"EllipsisMask": 1, "EndMask": 2}, (2, 3, 4), "ellipsis first"),
        ([0, 1, 0], [0, 2, 3], [1, 1, 2], {"NewAxisMask": 1}, (1, 1, 2, 4), "new axis first"),
        ([-1, 0, 0, 2], [0, 0, 0, 3], [-1, 1, 1, 1], {"EllipsisMask": 2, "NewAxisMask": 4, "ShrinkAxisMask": 8,
            "EndMask": 1}, (2, 3, 1), "all"),
        ([1, 0, 3], [1, 3, -2], [1, 2, -1], {"Offset": 1}, (1, 2, 2), "relative ends"),
    ]  # fmt: skip
    return [
        Case("BITCAST", [given], [x(2, 3, 4, kind="INT32")], "BitcastOptions"),
        *(Case("STRIDED_SLICE", [given, integers(*begin), integers(*end), integers(*step)], [x(*shape)],
            "StridedSliceOptions", masks, note=note) for begin, end, step, masks, shape, note in slices),
        Case("CONV_3D", [volume, weight(2, 3, 3, 3, 4)], [x(2, 5, 3, 2, 4)], "Conv3DOptions", strides, note="same"),
        Case("CONV_3D", [volume, weight(2, 3, 2, 3, 4), weight(4)], [x(2, 3, 4, 2, 4)], "Conv3DOptions",
            {"Padding": 1, "FusedActivationFunction": 1, **dilated}, note="dilated"),
        Case("CONV_3D_TRANSPOSE", [integers(2, 5, 6, 4, 3), weight(2, 3, 3, 3, 4), x(2, 5, 3, 2, 4)], [volume],
            "Conv3DOptions", strides, note="same"),
        Case("CONV_3D_TRANSPOSE", [integers(1, 3, 7, 4, 3), weight(2, 3, 2, 3, 4), x(1, 2, 3, 2, 4), weight(3)],
            [x(1, 3, 7, 4, 3)], "Conv3DOptions", {"Padding": 1, **strides}, note="valid"),
        *(Case("FAKE_QUANT", [given], [given], "FakeQuantOptions", {"Min": low, "Max": 1.3, "NumBits": bits,
            "NarrowRange": narrow}, note=f"{low}-{bits}-{narrow}")
            for low, bits, narrow in ((-1.0, 8, 0), (-0.7, 4, 0), (0.0, 8, 0))),
        Case("NON_MAX_SUPPRESSION_V4", [boxes, scores, limit, overlap, least], [index, count],
            "NonMaxSuppressionV4Options"),
        Case("NON_MAX_SUPPRESSION_V5", [boxes, scores, limit, overlap, least, sigma], [index, x(4), count],
            "NonMaxSuppressionV5Options", low=0.1),
    ]  # fmt: skip


CASES = [*elementwise(), *spectral(), *indexing(), *wider(), *images()]
