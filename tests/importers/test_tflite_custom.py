"""Custom operators of popular models: detections like LiteRT's; MediaPipe's by their definition."""

from __future__ import annotations

import importlib
import math
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flatbuffers import flexbuffers
from support.both_runners import Theirs, ours
from support.places import ROOT
from support.plugins import add_plugin
from support.tflite_files import Operator, Tensor, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load

Array = npt.NDArray[Any]
RNG = np.random.default_rng(3)


def flex(**options: Any) -> bytes:
    return bytes(flexbuffers.Dumps(options))


def single(name: str, tensors: list[Any], outputs: list[Any], custom: bytes) -> bytes:
    """Return a model of one custom operator; tensors without data are inputs."""
    inputs = [index for index, tensor in enumerate(tensors) if tensor.data is None]
    results = range(len(tensors), len(tensors) + len(outputs))
    operator = Operator(name, range(len(tensors)), results, custom=custom)
    content: bytes = writer.write([*tensors, *outputs], [operator], inputs, results)
    return content


# -- object detection -------------------------------------------------------------------------------------------------


def detections(classes: int, columns: int, regular: bool) -> bytes:
    options = flex(
        max_detections=5, max_classes_per_detection=1, detections_per_class=4, use_regular_nms=regular,
        nms_score_threshold=0.2, nms_iou_threshold=0.5, num_classes=classes,
        y_scale=10.0, x_scale=10.0, h_scale=5.0, w_scale=5.0,
    )  # fmt: skip
    anchors = np.tile(np.float32([0.5, 0.5, 0.3, 0.3]), (12, 1)) + RNG.uniform(-0.2, 0.2, (12, 4)).astype(np.float32)
    tensors = [Tensor("boxes", (1, 12, 4)), Tensor("scores", (1, 12, columns)),
        Tensor("anchors", (12, 4), data=np.abs(anchors).tobytes())]  # fmt: skip
    outputs = [Tensor("b", (1, 5, 4)), Tensor("c", (1, 5)), Tensor("s", (1, 5)), Tensor("n", (1,))]
    return single("TFLite_Detection_PostProcess", tensors, outputs, options)


@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize(("classes", "columns"), [(3, 4), (3, 3)])
def test_detections_are_litert_s(classes: int, columns: int, regular: bool) -> None:
    content = detections(classes, columns, regular)
    imported, litert = ours(content), Theirs(content)
    for _ in range(4):
        boxes = RNG.normal(0, 1, (1, 12, 4)).astype(np.float32)
        scores = RNG.uniform(0, 1, (1, 12, columns)).astype(np.float32)
        found, expected = imported([boxes, scores]), litert([boxes, scores])
        count = int(expected[3][0])
        assert found[3].tolist() == [count]
        for mine, theirs in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(mine[:, :count], theirs[:, :count], rtol=1e-5, atol=1e-6)


# -- MediaPipe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "size"), [(1, (6, 7)), (2, (7, 9))])
def test_a_transposed_convolution_adds_its_bias(scheme: int, size: tuple[int, int]) -> None:
    height, width, strides = 3, 4, (2, 2)
    weights, bias = RNG.normal(size=(2, 3, 3, 5)).astype(np.float32), np.float32([1, -1])
    tensors = [Tensor("x", (1, height, width, 5)), Tensor("w", weights.shape, data=weights.tobytes()),
        Tensor("b", (2,), data=bias.tobytes())]  # fmt: skip
    x = RNG.normal(size=(1, height, width, 5)).astype(np.float32)
    padding = [max(3 - (extent - 1) % 2 - 1, 0) if scheme == 1 else 0 for extent in (height, width)]
    shape = [2 * (extent - 1) + 3 - cut for extent, cut in zip((height, width), padding, strict=True)]
    expected = np.zeros((*shape, 2)) + bias
    for y, column, tap_y, tap_x in np.ndindex(height, width, 3, 3):
        out = (y * strides[0] - padding[0] // 2 + tap_y, column * strides[1] - padding[1] // 2 + tap_x)
        if 0 <= out[0] < shape[0] and 0 <= out[1] < shape[1]:
            expected[out] += weights[:, tap_y, tap_x] @ x[0, y, column]
    content = single(
        "Convolution2DTransposeBias", tensors, [Tensor("y", (1, *shape, 2))], struct.pack("<3i", scheme, *strides)
    )
    (found,) = ours(content)([x])
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)


POOL = struct.pack("<6i", 1, 2, 2, 2, 2, 0)


def test_a_pool_says_where_its_maxima_were_and_is_undone() -> None:
    image = RNG.permutation(2 * 5 * 6 * 3).reshape(2, 5, 6, 3).astype(np.float32)
    pooled = [Tensor("y", (2, 3, 3, 3)), Tensor("where", (2, 3, 3, 3))]
    values, where = ours(single("MaxPoolingWithArgmax2D", [Tensor("x", image.shape)], pooled, POOL))([image])
    for batch, row, column, channel in np.ndindex(2, 3, 3, 3):
        window = image[batch, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2, channel]
        assert values[batch, row, column, channel] == window.max()
        y, x = divmod(int(where[batch, row, column, channel]), 2)
        assert window[y, x] == window.max()
    unpooled = single("MaxUnpooling2D", pooled, [Tensor("x", (2, 6, 6, 3))], POOL)
    (restored,) = ours(unpooled)([values, where])
    expected = np.zeros((2, 6, 6, 3), np.float32)
    for batch, row, column, channel in np.ndindex(2, 3, 3, 3):
        y, x = divmod(int(where[batch, row, column, channel]), 2)
        expected[batch, 2 * row + y, 2 * column + x, channel] = values[batch, row, column, channel]
    np.testing.assert_array_equal(restored, expected)


def test_positions_outside_of_the_image_are_left_out() -> None:
    content = single("MaxUnpooling2D", [Tensor("y", (1, 1, 1, 1)), Tensor("where", (1, 1, 1, 1))],
        [Tensor("x", (1, 2, 2, 1))], POOL)  # fmt: skip
    one = np.ones((1, 1, 1, 1), np.float32)
    for position in (-5, 4, 1e30, np.nan):
        (found,) = ours(content)([one, one * np.float32(position)])
        assert found.sum() in (0, 1)


MATRIX = np.float32([[0.8, 0.3, 0, 1.2345], [-0.2, 0.9, 0, 0.5678], [0, 0, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize(("columns", "options"), [(3, flex(dimensions=3)), (2, flex(dimensions=2)), (2, b"")])
def test_landmarks_are_transformed(columns: int, options: bytes) -> None:
    """MediaPipe's face_landmark_with_attention has operators without options, for points of x and y."""
    points = RNG.uniform(0, 9, (1, 7, columns)).astype(np.float32)
    tensors = [Tensor("p", points.shape), Tensor("m", (1, 4, 4))]
    content = single("TransformLandmarks", tensors, [Tensor("y", points.shape)], options)
    (found,) = ours(content)([points, MATRIX[None]])
    flat = np.concatenate([points[0, :, :2], np.zeros((7, 1)), np.ones((7, 1))], axis=1)
    np.testing.assert_allclose(found[0, :, :2], (flat @ MATRIX.T)[:, :2], rtol=1e-5)
    np.testing.assert_array_equal(found[..., 2:], points[..., 2:])


def test_an_image_is_sampled_along_a_transformation() -> None:
    image = RNG.uniform(0, 1, (1, 6, 8, 2)).astype(np.float32)
    content = single("TransformTensorBilinear", [Tensor("x", image.shape), Tensor("m", (1, 4, 4))],
        [Tensor("y", (1, 5, 7, 2))], flex(output_height=5, output_width=7))  # fmt: skip
    (found,) = ours(content)([image, MATRIX[None]])
    padded = np.pad(image[0], ((0, 1), (0, 1), (0, 0)))
    for row, column in np.ndindex(5, 7):
        x, y = (MATRIX @ [column + 0.5, row + 0.5, 0, 1])[:2] - 0.5
        expected = np.zeros(2)
        if 0 <= x <= 7 and 0 <= y <= 5:
            left, top = int(x), int(y)
            for dy, dx in np.ndindex(2, 2):
                weight = abs(1 - dy - (y - top)) * abs(1 - dx - (x - left))
                expected = expected + weight * padded[top + dy, left + dx]
        np.testing.assert_allclose(found[0, row, column], expected, rtol=1e-4, atol=1e-5)


def test_the_corners_of_a_crop_are_those_of_the_rotated_box_around_landmarks() -> None:
    """Landmarks at the corners of a box of 4x2, turned by 30°: the crop's corners are these, enlarged by the scale."""
    angle = math.radians(30)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    corners = np.array([(-2, -1), (2, -1), (2, 1), (-2, 1)]) @ turn.T + [10, 20]
    points = np.zeros((1, 4, 3), np.float32)
    points[0, :, :2] = corners
    options = flex(subset_idxs=[0, 1, 2, 3], left_rotation_idx=0, right_rotation_idx=1, target_rotation_radians=0.0,
        output_height=16, output_width=32, scale_x=1.5, scale_y=1.5)  # fmt: skip
    content = single("Landmarks2TransformMatrix", [Tensor("p", (1, 4, 3))], [Tensor("m", (1, 4, 4))], options)
    (matrix,) = ours(content)([points])
    crop = np.array([(0, 0, 0, 1), (32, 0, 0, 1), (32, 16, 0, 1), (0, 16, 0, 1)])
    np.testing.assert_allclose((crop @ matrix[0].T)[:, :2], (corners - [10, 20]) * 1.5 + [10, 20], atol=1e-4)


# -- plug-ins ---------------------------------------------------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "how-to" / "custom-operators.md").read_text()
SOFTSIGN = single("Softsign", [Tensor("x", (2, 3))], [Tensor("y", (2, 3))], struct.pack("<f", 2.5))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on the path for plug-ins; afterwards their modules are forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("nnfmq_softsign"):
            del sys.modules[name]


def install(site: Path, source: str, module: str = "nnfmq_softsign", name: str = "CONVERTER") -> None:
    add_plugin(site, module, source, {"Softsign": f"{module}:{name}"}, "nnfmq.tflite_operators")
    importlib.invalidate_caches()


def test_a_plug_in_converts_the_documented_operator(site: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    install(site, source)
    x = np.float32([[-2, -1, 0], [0.5, 1, 9]])
    (found,) = ours(SOFTSIGN)([x])
    np.testing.assert_allclose(found, 2.5 * x / (1 + np.abs(x)), rtol=1e-6)


def test_without_a_plug_in_the_operator_is_not_supported() -> None:
    with pytest.raises(InvalidArgument, match=r"operator 0 \(CUSTOM 'Softsign'\): is not supported"):
        load(SOFTSIGN)


@pytest.mark.parametrize(
    ("source", "reason"),
    [("CONVERTER = 3", "is a int, not an OpConverter"), ("1 / 0", "cannot be imported: division by zero")],
)
def test_a_plug_in_that_cannot_be_used_is_a_problem_of_the_operator(site: Path, source: str, reason: str) -> None:
    install(site, source)
    with pytest.raises(InvalidArgument, match=f"its plug-in nnfmq_softsign:CONVERTER {reason}"):
        load(SOFTSIGN)


def test_two_plug_ins_for_one_operator_are_a_problem(site: Path) -> None:
    for module in ("nnfmq_softsign", "nnfmq_softsign_too"):
        install(site, "", module)
    with pytest.raises(InvalidArgument, match="has converters in several plug-ins"):
        load(SOFTSIGN)


@pytest.mark.parametrize("custom", [b"", b"\0", b"\xff" * 40, flex(dimensions="two"), flex(dimensions=2.5)])
def test_corrupt_options_are_a_problem_of_the_operator(custom: bytes) -> None:
    tensors = [Tensor("p", (1, 4, 3))]
    content = single("Landmarks2TransformMatrix", tensors, [Tensor("m", (1, 4, 4))], custom)
    with pytest.raises(InvalidArgument, match=r"operator 0 \(CUSTOM 'Landmarks2TransformMatrix'\): its option"):
        load(content)
