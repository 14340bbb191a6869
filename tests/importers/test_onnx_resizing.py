"""Resize and Upsample compute what ONNX Runtime computes: the same elements, and interpolated ones within rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.onnx_files import expected, file_of, results
from support.onnx_runtime import onnx

from nnfmq.hal.errors import UnsupportedModel

F32 = np.float32
MODES = [
    "half_pixel",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "half_pixel_symmetric",
    "tf_half_pixel_for_nn",
]
ROUNDINGS = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
SCALES = [0.3, 0.6, 0.7, 1.5, 2.0, 2.3]
SIZES = [(20, 6), (14, 1), (26, 7), (28, 2), (30, 9), (18, 39), (40, 12), (5, 13), (26, 64), (3, 3)]
LAYOUTS = {2: (0, 1), 3: (0, 1, 2), 4: (2, 3), 5: (2, 3, 4)}
CHANNELS_LAST = (1, 2)


def image(shape: tuple[int, ...], dtype: Any) -> Any:
    rng = np.random.default_rng(len(shape))
    if np.dtype(dtype).kind == "f":
        return rng.uniform(-3, 3, shape).astype(dtype)
    return rng.integers(0 if dtype is np.uint8 else -99, 99, shape).astype(dtype)


def resized(
    x: Any, *, opset: int = 18, given: Mapping[str, Any], roi: Any = (), **attributes: Any
) -> tuple[bytes, dict[str, Any]]:
    """Return a Resize from opset 11 on, with `scales` or `sizes` in `given`, and what it is fed with."""
    constants = {"roi": F32(roi), **({"sizes": np.int64(given["sizes"])} if "sizes" in given else {})}
    names = ["x", "roi", "", "sizes"]
    if "scales" in given:
        constants["scales"], names = F32(given["scales"]), ["x", "roi", "scales"]
    node = onnx.helper.make_node("Resize", names, ["y"], **attributes)
    return file_of([node], {"x": x}, ["y"], constants, opset), {"x": x}


def assert_same(content: bytes, fed: Mapping[str, Any]) -> None:
    (found,), (wanted,) = results(content, fed), expected(content, fed)
    assert found.shape == wanted.shape
    if wanted.dtype.kind != "f":
        np.testing.assert_array_equal(found, wanted)
    else:
        tolerance = 2e-3 if wanted.dtype == np.float16 else 1e-5
        largest = float(np.abs(wanted).max())
        np.testing.assert_allclose(found.astype(float), wanted.astype(float), 0, tolerance * largest)


def region(rank: int, axes: tuple[int, ...]) -> list[float]:
    """Return a roi that is partly outside of the input along some axes."""
    first = [-0.1 if axis in axes else 0.0 for axis in range(rank)]
    return first + [0.8 if axis in axes else 1.0 for axis in range(rank)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mode", MODES)
def test_the_nearest_element_is_that_of_onnx_runtime(mode: str, rounding: str) -> None:
    for extent, size in SIZES:
        if mode == "tf_crop_and_resize" and extent == size:
            continue  # ONNX Runtime copies an axis whose size stays, whatever its region is
        x = np.arange(extent, dtype=F32).reshape(1, 1, 1, extent)
        roi = region(4, (3,)) if mode == "tf_crop_and_resize" else ()
        attributes = {"coordinate_transformation_mode": mode, "nearest_mode": rounding, "extrapolation_value": -7.0}
        assert_same(*resized(x, given={"sizes": [1, 1, 1, size]}, roi=roi, mode="nearest", **attributes))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "align_corners"])
def test_places_follow_from_the_given_scale_even_if_it_gives_no_whole_size(mode: str, rounding: str) -> None:
    for scale in SCALES:
        x = np.arange(23, dtype=F32).reshape(1, 1, 1, 23)
        roi = region(4, (3,)) if mode == "tf_crop_and_resize" else ()
        attributes = {"coordinate_transformation_mode": mode, "nearest_mode": rounding}
        assert_same(*resized(x, given={"scales": [1, 1, 1, scale]}, roi=roi, mode="nearest", **attributes))


@pytest.mark.parametrize("dtype", [F32, np.float16, np.uint8, np.int8, np.int32])
@pytest.mark.parametrize("kind", ["linear", "cubic"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "align_corners"])
def test_interpolation_is_that_of_onnx_runtime(mode: str, kind: str, dtype: Any) -> None:
    for rank, axes in LAYOUTS.items():
        if kind == "cubic" and (rank not in (2, 4) or np.dtype(dtype).kind != "f"):
            continue  # ONNX Runtime has no such kernel
        shape = tuple(7 + axis if axis in axes else 2 for axis in range(rank))
        scales = [SCALES[(axis + rank) % len(SCALES)] if axis in axes else 1.0 for axis in range(rank)]
        roi = region(rank, axes) if mode == "tf_crop_and_resize" else ()
        attributes = {"coordinate_transformation_mode": mode, "extrapolation_value": 5.0}
        assert_same(*resized(image(shape, dtype), given={"scales": scales}, roi=roi, mode=kind, **attributes))


@pytest.mark.parametrize("dtype", [F32, np.uint8, np.int8, np.int32])
@pytest.mark.parametrize("mode", ["half_pixel", "asymmetric", "align_corners", "tf_crop_and_resize"])
def test_images_whose_channels_are_last_are_interpolated_as_onnx_runtime_does(mode: str, dtype: Any) -> None:
    for sizes in ([2, 4, 17, 3], [2, 13, 5, 3], [2, 1, 30, 3]):
        roi = region(4, CHANNELS_LAST) if mode == "tf_crop_and_resize" else ()
        x = image((2, 6, 11, 3), dtype)
        attributes = {"coordinate_transformation_mode": mode}
        assert_same(*resized(x, given={"sizes": sizes}, roi=roi, mode="linear", **attributes))


@pytest.mark.parametrize("dtype", [F32, np.uint8])
@pytest.mark.parametrize("excludes", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "cubic"])
def test_antialiased_images_are_those_of_onnx_runtime(kind: str, excludes: int, dtype: Any) -> None:
    for mode in ("half_pixel", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric"):
        for sizes in ([1, 2, 7, 9], [1, 2, 3, 40], [1, 2, 30, 5]):
            attributes = {"coordinate_transformation_mode": mode, "antialias": 1, "exclude_outside": excludes}
            content = resized(image((1, 2, 19, 24), dtype), given={"sizes": sizes}, mode=kind, **attributes)
            assert_same(*content)


@pytest.mark.parametrize("coefficient", [-0.75, -0.5])
def test_cubic_interpolation_may_exclude_what_is_outside(coefficient: float) -> None:
    attributes = {"cubic_coeff_a": coefficient, "exclude_outside": 1}
    assert_same(*resized(image((1, 1, 5, 8), F32), given={"sizes": [1, 1, 9, 3]}, mode="cubic", **attributes))


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("kind", ["nearest", "linear", "cubic"])
def test_an_aspect_ratio_is_kept(kind: str, policy: str) -> None:
    for sizes in ([7, 8], [4, 21], [10, 3]):
        attributes = {"mode": kind, "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
        assert_same(*resized(image((1, 2, 6, 9), F32), given={"sizes": sizes}, **attributes))


@pytest.mark.parametrize("kind", ["nearest", "linear"])
@pytest.mark.parametrize("opset", [7, 9, 10])
def test_older_operators_round_as_onnx_runtime_does(opset: int, kind: str) -> None:
    """Before opset 11 shrinking takes the next element, and stretching the one before."""
    for pair in ((2.0, 2.0), (1.3, 2.5), *(((0.6, 0.3), (0.5, 1.7)) if opset >= 10 else ())):
        x, scales = image((1, 2, 7, 10), F32), F32([1, 1, *pair])
        if opset == 7:
            node = onnx.helper.make_node("Upsample", ["x"], ["y"], mode=kind, scales=[float(scale) for scale in scales])
            constants = {}
        else:
            name = "Upsample" if opset == 9 else "Resize"
            node, constants = onnx.helper.make_node(name, ["x", "scales"], ["y"], mode=kind), {"scales": scales}
        assert_same(file_of([node], {"x": x}, ["y"], constants, opset), {"x": x})


@pytest.mark.parametrize("kind", ["nearest", "linear"])
def test_quantized_images_are_resized_without_regard_to_their_scale(kind: str) -> None:
    make = onnx.helper.make_node
    nodes = [
        make("QuantizeLinear", ["x", "s", "z"], ["q"]),
        make("Resize", ["q", "", "", "sizes"], ["r"], mode=kind),
        make("DequantizeLinear", ["r", "s", "z"], ["y"]),
    ]
    constants = {"s": F32(0.02), "z": np.uint8(120), "sizes": np.int64([1, 2, 9, 5])}
    fed = {"x": image((1, 2, 6, 7), F32)}
    assert_same(file_of(nodes, fed, ["y"], constants), fed)


def test_corners_cannot_be_aligned_if_the_scale_gives_no_whole_size() -> None:
    content, _ = resized(
        image((1, 1, 4, 4), F32),
        given={"scales": [1, 1, 0.6, 0.6]},
        mode="linear",
        coordinate_transformation_mode="align_corners",
    )
    with pytest.raises(UnsupportedModel, match="give sizes instead"):
        results(content, {"x": image((1, 1, 4, 4), F32)})


@pytest.mark.parametrize("kind", ["linear", "cubic"])
def test_elements_of_64_bits_are_not_interpolated_in_32(kind: str) -> None:
    content, fed = resized(image((1, 1, 4, 4), np.float64), given={"sizes": [1, 1, 7, 7]}, mode=kind)
    with pytest.raises(UnsupportedModel, match="float64"):
        results(content, fed)


@pytest.mark.parametrize("opset", [11, 13, 18, 19])
def test_empty_scales_beside_sizes_are_none(opset: int) -> None:
    """Exporters write them: an empty input of opset 11 had to be a tensor."""
    x = np.arange(20, dtype=F32).reshape(1, 1, 1, 20)
    constants = {"roi": F32([]), "scales": F32([]), "sizes": np.int64([1, 1, 1, 6])}
    node = onnx.helper.make_node("Resize", ["x", *constants], ["y"], mode="nearest", nearest_mode="round_prefer_ceil")
    assert_same(file_of([node], {"x": x}, ["y"], constants, opset), {"x": x})
