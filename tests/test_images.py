"""Photos as inputs: which square, which numbers, and what is said of a photo that cannot be one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.images import read_image

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
    with pytest.raises(InvalidArgument, match="this input is 1x3x224x224"):
        read_image(path, (1, 3, 224, 224), FLOAT)
    with pytest.raises(InvalidArgument, match="this input is int32"):
        read_image(path, (1, 8, 8, 3), np.dtype("int32"))


def test_without_pillow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'nnfmq\[images\]'"):
        read_image(tmp_path / "photo.png", (1, 8, 8, 3), UINT8)


def test_a_missing_photo_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "photo.png", (1, 8, 8, 3), UINT8)
