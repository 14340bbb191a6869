"""Infinity, NaN, -0 and numbers at the ends of their types in ONNX nodes: executed on both devices, and folded.

Expected are ONNX Runtime's values, or those of ONNX's reference implementation where ONNX Runtime has no kernel or
depends on the order of the elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from support.onnx_files import OnnxCase, expected, results
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.hal.errors import UnsupportedModel

F32, F16 = np.float32, np.float16
INF, NAN = np.inf, np.nan
LARGEST = np.finfo(F32).max


def case(operator: str, *inputs: Any, constants: tuple[int, ...] = (), opset: int = 18, **more: Any) -> OnnxCase:
    arrays = [None if each is None else np.asarray(each) for each in inputs]
    outputs = more.pop("outputs", 1)
    return OnnxCase(operator, arrays, more, frozenset(constants), outputs, opset)


def by_definition(each: OnnxCase) -> list[Any]:
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(onnx.ModelProto.FromString(each.content())).run(None, each.fed()))


def found_everywhere(client: nnfmq.Client | None, each: OnnxCase) -> Iterator[list[Any]]:
    """Yield the outputs of the interpreter, with the inputs given, with all but the first constant, and all constant.

    Those of a client are the compiling device's.
    """
    places = [place for place, array in enumerate(each.inputs) if array is not None]
    for constants in dict.fromkeys((each.constants, each.constants.union(places[1:]), frozenset(places))):
        variant = OnnxCase(each.operator, each.inputs, each.attributes, constants, each.outputs, each.opset)
        yield results(variant.content(), variant.fed())
    if client is not None:
        with client.device("compiled").prepare(nnfmq.load(each.content())) as model:
            yield model.execute(*each.fed().values())


def assert_right(client: nnfmq.Client | None, each: OnnxCase, wanted: list[Any], tolerance: float = 2e-5) -> None:
    for found in found_everywhere(client, each):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.shape == theirs.shape
            if theirs.dtype.kind == "f":
                assert ours.dtype == theirs.dtype
                np.testing.assert_allclose(ours, theirs, tolerance, tolerance / 10)
                np.testing.assert_array_equal(np.signbit(ours[theirs == 0]), np.signbit(theirs[theirs == 0]))
            else:
                np.testing.assert_array_equal(ours, theirs)


def some(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def with_elements(array: Any, **elements: float) -> Any:
    """Return an array with other elements at flat places, which are named _0, _1 and so on."""
    changed = array.copy()
    for place, element in elements.items():
        changed.reshape(-1)[int(place[1:])] = element
    return changed


TRANSPOSED = [
    ({"group": 2}, (1, 4, 3, 3), (4, 2, 2, 2)),
    ({"group": 2, "strides": [2, 3], "output_padding": [1, 0]}, (2, 4, 3, 2), (4, 1, 3, 2)),
    ({"dilations": [2, 2], "strides": [2, 2], "pads": [1, 0, 2, 1]}, (1, 2, 4, 3), (2, 3, 2, 3)),
    ({"group": 3, "strides": [3], "pads": [1, 1]}, (1, 3, 5), (3, 2, 2)),
    ({"strides": [2], "group": 2, "auto_pad": "SAME_UPPER"}, (1, 2, 4), (2, 1, 3)),
]


@pytest.mark.parametrize("kind", [F32, F16])
@pytest.mark.parametrize(("attributes", "image", "weights"), TRANSPOSED)
def test_an_infinite_weight_reaches_only_its_results(
    shared_client: nnfmq.Client, attributes: Any, image: Any, weights: Any, kind: Any
) -> None:
    x, w = some(*image).astype(kind), with_elements(some(*weights, seed=1).astype(kind), _0=INF, _5=-INF)
    each = case("ConvTranspose", x, w, some(w.shape[1] * attributes.get("group", 1)).astype(kind), **attributes)
    tolerance = 2e-5 if kind == F32 else 4e-3
    assert_right(shared_client if kind == F32 else None, each, expected(each.content(), each.fed()), tolerance)


def test_infinite_weights_of_a_large_kernel_are_refused() -> None:
    each = case("ConvTranspose", some(1, 2, 9), some(2, 1, 65), group=2)
    with pytest.raises(UnsupportedModel, match="a kernel of 65 weights"):
        nnfmq.load(each.content())


@pytest.mark.parametrize("scale", [0.4, 0.5, 1.6, 2.5])
@pytest.mark.parametrize(("mode", "reach"), [("linear", 1), ("cubic", 2)])
def test_an_infinite_pixel_reaches_only_its_neighbours(
    shared_client: nnfmq.Client, mode: str, reach: int, scale: float
) -> None:
    place, scales = 9, np.array([1, 1, 1, scale], F32)
    x, infinite = (with_elements(some(1, 1, 2, 20), **{f"_{place}": number}) for number in (0.0, INF))
    plain, each = (
        case("Resize", array, None, scales, constants=(2,), mode=mode, antialias=1) for array in (x, infinite)
    )
    (wanted,) = expected(plain.content(), plain.fed())
    centers = (np.arange(wanted.shape[-1]) + 0.5) / scale - 0.5
    is_near = np.zeros(wanted.shape, bool)
    is_near[0, 0, 0] = np.abs(centers - place) * min(scale, 1) < reach
    for (found,) in found_everywhere(shared_client, each):
        np.testing.assert_array_equal(np.isfinite(found), ~is_near)
        np.testing.assert_allclose(found[~is_near], wanted[~is_near], 2e-5, 2e-6)


@pytest.mark.parametrize("kind", [np.uint8, F32])
def test_linear_resizing_has_no_neighbours_outside(shared_client: nnfmq.Client, kind: Any) -> None:
    x, sizes = np.array([1, 254, 1, 127, 255], kind), np.array([4])
    plain, excluding = (
        case("Resize", x, None, None, sizes, constants=(3,), mode="linear", exclude_outside=flag) for flag in (0, 1)
    )
    (wanted,) = next(found_everywhere(shared_client, plain))
    np.testing.assert_allclose(wanted, [32.625, 159.125, 79.75, 239.0], 0, 0 if kind == F32 else 1)
    assert_right(shared_client, excluding, [wanted])


def test_cubic_resizing_of_integers_without_neighbours_outside_is_refused() -> None:
    x, sizes = np.arange(6, dtype=np.uint8), np.array([4])
    each = case("Resize", x, None, None, sizes, constants=(3,), mode="cubic", exclude_outside=1)
    with pytest.raises(UnsupportedModel, match="mode 'cubic' is not supported for elements of uint8"):
        nnfmq.load(each.content())


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_nan_is_last_among_the_smallest(shared_client: nnfmq.Client, kind: str, count: int) -> None:
    rows = [[NAN, 2, INF, 2, -INF, NAN, -0.5, 2], [3, 3, NAN, -1, 3, 0, -1, 3]]
    each = case("TopK", np.array(rows, kind), np.array([count]), constants=(1,), outputs=2, largest=0)
    assert_right(shared_client, each, by_definition(each))


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_the_remainder_has_the_sign_of_the_dividend(shared_client: nnfmq.Client, kind: str) -> None:
    special = np.array([-0.0, 0.0, -3.0, 3.0, -4.5, INF, -INF, NAN, 0.25], kind)
    each = case("Mod", *(np.ascontiguousarray(grid) for grid in np.meshgrid(special, special)), fmod=1)
    assert_right(shared_client, each, by_definition(each))


POWERS = [
    ("float16", "int16", [-1.0, -1.0, -0.5, 2.0], [-32767, 2049, 3, -5]),
    ("float16", "int32", [-1.0, -1.0, -1.5, 2.0], [70_001, -70_002, 7, 11]),
    ("float32", "int32", [-1.0, -1.0, -1.0, 3.0], [2**24 + 1, 2**31 - 1, -(2**31), 5]),
    ("float32", "int64", [-1.0, -1.0, 1.5, 3.0], [2**24 + 1, 2**31 + 1, 9, -5]),
    ("float16", "float32", [100.0, 2.0, 2.0, -1.0], [1e-4, 2.0004, -1e30, 1e5 + 1]),
    ("float32", "float16", [0.3637, 0.8887, 2.0, -3.0], [2.0, 3.0, 0.5, 3.0]),
    ("int32", "int64", [-2, 3, 2, 7], [2**62, 41, 31, 0]),
    ("int32", "int8", [-2, 3, 2, 7], [3, 41, 31, 0]),
    ("int64", "int32", [-2, 3, 2, 7], [3, 90, 63, 0]),
    ("int32", "uint32", [-1, 3, 2, 1], [2**31 + 1, 41, 31, 2**32 - 1]),
]


@pytest.mark.parametrize(("base", "exponent", "bases", "exponents"), POWERS)
def test_exponents_keep_the_elements_of_their_type(
    shared_client: nnfmq.Client, base: str, exponent: str, bases: Any, exponents: Any
) -> None:
    each = case("Pow", np.array(bases, base), np.array(exponents, exponent), opset=15)
    with np.errstate(all="ignore"):
        (wanted,) = by_definition(each)
    assert_right(shared_client, each, [wanted.astype(base)], 2e-3 if base == "float16" else 2e-5)


@pytest.mark.parametrize(("exponent", "name"), [(2.0, "MUL"), ([2.0], "MUL"), ([[2.0]], "POW"), (3.0, "POW")])
def test_squares_are_products(exponent: Any, name: str) -> None:
    numbers = np.array([-0.0, 1e30, 1.1, -3, NAN, -INF, 1e-30], F32)
    each = case("Pow", numbers, np.array(exponent, F32), constants=(1,))
    assert [operation.type.name for operation in nnfmq.load(each.content()).model.main.operations] == [name]
    assert_right(None, each, by_definition(each), 2e-7)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_negative_powers_of_integers_are_cut_off(shared_client: nnfmq.Client, kind: str) -> None:
    each = case("Pow", np.array([1, -1, -1, 2, -7, 0], kind), np.array([-3, -3, -2, -1, -2, -1], kind), opset=15)
    assert_right(shared_client, each, [np.array([1, -1, 1, 0, 0, 0], kind)])


def test_exponents_beyond_int64_are_refused() -> None:
    each = case("Pow", np.array([3], np.int32), np.array([2], np.uint64))
    with pytest.raises(UnsupportedModel, match="exponents of uint64 are not supported with a base of int32"):
        nnfmq.load(each.content())


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "int32"])
@pytest.mark.parametrize("channels", [False, True])
def test_dequantized_numbers_have_the_type_of_their_scale(kind: str, channels: bool) -> None:
    x, scale = np.array([[3, 100, 7], [0, 1, 88]], kind), np.array([0.3, 1.7, 0.01], F16)
    inputs = (x, scale) if channels else (x, scale[0])
    constants = (1,) if channels else ()
    each = case("DequantizeLinear", *inputs, constants=constants, opset=21, axis=1)
    for (found,) in found_everywhere(None, each):
        assert found.dtype == F16
        np.testing.assert_allclose(found, by_definition(each)[0], 1e-3)


@pytest.mark.parametrize("bias", [0.0, 0.2, 1.5, -2.7, 3.0])
@pytest.mark.parametrize("lambd", [0.5, 0.0, 1.5, -0.5, 300.0])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64", "float32"])
def test_shrunk_integers_are_cut_off(kind: str, bias: float, lambd: float) -> None:
    x = np.array([0, 1, 2, 3, 4, 7, 100, *([] if kind == "uint8" else [-1, -2, -3, -4, -9])], kind)
    each = case("Shrink", x, bias=bias, lambd=lambd)
    wanted = np.where(x < -F32(lambd), x + float(F32(bias)), np.where(x > F32(lambd), x - float(F32(bias)), 0))
    assert_right(None, each, [wanted.astype(np.int64).astype(kind) if kind != "float32" else wanted.astype(kind)])


@pytest.mark.parametrize("operator", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows_have_the_precision_of_their_type(operator: str, periodic: int) -> None:
    size = np.array(9, np.int32)
    (wanted,) = by_definition(case(operator, size, periodic=periodic, output_datatype=onnx.TensorProto.DOUBLE))
    for kind, number, tolerance in ((F16, 10, 1e-3), (F32, 1, 1e-7), (np.float64, 11, 1e-14)):
        each = case(operator, size, constants=(0,), periodic=periodic, output_datatype=number)
        for (found,) in found_everywhere(None, each):
            assert found.dtype == kind
            np.testing.assert_allclose(found.astype(float), wanted, tolerance, 1e-16 if kind != F16 else 1e-7)


@pytest.mark.parametrize("size", [(1, 1, 3, 4), (2, 3, 1, 2), (1, 2, 2, 3, 4), (2, 1, 1, 5, 1)])
@pytest.mark.parametrize("is_aligned", [0, 1])
def test_grids_have_places_for_any_batch(shared_client: nnfmq.Client, size: tuple[int, ...], is_aligned: int) -> None:
    rank = len(size) - 2
    each = case("AffineGrid", some(size[0], rank, rank + 1), np.array(size), constants=(1,), opset=20)
    each = OnnxCase(each.operator, each.inputs, {"align_corners": is_aligned}, each.constants, 1, 20)
    if is_aligned and 1 in size[2:]:
        with pytest.raises(UnsupportedModel, match="corners of an image of one row or column are not defined"):
            nnfmq.load(each.content())
    else:
        assert_right(shared_client, each, by_definition(each))


@pytest.mark.parametrize("opset", [7, 11, 13])
@pytest.mark.parametrize("bounds", ["", "min", "max"])
def test_omitted_bounds_are_the_last_finite_numbers(shared_client: nnfmq.Client, opset: int, bounds: str) -> None:
    x = np.array([INF, -INF, NAN, LARGEST, -LARGEST, -0.0, 0.5, -2.0], F32)
    number = {"min": -1.0, "max": 1.0}
    if opset < 11:
        each = case("Clip", x, opset=opset, **({bounds: number[bounds]} if bounds else {}))
    else:
        given = [F32(number[name]) if name == bounds else None for name in ("min", "max")]
        each = case("Clip", x, *given, opset=opset)
    assert_right(shared_client, each, expected(each.content(), each.fed()))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1), ()])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_matrix_with_factor_0_does_not_count(shared_client: nnfmq.Client, shape: Any, alpha: float) -> None:
    each = case("Gemm", some(2, 4), some(4, 3), np.full(shape, INF, F32), alpha=alpha, beta=0.0)
    assert_right(shared_client, each, expected(each.content(), each.fed()))


@pytest.mark.parametrize("numbers", [[-INF, 1, 2, -LARGEST], [INF, 1, -2], [-INF, INF, 0], [-3, NAN, 4], [0, 0, 0]])
def test_ranges_without_an_end_have_the_zero_point_of_onnx_runtime(shared_client: nnfmq.Client, numbers: Any) -> None:
    each = case("DynamicQuantizeLinear", np.array(numbers, F32), outputs=3, opset=11)
    assert_right(shared_client if numbers[0] == -INF else None, each, expected(each.content(), each.fed()))
