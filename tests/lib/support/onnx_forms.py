"""Forms of ONNX operators that users' models have: cases, whose results other runtimes compute, and illegal ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.onnx_files import OnnxCase

__all__ = ["BY_REFERENCE", "FORMS", "ILLEGAL", "ILLEGAL_BY_TEXT", "VERSIONS"]

_RNG = np.random.default_rng(31)
_IMAGE_PADS = [1, 0, 2, 1]
_TYPES = ("f4", "f2", "i4", "?")


def _real(*shape: int) -> Any:
    return _RNG.uniform(-2, 2, shape).astype(np.float32)


def _of(kind: str, *shape: int) -> Any:
    """Return elements of a NumPy type, such as "i4" for int32."""
    values = _RNG.uniform(-9, 9, shape)
    return values > 0 if kind == "?" else values.astype(kind)


def _ints(*values: int) -> Any:
    return np.array(values, np.int64)


def _floats(*values: float) -> Any:
    return np.array(values, np.float32)


def _case(operator: str, *inputs: Any, c: Any = (), outputs: Any = 1, opset: Any = 18, **a: Any) -> OnnxCase:
    """Return a case with attributes `a`, whose inputs at the positions `c` are constants."""
    return OnnxCase(operator, inputs, a, frozenset(place for place in c if place < len(inputs)), outputs, opset)


def _transposed(channels: int, outputs: int, **attributes: Any) -> list[OnnxCase]:
    """Return a ConvTranspose with these attributes and a bias, with constant and with computed weights."""
    image, weights = _real(1, channels, 3, 4), _real(channels, outputs, 3, 2)
    bias = _real(outputs * attributes.get("group", 1))
    return [_case("ConvTranspose", image, weights, bias, c=c, **attributes) for c in ((1, 2), ())]


_CONVOLUTIONS = [
    *_transposed(4, 1, group=4, strides=[2, 3]),
    *_transposed(4, 2, group=2, pads=_IMAGE_PADS, dilations=[2, 1]),
    *_transposed(2, 3, dilations=[2, 3], strides=[2, 2], output_padding=[1, 1]),
    *_transposed(2, 3, strides=[2, 2], output_padding=[1, 1]),
    *_transposed(2, 3, strides=[2, 2], auto_pad="SAME_UPPER"),
    *_transposed(2, 3, strides=[1, 2], auto_pad="SAME_LOWER"),
    *_transposed(4, 1, group=4, strides=[2, 2], output_shape=[6, 9]),
    *_transposed(2, 3, strides=[2, 2], output_shape=[8, 7]),
    _case("ConvTranspose", _real(2, 3, 5), _real(3, 2, 3), c=(1,), group=3, strides=[2], pads=[1, 0], dilations=[2]),
    _case("ConvTranspose", _real(1, 2, 5), _real(2, 2, 2), _real(2), strides=[3], output_padding=[2], auto_pad="VALID"),
    _case("ConvTranspose", *(_real(*s).astype("f2") for s in ((1, 4, 3, 3), (4, 1, 2, 2))), group=4, strides=[2, 2]),
    _case(
        "Conv", _real(1, 6, 7, 8), _real(4, 3, 2, 3), _real(4), c=(1, 2), group=2, dilations=[2, 1], pads=_IMAGE_PADS
    ),
    _case("Conv", _real(2, 6, 12), _real(6, 2, 3), c=(1,), group=3, dilations=[4], strides=[2]),
    _case("Conv", _real(1, 4, 9), _real(4, 2, 2), _real(4), group=2, dilations=[3]),
    _case("Col2Im", _real(1, 5, 5), _ints(5, 5), _ints(1, 5), c=(1, 2)),
    _case("Col2Im", _real(2, 8, 4), _ints(4, 6), _ints(2, 2), c=(1, 2), strides=[2, 3], pads=[0, 1, 0, 0]),
    _case("Col2Im", _real(1, 4, 4), _ints(6, 6), _ints(2, 2), c=(1, 2), dilations=[4, 4]),
]

_POOLS = [
    *(
        _case(name, _real(2, 3, 7, 8), kernel_shape=[3, 2], opset=19, **attributes)
        for name in ("MaxPool", "AveragePool", "LpPool")
        for attributes in (
            {"dilations": [2, 3], "strides": [2, 1]},
            {"ceil_mode": 1, "strides": [2, 3], "pads": _IMAGE_PADS},
            {"ceil_mode": 1, "strides": [3, 2], "dilations": [2, 2], "pads": [1, 1, 1, 1]},
        )
    ),
    *(
        _case("AveragePool", _real(1, 2, 5, 6), kernel_shape=[3, 3], count_include_pad=1, opset=19, **attributes)
        for attributes in (
            {"ceil_mode": 1, "strides": [2, 2], "pads": [1, 1, 1, 1]},
            {"ceil_mode": 1, "strides": [3, 3], "pads": [1, 1, 1, 1]},
            {"dilations": [2, 1], "pads": [1, 1, 2, 2]},
        )
    ),
    _case("AveragePool", _real(1, 1, 2, 2), kernel_shape=[3, 3], strides=[3, 3], pads=[1] * 4, ceil_mode=1, opset=22),
    _case("AveragePool", _real(1, 2, 9), kernel_shape=[2], dilations=[3], strides=[2], opset=19),
    _case("MaxPool", _real(1, 2, 9).astype("f2"), kernel_shape=[3], dilations=[2], ceil_mode=1, strides=[3]),
    *(_case("MaxPool", _of(kind, 1, 2, 5, 5), kernel_shape=[2, 3], pads=[1, 0, 0, 1]) for kind in ("i1", "u1")),
    *(_case("LpPool", _real(1, 2, 6), kernel_shape=[2], p=p, auto_pad="SAME_LOWER") for p in (1, 3)),
    *(_case("GlobalLpPool", _real(2, 3, 4, 5), p=p) for p in (1, 2, 3)),
]

_PADS = [
    *(
        _case("Pad", _of(kind, 1, 3, 4), _ints(0, 2, 1, 3, 1, 3), c=(1,), mode=mode, opset=19)
        for mode in ("edge", "wrap")
        for kind in _TYPES
    ),
    *(_case("Pad", _of(kind, 2, 3, 4), _ints(1, 2, 0, 0, 1, 3), c=(1,), mode="reflect") for kind in _TYPES),
    *(
        _case("Pad", _real(2, 3, 4), pads, None, axes, c=(1, 3), mode=mode, opset=19)
        for mode in ("constant", "edge", "reflect", "wrap")
        for pads, axes in ((_ints(-1, 1, 2, -1), _ints(-1, 1)), (_ints(1, 1), _ints(0)), (_ints(0, -2), _ints(2)))
    ),
    _case("Pad", _real(2, 3), _ints(0, -1, 1, 2), np.float32(1.5), c=(1,)),
    _case("Pad", _of("?", 2, 3), _ints(0, 1, 1, 2), np.array(True), c=(1, 2)),
    _case("Pad", _of("?", 2, 3), _ints(0, 1, 1, 2), np.array(True), c=(1,)),
    *(_case("Pad", _real(2, 3), mode=mode, pads=[0, 1, 2, -1], opset=9) for mode in ("edge", "constant")),
]

_EQUATIONS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("...k,kd->...d", [(2, 3, 4), (4, 5)]),
    ("...ij,...jk->...ik", [(5, 2, 3), (5, 3, 4)]),
    ("...ij,...jk", [(5, 2, 3), (1, 3, 4)]),
    ("...ii->...i", [(2, 3, 3)]),
    ("ii", [(3, 3)]),
    ("iijj->ij", [(2, 2, 3, 3)]),
    ("iii->i", [(3, 3, 3)]),
    ("i...->...", [(2, 3, 4)]),
    ("i,j,k->kij", [(2,), (3,), (4,)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ij,jk,kl", [(2, 3), (3, 4), (4, 5)]),
    ("ab,ab,ab->a", [(2, 3), (2, 3), (2, 3)]),
    (",i->i", [(), (3,)]),
    (",->", [(), ()]),
    ("ba", [(2, 3)]),
    ("aB,Bc->ac", [(2, 3), (3, 2)]),
    ("bhwc,hkc->bhwk", [(1, 2, 3, 4), (2, 5, 4)]),
    ("abcde,e->abcd", [(1, 2, 3, 2, 2), (2,)]),
    ("i j , j k -> i k", [(2, 3), (3, 2)]),
    ("bi,bi->bi", [(1, 3), (2, 3)]),
]
_EINSUMS = [
    _case("Einsum", *(_of(kind, *shape) for shape in shapes), equation=equation, opset=12)
    for equation, shapes in _EQUATIONS
    for kind in ("f4", "i4")
]

_SELECTIONS = [
    *(_case("TopK", _real(3, 5), outputs=2, opset=opset, k=2, axis=axis) for opset in (7, 8, 9) for axis in (0, -1)),
    *(_case("TopK", _of(kind, 3, 5, 2), _ints(2), c=(1,), outputs=2, opset=11, axis=axis, largest=largest)
      for kind in ("f4", "f2", "i4") for axis in (0, 1) for largest in (0, 1)),
    *(_case(name, _real(2, 3, 4), opset=opset, **axis) for name in ("Hardmax", "Softmax", "LogSoftmax")
      for opset in (7, 11, 13) for axis in ({}, {"axis": 0}, {"axis": 2})),
    *(_case("GatherND", _real(2, 3, 4), np.array(indices), c=c, batch_dims=dims) for c in ((), (1,))
      for dims, indices in (
        (1, [[1], [-1]]), (1, [[[0, 1], [2, 3]], [[1, 1], [0, -1]]]), (2, [[[1], [2], [3]], [[-1], [0], [0]]]))),
    *(_case("OneHot", np.array([[0, -1], [5, 2]]).astype(indices), np.array(4).astype(depth),
            np.array([2, 5]).astype(values), c=(1,), opset=opset, axis=axis)
      for indices, depth, values in (("f4", "f4", "f4"), ("i8", "i8", "i8"), ("i4", "i4", "f4"))
      for opset in (11, 13) for axis in (-1, 0)),
    *(_case("Compress", _of(kind, 3, 4), np.array(condition, bool), c=(1,), **attributes) for kind in _TYPES
      for condition, attributes in (([0, 1, 1], {"axis": 0}), ([0, 1], {"axis": -1}), ([1, 0, 0, 1, 0, 1], {}))),
    *(_case(name, _of("?", 2, 3), _ints(1), c=(1,), opset=20, keepdims=keeps) for name in ("ReduceMax", "ReduceMin")
      for keeps in (0, 1)),
    *(_case("Pow", np.array([1, 2, -3], base), np.array(power).astype(kind), c=c) for base in ("i4", "i8", "f4")
      for kind in ("i4", "i8", "f4") for power in ([2, 3, 2], 3) for c in ((), (1,))),
    _case("Pow", np.array([7, 50, 1, 2], np.int32), _floats(0.5, 2.5, -1, 30.9)),
    *(_case("DepthToSpace", _of(kind, 1, 8, 2, 3), blocksize=2, mode=mode) for kind in ("f4", "f2")
      for mode in ("DCR", "CRD")),
    _case("Det", _real(2, 4, 4), opset=11),
    _case("Det", _real(3, 3), opset=22),
    _case("STFT", _real(1, 32, 1), np.array(8), None, np.array(16), c=(1, 3), opset=17),
    _case("STFT", _real(2, 20, 1), np.array(5), _real(10), c=(1,), opset=17, onesided=0),
    *(_case(name, np.array(size), c=(0,), periodic=periodic) for size in (8, 9) for periodic in (0, 1)
      for name in ("BlackmanWindow", "HammingWindow", "HannWindow")),
    *(_case("AffineGrid", _real(2, len(size), len(size) + 1), _ints(2, 1, *size), c=(1,), opset=20, align_corners=flag)
      for size in ((3, 4), (2, 3, 4)) for flag in (0, 1)),
    *(_case("Shrink", 3 * _real(2, 7), opset=opset, bias=0.3, lambd=1.2) for opset in (9, 18)),
    _case("TensorScatter", _real(2, 1, 4, 5), _real(2, 1, 2, 5), _ints(1, 2), opset=24),
    _case("TensorScatter", _real(2, 1, 4, 5), _real(2, 1, 2, 5), _ints(1, 3), c=(2,), opset=24, mode="circular"),
    _case("TensorScatter", _real(3, 4, 5), _real(3, 2, 5), opset=24, axis=1),
    _case("TensorScatter", _of("?", 2, 4, 5), _of("?", 2, 2, 5), _ints(1, 3), opset=24, mode="circular"),
    _case("Resize", _real(1, 2, 3, 4), None, _floats(1, 1, 2, 1.5), c=(2,), opset=18, mode="linear",
          keep_aspect_ratio_policy="stretch"),
    _case("Cast", _real(2, 3), to=6, opset=24, round_mode="up"),
    _case("CastLike", _real(2, 3), _ints(1), opset=24, round_mode="up"),
    *(_case("ReduceL2", _of("i4", 2, 3, 4), _ints(2, 0), c=(1,), keepdims=keepdims) for keepdims in (0, 1)),
    *(_case("ReduceL2", _of(kind, 2, 3), opset=13, axes=[1]) for kind in ("i4", "i8")),
    *(_case("BitShift", _of(kind, 8), np.array([0, 1, 7, 8, 31, 64, -1, -64], kind), c=c, opset=28, direction=direction)
      for kind in ("i1", "i4", "i8") for direction in ("LEFT", "RIGHT") for c in ((), (1,))),
]  # fmt: skip
BY_REFERENCE = [
    *(_case("BitCast", _of(kind, 2, 3), to=to, opset=26) for kind, to in (("f4", 6), ("i1", 2), ("?", 2))),
    _case("BitCast", _floats(1, -0.0, 2.5e-3).view(np.int32), to=1, opset=26),
    *(_case("SpaceToDepth", _of(kind, 1, 2, 4, 6), blocksize=2, **attributes) for kind in ("f4", "i4", "?")
      for attributes in ({}, {"mode": "CRD", "opset": 28}, {"mode": "DCR", "opset": 28})),
    *(_case("DepthToSpace", _of("i4", 1, 8, 2, 3), blocksize=2, mode=mode) for mode in ("DCR", "CRD")),
    _case("OneHot", _ints(-1, 1, 3), np.array(3), _floats(0, 1), c=(1,), opset=9),
]  # fmt: skip
"""Cases that ONNX Runtime has no kernel for; ONNX's reference computes them."""

_AXES_INPUT = {"ReduceSum": 13}  # the opset from which axes are an input of a reduction; 18 for the others
_REDUCTIONS = (
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
)
VERSIONS = [
    *(_case(name, abs(_real(2, 3, 4)), opset=opset, **attributes) for name in _REDUCTIONS for opset in (7, 11, 13, 17)
      for attributes in ({"axes": [1]}, {"axes": [0, -1], "keepdims": 0}, {}) if opset < _AXES_INPUT.get(name, 18)
      and (opset > 7 or attributes.get("axes") != [0, -1])),
    *(_case(name, abs(_real(2, 3, 4)), axes, c=(1,), opset=opset, noop_with_empty_axes=noop) for name in _REDUCTIONS
      for opset in (13, 18, 20) for axes in (_ints(1), _ints(0, -1), _ints(), None) for noop in (0, 1)
      if opset >= _AXES_INPUT.get(name, 18)),
    *(case for opset in (7, 9, 11, 12) for case in (
        _case("Squeeze", _real(1, 2, 1), axes=[0], opset=opset),
        _case("Unsqueeze", _real(2, 3), axes=[0, 3], opset=opset),
        _case("Split", _real(4, 6), axis=1, split=[2, 4], outputs=2, opset=opset),
        _case("Split", _real(4, 6), outputs=2, opset=opset),
        _case("Dropout", _real(2, 3), outputs=2, opset=opset, **({"ratio": 0.3} if opset < 12 else {})),
        _case("Gemm", _real(2, 3), _real(3, 2), _real(2), alpha=0.5, opset=opset),
        _case("Sum", _real(2, 3), _real(2, 3), opset=opset),
        _case("Flatten", _real(2, 3, 4), axis=2, opset=opset),
        _case("Pow", _real(2, 3) ** 2, _real(3), opset=opset),
        _case("Concat", _real(2, 3), _real(2, 1), axis=1, opset=opset),
    )),
    *(_case("BatchNormalization", _real(2, 3, 4), *(abs(_real(*shape)) for _ in range(4)), c=c, opset=opset,
            spatial=spatial)
      for opset in (7, 8) for spatial, shape in ((1, (3,)), (0, (3, 4))) for c in ((1, 2, 3, 4), ())),
    *(_case("Slice", _real(4, 5), starts=[1, -2], ends=[3, 2**31 - 1], axes=[0, 1], opset=opset) for opset in (7, 9)),
    *(_case("Slice", _real(4, 5), _ints(3, 4), _ints(-100, 0), _ints(0, 1), _ints(-1, -2), c=(1, 2, 3, 4), opset=opset)
      for opset in (10, 13)),
    *(_case("Clip", _real(3, 4), opset=opset, **limits) for opset in (7, 10)
      for limits in ({"min": -0.5, "max": 0.5}, {})),
    _case("Clip", _real(3, 4), None, np.array(0.5, np.float32), opset=11),
    *(_case("Pad", _real(3, 4), pads=[0, 1, 2, 1], value=1.5, opset=opset) for opset in (7, 10)),
    *(_case("Upsample", _real(1, 1, 2, 2), scales=[1.0, 1.0, 2.0, 2.0], opset=opset) for opset in (7, 8)),
    _case("Scatter", _real(3, 3), np.array([[1, 0, 2]]), _real(1, 3), opset=9),
    *(_case("GroupNormalization", _real(2, 4, 3), _real(size), _real(size), num_groups=2, opset=opset)
      for opset, size in ((18, 2), (20, 2), (21, 4))),
    *(_case("Split", _real(5, 6), outputs=3, num_outputs=3, opset=opset, axis=axis) for opset in (18, 22)
      for axis in (0, 1)),
    *(_case("Mod", _real(3), _real(3), fmod=1, opset=opset) for opset in (10, 13)),
    *(_case("Resize", _real(1, 1, 1, 20), _floats(), _floats(), _ints(1, 1, 1, 6), c=(1, 2, 3), opset=opset)
      for opset in (11, 13, 18)),
    _case("Resize", _real(1, 1, 2, 3), _floats(), _floats(1, 1, 2, 2), c=(1, 2), opset=11),
    *(_case("Shape", _real(2, 3, 4), opset=15, **ends)
      for ends in ({"start": 1}, {"start": -1}, {"start": -9, "end": -1})),
    *(_case("MaxPool", _real(1, 2, 5, 5), kernel_shape=[2, 2], opset=opset) for opset in (7, 8, 10, 12)),
]  # fmt: skip
"""Cases of old and new versions of operators, which ONNX Runtime computes."""

FORMS = [*_CONVOLUTIONS, *_POOLS, *_PADS, *_EINSUMS, *_SELECTIONS]
"""Cases that ONNX Runtime computes."""

ILLEGAL = [
    (_case("Relu", _real(2), future=1), "opset 18 has no attribute 'future'"),
    (_case("Relu", _ints(1), opset=13), "input 0 (X) has elements of int64"),
    (_case("Add", _real(2), _ints(1, 2)), "input 1 has elements of int64, and others those of float"),
    (_case("Pow", _real(2), _ints(2), opset=11), "input 1 (Y) has elements of int64"),
    (_case("Add", _real(2)), "it has 1 input: 2 are allowed"),
    (_case("Gemm", _real(2, 3), _real(3, 2), opset=9), "it has 2 inputs: 3 are allowed"),
    (_case("Gelu", _real(2), opset=19), "opset 19 does not have it: it is in opset 20 and later ones"),
    (_case("Upsample", _real(1, 1, 2, 2), _floats(1, 1, 2, 2), c=(1,), opset=10), "does not have it any more"),
    (_case("Scatter", _real(3), _ints(0), _real(1), opset=11), "does not have it any more"),
    (_case("TopK", _real(3), _ints(2), c=(1,), opset=9, k=2), "it has 2 inputs"),
    (_case("TopK", _real(3), _ints(2), c=(1,), outputs=2, opset=10, largest=0), "no attribute 'largest'"),
    (_case("TopK", _real(3), _ints(4), c=(1,), outputs=2), "4"),
    (_case("Softmax", _real(2, 3), axis=2), "axis"),
    (_case("Concat", _real(2, 3), _real(2, 3)), "attribute axis is missing"),
    (_case("Concat", _real(2, 3), _real(3), axis=0), "(2, 3), (3,)"),
    (_case("Transpose", _real(2, 3), perm=[0, 0]), "perm"),
    (_case("Squeeze", _real(2, 1), _ints(0), c=(1,)), "(2, 1)"),
    (_case("MatMul", _real(2, 3), _real(2, 3)), "(2, 3), (2, 3)"),
    (_case("Conv", _real(1, 3, 5, 5), _real(2, 2, 3, 3)), "(2, 2, 3, 3)"),
    (_case("MaxPool", _real(1, 1, 4, 4), kernel_shape=[2, 2], pads=[2, 2, 2, 2]), "smaller than the window"),
    (_case("Einsum", _real(2, 3), _real(2, 3), equation="ij,jk->ik", opset=12), "the extents 3 and 2"),
    (_case("Einsum", _real(2, 3), equation="ij->iij", opset=12), "ij->iij"),
    (_case("Cast", _real(2)), "attribute to is missing"),
    (_case("Clip", _real(2), np.float64(0), opset=13), "input 1 has elements of float64"),
    (_case("Where", _real(2), _real(2), _real(2)), "input 0 (condition) has elements of float32"),
    (_case("And", _ints(1), _ints(1)), "input 0 (A) has elements of int64"),
    (_case("GatherND", _real(2, 3), _ints(0, 1), c=(1,), batch_dims=2), "(2, 3), (2,)"),
    (_case("Pad", _real(2, 3), _ints(0, 3, 0, 0), c=(1,), mode="reflect"), "cannot be reflected"),
    (_case("DepthToSpace", _real(1, 6, 2, 2), blocksize=2), "6 channels"),
    (_case("Det", _real(2, 3)), "(2, 3)"),
    (_case("Max", _real(2, 3), _real(3), opset=7), "which opset 7 does not allow"),
    (_case("Mod", _real(3), _real(3), opset=13), "requires fmod = 1"),
    (_case("Mod", _ints(3), _ints(3), fmod=7), "attribute fmod is 7"),
    (_case("Cast", _real(2), to=6, opset=24, round_mode="down"), "attribute round_mode is not supported"),
    (_case("Reshape", _real(2, 3), _ints(0, 3), c=(1,), allowzero=1), "6 elements do not fit"),
    (_case("Conv", _real(1, 2, 5), _real(2, 2, 3), kernel_shape=[2]), "attribute kernel_shape"),
    (_case("ReduceSum", _real(2, 3), np.array([[1]]), c=(1,)), "must be a vector"),
    (_case("InstanceNormalization", _real(1, 2, 3), _real(1, 2), _real(2)), "(2,)"),
    (_case("RNN", _real(3, 2, 4), _real(1, 3, 4), _real(1, 3, 3), c=(1, 2), hidden_size=5), "hidden_size is 5"),
    (
        _case(
            "LSTM",
            _real(3, 2, 4),
            _real(1, 12, 4),
            _real(1, 12, 3),
            None,
            None,
            _real(1, 4, 3),
            c=(1, 2),
            hidden_size=3,
        ),
        "input 5 has the shape (1, 4, 3)",
    ),
    (_case("ConvTranspose", _real(1, 2, 3), _real(2, 1, 2), strides=[2], output_padding=[2]), "output_padding"),
    *((_case(name, _real(3, 2, 4), _real(1, rows, 4), _real(1, rows, 3), c=(1, 2), clip=0.0), "attribute clip")
      for name, rows in (("GRU", 9), ("LSTM", 12), ("RNN", 3))),
]  # fmt: skip
"""Cases that ONNX Runtime does not accept, and what the error says."""

ILLEGAL_BY_TEXT = [
    (_case("TopK", _real(3), _ints(2), c=(1,), outputs=2, largest=7), "attribute largest is 7: it must be 0 or 1"),
    (_case("PRelu", _real(2, 3), _real(4, 2, 3)), "a slope of shape (4, 2, 3)"),
    (_case("LayerNormalization", _real(2, 3), _real(3), stash_type=16), "stash_type 16 is not supported"),
    (_case("RMSNormalization", _real(2, 3), _real(3), opset=23, stash_type=10), "stash_type 10 is not supported"),
]
"""Cases that ONNX Runtime accepts although their results have no meaning."""
