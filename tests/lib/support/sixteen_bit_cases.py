"""TFLite files of one operator on tensors of 16 bits, each in the forms that differ in computation."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.tflite_cases import SAME, VALID, Case, codes, integers, x
from support.tflite_files import CONV, Tensor

Array = np.ndarray[Any, Any]
UNIT, Q12 = 2.0**-15, 2.0**-12
NARROW = {"QuantizedBiasType": 2}  # INT32
POOL = {"StrideW": 2, "StrideH": 1, "FilterWidth": 3, "FilterHeight": 2}


def wide(*shape: int, scale: float = 1e-3, name: str = "wide") -> Any:
    """A tensor of 16 bits that the model is given, or that the operator writes."""
    return codes(*shape, kind="INT16", scale=scale, zero_point=0, name=name)


def filter(*shape: int, scales: tuple[float, ...] = (0.02,), dimension: int = 0, low: int = -127) -> Any:
    data = np.random.default_rng(7).integers(low, 128, shape).astype(np.int8)
    return Tensor(f"q{shape}", shape, "INT8", data.tobytes(), scales, (0,) * len(scales), dimension)


def bias(count: int, kind: str = "INT64", largest: int = 10**6) -> Any:
    data = np.random.default_rng(8).integers(-largest, largest, count).astype(kind.lower())
    return Tensor(f"b{count}", (count,), kind, data.tobytes(), (1e-5,), (0,))


def channels(count: int) -> tuple[float, ...]:
    return tuple(float(scale) for scale in np.random.default_rng(9).uniform(0.002, 0.04, count))


def products() -> list[Case]:
    image, out = wide(2, 7, 6, 4), wide(2, 7, 6, 6, scale=0.3)
    conv, depthwise = ("CONV_2D", "Conv2DOptions"), ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions")
    weights = filter(6, 3, 2, 4, scales=channels(6))
    dilated = CONV | {"DilationWFactor": 2, "DilationHFactor": 1}
    strided = CONV | {"StrideW": 2, "StrideH": 2, "FusedActivationFunction": 1}
    taps, deep = filter(1, 3, 2, 8, scales=channels(8), dimension=3), {"DepthMultiplier": 2}
    deep_out = wide(2, 7, 6, 8, scale=0.05)
    cases = [
        Case(conv[0], [image, weights, bias(6)], [out], conv[1], dilated, note="dilated"),
        Case(conv[0], [image, weights, bias(6, "INT32")], [out], conv[1], CONV | NARROW, note="int32"),
        Case(conv[0], [image, weights, bias(6, "INT64", 10**11)], [out], conv[1], CONV, note="large"),
        Case(
            conv[0],
            [image, filter(6, 3, 2, 4), bias(6)],
            [wide(2, 4, 3, 6, scale=0.3)],
            conv[1],
            strided,
            note="tensor",
        ),
        Case(conv[0], [image, filter(6, 1, 1, 2, scales=channels(6)), bias(6)], [out], conv[1], CONV, note="groups"),
        Case(depthwise[0], [image, taps, bias(8)], [deep_out], depthwise[1], dilated | deep, note="dilated"),
    ]
    for kind in ("INT32", "INT64"):
        options = NARROW if kind == "INT32" else {}
        given = [wide(3, 50), filter(7, 50), bias(7, kind)]
        per_unit = [wide(3, 50), filter(7, 50, scales=channels(7)), bias(7, kind)]
        for note, tensors in (("tensor", given), ("units", per_unit)):
            out = wide(3, 7, scale=0.4)
            cases.append(Case("FULLY_CONNECTED", tensors, [out], "FullyConnectedOptions", options, note=kind + note))
    size, kernel = integers(2, 8, 6, 5), filter(5, 3, 3, 4, scales=channels(5))
    transposed = {"Padding": SAME, "StrideW": 2, "StrideH": 2}
    for note, tensors in (("bias", [bias(5)]), ("no-bias", []), ("int32", [bias(5, "INT32")])):
        inputs, out = [size, kernel, wide(2, 4, 3, 4), *tensors], wide(2, 8, 6, 5, scale=0.3)
        cases.append(
            Case(
                "TRANSPOSE_CONV",
                inputs,
                [out],
                "TransposeConvOptions",
                transposed | (NARROW if note == "int32" else {}),
                note=note,
            )
        )
    left, right = wide(2, 3, 9), wide(2, 9, 5, name="right")
    flat = wide(2, 3, 5, scale=0.9)
    return [
        *cases,
        Case("BATCH_MATMUL", [left, right], [flat], "BatchMatMulOptions", {}),
        Case("BATCH_MATMUL", [left, wide(9, 5, name="one")], [flat], "BatchMatMulOptions", {}, note="one"),
        Case("BATCH_MATMUL", [wide(1, 3, 9), right], [flat], "BatchMatMulOptions", {}, note="repeated"),
        Case(
            "BATCH_MATMUL", [left, wide(2, 5, 9, name="r")], [flat], "BatchMatMulOptions", {"AdjY": 1}, note="adjoint"
        ),
    ]


def arithmetic() -> list[Case]:
    a, row = wide(3, 5, 8), wide(5, 1, scale=3e-3, name="row")
    general = {"PotScaleInt16": False}
    powers = [wide(3, 8, scale=Q12), wide(3, 8, scale=Q12 / 4, name="small")]
    cases = []
    for name in ("ADD", "SUB"):
        table = f"{name.title()}Options"
        cases += [
            Case(name, [a, row], [wide(3, 5, 8, scale=2.5e-3)], table, general, note="broadcast"),
            Case(name, [a, wide(3, 5, 8, scale=2e-3, name="b")], [a], table, general | {"FusedActivationFunction": 1}),
            Case(name, powers, [wide(3, 8, scale=Q12)], table, {}, note="powers"),
            Case(name, powers[::-1], [wide(3, 8, scale=Q12)], table, {}, note="swapped"),
            Case(name, powers, [wide(3, 8, scale=Q12)], table, general, note="general"),
            Case(name, [a, wide(3, 5, 8, scale=2e-3, name="b")], [a], table, {}, note="no-powers"),
        ]
    truth = x(3, 5, 8, kind="BOOL")
    comparisons = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")
    cases += [Case(name, [a, wide(8, name="row")], [truth]) for name in comparisons]
    cases += [Case(name, [a, wide(8, name="row")], [a]) for name in ("MAXIMUM", "MINIMUM")]
    for out in (2e-3, 30.0):
        cases.append(Case("MUL", [a, row], [wide(3, 5, 8, scale=out)], "MulOptions", note=f"{out}"))
    for out, activation in ((1e-4, 0), (3e-4, 1), (5e-4, 3)):
        options = {"FusedActivationFunction": activation}
        cases.append(Case("DIV", [a, row], [wide(3, 5, 8, scale=out)], "DivOptions", options, note=f"{out}"))
    result = wide(3, 5, 8, scale=2e-3)
    cases += [
        Case("LEAKY_RELU", [a], [result], "LeakyReluOptions", {"Alpha": alpha}, note=f"{alpha}")
        for alpha in (0.3, -0.2, 1.7, 0.0)
    ]
    slopes = np.random.default_rng(3).integers(-128, 128, 8).astype(np.int8).tobytes()
    cases.append(Case("PRELU", [a, Tensor("alpha", (1, 1, 8), "INT8", slopes, (3e-3,), (7,))], [result]))
    cases += [
        Case(name, [a], [out], note=f"{out.scales[0]}") for name in ("RELU", "RELU6", "ABS") for out in (a, result)
    ]
    return [*cases, Case("NEG", [a], [a])]


def functions() -> list[Case]:
    cases = [
        Case(
            "GELU",
            [wide(512, scale=scale)],
            [wide(512, scale=1e-4)],
            "GeluOptions",
            {"Approximate": flag},
            note=f"{scale} {flag}",
        )
        for scale in (1e-4, 3e-5)
        for flag in (False, True)
    ]
    for name in ("LOGISTIC", "TANH"):
        cases += [
            Case(name, [wide(4, 4096, scale=scale)], [wide(4, 4096, scale=UNIT)], note=f"{scale}")
            for scale in (Q12, 2 * Q12, 1e-4, 3.3e-4, 7e-3)
        ]
    cases += [
        Case(
            "SOFTMAX",
            [wide(6, size, scale=scale)],
            [wide(6, size, scale=UNIT)],
            "SoftmaxOptions",
            {"Beta": beta},
            note=f"{size}-{beta}",
        )
        for size, scale, beta in ((2, 1e-4, 1.0), (50, 3e-4, 1.0), (1000, 1e-4, 0.7))
    ]
    cases += [
        Case("EXP", [wide(2000, scale=1e-4)], [wide(2000, scale=1e-3)]),
        Case("RSQRT", [wide(2000, scale=1e-4)], [wide(2000, scale=3e-4)], low=0),
        Case("SQRT", [wide(2000, scale=1e-4)], [wide(2000, scale=3e-5)], low=0),
        Case("LOG", [wide(2000, scale=1e-4)], [wide(2000, scale=4e-4)]),
        Case("DEQUANTIZE", [wide(300)], [x(300)]),
        Case("QUANTIZE", [x(300)], [wide(300, scale=1e-4)], low=-5, high=5, note="reals"),
        Case("CAST", [Tensor("plain", (300,), "INT16")], [x(300)], "CastOptions", note="reals"),
        Case("CAST", [wide(300)], [x(300, kind="INT32")], "CastOptions", note="int32"),
    ]
    kinds = {"INT8": (0.3, 5), "UINT8": (0.2, 70), "INT16": (2e-3, 0), "INT32": (1e-6, 0)}
    pairs = [
        ("INT16", "INT8"), ("INT16", "INT16"), ("INT16", "INT32"), ("INT32", "INT16"), ("INT8", "INT16"),
        ("INT8", "INT8"), ("INT8", "UINT8"), ("UINT8", "INT8"), ("UINT8", "UINT8"), ("INT32", "INT8"),
    ]  # fmt: skip
    for given, result in pairs:
        (scale, zero), (out_scale, out_zero) = kinds[given], kinds[result]
        same = 0.7 if given == result else 1.0
        source = codes(500, kind=given, scale=scale, zero_point=zero)
        target = codes(500, kind=result, scale=out_scale * same, zero_point=out_zero)
        low, high = (-(10**8), 10**8) if given == "INT32" else (-2, 2)
        cases.append(Case("QUANTIZE", [source], [target], low=low, high=high, note=f"{given}-{result}"))
    return cases


def images() -> list[Case]:
    image = wide(2, 5, 6, 3)
    cases = []
    for padding in (SAME, VALID):
        shape = (2, 5, 3, 3) if padding == SAME else (2, 4, 2, 3)
        for name in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
            for code in (0, 3):
                options = POOL | {"Padding": padding, "FusedActivationFunction": code}
                cases.append(Case(name, [image], [wide(*shape)], "Pool2DOptions", options, note=f"{padding}{code}"))
    for flags in ({}, {"AlignCorners": 1}, {"HalfPixelCenters": 1}):
        note = "-".join(flags)
        for size in ((9, 11), (3, 4)):
            out, wanted = wide(2, *size, 3), integers(*size)
            cases += [
                Case("RESIZE_BILINEAR", [image, wanted], [out], "ResizeBilinearOptions", flags, note=f"{note}{size}"),
                Case(
                    "RESIZE_NEAREST_NEIGHBOR",
                    [image, wanted],
                    [out],
                    "ResizeNearestNeighborOptions",
                    flags,
                    note=f"{note}{size}",
                ),
            ]
    for scale in (1e-3, 3e-4):
        cases.append(
            Case("MEAN", [image, integers(1, 2)], [wide(2, 3, scale=scale)], "ReducerOptions", note=f"{scale}")
        )
    cases += [
        Case("REDUCE_PROD", [wide(40, 3), integers(1)], [wide(40, scale=scale)], "ReducerOptions", note=f"{scale}")
        for scale in (1e-1, 3.0)
    ]
    keep = wide(2, 1, 6, 3)
    cases += [
        Case(n, [image, integers(1)], [keep], "ReducerOptions", {"KeepDims": 1})
        for n in ("REDUCE_MAX", "REDUCE_MIN", "MEAN")
    ]
    return cases


def movement() -> list[Case]:
    image, flat = wide(2, 4, 6, 3), wide(4, 6)
    pads = integers(0, 0, 1, 2, 0, 1, 0, 0, shape=(4, 2))
    padded, constant = wide(2, 7, 7, 3), Tensor("v", (1,), "INT16", b"\x03\xf0", (1e-3,), (0,))
    choice = x(2, 4, 6, 3, kind="BOOL")
    table = Tensor("t", (5, 4), "INT16", np.arange(-20, 0, dtype=np.int16).tobytes(), (1e-3,), (0,))
    return [
        Case("PAD", [image, pads], [padded]),
        Case("PADV2", [image, pads, constant], [padded]),
        Case("MIRROR_PAD", [image, pads], [padded], "MirrorPadOptions", {"Mode": 0}),
        Case(
            "STRIDED_SLICE",
            [flat, integers(1, 5), integers(4, 0), integers(2, -2)],
            [wide(2, 3)],
            "StridedSliceOptions",
        ),
        Case("SLICE", [flat, integers(1, 0), integers(2, 6)], [wide(2, 6)]),
        Case("RESHAPE", [flat, integers(2, 12)], [wide(2, 12)], "ReshapeOptions"),
        Case("SQUEEZE", [wide(1, 4, 1)], [wide(4)], "SqueezeOptions", {"SqueezeDims": [0, 2]}),
        Case("EXPAND_DIMS", [flat, integers(1, shape=())], [wide(4, 1, 6)]),
        Case("CONCATENATION", [flat, wide(4, 2, name="two")], [wide(4, 8)], "ConcatenationOptions", {"Axis": 1}),
        Case("PACK", [flat, wide(4, 6, name="two")], [wide(4, 2, 6)], "PackOptions", {"ValuesCount": 2, "Axis": 1}),
        Case("UNPACK", [flat], [wide(6, name=f"p{i}") for i in range(4)], "UnpackOptions", {"Num": 4, "Axis": 0}),
        Case(
            "SPLIT", [integers(1, shape=()), flat], [wide(4, 3), wide(4, 3, name="q")], "SplitOptions", {"NumSplits": 2}
        ),
        Case("TRANSPOSE", [image, integers(0, 3, 1, 2)], [wide(2, 3, 4, 6)]),
        Case("REVERSE_V2", [flat, integers(1)], [flat]),
        Case("TILE", [flat, integers(2, 1)], [wide(8, 6)]),
        Case("GATHER", [flat, integers(3, 0, 3)], [wide(4, 3)], "GatherOptions", {"Axis": 1}),
        Case("EMBEDDING_LOOKUP", [x(2, kind="INT32"), table], [wide(2, 4)], low=0, high=4),
        Case("SPACE_TO_BATCH_ND", [image, integers(2, 3), integers(0, 0, 0, 0, shape=(2, 2))], [wide(12, 2, 2, 3)]),
        Case("BATCH_TO_SPACE_ND", [wide(12, 2, 2, 3), integers(2, 3), integers(0, 0, 0, 0, shape=(2, 2))], [image]),
        Case("SELECT", [choice, image, wide(2, 4, 6, 3, name="b")], [image], low=0, high=1),
        Case("TOPK_V2", [wide(3, 40), integers(5, shape=())], [wide(3, 5), x(3, 5, kind="INT32")]),
    ]


SIXTEEN_BIT_CASES = [*products(), *arithmetic(), *functions(), *images(), *movement()]
