"""Photos as inputs: which square, which numbers, and what is said of a photo that cannot be one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnfmq
from nnfmq.hal.errors import InvalidArgument
from nnfmq.media.images import read_image

Image = pytest.importorskip("PIL.Image")

FLOAT, UINT8, INT8 = np.dtype("float32"), np.dtype("uint8"), np.dtype("int8")


def saved(path: Path, pixels: np.ndarray[Any, Any]) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def framed(height: int, width: int, square: slice, column: slice) -> np.ndarray[Any, Any]:
    """Return a black picture with a white region."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[square, column] = 255
    return pixels


def test_the_image_is_cropped_to_the_central_square_of_seven_eighths_of_the_shorter_side(tmp_path: Path) -> None:
    path = saved(tmp_path / "photo.png", framed(16, 32, slice(1, 15), slice(9, 23)))
    assert read_image(path, (1, 7, 7, 3), UINT8).min() == 255


@pytest.mark.parametrize("side", [slice(2, 15), slice(1, 14)])
def test_the_cropped_square_includes_its_edges(tmp_path: Path, side: slice) -> None:
    path = saved(tmp_path / "photo.png", framed(16, 32, side, slice(9, 23)))
    assert read_image(path, (1, 14, 14, 3), UINT8).min() == 0


@pytest.mark.parametrize(
    ("dtype", "expected"), [(FLOAT, [-1.0, 0.2, 1.0]), (UINT8, [0, 153, 255]), (INT8, [-128, 25, 127])]
)
def test_pixels_are_converted_to_the_model_s_input_type(
    tmp_path: Path, dtype: np.dtype[Any], expected: list[float]
) -> None:
    pixels = np.full((8, 8, 3), (0, 153, 255), np.uint8)
    image = read_image(saved(tmp_path / "photo.png", pixels), (1, 4, 4, 3), dtype)
    assert image.shape == (1, 4, 4, 3)
    assert image.dtype == dtype
    np.testing.assert_allclose(image[0, 0, 0], expected, atol=1e-6)


def test_downscaling_averages_only_the_nearest_pixels(tmp_path: Path) -> None:
    rows = np.broadcast_to(np.arange(16, dtype=np.uint8)[:, None, None] ** 2, (16, 16, 3))
    image = read_image(saved(tmp_path / "photo.png", np.ascontiguousarray(rows)), (1, 2, 2, 3), UINT8)
    # The square is rows 1 to 14; the midpoints of the two results are its rows 3 and 10.
    assert image[0, :, 0, 0].tolist() == [4**2, 11**2]


def test_upscaling_interpolates_between_pixels(tmp_path: Path) -> None:
    columns = np.broadcast_to(np.uint8([0, 40, 120, 0])[None, :, None], (4, 4, 3))
    image = read_image(saved(tmp_path / "photo.png", np.ascontiguousarray(columns)), (1, 1, 8, 3), UINT8)
    # The square of 4 pixels doubles: each result is at a quarter of the distance to a neighbour.
    assert image[0, 0, :, 0].tolist()[1:7] == [10, 30, 60, 100, 90, 30]


def test_a_one_channel_model_gets_a_gray_image(tmp_path: Path) -> None:
    path = saved(tmp_path / "photo.png", np.full((8, 8, 3), 90, np.uint8))
    assert read_image(path, (1, 4, 4, 1), UINT8).tolist() == np.full((1, 4, 4, 1), 90).tolist()


def test_height_and_width_are_not_swapped(tmp_path: Path) -> None:
    path = saved(tmp_path / "photo.png", np.zeros((9, 9, 3), np.uint8))
    assert read_image(path, (1, 2, 5, 3), UINT8).shape == (1, 2, 5, 3)


def test_a_truncated_photo_is_rejected(tmp_path: Path) -> None:
    path = saved(tmp_path / "photo.jpg", np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(InvalidArgument, match=r"photo\.jpg is not a complete image: .*truncated"):
        read_image(path, (1, 8, 8, 3), UINT8)


@pytest.mark.parametrize(
    "content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + bytes(30), b"BM" + bytes(60), b"GIF89a\xff"]
)
def test_a_file_that_is_not_an_image_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="not a complete image"):
        read_image(path, (1, 8, 8, 3), UINT8)


@pytest.mark.parametrize("length", range(0, 800, 37))
def test_an_image_truncated_at_any_byte_is_rejected(tmp_path: Path, length: int) -> None:
    path = saved(tmp_path / "photo.png", np.random.default_rng(1).integers(0, 255, (20, 20, 3), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(InvalidArgument, match="not a complete image"):
        read_image(path, (1, 8, 8, 3), UINT8)


def test_the_error_for_a_model_without_image_input_names_its_input(tmp_path: Path) -> None:
    path = saved(tmp_path / "photo.png", np.zeros((8, 8, 3), np.uint8))
    for shape, text in (((1, 4, 224, 224), "1x4x224x224"), ((3, 8, 8), "3x8x8"), ((2, 8, 8, 3), "2x8x8x3")):
        with pytest.raises(InvalidArgument, match=f"1xHxWxC or 1xCxHxW with C = 1 or 3; this input is {text}$"):
            read_image(path, shape, FLOAT)
    with pytest.raises(InvalidArgument, match=r"this input is 1x3x\?x\?; give the model shapes of known sizes"):
        read_image(path, (1, 3, 0, 0), FLOAT)
    with pytest.raises(InvalidArgument, match="this input is int32"):
        read_image(path, (1, 8, 8, 3), np.dtype("int32"))


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_be_the_second_dimension(tmp_path: Path, channels: int) -> None:
    pixels = np.random.default_rng(2).integers(0, 255, (9, 9, 3), dtype=np.uint8)
    path = saved(tmp_path / "photo.png", pixels)
    last, second = (read_image(path, shape, UINT8) for shape in ((1, 4, 5, channels), (1, channels, 4, 5)))
    np.testing.assert_array_equal(second, last.transpose(0, 3, 1, 2))
    assert second.flags.c_contiguous


COLOURS, MEAN, STD = (0, 153, 255), (10.0, 20.0, 30.0), (2.0, 4.0, 8.0)
NORMALIZED = [(colour - mean) / std for colour, mean, std in zip(COLOURS, MEAN, STD, strict=True)]


@pytest.mark.parametrize("shape", [(1, 4, 4, 3), (1, 3, 4, 4)])
def test_each_channel_has_its_normalization_wherever_channels_are(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = saved(tmp_path / "photo.png", np.full((8, 8, 3), COLOURS, np.uint8))
    photo = nnfmq.read_photo(path, nnfmq.TensorInfo("x", shape, "float32"), mean=MEAN, std=STD)
    assert (photo.shape, photo.dtype) == (shape, FLOAT)
    channels = photo[0, 1, 2] if shape[3] == 3 else photo[0, :, 1, 2]
    np.testing.assert_allclose(channels, NORMALIZED, rtol=1e-6)
    quantized = nnfmq.TensorInfo("x", shape, "int8", scale=0.5, zero_point=-3)
    codes = nnfmq.read_photo(str(path), quantized, mean=10, std=4.0)
    expected = [round((colour - 10) / 4 / 0.5) - 3 for colour in COLOURS]
    assert (codes[0, 1, 2] if shape[3] == 3 else codes[0, :, 1, 2]).tolist() == expected


def test_a_model_gives_its_input_and_the_normalization_of_its_metadata(tmp_path: Path) -> None:
    path = saved(tmp_path / "photo.png", np.full((8, 8, 3), COLOURS, np.uint8))
    info = nnfmq.TensorInfo("x", (1, 4, 4, 3), "float32")
    described = nnfmq.ModelMetadata(inputs=(nnfmq.TensorMetadata(mean=MEAN, std=STD),))
    model: Any = SimpleNamespace(inputs=(info,), metadata=described)
    np.testing.assert_allclose(nnfmq.read_photo(path, model)[0, 0, 0], NORMALIZED, rtol=1e-6)
    np.testing.assert_allclose(nnfmq.read_photo(path, model, mean=0, std=1)[0, 0, 0], COLOURS)
    model.metadata = None
    np.testing.assert_array_equal(nnfmq.read_photo(path, model), read_image(path, info.shape, FLOAT))
    model.inputs = (info, info)
    with pytest.raises(InvalidArgument, match=r"a photo is for one input; the model has 2 inputs: 'x', 'x'; give one"):
        nnfmq.read_photo(path, model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mean": 1.0}, "only mean is given"),
        ({"std": (1, 2, 3)}, "only std is given"),
        ({"mean": 0, "std": 0}, "no std of 0"),
        ({"mean": float("nan"), "std": 1}, "finite numbers"),
        ({"mean": (1, 2), "std": (1, 2)}, "a normalization of 2 channels; the input has 3"),
    ],
)
def test_a_normalization_that_is_none_is_rejected(tmp_path: Path, given: Any, said: str) -> None:
    path = saved(tmp_path / "photo.png", np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(InvalidArgument, match=said):
        nnfmq.read_photo(path, nnfmq.TensorInfo("x", (1, 4, 4, 3), "float32"), **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nnfmq.TensorInfo("x", (1, 4, 4, 3), "int32"), "an input of float32, uint8 or int8; this input is int32"),
        (nnfmq.TensorInfo("x", (1, 4, 4, 3), "uint8"), "an input of float32, uint8 or int8; this input is uint8"),
        ("digits.tflite", "a photo is for a model or one of its inputs, not for a str: give what nnfmq.load"),
    ],
)
def test_a_photo_is_not_normalized_for_an_input_without_real_values(tmp_path: Path, given: Any, said: str) -> None:
    path = saved(tmp_path / "photo.png", np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(InvalidArgument, match=said):
        nnfmq.read_photo(path, given, mean=1.0, std=2.0)


def test_a_prepared_model_has_the_metadata_of_its_file() -> None:
    loaded = nnfmq.load(nnfmq.example_path("digits.tflite"))
    described = replace(loaded, metadata=nnfmq.ModelMetadata(name="digits"))
    with nnfmq.connect(embedded=True) as client:
        for prepare in (client.prepare, client.device("reference").prepare):
            with prepare(described) as model:
                assert model.metadata == described.metadata
        with nnfmq.Runtime([], embedded=True) as runtime:
            assert runtime.prepare(described, ["sample-minimal", "reference"]).metadata == described.metadata


def test_without_pillow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'nnfmq\[images\]'"):
        read_image(tmp_path / "photo.png", (1, 8, 8, 3), UINT8)


def test_a_missing_photo_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "photo.png", (1, 8, 8, 3), UINT8)
